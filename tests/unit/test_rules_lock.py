"""Versions of the claims' rules: the lock has the code's rules, its forms judge as they do, and a gap is refused."""

import itertools
import re
import subprocess
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ondevice import assets
from ondevice.evidence import AtLeast, Estimate, Rule, Untested, read_value
from ondevice.evidence.rules import parts_of
from ondevice_studies import board, rules_lock
from ondevice_studies.claims import CLAIMS

LINES = rules_lock.read()
RULES = {
    claim: row.rule for rows in CLAIMS.values() for claim, row in rows.items() if not isinstance(row.rule, Untested)
}


def git(*arguments: str) -> str | None:
    """What git prints; None where it fails, as in an export without history."""
    call = subprocess.run(["git", *arguments], cwd=assets.ROOT, capture_output=True, text=True, check=False)
    return None if call.returncode else call.stdout


# The published lock


def test_the_lock_has_the_codes_rules():
    rules_lock.check()


def test_versions_follow_each_other():
    assert set(LINES["change"]) <= set(rules_lock.CHANGES)
    assert LINES["why"].str.fullmatch(r"\S.*\S").all()
    assert LINES["date"].str.fullmatch(r"\d{4}-\d\d-\d\d").all()
    assert set(LINES["after_result"]) <= {"no", "yes"}
    for _, versions in LINES.groupby("claim"):
        assert list(versions["version"]) == [str(k + 1) for k in range(len(versions))]
        assert [k for k, change in enumerate(versions["change"]) if change == "first"] == [0]
        assert list(versions["date"]) == sorted(versions["date"])
        assert list(versions["after_result"]) == sorted(versions["after_result"])
        text = (versions["rule"] + versions["words"]).tolist()
        assert all(old != new for old, new in itertools.pairwise(text))
    same = LINES["rule"] == LINES.groupby("claim")["rule"].shift()
    assert same[LINES["change"].isin(["wording", "null"])].all()
    assert not same[LINES["change"].isin(["bound", "untested"])].any()


@pytest.mark.long  # a history that was joined or lost has not the commits, whatever the rules
def test_every_version_is_of_a_commit_in_the_history():
    if git("rev-parse", "--is-shallow-repository") != "false\n":
        pytest.skip("no whole history")
    for commit in LINES["commit"].unique():
        assert re.fullmatch("[0-9a-f]{12}", commit) and git("merge-base", "--is-ancestor", commit, "HEAD") is not None


def test_versions_are_added_and_none_is_rewritten(tmp_path):
    commits = (git("log", "-2", "--format=%H", "--", rules_lock.FILE) or "").split()
    for commit in commits:
        (tmp_path / "lock.csv").write_text(git("show", f"{commit}:{rules_lock.FILE}") or "", encoding="utf-8")
        committed = pd.read_csv(tmp_path / "lock.csv", dtype=str, keep_default_na=False)
        key = ["claim", "version", "rule", "words"]
        assert set(committed[key].itertuples(index=False)) <= set(LINES[key].itertuples(index=False))


# Forms


def judged(form: str, value) -> str:
    reproduced, trend = rules_lock.tests(form)
    return Rule("a quantity", "", reproduced, trend, 0.0, no_null="only its tests are asked here").verdict(value)


def test_a_form_is_read_and_written_the_same():
    for form in filter(None, LINES["rule"].unique()):
        reproduced, trend = rules_lock.tests(form)
        assert form == reproduced.form + (f" | trend {trend.form}" if trend else "")


def test_a_form_that_is_read_judges_as_the_code_does():
    """Of each rule's wrong value, and of values whose ends are on the tests' bounds, beside them, far away."""
    generator = np.random.default_rng(0)
    for claim, rule in RULES.items():
        form = rules_lock.form(rule)
        bounds = [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", form)] + [0.0]
        ends = np.array([bound + step for bound in bounds for step in (-10, -1e-3, 0, 1e-3, 10)])
        values = [rule.wrong]
        for _ in range(15):
            low, value, high = np.sort(generator.choice(ends, (3, len(parts_of(rule.wrong)))), axis=0)
            parts = zip(value.tolist(), low.tolist(), high.tolist(), strict=True)
            values.append([Estimate(*part, 10, "measured") for part in parts])
        assert [judged(form, value) for value in values] == [rule.verdict(value) for value in values], claim


@pytest.mark.parametrize(
    "text",
    ["", "AtLeast", "AtLeast(1", "AtLeast('a')", "AtLeast(1, 2)", "__import__('os').getcwd()", "Each(print(1))"],
)
def test_only_calls_of_the_constructors_are_a_form(text):
    with pytest.raises(ValueError):
        rules_lock.tests(text)


# A lock that was written anew from the code, and what is done to it


CLAIM = "diaa-c03"


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """The file of a lock with version 1 of every rule, in the place of the published one."""
    path = tmp_path / "rules.lock.csv"
    names = [claim for rows in CLAIMS.values() for claim in rows]
    empty = pd.DataFrame(columns=rules_lock.COLUMNS)
    rules_lock.add(empty, names, "first recorded").assign(commit="0" * 12).to_csv(path, index=False)
    monkeypatch.setattr(assets, "data", lambda *parts: tmp_path.joinpath(parts[-1]))
    return path


@pytest.fixture
def loosen(monkeypatch):
    """Gives the claim a bound that all values pass."""

    def loosen(x: float = 0.01) -> None:
        row = CLAIMS["diaa"][CLAIM]
        monkeypatch.setitem(CLAIMS["diaa"], CLAIM, replace(row, rule=replace(row.rule, reproduced=AtLeast(x))))

    return loosen


def last(path) -> dict[str, str]:
    lines = pd.read_csv(path, dtype=str, keep_default_na=False)
    return dict(lines[lines["claim"] == CLAIM].iloc[-1])


def test_a_lock_of_todays_rules_passes(lock):
    rules_lock.main([])


def test_a_bound_that_is_loosened_fails_even_where_its_verdict_is_published(lock, loosen, tmp_path, monkeypatch):
    loosen()
    rule = CLAIMS["diaa"][CLAIM].rule
    published = board.scoreboard()
    chosen = published["claim"] == CLAIM
    value = read_value(published.loc[chosen, "value"].item())
    published = published.assign(
        verdict=published["verdict"].mask(chosen, rule.verdict(value)), note=published["note"].mask(chosen, rule.words)
    )
    for paper, rows in published.rename(columns={"paper": "folder", "printed": "paper"}).groupby("folder"):
        (tmp_path / "figures" / str(paper)).mkdir(parents=True)
        rows.drop(columns="folder").to_csv(tmp_path / "figures" / str(paper) / "claims.csv", index=False)
    monkeypatch.setattr(assets, "ROOT", tmp_path)
    assert board.scoreboard().set_index("claim").loc[CLAIM, "verdict"] == "reproduced"
    with pytest.raises(ValueError, match=CLAIM):
        rules_lock.check()


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (lambda lines: lines[lines["claim"] != CLAIM], CLAIM),
        (lambda lines: lines.replace({"claim": {CLAIM: "diaa-c99"}}), "diaa-c99"),
        (lambda lines: pd.concat([lines, lines[lines["claim"] == CLAIM]]), CLAIM),
        (lambda lines: lines.assign(rule=lines["rule"].mask(lines["claim"] == CLAIM, "exit()")), "exit()"),
        (lambda lines: lines.assign(words=lines["words"].mask(lines["claim"] == CLAIM, "x")), CLAIM),
        (lambda lines: lines.drop(columns="why"), "columns"),
        (lambda lines: lines.iloc[:0, :0], rules_lock.FILE),
        (None, rules_lock.FILE),
    ],
)
def test_a_lock_that_contradicts_the_code_or_is_missing_is_refused_in_one_sentence(lock, capsys, fault, what):
    lines = pd.read_csv(lock, dtype=str, keep_default_na=False)
    lock.unlink()
    if fault:
        fault(lines).to_csv(lock, index=False)
    with pytest.raises(SystemExit) as ended:
        rules_lock.main([])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and what in error


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--why", " ", CLAIM], "--why"),
        (["--why", "a reason"], "claims"),
        (["--why", "a reason", "diaa-c99"], "diaa-c99"),
        (["--why", "a reason", "diaa-c13", CLAIM], "diaa-c13"),
    ],
)
def test_a_version_without_reason_claim_or_difference_is_refused(lock, loosen, capsys, arguments, what):
    loosen()
    before = lock.read_bytes()
    with pytest.raises(SystemExit) as ended:
        rules_lock.main(arguments)
    assert ended.value.code == 2 and what in capsys.readouterr().err
    assert lock.read_bytes() == before


def test_a_new_version_has_its_reason_and_takes_the_place_of_one_of_the_same_commit(lock, loosen, monkeypatch):
    monkeypatch.setattr(rules_lock, "_head", lambda: "a" * 12)
    first, rule = lock.read_bytes(), CLAIMS["diaa"][CLAIM]
    loosen(0.5)
    rules_lock.main(["--why", "a first  reason", CLAIM])
    version = last(lock)
    assert (version["version"], version["change"], version["after_result"]) == ("2", "bound", "yes")
    assert (version["commit"], version["why"]) == ("a" * 12, "a first reason")
    assert version["rule"].startswith("AtLeast(0.5) | trend ")
    rules_lock.check()
    loosen(0.6)
    rules_lock.main(["--why", "another", CLAIM])
    assert (last(lock)["version"], last(lock)["why"]) == ("2", "a first reason; another")
    second = lock.read_bytes()
    monkeypatch.setitem(CLAIMS["diaa"], CLAIM, rule)
    rules_lock.main(["--why", "put back before a commit", CLAIM])
    assert lock.read_bytes() == first
    lock.write_bytes(second)
    monkeypatch.setattr(rules_lock, "_head", lambda: "b" * 12)
    loosen(0.7)
    rules_lock.main(["--why", "a third", CLAIM])
    assert (last(lock)["version"], last(lock)["why"]) == ("3", "a third")


@pytest.mark.parametrize(
    ("changes", "options", "kind"),
    [
        (dict(quantity="something else"), [], "quantity"),
        (dict(quantity="something else"), ["--wording"], "wording"),
        (dict(null="another method"), [], "null"),
        (None, [], "untested"),
    ],
)
def test_the_kind_of_a_change_is_told(lock, monkeypatch, changes, options, kind):
    row = CLAIMS["diaa"][CLAIM]
    rule = Untested("it is not tested any more") if changes is None else replace(row.rule, **changes)
    monkeypatch.setitem(CLAIMS["diaa"], CLAIM, replace(row, rule=rule))
    rules_lock.main(["--why", "a reason", *options, CLAIM])
    assert last(lock)["change"] == kind


# For the scoreboard


def test_changes_count_from_the_first_result_and_judge_todays_value(lock, monkeypatch):
    rule = CLAIMS["diaa"][CLAIM].rule
    now = rules_lock.form(rule)
    head = dict(claim=CLAIM, date="2026-01-01", commit="0" * 12)
    versions = [("no", "first", "Each(AtLeast(1), None)"), ("yes", "quantity", "AtLeast(0.1)"), ("yes", "untested", ""),
                ("yes", "untested", "AtLeast(0.1)"), ("yes", "bound", now)]  # fmt: skip
    lines = [dict(head, version=k + 1, after_result=after, change=change, why=f"reason {k + 1}", rule=form, words="x")
             for k, (after, change, form) in enumerate(versions)]  # fmt: skip
    pd.DataFrame(lines)[rules_lock.COLUMNS].to_csv(lock, index=False)
    (row,) = rules_lock.changes(pd.DataFrame([{"paper": "diaa", "claim": CLAIM, "value": "0.7"}])).to_dict("records")
    assert (row["times"], row["change"]) == (4, "quantity, untested, bound")
    verdicts = ["v1 another quantity", "v2 another quantity", "v3 untested", "v4 reproduced", f"v5 {rule.verdict(0.7)}"]
    assert row["today"] == ", ".join(verdicts)
