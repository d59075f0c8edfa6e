"""README says what the published verdicts say, and what the library's folders hold."""

import re

import pandas as pd
import pytest

from ondevice import assets
from ondevice_studies import readme
from ondevice_studies.board import scoreboard
from ondevice_studies.claims import CLAIMS


def test_the_summary_is_that_of_the_published_verdicts():
    text = (assets.ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.written(text, readme.summary(scoreboard())) == text, "run python -m ondevice_studies.readme"


def test_another_verdict_is_another_summary():
    board = scoreboard()
    headline = next(iter(readme.headlines()))
    changed = board.assign(verdict=board["verdict"].mask(board["claim"] == headline, "untested"))
    assert readme.summary(changed) != readme.summary(board)


def test_a_summary_of_two_claims_by_hand(monkeypatch):
    monkeypatch.setattr(readme, "headlines", lambda: {"a-c01": "A: seconds"})
    rows = [("a-c01", "2 s", '{"value": 1.234, "low": 1, "high": 2}', "recorded", "trend", "does not discriminate: x"),
            ("a-c02", "-", "", "", "untested", "")]  # fmt: skip
    board = pd.DataFrame(rows, columns=["claim", "printed", "value", "kind", "verdict", "remark"])
    assert readme.summary(board).splitlines()[2:] == [
        "| A: seconds | 2 s | 1.23 [1, 2] | recorded | trend |", "",
        "Of 2 claims: 1 trend, 1 untested. The 1 verdicts rest on: 1 measurement.",
        "1 claims do not discriminate: a trivial method gets the same verdict.",
    ]  # fmt: skip


def test_a_readme_without_the_place_is_refused():
    with pytest.raises(ValueError, match="0 places"):
        readme.written("nothing", "block")


def test_each_paper_has_one_headline_in_the_readmes_order():
    assert [claim.partition("-")[0] for claim in readme.headlines()] == list(CLAIMS)


def test_the_map_names_every_folder_and_its_lines_to_a_tenth():
    text = (assets.ROOT / "README.md").read_text(encoding="utf-8")
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
