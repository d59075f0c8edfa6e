import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from ondevice import assets
from ondevice.evidence import (
    Above,
    All,
    AtLeast,
    Claim,
    Estimate,
    PaperRun,
    Rule,
    Untested,
    born,
    exact,
    quoted,
    read_value,
)
from ondevice.evidence.claims import ELSEWHERE

CLAIMS = pd.DataFrame(
    {
        "paper": "tiny",
        "claim_id": ["tiny-c01", "tiny-c02"],
        "exhibit": ["fig_01", "table_01"],
        "statement": ["it is faster", "it is cheaper"],
        "value_low": [1.5, np.nan],
        "value_high": [1.5, 80.0],
        "unit": ["times", "percent"],
    }
)
EXHIBITS = pd.DataFrame(
    {
        "paper": "tiny",
        "exhibit": ["fig_01", "fig_02", "table_01", "equation_1"],
        "title": ["Speed", "Parts", "Cost", "Sum"],
        "kind": ["measured", "diagram", "simulated", "analytic"],
    }
)
FASTER = Rule("speed-up", "times", AtLeast(1.4), Above(1), wrong=0.5, null="no cache", null_value=1.0)
NUMBERS = pd.DataFrame({"x": [1, 2], "y": [0.123456789, 2.0]})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a paper of two claims and three exhibits writes."""
    tables = {"claims": CLAIMS, "exhibits": EXHIBITS}
    monkeypatch.setattr(assets, "paper_list", lambda stem, paper: tables[stem])
    monkeypatch.setenv(assets.FIGURES_VARIABLE, str(tmp_path / "figures"))
    monkeypatch.setenv(assets.RESULT_VARIABLE, str(tmp_path / "result.json"))
    return tmp_path / "figures" / "tiny"


@pytest.fixture
def run(folder):
    return PaperRun("tiny", {"seed": np.int64(3)}, {"tiny-c01": FASTER, "tiny-c02": Untested("no price list")})


def files(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_an_exhibit_is_numbers_picture_and_provenance(run, folder):
    figure = Figure()
    figure.add_subplot().plot([0, 1])
    run.save("fig_01_speed", NUMBERS, figure, kind="measured+quoted", inputs=["trace"], note="one")
    assert files(folder) == ["fig_01_speed.csv", "fig_01_speed.json", "fig_01_speed.png"]
    assert (folder / "fig_01_speed.csv").read_text() == "x,y\n1,0.123457\n2,2\n"
    record = json.loads((folder / "fig_01_speed.json").read_text())
    assert (record["title"], record["kind"], record["inputs"]) == ("Speed", "measured+quoted", ["trace"])
    assert record["parameters"] == {"seed": 3} and {"versions", "machine", "seconds"} <= set(record)


def test_a_picture_that_fails_leaves_no_half_of_it(run, folder, monkeypatch):
    write = Path.write_bytes

    def fail(self, data):
        write(self, data[:9])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        run.save("fig_01_speed", NUMBERS, Figure(), kind="measured")
    assert set(files(folder)) <= {"fig_01_speed.csv"} and not run.exhibits


@pytest.mark.parametrize(
    ("stem", "table", "kind", "message"),
    [
        ("fig_01_speed", NUMBERS, "guessed", "'guessed'"),
        ("fig_09_other", NUMBERS, "measured", "fig_09_other"),
        ("fig_01_speed", NUMBERS[:0], "measured", "fig_01_speed"),
    ],
)
def test_a_bad_exhibit_is_refused_and_writes_nothing(run, folder, stem, table, kind, message):
    with pytest.raises(ValueError, match=message):
        run.save(stem, table, kind=kind)
    assert not folder.exists()


def test_every_claim_needs_a_rule_and_every_rule_a_claim(folder):
    with pytest.raises(ValueError, match=r"tiny-c02.*tiny-c03"):
        PaperRun("tiny", {}, {"tiny-c01": FASTER, "tiny-c03": FASTER})


def test_a_claim_is_shown_beside_the_paper(run):
    line = run.judge("tiny-c01", Estimate(1.23456, 1.1, 1.35, 72, "recorded", "users"))
    assert all(part in line for part in ("trend", "tiny-c01", "1.5 times", "1.23 times [1.1, 1.35]", "72", "recorded"))
    with pytest.raises(ValueError, match="tiny-c02"):
        run.judge("tiny-c02", 80, kind="measured")


def test_what_is_undecided_says_how_much_would_decide(run):
    run.judge("tiny-c01", Estimate(1.1, 0.9, 1.3, 10, "measured"))
    row = run.verdict_table().set_index("claim").loc["tiny-c01"]
    assert (row["verdict"], row["n"], row["remark"]) == ("undecided", "10", "n 41 would decide")


@pytest.mark.parametrize(
    ("value", "null", "flagged"),
    [(1.5, None, False), (1.5, 1.39, False), (1.5, 1.41, True), (1.2, 1.5, True), (0.5, 1.2, False), (0.5, 0.4, False)],
)
def test_a_null_with_the_same_verdict_does_not_discriminate(run, value, null, flagged):
    """Nor one that does better. Beside a contradicted claim a null says nothing."""
    line = run.judge("tiny-c01", exact(value, "simulated"), null=null)
    assert ("does not discriminate" in line) == bool(run.verdict_table()["remark"][0]) == flagged


def test_a_null_without_a_value_is_refused(run):
    run.rules = {"tiny-c01": Rule("speed-up", "times", AtLeast(1.4), None, wrong=0.5, null="no cache")}
    with pytest.raises(ValueError, match="tiny-c01"):
        run.judge("tiny-c01", 1.5, kind="measured")


def test_kinds_come_with_the_data_and_are_not_overruled(run, folder):
    table = born(NUMBERS.copy(), "simulated")
    assert run.save("fig_01_speed", table).startswith("fig_01: simulated,")
    with pytest.raises(ValueError, match=r"fig_01_speed.*simulated.*measured"):
        run.save("fig_01_speed", table, kind="measured")
    with pytest.raises(ValueError, match=r"tiny-c01.*simulated.*measured"):
        run.judge("tiny-c01", exact(1.5, "simulated"), kind="measured")
    for without_kind in (lambda: run.judge("tiny-c01", 1.5), lambda: run.save("fig_01_speed", NUMBERS)):
        with pytest.raises(ValueError, match="where it comes from"):
            without_kind()
    assert json.loads((folder / "fig_01_speed.json").read_text())["kind"] == "simulated" and not run.verdicts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.000123456, "0.000123"),
        (12345.6, "12346"),
        (3e-15, "0"),
        ((1, -2, 3, 4, 5), "-2 to 5 times (5 values)"),
        ((1.0, Estimate(2, 1.5, 2.5, 9, "measured")), "1, 2 [1.5, 2.5]"),
    ],
)
def test_our_value_is_shown_with_three_digits_and_stored_whole(run, value, text):
    run.rules = {"tiny-c01": Rule("any value", "times", All(Above(-9)), None, wrong=-9)}
    unit = "" if "times" in text else " times"
    parts = value if isinstance(value, tuple) else (value,)
    carried = [exact(x, "measured") if not isinstance(x, Estimate) else x for x in parts]
    assert f"ours {text}{unit}, " in run.judge("tiny-c01", tuple(carried) if isinstance(value, tuple) else carried[0])
    stored = np.atleast_1d(np.asarray(read_value(run.verdicts["tiny-c01"]["value"]), dtype=object))
    for field in ("value", "low"):
        assert [getattr(x, field, x) for x in stored] == [getattr(x, field, x) for x in parts]


def test_finish_needs_every_exhibit_and_every_verdict(run, folder):
    with pytest.raises(ValueError, match="fig_01, table_01"):
        run.finish()
    run.save("fig_01_speed", NUMBERS, kind="measured")
    run.skip("table_01", "the prices are not public")
    with pytest.raises(ValueError, match="tiny-c01"):
        run.finish()
    assert not (folder / "claims.csv").exists()
    run.leave("tiny-c01", "no server here")
    assert run.finish()["verdict"].tolist() == ["1 untested", "1 untested"]


def test_finish_writes_verdicts_and_the_result_record(run, folder, tmp_path):
    run.save("fig_01_speed", NUMBERS, kind="measured")
    run.skip("table_01", "the prices are not public")
    run.judge("tiny-c01", 1.5, kind="measured")
    summary = run.finish()
    assert summary.to_dict("records") == [
        {"exhibit": "fig_01", "kind": "measured", "file": "fig_01_speed.csv", "verdict": "1 reproduced"},
        {"exhibit": "table_01", "kind": "untested", "file": "", "verdict": "1 untested"},
    ]
    claims = pd.read_csv(folder / "claims.csv", keep_default_na=False)
    assert claims["verdict"].tolist() == ["reproduced", "untested"]
    assert claims["paper"].tolist() == ["1.5 times", "up to 80 percent"]
    assert claims["note"].tolist() == [FASTER.words, "no price list"]
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["paper"] == "tiny" and record["exhibits"] == summary.to_dict("records")
    assert record["verdicts"] == {"reproduced": 1, "untested": 1} and record["parameters"] == {"seed": 3}


@pytest.mark.parametrize(
    ("low", "high", "unit", "text"),
    [
        (np.nan, 84, "percent", "up to 84 percent"),
        (5, np.nan, "s", "5 s"),
        (0.2, 0.2, "s", "0.2 s"),
        (np.nan, np.nan, "s", "-"),
        (0.37, 0.82, np.nan, "0.37 to 0.82"),
    ],
)
def test_the_papers_value_as_text(low, high, unit, text):
    assert quoted(pd.Series({"value_low": low, "value_high": high, "unit": unit})) == text


@pytest.fixture
def section_run(folder):
    """A run whose two claims stand in two sections and are judged by their own functions."""
    cheaper = Rule("cost", "percent", AtLeast(60), Above(10), wrong=5, null="no cache")
    return PaperRun(
        "tiny",
        {},
        {
            "tiny-c01": Claim("Speed", FASTER, lambda times, factor=1: factor * times, kind="measured"),
            "tiny-c02": Claim("Cost", cheaper, lambda costs, cut: exact(cut * costs, "simulated"), {"cut": 0.9}),
        },
    )


def test_a_section_judges_its_claims_by_the_tables_it_is_given(section_run):
    line = section_run.judge_section("Speed", times=2.0, costs=None)
    assert line.startswith("reproduced") and "tiny-c01" in line and "ours 2 times" in line
    assert section_run.verdicts["tiny-c01"]["kind"] == "measured" and list(section_run.verdicts) == ["tiny-c01"]
    assert "ours 1 times" in section_run.judge_section("Speed", times=2.0, factor=0.5)
    assert "does not discriminate: no cache has 90 percent" in section_run.judge_section("Cost", costs=100.0, cut=0.7)
    assert section_run.verdicts["tiny-c02"]["kind"] == "simulated"


def test_a_claim_about_other_hardware_is_untested_with_our_value_beside_it(folder):
    plain = Rule("speed-up", "times", AtLeast(1.4), None, wrong=0.5, null="no cache")
    claim = Claim("Speed", plain, lambda times, cached=True: times if cached else 1.0, {"cached": False}, "recorded")
    rows = {"tiny-c01": dataclasses.replace(claim, regime="hardware"), "tiny-c02": Untested("no phone")}
    run = PaperRun("tiny", {}, rows)
    assert run.judge_section("Speed", times=2.0).startswith("untested") and "ours 2 times" in run.judge_section(
        "Speed", times=2.0
    )
    row = run.verdict_table().set_index("claim").loc["tiny-c01"]
    assert (row["verdict"], row["null"], row["remark"]) == ("untested", "1 times", "") and row["note"] == ELSEWHERE


@pytest.mark.parametrize(
    ("section", "tables"), [("Speed", {"costs": 1.0}), ("Speed", {}), ("Memory", {"times": 2.0}), ("Cost", {"cut": 1})]
)
def test_a_section_without_a_claim_for_these_tables_is_refused(section_run, section, tables):
    with pytest.raises(ValueError, match=f"{section}.*{'.*'.join(tables)}"):
        section_run.judge_section(section, **tables)
    assert not section_run.verdicts
