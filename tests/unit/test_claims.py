"""The rules that judge the papers' claims: each can fail, and the published verdicts are what they say."""

import hashlib
import inspect
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ondevice import assets
from ondevice.evidence import VERDICTS, Estimate, Rule, Untested, quoted, read_value
from ondevice_studies import rules_lock
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
    assert all(rule.why if isinstance(rule, Untested) else rule.words for rule in rules_of(paper).values())


FILES = subprocess.run(["git", "ls-files", "-z"], cwd=assets.ROOT, capture_output=True, text=True, check=False).stdout


# By commands, as the outputs of notebooks are. By hand a claim has the words of its paper, a rule, and a section that
# judges it. One that readers meet first has a sentence in README's table, too, and one in the scoreboard.
WRITTEN = {rules_lock.FILE, "docs/verdicts.md", *(f"figures/{paper}/claims.csv" for paper in PAPERS)}


def by_hand(path: Path) -> str:
    """A file's text, of a notebook its cells' sources."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def test_a_claim_stands_by_hand_in_at_most_five_files():
    files: dict[str, set[str]] = {claim: set() for rows in CLAIMS.values() for claim in rows}
    for name in set(FILES.split("\0")) - {""} - WRITTEN:
        path = assets.ROOT / name
        if path.suffix in {".py", ".csv", ".ipynb", ".md"} and path.is_file():
            for claim in set(re.findall(r"\b\w+-c\d+\b", by_hand(path))) & set(files):
                files[claim].add(name)
    if not FILES:
        pytest.skip("no git checkout")
    assert {claim: names for claim, names in files.items() if len(names) > 5} == {}


def test_a_claim_has_a_value_where_it_has_a_rule():
    rows = {claim: row for paper in PAPERS for claim, row in CLAIMS[paper].items()}
    assert all(isinstance(row.rule, Untested) == (row.value is None) for row in rows.values())


@EACH_RULE
def test_every_judged_claim_has_a_null_line(claim, rule):
    assert [bool(line) for line in (rule.null, rule.no_null, rule.null_pending)].count(True) == 1


def test_few_claims_have_no_possible_null_and_each_argues_why():
    reasons = [rule.no_null for _, rule in RULES if rule.no_null]
    assert len(reasons) <= 20
    assert all(len(reason.split()) >= 6 for reason in reasons)


@EACH_RULE
def test_a_null_is_the_value_function_with_other_parameters(claim, rule):
    row = CLAIMS[claim.partition("-")[0]][claim]
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


def published(paper: str) -> pd.DataFrame:
    return pd.read_csv(FIGURES / paper / "claims.csv", dtype=str, keep_default_na=False).set_index("claim")


def disagreements(paper: str, rows: pd.DataFrame) -> list[str]:
    """Claims whose published row is not what data/paper and the rules say, in numbers and in words."""
    claims = assets.paper_list("claims", paper).set_index("claim_id")
    wrong = sorted(set(rows.index) ^ set(claims.index))
    for claim, row in rows.iterrows():
        rule = rules_of(paper)[claim]
        if row["verdict"] == "untested":
            agrees = row["note"] and not row["ours"]
        else:
            agrees = not isinstance(rule, Untested) and row["verdict"] == rule.verdict(read_value(row["value"]))
            agrees = agrees and ("remark" not in row or row["note"].endswith(rule.words))
        if not agrees or row["paper"] != quoted(claims.loc[claim]):
            wrong.append(claim)
    return wrong


@pytest.mark.parametrize("paper", PUBLISHED)
def test_the_published_verdicts_are_the_rules(paper):
    assert disagreements(paper, published(paper)) == []


@pytest.mark.parametrize("paper", PUBLISHED)
def test_a_changed_verdict_or_quoted_number_is_noticed(paper):
    rows = published(paper)
    for claim in rows.index[rows["verdict"] != "untested"]:
        for other in JUDGED - {rows.loc[claim, "verdict"]}:
            changed = rows.assign(verdict=rows["verdict"].where(rows.index != claim, other))
            assert disagreements(paper, changed) == [claim]
    claim = rows.index[rows["paper"].str.contains(r"\d")][0]
    changed = rows["paper"].str.replace(r"^(\D*)\d", r"\g<1>999", regex=True)
    assert disagreements(paper, rows.assign(paper=rows["paper"].where(rows.index != claim, changed))) == [claim]


@pytest.mark.parametrize("paper", PUBLISHED)
def test_the_published_summary_agrees_with_its_files(paper):
    folder = FIGURES / paper
    claims = pd.read_csv(folder / "claims.csv", keep_default_na=False)
    for row in pd.read_csv(folder / "exhibits.csv", keep_default_na=False).itertuples():
        counts = claims.loc[claims["exhibit"] == row.exhibit, "verdict"].value_counts()
        if row.verdict not in ("no claim", "untested"):
            assert dict(reversed(part.split()) for part in row.verdict.split(", ")) == counts.astype(str).to_dict()
        if row.file:
            stem = (folder / row.file).with_suffix("")
            assert (folder / row.file).is_file() and len(pd.read_csv(stem.with_suffix(".csv"))) > 0
            assert json.loads(stem.with_suffix(".json").read_text())["kind"] == row.kind


@pytest.mark.parametrize("record", sorted(FIGURES.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_published_numbers_are_those_that_the_run_wrote(record):
    numbers = record.with_suffix(".csv").read_bytes()
    assert hashlib.sha256(numbers).hexdigest() == json.loads(record.read_text())["csv_sha256"]
