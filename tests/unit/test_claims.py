"""The rules that judge the papers' claims: each can fail, and the published verdicts are what they say."""

import inspect

import numpy as np
import pandas as pd
import pytest

from ondevice import assets
from ondevice.evidence import VERDICTS, Estimate, Rule, Untested, judged, quoted, read_claims, read_value
from ondevice.evidence.claims import ELSEWHERE
from ondevice_studies.claims import CLAIMS

PAPERS = sorted(CLAIMS)
FIGURES = assets.ROOT / "figures"
JUDGED = {*VERDICTS} - {"untested"}
PUBLISHED = [paper for paper in PAPERS if (FIGURES / paper / "claims.csv").is_file()]


def rules_of(paper: str) -> dict[str, Rule | Untested]:
    return {claim: row.rule for claim, row in CLAIMS[paper].items()}


RULES = [(claim, rule) for paper in PAPERS for claim, rule in rules_of(paper).items() if isinstance(rule, Rule)]
EACH_RULE = pytest.mark.parametrize(("claim", "rule"), RULES, ids=[claim for claim, _ in RULES])


ROW = {
    "paper": "tiny", "claim_id": "tiny-c01", "section": "1. Speed", "judged": "speed", "judged_unit": "x",
    "reproduced": "AtLeast(2)", "trend": "Above(1)", "wrong": "0.9", "null": "plain", "null_value": "1.0",
    "no_null": "", "note": "", "regime": "formula", "untested": "", "kind": "", "headline": "",
}  # fmt: skip
WRONG = {
    "no rule and no reason": ({"reproduced": ""}, "has a rule, or why"),
    "a rule and a reason": ({"untested": "no phone"}, "has a rule, or why"),
    "a function of an untested claim": ({"reproduced": "", "untested": "no phone"}, "a function"),
    "another id": ({"claim_id": "tiny-c02"}, "tiny-c01"),
    "an unknown test": ({"reproduced": "Nearly(2)"}, "Nearly"),
    "a call of anything else": ({"trend": "print(1)"}, "print"),
    "no regime": ({"regime": ""}, "tiny-c01: a claim with a rule has a regime"),
    "another regime": ({"regime": "phone"}, "'phone'"),
    "a value that is no number": ({"wrong": "open('x')"}, "tiny-c01"),
}


def speed(seconds):
    return float(seconds)


def listed(folder, monkeypatch, **changed):
    (folder / "paper").mkdir(exist_ok=True)
    pd.DataFrame([ROW | changed]).to_csv(folder / "paper" / "claims.csv", index=False)
    monkeypatch.setattr(assets, "data", lambda *parts: folder.joinpath(*parts))
    return read_claims("tiny", {"tiny-c01": judged(speed)})


def test_a_claim_is_a_row_and_a_function(tmp_path, monkeypatch):
    claim = listed(tmp_path, monkeypatch)["tiny-c01"]
    assert claim.values({"seconds": 3}) == (3.0, None) and claim.section == "1. Speed"
    assert claim.rule.words == "speed: at least 2 x; trend: above 1 x; null: plain" and claim.rule.null_value == 1


@pytest.mark.parametrize("case", WRONG)
def test_a_row_that_cannot_be_judged_is_refused_by_its_claim(case, tmp_path, monkeypatch):
    changed, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        listed(tmp_path, monkeypatch, **changed)


@EACH_RULE
def test_a_null_is_the_value_function_with_other_parameters(claim, rule):
    row = CLAIMS[claim.partition("-")[0]][claim]
    assert [bool(line) for line in (rule.null, rule.no_null)].count(True) == 1
    if row.null is None:
        assert not rule.null or rule.null_value is not None
    else:
        assert rule.null and rule.null_value is None
        assert row.null and set(row.null) <= set(inspect.signature(row.value).parameters)


@EACH_RULE
def test_each_rule_rejects_its_wrong_value_and_knows_what_its_null_has(claim, rule):
    assert rule.verdict(rule.wrong) == "contradicted"
    if rule.null_value is not None:
        assert rule.null and np.shape(rule.null_value) == np.shape(rule.wrong)
        assert rule.verdict(rule.null_value) in JUDGED - {"undecided"}


@EACH_RULE
def test_a_value_that_could_be_anything_is_undecided(claim, rule):
    parts = [Estimate(x, -1e12, 1e12, 10, "measured") for x in np.atleast_1d(rule.wrong).astype(float)]
    assert rule.verdict(parts if np.ndim(rule.wrong) else parts[0]) == "undecided"


@pytest.mark.parametrize("paper", PUBLISHED)
def test_the_published_verdicts_are_the_rules(paper):
    """And the quoted numbers those of data/paper."""
    claims = assets.paper_list("claims", paper).set_index("claim_id")
    rows = pd.read_csv(FIGURES / paper / "claims.csv", dtype=str, keep_default_na=False).set_index("claim")
    assert set(rows.index) == set(claims.index)
    for claim, row in rows.iterrows():
        rule = rules_of(paper)[claim]
        if (published := CLAIMS[paper][claim]).elsewhere:
            null = "" if published.null is None else row["null"]
            assert (row["verdict"], row["note"], ":" in null) == ("untested", ELSEWHERE, False) and row["ours"], claim
        elif row["verdict"] == "untested":
            assert row["note"] and not row["ours"], claim
        else:
            assert row["verdict"] == rule.verdict(read_value(row["value"])), claim
            assert "remark" not in row or row["note"].endswith(rule.words), claim
        assert row["paper"] == quoted(claims.loc[claim]), claim


@pytest.mark.parametrize("paper", PUBLISHED)
def test_the_published_summary_agrees_with_its_files(paper):
    folder = FIGURES / paper
    claims = pd.read_csv(folder / "claims.csv", keep_default_na=False)
    for row in pd.read_csv(folder / "exhibits.csv", keep_default_na=False).itertuples():
        counts = claims.loc[claims["exhibit"] == row.exhibit, "verdict"].value_counts()
        if row.verdict not in ("no claim", "untested"):
            assert dict(reversed(part.split()) for part in row.verdict.split(", ")) == counts.astype(str).to_dict()
        assert not row.file or len(pd.read_csv((folder / row.file).with_suffix(".csv"))) > 0
