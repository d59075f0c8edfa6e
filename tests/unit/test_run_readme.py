"""README and pages of docs/ have the published verdicts' numbers, and the map has the library's folders."""

import dataclasses
import re

import pandas as pd
import pytest

from ondevice import assets, fetched, prompts
from ondevice.evidence.estimates import LEVEL
from ondevice_studies import board, front, readme
from ondevice_studies.board import scoreboard
from ondevice_studies.claims import CLAIMS


@pytest.fixture(scope="module")
def pages():
    return readme.pages()


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "docs/findings.md", "docs/verdicts.md"])
def test_a_page_is_that_of_the_published_verdicts(pages, page):
    path = assets.ROOT / page
    assert pages[path] == path.read_text(encoding="utf-8"), "run python -m ondevice_studies.readme"


def test_readme_has_at_most_160_lines():
    assert len((assets.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


def test_another_verdict_is_another_summary():
    rows = scoreboard()
    headline = next(iter(readme.headlines()))
    changed = rows.assign(verdict=rows["verdict"].mask(rows["claim"] == headline, "untested"))
    assert readme.summary(changed) != readme.summary(rows)


COLUMNS = ["claim", "printed", "value", "n", "drawn", "kind", "null", "verdict", "remark"]


def test_a_summary_of_two_claims_by_hand(monkeypatch):
    monkeypatch.setattr(readme, "headlines", lambda: {"a-c01": "A: seconds"})
    value = '{"value": 1.234, "low": 1, "high": 2, "n": 7, "drawn": "prompts", "ends": "interval"}'
    rows = [
        ("a-c01", "2 s", value, "7", "prompts", "recorded", "1 s: trend", "trend", "does not discriminate: x"),
        ("a-c02", "-", "", "", "", "", "", "untested", ""),
        ("a-c03", "-", "1", "7", "prompts", "recorded", "1 s: contradicted", "reproduced", ""),
    ]
    assert readme.summary(pd.DataFrame(rows, columns=COLUMNS)).splitlines()[2:] == [
        "| A: seconds | 2 s | 1.23 [1, 2] | 7 prompts | recorded | trend | trend |",
        "",
        "Of 3 claims: 1 reproduced, 1 trend, 1 untested. The 2 verdicts rest on: 2 measurement.",
        "Of the 1 that are reproduced: 1 by a measurement against a null, 0 by a measurement without a possible null, "
        "0 by a formula, 0 by a simulation, 0 by a measurement in which the null gets the same verdict, "
        "0 by a measurement whose null is pending.",
    ]


@pytest.mark.parametrize(
    ("kind", "null", "remark", "group"),
    [
        ("recorded", "1 x: contradicted", "", "against a null"),
        ("measured+quoted", "no null possible: an identity", "", "without a possible null"),
        ("recorded", "1 x: reproduced", "does not discriminate: vanilla has 1 x", "as its null is"),
        ("recorded", "null pending: the larger model", "", "null pending"),
        ("analytic", "1 x: contradicted", "", "formula"),
        ("simulated", "1 x: contradicted", "", "simulation"),
    ],
)
def test_what_is_reproduced_is_counted_by_what_it_is_worth(kind, null, remark, group):
    assert board.group(kind, null, remark) == group and group in board.GROUPS


FINDING = front.Finding("a-c01", "A is faster", "a phone", "{0} to {1} x", "a laptop, {machine}", "trend", "It is.")
VALUE = '{"value": 1.234, "low": 1, "high": 2, "n": 7, "drawn": "prompts", "ends": "interval"}'
ROW = {"claim": "a-c01", "printed": "2 x", "n": "7", "drawn": "prompts", "kind": "recorded", "null": "1 x: undecided",
       "verdict": "trend", "machine": "zen0-2c", "value": f"[{VALUE}, 3.0]"}  # fmt: skip
HEAD = ["| claim | paper (model, machine) | here (model, machine) | what it means |", "|---|---|---|---|"]


def test_a_finding_by_hand(monkeypatch):
    monkeypatch.setattr(front, "FINDINGS", [FINDING])
    assert front.findings(pd.DataFrame([ROW])).splitlines() == [
        *HEAD,
        "| A is faster | 2 x (a phone) | 1.23 [1, 2] to 3 x (a laptop, zen0-2c; 7 prompts) "
        "| *trend*, null *undecided*. It is. |",
    ]
    unmeasured = front.findings(pd.DataFrame([{**ROW, "kind": "simulated", "machine": "", "null": ""}]))
    assert unmeasured.endswith("(a laptop, ; 7 prompts; simulated) | *trend*. It is. |")


def test_a_finding_that_nothing_judges_has_no_number(monkeypatch):
    monkeypatch.setattr(front, "FINDINGS", [dataclasses.replace(FINDING, shown="-", verdict="untested")])
    row = {**ROW, "value": "", "verdict": "untested", "null": ""}
    table = front.findings(pd.DataFrame([row]))
    assert table.splitlines()[2] == "| A is faster | 2 x (a phone) | - | *untested*. It is. |"


def test_words_for_another_verdict_are_refused(monkeypatch):
    monkeypatch.setattr(front, "FINDINGS", [FINDING])
    with pytest.raises(ValueError, match="a-c01 for trend, but it is reproduced"):
        front.findings(pd.DataFrame([{**ROW, "verdict": "reproduced"}]))
    monkeypatch.setattr(front, "FINDINGS", [dataclasses.replace(FINDING, others={"a-c02": "reproduced"})])
    with pytest.raises(ValueError, match="a-c02 for reproduced, but it is contradicted"):
        front.findings(pd.DataFrame([ROW, {**ROW, "claim": "a-c02", "verdict": "contradicted"}]))


def test_findings_are_of_the_abstracts_but_where_those_are_untested():
    papers = [finding.claim.partition("-")[0] for finding in front.FINDINGS]
    assert list(dict.fromkeys(papers)) == list(CLAIMS) and {papers.count(paper) for paper in CLAIMS} <= {2, 3}
    other = [finding.claim for finding in front.FINDINGS if finding.claim not in readme.headlines()]
    assert [claim.partition("-")[0] for claim in other] == ["sdnpu"]
    published = scoreboard().set_index("claim")["verdict"]
    assert {published[claim] for claim in readme.headlines() if claim.startswith("sdnpu")} == {"untested"}
    assert {"contradicted", "untested"} < {finding.verdict for finding in front.FINDINGS}


def test_the_words_of_a_finding_have_no_result_typed_by_hand():
    for finding in front.FINDINGS:
        assert not NUMBER.findall(re.sub(r"\{\d}", "", finding.shown) + finding.meaning), finding.claim
        assert finding.shown == "-" or "{0}" in finding.shown, finding.claim


def test_every_notebook_has_its_row_and_the_minutes_of_its_published_run(monkeypatch, tmp_path):
    assert set(front.NOTEBOOKS) == {path.stem for path in (assets.ROOT / "notebooks").glob("*.ipynb")}
    (tmp_path / "figures" / "a").mkdir(parents=True)
    for name, text in (("one", '{"seconds": 80}'), ("two", '{"seconds": 20.5}'), ("three", "{}")):
        (tmp_path / "figures" / "a" / f"{name}.json").write_text(text)
    monkeypatch.setattr(assets, "ROOT", tmp_path)
    assert front.minutes("a") == "2" and front.minutes("b") == "under 1"


def test_a_readme_without_the_place_is_refused():
    with pytest.raises(ValueError, match="0 places"):
        readme.written("nothing", "block", readme.MAP)


def test_the_headlines_are_the_numbers_of_the_abstracts():
    claims = pd.concat(assets.paper_list("claims", paper) for paper in CLAIMS)
    printed = claims[["value_low", "value_high"]].notna().any(axis=1)
    abstract = claims["conditions"].fillna("").str.startswith("abstract") & printed
    assert set(readme.headlines()) == set(claims.loc[abstract, "claim_id"])
    assert [claim.partition("-")[0] for claim in readme.headlines()] == sorted(
        (claim.partition("-")[0] for claim in readme.headlines()), key=list(CLAIMS).index
    )


def test_the_map_names_every_folder_and_its_lines_to_a_tenth():
    text = (assets.ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    rows = re.compile(r"(\| [*]*`\w+/.*) \| ([\d,]+) \|$", re.M)
    shown, present = (rows.findall(each) for each in (text, readme.library_map(assets.ROOT / "lib")))
    assert [words for words, _ in shown] == [words for words, _ in present], "run python -m ondevice_studies.readme"
    for (words, count), (_, now) in zip(shown, present, strict=True):
        lines, most = int(count.replace(",", "")), int(now.replace(",", ""))
        assert abs(lines - most) <= max(50, most / 10), f"{words}: run python -m ondevice_studies.readme"


def test_the_map_of_a_small_library(tmp_path):
    (tmp_path / "kit" / "room").mkdir(parents=True)
    (tmp_path / "kit" / "__init__.py").write_text('"""The kit.\n\nMore.\n"""\n')
    (tmp_path / "kit" / "room" / "__init__.py").write_text('"""A room."""\n\nA = """text\nof two lines"""\n')
    (tmp_path / "kit" / "more.py").write_text('def f():\n    """Words."""\n    # why\n    return (\n        1)\n' * 4)
    assert readme.library_map(tmp_path).splitlines()[2:] == [
        "| **`kit/`** | The kit | 10 |", "| `kit/room/` | A room | 0 |",
    ]  # fmt: skip
    assert readme.code_lines((tmp_path / "kit" / "more.py").read_text()) == 12


WORDS = "half|quarter|third|two|three|four|five|six|seven|eight|nine|ten|twice|double"
NUMBER = re.compile(rf"\d[\d.,]*\d|\d|\b(?:{WORDS})\b")
# Every number of README's own text, in its order; a block that is written by a program has its own tests.
PROSE = {
    "implements five papers": "five",
    "SmolLM2-135M-Instruct": "2",
    "-135M-": "135",
    "(93 MB)": "93",
    "two or three claims": "two",
    "three claims of each paper": "three",
    "whole 95 % interval, in brackets": "95",
    "On two cores the set-up": "two",
    "set-up takes two minutes": "two",
    "a quarter of an hour": "quarter",
    "Python (3.11": "3.11",
    "or 3.12": "3.12",
    "2.3 GB of disk": "2.3",
    "takes five minutes": "five",
    "quick runs, on two cores": "two",
    "**All five** answer": "five",
    "machines with two cores": "two",
    "Apache-2.0": "2.0",
}
# Every number behind a command on the page that has the longer ones
COMMENTS = ["four hours", "two cores", "half an hour", "dragon takes four hours", "grating two", "480 questions",
            "WikiText-2", "491 MB"]  # fmt: skip


def own_prose(text: str) -> str:
    """README without what programs write, code, and addresses."""
    for part in (r"<!-- \w+: written by.*?<!-- end -->", r"^```.*?^```", r"`[^`]*`", r"(?<=\])\([^)]*\)"):
        text = re.sub(part, "", text, flags=re.S | re.M)
    return text


def test_the_readmes_own_text_has_no_other_number():
    text = (assets.ROOT / "README.md").read_text(encoding="utf-8")
    assert NUMBER.findall(own_prose(text)) == list(PROSE.values())
    assert [words for words in PROSE if words not in text.replace("\n", " ")] == []
    assert f"{round(100 * LEVEL)} % interval" in text and len(CLAIMS) == 5  # papers
    page = (assets.ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    minutes = re.search(r"It takes about (\w+) minutes", page)
    assert minutes and f"takes {minutes[1]} minutes" in text


def test_the_numbers_of_the_other_pages_are_the_librarys():
    house, running = ((assets.ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("house.md", "running.md"))
    assert NUMBER.findall(own_prose(house)) == ["five", "96", "six"]
    packages = [path for path in (assets.ROOT / "lib").iterdir() if (path / "__init__.py").is_file()]
    assert len(packages) == 5 and "library in five packages" in house
    assert len(prompts.own()) + len(prompts.own("validation")) == 96 and len(prompts.TASKS) == 6
    assert round(fetched.FILES[fetched.QWEN].size / 1e6) == 491
    assert NUMBER.findall(own_prose(running)) == []
    comments = " ".join(re.findall(r"  # (.*)", running))
    assert NUMBER.findall(comments) == [word for words in COMMENTS for word in NUMBER.findall(words)]
