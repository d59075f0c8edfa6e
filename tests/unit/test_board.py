"""The scoreboard's rows: where a claim is judged, prose that holds to its verdicts, the first editions' verdicts."""

import json
import subprocess

import pandas as pd
import pytest

from ondevice import assets, evidence
from ondevice_studies import board


@pytest.fixture(scope="module")
def claims():
    return board.claims()


def test_every_claim_has_a_section_of_its_notebook(claims):
    for paper, rows in claims.groupby("paper"):
        cells = json.loads((assets.ROOT / "notebooks" / f"{paper}.ipynb").read_text(encoding="utf-8"))["cells"]
        lines = {
            line for cell in cells if cell["cell_type"] == "markdown" for line in "".join(cell["source"]).split("\n")
        }
        headings = {line.lstrip("#").strip() for line in lines if line.startswith("#")}
        assert set(rows["section"]) <= headings
        places = board.sections(str(paper))
        assert set(rows.loc[rows["verdict"] != "untested", "claim"]) <= set(places), (
            "judged, but not by a stored output"
        )


def test_only_measurements_name_a_machine(claims):
    measured = claims["kind"].str.contains("measured|recorded")
    assert (claims["machine"] != "").equals(measured)


def test_an_address_is_the_heading_with_hyphens():
    assert board.link("diaa", "2.1 Two `tables`, warm") == "diaa.ipynb#2.1-Two-tables,-warm"


def row(claim, verdict, value, printed="2 x"):
    return {"claim": claim, "verdict": verdict, "value": value, "printed": printed}


TWO = pd.DataFrame([
    row("a-c01", "trend", '[{"value": 1.5, "low": 1, "high": 2, "n": 3}, 7.0]'), row("a-c02", "contradicted", "0.5"),
])  # fmt: skip


def test_prose_is_filled_from_the_verdicts():
    text = "Ours is {a-c01\ntrend} of {a-c01 trend 1} and {a-c02 contradicted}, the paper's {a-c01 paper}."
    assert board.told(text, TWO) == "Ours is 1.5 [1, 2] of 7 and 0.5, the paper's 2 x."


def test_prose_that_takes_a_claim_for_something_else_is_refused():
    with pytest.raises(ValueError, match="takes a-c02 for reproduced, but it is contradicted"):
        board.told("It is {a-c02 reproduced}.", TWO)


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


def test_the_first_verdicts_are_those_of_their_commits(claims):
    first = evidence.load("scoreboard", "first")
    assert set(first["claim"]) == set(claims["claim"])
    for paper, run in first.attrs["sidecar"]["parameters"].items():
        words = ["git", "-C", str(assets.ROOT), "show", f"{run['commit']}:figures/{paper}/claims.csv"]
        then = subprocess.run(words, capture_output=True, text=True, check=False)
        if then.returncode:
            pytest.skip("a shallow clone has not the commits of the first editions")
        rows = [line for line in then.stdout.splitlines() if line.startswith(f"{paper}-c")]
        kept = first[first["claim"].str.startswith(f"{paper}-")]
        assert len(rows) == len(kept)
        for one in kept.itertuples():
            (line,) = [text for text in rows if text.startswith(f"{one.claim},")]
            assert f",{one.verdict}," in line
