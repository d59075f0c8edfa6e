"""Versions of the claims' rules, data/paper/rules.lock.csv: `python -m ondevice_studies.rules_lock` checks it.

A rule that differs from the lock's last version fails the check. `--why "..." [CLAIM ...]` writes a new version of it.

A line is a claim's rule from a date on: the commit, whether the claim's first recorded result was published before
(after_result), what changed and why, the form of its tests, and the rule in words. What changed is a bound, the
quantity, whether it is tested at all, the null, or the wording alone.

The lines of the commits up to 924b74b and 1e39201 (2026-11-25) were filled from the history of `rules.py` and
`claims.py`, by running each commit of them. They start where rules became tables (025c570 and ec1b388). Before,
functions judged small samples, and none of their results was recorded. A paper's first recorded result is in its first
`figures/<paper>/claims.csv` with a column n: DIAA f86e6fa, DiSCo 69c32a6, sd.npu dc787b1, DRAGON 949d712, GRATING
924b74b. A line that the command writes has the commit that it was written upon, and takes the place of one that was
written upon the same commit.
"""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from ondevice import assets, commands
from ondevice.evidence import Rule, Test, Untested
from ondevice.evidence.claims import ELSEWHERE, Claim
from ondevice.evidence.rules import parsed
from ondevice_studies import board
from ondevice_studies.claims import CLAIMS

PROGRAM = "python -m ondevice_studies.rules_lock"
FILE = "data/paper/rules.lock.csv"
COLUMNS = ["claim", "version", "date", "commit", "after_result", "change", "why", "rule", "words"]
CHANGES = ("first", "bound", "quantity", "untested", "null", "wording")
_TREND = " | trend "
_UNTESTED = "untested: "
_RESTORE = f"`git checkout -- {FILE}` restores it"


def read() -> pd.DataFrame:
    """The lock's lines as text. Raises ValueError where there is no such file, or it has other columns."""
    try:
        lines = pd.read_csv(assets.data("paper", "rules.lock.csv"), dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{FILE} cannot be read ({error}): {_RESTORE}.") from None
    if list(lines.columns) != COLUMNS:
        raise ValueError(f"{FILE} has other columns than {', '.join(COLUMNS)}: {_RESTORE}.")
    return lines


def form(rule: Rule | Untested) -> str:
    """A rule's tests as calls, `AtLeast(1.2) | trend Above(1)`; empty where it is untested."""
    if isinstance(rule, Untested):
        return ""
    return rule.reproduced.form + (_TREND + rule.trend.form if rule.trend else "")


def words(rule: Rule | Untested) -> str:
    """A rule as the lock has it in words."""
    return rule.words if isinstance(rule, Rule) else _UNTESTED + rule.why


def tests(text: str) -> tuple[Test, Test | None]:
    """(reproduced, trend) of a form. Raises ValueError on anything but calls of the tests' constructors."""
    reproduced, _, trend = text.partition(_TREND)
    return parsed(reproduced), parsed(trend) if trend else None


def check() -> pd.DataFrame:
    """The lock's lines. Raises ValueError, which names file, claim and command, where they contradict the claims."""
    lines = read()
    current = _rules()
    for claim, versions in _by_claim(lines):
        if claim not in current:
            raise ValueError(f"{FILE} has lines of {claim}, which is no claim: {_RESTORE}.")
        if list(versions["version"]) != [str(k + 1) for k in range(len(versions))]:
            raise ValueError(f"{FILE} has versions of {claim} that do not count from 1: {_RESTORE}.")
        for text in filter(None, versions["rule"]):
            try:
                tests(text)
            except ValueError as error:
                raise ValueError(f"{FILE}, {claim}: {error} {_RESTORE}.") from None
    if differing := _differing(lines, current):
        names = " ".join(differing)
        raise ValueError(
            f"{FILE} has another rule than the code for {len(differing)} claims: `{PROGRAM} --why '...' {names}` "
            "writes their new versions, each with the reason of the change."
        )
    return lines


def changes(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Claims whose rule changed after their first recorded result, in the lock's order.

    verdicts: of `board.scoreboard`. Columns: paper, claim; times, how often after that result; change, the kinds of
    these changes; why; today, what each version says of the published value: `another quantity` where the version
    judges another one, `no value` where none is published.
    """
    published = verdicts.set_index("claim")
    rows = []
    for claim, versions in _by_claim(read()):
        later = versions[versions["after_result"] == "yes"]
        if later.empty or claim not in published.index:
            continue
        row: Any = published.loc[claim]
        texts = (", ".join(dict.fromkeys(later["change"])), "; ".join(dict.fromkeys(later["why"])))
        today = _verdicts(judging(CLAIMS[row["paper"]][claim]), versions, row["value"])
        rows.append([row["paper"], claim, len(later), *texts, ", ".join(today)])
    return pd.DataFrame(rows, columns=["paper", "claim", "times", "change", "why", "today"])


def add(lines: pd.DataFrame, claims: Sequence[str], why: str, wording: bool = False) -> pd.DataFrame:
    """The lock with a new version of each of these claims. wording: their quantity only has other words.

    A version that was written upon the same commit is replaced, as no commit ever had it. Raises ValueError for a claim
    that there is not, and for one whose rule is the lock's.
    """
    current = _rules()
    if unknown := [claim for claim in claims if claim not in current]:
        raise ValueError(f"{', '.join(unknown)}: there is no such claim in data/paper/claims.csv.")
    differing = _differing(lines, current)
    if same := [claim for claim in claims if claim not in differing]:
        raise ValueError(f"{FILE} already has today's rule of {', '.join(same)}; there is nothing to write.")
    today = datetime.date.today().isoformat()
    head = _head()
    replaced = lines["claim"].isin(claims) & (lines["commit"] == head)
    lines, before = lines[~replaced], lines[replaced].set_index("claim")["why"]
    new = []
    for claim in _differing(lines, {claim: current[claim] for claim in claims}):
        old = lines[lines["claim"] == claim]
        change = _change(old.iloc[-1], current[claim], wording) if len(old) else "first"
        reasons = "; ".join(dict.fromkeys(filter(None, [before.get(claim), why])))
        rule = form(current[claim]), words(current[claim])
        new.append([claim, str(len(old) + 1), today, head, "yes" if len(old) else "no", change, reasons, *rule])
    whole = pd.concat([lines, pd.DataFrame(new, columns=COLUMNS)])
    order = {claim: k for k, claim in enumerate(current)}
    return whole.sort_values("claim", key=lambda claims: claims.map(order), kind="stable")


def main(argv: Sequence[str] | None = None) -> None:
    """Check the lock, or write new versions into it."""
    parser = commands.Parser(
        PROGRAM,
        "python -m ondevice_studies.rules_lock --why 'a null is named' disco-c01",
        description=f"Check that {FILE} has the rules of the code, or write the new version of a rule that changed.",
    )
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="whose rule changed")
    parser.add_argument("--why", default="", help="why it changed, one line of plain English")
    parser.add_argument("--wording", action="store_true", help="only words changed: it is the same quantity as before")
    arguments = parser.parse_args(argv)
    why = " ".join(arguments.why.split())
    if arguments.claims and not why:
        parser.error("a new version of a rule needs --why, the reason of the change")
    if why and not arguments.claims:
        parser.error("--why needs the claims whose rule changed")
    with commands.refusing(PROGRAM):
        if arguments.claims:
            lines = add(read(), list(dict.fromkeys(arguments.claims)), why, arguments.wording)
            assets.write_text(assets.data("paper", "rules.lock.csv"), lines.to_csv(index=False))
            print(f"{FILE}: a new version of {', '.join(arguments.claims)}")
        else:
            lines = check()
            print(f"{FILE} has the code's rules: {lines['claim'].nunique()} claims, {len(lines)} versions")


def judging(claim: Claim) -> Rule | Untested:
    """What judges a claim here; of one about other hardware, why nothing does, and its rule there."""
    if isinstance(claim.rule, Rule) and claim.elsewhere:
        return Untested(f"{ELSEWHERE} Its rule there: {claim.rule.words}")
    return claim.rule


def _rules() -> dict[str, Rule | Untested]:
    return {claim: judging(row) for rows in CLAIMS.values() for claim, row in rows.items()}


def _by_claim(lines: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    return ((str(claim), versions) for claim, versions in lines.groupby("claim", sort=False))


def _differing(lines: pd.DataFrame, current: dict[str, Rule | Untested]) -> list[str]:
    """Claims whose rule is not the last version."""
    last: dict[Any, Any] = {row.claim: (row.rule, row.words) for row in lines.itertuples()}
    return [claim for claim, rule in current.items() if last.get(claim) != (form(rule), words(rule))]


def _change(old: pd.Series, new: Rule | Untested, wording: bool) -> str:
    """What kind of change leads from a line of the lock to a rule."""
    if isinstance(new, Untested) or not old["rule"]:
        return "wording" if isinstance(new, Untested) and not old["rule"] else "untested"
    if not wording and not old["words"].startswith(f"{new.quantity}: "):
        return "quantity"
    if old["rule"] != form(new):
        return "bound"
    return "wording" if wording or new.null_words in old["words"] else "null"


def _verdicts(today: Rule | Untested, versions: pd.DataFrame, stored: str) -> list[str]:
    """What each version says of a published value: `v1 another quantity`, `v2 trend`."""
    verdicts: list[str] = []
    another = False  # quantity, before its last change
    line: Any
    for line in reversed(list(versions.itertuples())):
        if not line.rule:
            verdict = "untested"
        elif not stored or isinstance(today, Untested):
            verdict = "no value"
        elif another:
            verdict = "another quantity"
        else:
            reproduced, trend = tests(line.rule)
            verdict = board.verdict_of(replace(today, reproduced=reproduced, trend=trend), stored)
        verdicts.insert(0, f"v{line.version} {verdict}")
        another = another or line.change in ("quantity", "untested")
    return verdicts


def _head() -> str:
    """The commit that the checkout stands on, 12 digits; `unknown` outside of one."""
    call = ["git", "-C", str(assets.ROOT), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(call, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
