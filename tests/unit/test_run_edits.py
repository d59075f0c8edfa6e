"""An edit beside what it replaced, on GRATING's source cells in a session of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from ondevice import plotting
from ondevice.evidence import born, mean
from ondevice.run import Layout, sources
from ondevice.run.edits import SHIPPED, YOURS, Edits, compared, exactly

EDITS = Edits("grating")
IMPORTS = """
from collections.abc import Callable
import numpy as np
from numpy.typing import ArrayLike, NDArray
from ondevice_papers.grating.clustering import Floats
from ondevice_papers.grating.pruning import ACCEPT, CLUSTERS, DEFER, DROP, Rule, Verdicts, expit
calls = []
"""
DISPERSION, KMEANS, RANKING, BOUNDARY, RULE = (
    sources.definition(Layout().library, f"ondevice_papers.grating.{name}")
    for name in (
        "pruning.dispersion", "clustering.kmeans", "pruning.ranking", "pruning.around_boundary", "pruning.cluster_rule"
    )
)
DISPLAY = """
def doubled(scores):
    return 2 * dispersion(scores)

def shown():
    calls.append(1)
    return {(n,): [doubled(np.arange(1.0, n)), doubled(np.arange(2.0, n))] for n in (4, 8)}
"""


class Session(dict[str, Any]):
    """What a kernel's cells leave behind."""

    def __init__(self, *cells: str) -> None:
        super().__init__(__name__="__main__", In=[""])
        self.run(IMPORTS, *cells)

    def run(self, *cells: str) -> Session:
        for cell in cells:
            self["In"] += [cell]
            exec(cell, self)
        return self


@pytest.fixture
def session() -> Session:
    return Session(DISPERSION, KMEANS, RANKING, BOUNDARY, RULE, DISPLAY)


def edited(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


def test_unedited_it_is_computed_once(session: Session) -> None:
    both = EDITS.both(session["shown"])
    assert list(both) == [SHIPPED] and session["calls"] == [1] and both[SHIPPED] == session["shown"]()
    session.run("# a comment\n" + edited(DISPERSION, "return float", "return  float"))
    session["In"] += ["%magic that is no Python"]
    assert EDITS.of(session["shown"]) == []


def test_an_edit_stands_beside_the_library_s(session: Session) -> None:
    before = session["shown"]()
    session.run(edited(DISPERSION, "p.std() /", "3 * p.std() /"))
    both = EDITS.both(session["shown"])
    assert EDITS.of(session["shown"]) == ["dispersion"] and both[SHIPPED] == before
    assert both[YOURS] == {key: pytest.approx([3 * value for value in values]) for key, values in before.items()}
    assert session["dispersion"](np.array([1.0, 3])) == 1.5  # the session keeps the edit
    session.run(DISPERSION)
    assert EDITS.both(session["shown"]) == {SHIPPED: before}


def test_edits_count_only_where_a_display_follows_them(session: Session) -> None:
    session.run(edited(KMEANS, "min(k, len(x))", "1"), "def ruled():\n    return cluster_rule(0.1)")
    assert EDITS.of(session["shown"]) == [] and EDITS.of(session["ruled"]) == ["kmeans"]  # through the rule
    session.run("def local():\n    kmeans = 1\n    return kmeans")
    assert EDITS.of(session["local"]) == []


def test_an_edit_that_raises_is_named_and_the_library_s_is_shown(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    before = session["shown"]()
    session.run(edited(DISPERSION, "p.mean()", "nothing"))
    assert EDITS.both(session["shown"]) == {SHIPPED: before}
    assert capsys.readouterr().out == (
        "Your edit of dispersion ends with NameError: name 'nothing' is not defined\n"
    )  # fmt: skip


def test_the_table_has_both_versions_and_the_paired_difference_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def summarised(samples: Any) -> pd.DataFrame:
        return born(pd.DataFrame([(*key, float(np.mean(values))) for key, values in samples.items()]), "measured")

    def less(shipped: Any, yours: Any) -> Any:
        return mean(np.subtract(yours, shipped).tolist(), "measured", drawn="pools")

    once = {SHIPPED: {("a",): [1.0, 2, 6], ("b",): [1.0, 1, 1]}}
    assert "version" not in compared(once, summarised, less) and capsys.readouterr().out == ""
    table = compared(once | {YOURS: {("a",): [0.5, 1.5, 5.5], ("b",): [1.0, 1, 1]}}, summarised, less)
    assert table["version"].tolist() == [SHIPPED] * 2 + [YOURS] * 2 and table[1].tolist() == [3, 1, 2.5, 1]
    assert capsys.readouterr().out == "your edit less shipped, at most: -0.5 at a (3 pools)\n"


def test_of_exact_rows_the_greatest_difference_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = born(pd.DataFrame({"rule": ["p", "q"], "b": [0.1, 0.2], "mean": [1.0, 2.0], "more": 0}), "simulated")
    assert exactly({SHIPPED: shipped}, "mean") is shipped and capsys.readouterr().out == ""
    table = exactly({SHIPPED: shipped, YOURS: born(shipped.assign(mean=[1.25, 1.5]), "simulated")}, "mean")
    assert table["mean"].tolist() == [1, 2, 1.25, 1.5] and table["version"].tolist() == [SHIPPED] * 2 + [YOURS] * 2
    assert capsys.readouterr().out == "your edit less shipped, at most: -0.5 at q, 0.2\n"


def test_versions_are_drawn_in_a_series_own_colour() -> None:
    rows = [(version, name, x, x) for version in (SHIPPED, YOURS) for name in "pq" for x in (1.0, 2)]
    table = born(pd.DataFrame(rows, columns=["version", "name", "x", "y"]), "measured")
    _, axis = plotting.panel(table, "x", "y", "name", labels=("x", "y"), words="Lines.")
    drawn = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in axis.get_lines()}
    assert [style for _, style in drawn.values()] == ["--"] * 2 + ["-"] * 2
    assert drawn[f"p, {SHIPPED}"][0] == drawn[f"p, {YOURS}"][0] != drawn[f"q, {YOURS}"][0]
    figure, axis = plotting.panel(table, "x", "y", "name", labels=("x", "y"), words="Bars.", draw=plotting.bars)
    assert len(axis.patches) == 8 and len(figure.legends[0].get_texts()) == 4
