"""README and pages of docs/ have the published verdicts' numbers, and the map has the library's folders."""

import dataclasses
import re

import pandas as pd
import pytest

from ondevice import assets
from ondevice.evidence.estimates import LEVEL
from ondevice_studies import board, front, readme
from ondevice_studies.claims import CLAIMS


@pytest.fixture(scope="module")
def pages():
    return readme.pages()


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "docs/findings.md", "docs/verdicts.md"])
def test_a_page_is_that_of_the_published_verdicts(pages, page):
    path = assets.ROOT / page
    assert pages[path] == path.read_text(encoding="utf-8"), "run python -m ondevice_studies.readme"


COLUMNS = ["claim", "printed", "value", "n", "drawn", "kind", "null", "verdict", "remark"]


def test_a_summary_of_two_claims_by_hand(monkeypatch):
    monkeypatch.setattr(readme, "headlines", lambda: {"a-c01": "A: seconds"})
    value = '{"value": 1.234, "low": 1, "high": 2, "n": 7, "drawn": "prompts", "ends": "interval"}'
    rows = [
        ("a-c01", "2 s", value, "7", "prompts", "recorded", "1 s: trend", "trend", "does not discriminate: x"),
        ("a-c02", "-", "", "", "", "", "", "untested", ""),
        ("a-c03", "-", "1", "7", "prompts", "recorded", "1 s: contradicted", "reproduced", ""),
    ]
    row, _, counts, reproduced = readme.summary(pd.DataFrame(rows, columns=COLUMNS)).splitlines()[2:]
    assert row == "| A: seconds | 2 s | 1.23 [1, 2] | 7 prompts | recorded | trend | trend |"
    assert re.findall(r"\d+ \w+", counts) == ["3 claims", "1 reproduced", "1 trend", "1 untested", "2 verdicts",
                                              "2 measurement"]  # fmt: skip
    assert re.findall(r"\d", reproduced) == list("110000000")


@pytest.mark.parametrize(
    ("kind", "null", "remark", "group"),
    [
        ("recorded", "1 x: contradicted", "", "against a null"),
        ("measured+quoted", "no null possible: an identity", "", "without a possible null"),
        ("recorded", "1 x: reproduced", "does not discriminate: vanilla has 1 x", "as its null is"),
        ("recorded", "null pending: the larger model", "", "null pending"),
        ("analytic", "1 x: contradicted", "", "formula"),
        ("simulated", "1 x: contradicted", "", "simulation"),
        ("recorded+simulated", "1 x: contradicted", "", "simulation"),
        ("recorded+predicted", "1 x: contradicted", "", "prediction"),
        ("quoted+replayed", "1 x: contradicted", "", "replay"),
    ],
)
def test_what_is_reproduced_is_counted_by_what_it_is_worth(kind, null, remark, group):
    assert board.group(kind, null, remark) == group and group in board.GROUPS


FINDING = front.Finding("a-c01", "A is faster", "a phone", "{0} to {1} x", "a laptop, {machine}", "trend", "It is.")
VALUE = '{"value": 1.234, "low": 1, "high": 2, "n": 7, "drawn": "prompts", "ends": "interval"}'
ROW = {"claim": "a-c01", "printed": "2 x", "n": "7", "drawn": "prompts", "kind": "recorded", "null": "1 x: undecided",
       "verdict": "trend", "machine": "zen0-2c", "value": f"[{VALUE}, 3.0]"}  # fmt: skip


def test_a_finding_by_hand(monkeypatch):
    monkeypatch.setattr(front, "FINDINGS", [FINDING])
    monkeypatch.setattr(front, "null_of", lambda claim: "a coin")
    assert front.findings(pd.DataFrame([ROW])).splitlines()[2] == (
        "| A is faster | 2 x (a phone) | 1.23 [1, 2] to 3 x (a laptop, zen0-2c; 7 prompts) "
        "| *trend* (null, a coin: 1 x, *undecided*). It is. |"
    )
    unmeasured = front.findings(pd.DataFrame([{**ROW, "kind": "simulated", "machine": "", "null": ""}]))
    assert unmeasured.endswith("(a laptop, ; 7 prompts; simulated) | *trend*. It is. |")
    monkeypatch.setattr(front, "FINDINGS", [dataclasses.replace(FINDING, shown="-", verdict="untested")])
    table = front.findings(pd.DataFrame([{**ROW, "value": "", "verdict": "untested", "null": ""}]))
    assert table.endswith("| A is faster | 2 x (a phone) | - | *untested*. It is. |")


def test_words_for_another_verdict_are_refused(monkeypatch):
    monkeypatch.setattr(front, "FINDINGS", [FINDING])
    with pytest.raises(ValueError, match="a-c01"):
        front.findings(pd.DataFrame([{**ROW, "verdict": "reproduced"}]))
    monkeypatch.setattr(front, "FINDINGS", [dataclasses.replace(FINDING, others={"a-c02": "reproduced"})])
    with pytest.raises(ValueError, match="a-c02"):
        front.findings(pd.DataFrame([ROW, {**ROW, "claim": "a-c02", "verdict": "contradicted"}]))


def test_every_notebook_has_its_row():
    assert set(front.NOTEBOOKS) == {path.stem for path in (assets.ROOT / "notebooks").glob("*.ipynb")}


def test_the_headlines_are_the_numbers_of_the_abstracts():
    claims = pd.concat(assets.paper_list("claims", paper) for paper in CLAIMS)
    printed = claims[["value_low", "value_high"]].notna().any(axis=1)
    abstract = claims["conditions"].fillna("").str.startswith("abstract") & printed
    assert set(readme.headlines()) == set(claims.loc[abstract, "claim_id"])


def test_the_map_names_every_folder_and_its_lines_to_a_tenth(pages):
    path = assets.ROOT / "docs" / "house.md"
    text = path.read_text(encoding="utf-8")
    rows = re.compile(r"(\| [*]*`\w+/.*) \| ([\d,]+) \|$", re.M)
    shown, present = (rows.findall(each) for each in (text, pages[path]))
    assert [words for words, _ in shown] == [words for words, _ in present], "run python -m ondevice_studies.readme"
    for (words, count), (_, now) in zip(shown, present, strict=True):
        lines, most = int(count.replace(",", "")), int(now.replace(",", ""))
        assert abs(lines - most) <= max(50, most / 10), f"{words}: run python -m ondevice_studies.readme"


WORDS = "half|quarter|third|two|three|four|five|six|seven|eight|nine|ten|twice|double"
NUMBER = re.compile(rf"\d[\d.,]*\d|\d|\b(?:{WORDS})\b")
# Every number of README's own text, in its order; a block that is written by a program has its own tests.
PROSE = [
    "five", "2", "135", "93", "three", "95", "two", "two", "quarter", "3.11", "3.12", "2.3", "five", "two",
    "four", "five", "two", "2.0",
]  # fmt: skip


def own_prose(text: str) -> str:
    """README without what programs write, code, and addresses."""
    for part in (r"<!-- \w+: written by.*?<!-- end -->", r"^```.*?^```", r"`[^`]*`", r"(?<=\])\([^)]*\)"):
        text = re.sub(part, "", text, flags=re.S | re.M)
    return text


def test_the_readmes_own_text_has_no_other_number():
    text = (assets.ROOT / "README.md").read_text(encoding="utf-8")
    assert NUMBER.findall(own_prose(text)) == PROSE
    assert f"{round(100 * LEVEL)} % interval" in text and len(CLAIMS) == 5  # papers


def test_readme_is_short():
    assert len((assets.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160
