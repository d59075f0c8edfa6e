"""The scoreboard's rows: where a claim is judged, and prose that holds to its verdicts."""

import json
import re

import pandas as pd
import pytest

from ondevice import assets, evidence
from ondevice_studies import board


@pytest.fixture(scope="module")
def claims():
    return board.claims()


VERDICT_LINE = re.compile(rf"^(?:{'|'.join(evidence.VERDICTS)}) +(\w+-c\d+) ", re.M)


def judged_under(paper: str) -> dict[str, list[str]]:
    """By claim: the headings under which a stored output of the notebook has its verdict."""
    notebook = json.loads((assets.ROOT / "notebooks" / f"{paper}.ipynb").read_text(encoding="utf-8"))
    heading = ""
    headings: dict[str, list[str]] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^#+ (.+)", "".join(cell["source"]), re.M) or [heading])[-1]
        else:
            printed = "".join("".join(output.get("text", [])) for output in cell["outputs"])
            for claim in VERDICT_LINE.findall(printed):
                headings.setdefault(claim, []).append(heading)
    return headings


def test_every_claim_has_the_section_that_shows_its_verdict(claims):
    for paper, rows in claims.groupby("paper"):
        notebook = json.loads((assets.ROOT / "notebooks" / f"{paper}.ipynb").read_text(encoding="utf-8"))
        texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
        assert set(rows["section"]) <= set(re.findall(r"^#+ (.+)", "\n".join(texts), re.M))
        headings = judged_under(str(paper))
        judged = rows[rows["ours"] != ""]
        assert [row.claim for row in judged.itertuples() if row.section not in headings[row.claim]] == []


def row(claim, verdict, value, printed="2 x"):
    return {"claim": claim, "verdict": verdict, "value": value, "printed": printed}


TWO = pd.DataFrame([
    row("a-c01", "trend", '[{"value": 1.5, "low": 1, "high": 2, "n": 3}, 7.0]'), row("a-c02", "contradicted", "0.5"),
])  # fmt: skip


def test_prose_is_filled_from_the_verdicts():
    text = "Ours is {a-c01\ntrend} of {a-c01 trend 1} and {a-c02 contradicted}, the paper's {a-c01 paper}."
    assert board.filled(text, TWO) == "Ours is 1.5 [1, 2] of 7 and 0.5, the paper's 2 x."


def test_prose_that_takes_a_claim_for_something_else_is_refused():
    with pytest.raises(ValueError, match="a-c02"):
        board.filled("It is {a-c02 reproduced}.", TWO)


@pytest.mark.parametrize(
    ("stored", "verdict"), [("3.0", "reproduced"), ("1.0", "contradicted"), ("", None), ("[3, 3]", None)]
)
def test_a_rule_judges_a_stored_value_of_its_own_shape(stored, verdict):
    rule = evidence.Rule("speed", "x", evidence.AtLeast(2), None, 1.0)
    assert board.verdict_of(rule, stored) == (verdict or "another quantity")
    assert board.verdict_of(evidence.Untested("no phone"), stored) == "another quantity"


def test_rows_are_shown_whole_and_escaped(claims):
    rows = claims.head(3).assign(basis="measurement", statement="a < b & " + "c " * 200)
    shown = board.as_html(rows)
    assert shown.count("<tr>") == 4 and max(map(len, shown.split("\n"))) <= 110
    assert "a &lt; b &amp; c" in shown and shown.count("c ") + shown.count("c\n") >= 600
    assert "No claim" in board.as_html(rows.head(0))


def test_verdicts_are_counted_apart_by_what_they_rest_on():
    counts = pd.DataFrame(
        [("p", "measurement", "reproduced", 3), ("p", "simulation", "undecided", 2), ("p", "formula", "trend", 1),
         ("q", "measurement", "contradicted", 4), ("q", "untested", "untested", 5)],
        columns=["paper", "basis", "verdict", "claims"],
    )  # fmt: skip
    figure = board.verdict_bars(counts)
    assert [axis.get_title() for axis in figure.axes] == ["measurement", "simulation", "formula", "untested"]
    sizes = {(axis.get_title(), bars.get_label()): [patch.get_width() for patch in bars] for axis in figure.axes
             for bars in axis.containers}  # fmt: skip
    assert sizes["measurement", "reproduced"] == [3, 0] and sizes["measurement", "contradicted"] == [0, 4]
    assert sizes["simulation", "undecided"] == [2, 0] and sizes["untested", "untested"] == [0, 5]
