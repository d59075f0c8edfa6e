"""The rules that judge the papers' claims: each can fail, and the published verdicts are what they say."""

import inspect

import numpy as np
import pandas as pd
import pytest

from ondevice import assets
from ondevice.evidence import VERDICTS, Estimate, Rule, Untested, quoted, read_value
from ondevice_studies.claims import CLAIMS

PAPERS = sorted(CLAIMS)
FIGURES = assets.ROOT / "figures"
JUDGED = {*VERDICTS} - {"untested"}
PUBLISHED = [paper for paper in PAPERS if (FIGURES / paper / "claims.csv").is_file()]


def rules_of(paper: str) -> dict[str, Rule | Untested]:
    return {claim: row.rule for claim, row in CLAIMS[paper].items()}


RULES = [(claim, rule) for paper in PAPERS for claim, rule in rules_of(paper).items() if isinstance(rule, Rule)]
EACH_RULE = pytest.mark.parametrize(("claim", "rule"), RULES, ids=[claim for claim, _ in RULES])


@pytest.mark.parametrize("paper", PAPERS)
def test_every_claim_has_a_rule_or_a_reason_in_the_papers_order(paper):
    assert list(rules_of(paper)) == list(assets.paper_list("claims", paper)["claim_id"])
    assert all(isinstance(row.rule, Untested) == (row.value is None) for row in CLAIMS[paper].values())


@EACH_RULE
def test_a_null_is_the_value_function_with_other_parameters(claim, rule):
    row = CLAIMS[claim.partition("-")[0]][claim]
    assert [bool(line) for line in (rule.null, rule.no_null, rule.null_pending)].count(True) == 1
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
        if row["verdict"] == "untested":
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
