"""Exhibits (a figure or table, its numbers and their source) and claims (what the paper says, what we saw).

A notebook opens a `PaperRun`, saves each exhibit, judges each claim and finishes. Files are
written whole or not at all.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ondevice import assets
from ondevice.evidence.claims import ELSEWHERE, Claim, Untested
from ondevice.evidence.estimates import Estimate, Value, kind_of
from ondevice.evidence.exhibits import write_exhibit, write_result
from ondevice.evidence.rules import VERDICTS, Rule, parts_of

_WIDTH = 110
_MANY = 4  # values, above which their range is shown
_STORED = ("value", "low", "high", "n", "drawn", "ends")  # of a value with an interval


@dataclass
class PaperRun:
    """One run of one paper's notebook: its parameters, exhibits and verdicts.

    rows: one for every claim of the paper in data/paper/claims.csv; none where there is no paper.
    """

    paper: str
    parameters: Mapping[str, Any]
    rows: Mapping[str, Claim | Rule | Untested]
    exhibits: dict[str, dict[str, Any]] = field(default_factory=dict)
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rules = {claim: row.rule if isinstance(row, Claim) else row for claim, row in self.rows.items()}
        lists = ("claims", "exhibits") if self.rules else ()
        claims, exhibits = [assets.paper_list(stem, self.paper).itertuples() for stem in lists] or ((), ())
        self.claims: dict[Any, Any] = {row.claim_id: row for row in claims}
        self.paper_exhibits: dict[Any, Any] = {row.exhibit: row for row in exhibits}
        if set(self.rules) != set(self.claims):
            raise ValueError(f"Rules and claims differ: {sorted(set(self.rules) ^ set(self.claims))}.")
        self._start = self._last = time.perf_counter()

    def save(
        self,
        stem: str,
        table: pd.DataFrame,
        figure: Figure | None = None,
        *,
        kind: str | None = None,
        inputs: Sequence[str] = (),
        note: str = "",
        timed: Sequence[str] = (),
    ) -> str:
        """Write <stem>.csv, <stem>.json and, for a figure, <stem>.png; return one line that says so.

        stem: the paper's name of the exhibit, then words: fig_06_mean_ttft. kind: only for a table that carries none.
        inputs: names of the traces, models or tables used. timed: columns with times or memory of this very run, which
        no other run repeats. seconds counts from the previous exhibit.
        """
        exhibit = self._exhibit_of(stem)
        kind = _kind(table, kind, f"Exhibit {stem}")
        if table.empty:
            raise ValueError(f"Exhibit {stem} has no numbers.")
        if timed and not ({*timed} <= {*table} and "measured" in kind):
            raise ValueError(f"Exhibit {stem} is {kind}; {', '.join(timed)} are no columns that were measured here.")
        now = time.perf_counter()
        title = self.paper_exhibits[exhibit].title if exhibit in self.paper_exhibits else stem
        record = dict(
            exhibit=exhibit,
            title=title,
            kind=kind,
            inputs=list(inputs),
            note=note,
            timed=list(timed),
            parameters=dict(self.parameters),
            seconds=round(now - self._last, 2),
        )
        file = write_exhibit(assets.figures_folder(self.paper), stem, table, figure, record)
        self._last = now
        self.exhibits[stem] = {"exhibit": exhibit, "kind": kind, "file": file}
        return f"{exhibit}: {kind}, {self.paper}/{file}"

    def skip(self, exhibit: str, why: str) -> str:
        """Record that an exhibit is not regenerated here, and why."""
        self._exhibit_of(exhibit)
        self.exhibits[exhibit] = {"exhibit": exhibit, "kind": "untested", "file": "", "why": why}
        return f"{exhibit}: untested. {why}"

    def judge(
        self, claim_id: str, value: Value, *, null: Value | None = None, kind: str | None = None, note: str = ""
    ) -> str:
        """Apply the claim's rule to our value; return a line with the verdict, the paper's value and ours.

        A claim about hardware that is not here stays untested, with our value beside it.
        null: what the trivial method gets, where the rule does not know it beforehand. kind: only for plain numbers.
        note: what to say beside the rule. Raises ValueError where the rule names a null that has no value.
        """
        rule = self.rules[claim_id]
        if isinstance(rule, Untested):
            raise ValueError(f"{claim_id} is declared untested ({rule.why}); give it a rule before judging it.")
        kind = _kind(value, kind, claim_id)
        claim = self.claims[claim_id]
        elsewhere = getattr(self.rows[claim_id], "elsewhere", False)
        verdict = "untested" if elsewhere else rule.verdict(value)
        null = rule.null_value if null is None else null
        if rule.null and null is None:
            raise ValueError(f"{claim_id} names a null, {rule.null}, but no value of it.")
        needed = rule.needs(value) if verdict == "undecided" and kind != "analytic" else None  # no sample decides it
        about = rule.quantity if rule.unit != claim.unit or hasattr(value, "__len__") else ""
        remarks = [f"n {needed} would decide"] if needed else []
        if null is not None and _at_least_as_good(rule.verdict(null), verdict):
            remarks.append(f"does not discriminate: {rule.null or 'the null'} has {shown(null, rule.unit)}")
        ours = ", ".join(filter(None, [shown(value, rule.unit), about]))
        of_null = rule.null_words if null is None else shown(null, rule.unit)
        n = _samples(value)
        drawn = " and ".join(dict.fromkeys(x.drawn for x in parts_of(value) if x.drawn))
        self.verdicts[claim_id] = dict(
            ours=ours,
            n=n,
            drawn=drawn,
            kind=kind,
            verdict=verdict,
            null=of_null if null is None or elsewhere else f"{of_null}: {rule.verdict(null)}",
            remark="; ".join(remarks),
            note=ELSEWHERE if elsewhere else f"{note}. Rule: {rule.words}" if note else rule.words,
            value=json.dumps(_stored(value)),
        )
        head = f"{verdict:12} {claim_id}  {claim.statement}: paper {quoted(claim)},"
        tail = ", ".join([f"ours {ours}", *([f"n {n} {drawn}".strip()] if n else []), kind, *remarks])
        if len(head) + 1 + len(tail) <= _WIDTH:
            return f"{head} {tail}"
        first = textwrap.wrap(head, _WIDTH, subsequent_indent=" " * 13)
        return "\n".join([*first, *textwrap.wrap(tail, _WIDTH, initial_indent=" " * 13, subsequent_indent=" " * 13)])

    def judge_section(self, section: str, **tables: Any) -> str:
        """Judge every claim of a section whose value can be made of these tables; a line each.

        section: its heading. tables: by the names of the value functions' parameters. Raises ValueError where there is
        no such claim.
        """
        rows = {
            claim: row
            for claim, row in self.rows.items()
            if isinstance(row, Claim) and row.section == section and row.takes(tables)
        }
        if not rows:
            raise ValueError(f"No claim of the section {section!r} is judged by {', '.join(tables) or 'nothing'}.")
        lines = []
        for claim, row in rows.items():
            value, null = row.values(tables)
            lines.append(self.judge(claim, value, null=null, kind=row.kind))
        return "\n".join(lines)

    def leave(self, claim_id: str, why: str) -> str:
        """Record that a claim which has a rule is not tested in this run, and why."""
        self.verdicts[claim_id] = _untested(why)
        return f"{'untested':12} {claim_id}  {self.claims[claim_id].statement}. {why}"

    def verdict_table(self) -> pd.DataFrame:
        """Every claim with the paper's value, ours, the kind and the verdict, in the order of claims.csv."""
        rows = []
        for claim_id, claim in self.claims.items():
            why = getattr(self.rules[claim_id], "why", "not judged in this run")
            quote = dict(claim=claim_id, exhibit=claim.exhibit, statement=claim.statement, paper=quoted(claim))
            rows.append({**quote, **self.verdicts.get(claim_id, _untested(why))})
        return pd.DataFrame(rows, columns=None if rows else ["exhibit", "verdict"])

    def finish(self) -> pd.DataFrame:
        """Write claims.csv and the result record, and return one row per exhibit: exhibit, kind, file, verdict.

        Raises ValueError when an exhibit of the paper was neither saved nor skipped, or a testable claim not judged.
        """
        covered = {row["exhibit"] for row in self.exhibits.values()}
        exhibits = self.paper_exhibits.items()
        missing = sorted(name for name, row in exhibits if name not in covered and row.kind != "diagram")
        if missing := [name for name in missing if name.startswith(("fig_", "table_"))]:
            raise ValueError(f"Not saved and not skipped: {', '.join(missing)}.")
        judged = {*self.verdicts, *(name for name, rule in self.rules.items() if isinstance(rule, Untested))}
        if unjudged := sorted(set(self.rules) - judged):
            raise ValueError(f"Claims with a rule but without a value: {', '.join(unjudged)}.")
        claims, folder, rows = self.verdict_table(), assets.figures_folder(self.paper), []
        for exhibit, file, kind in sorted((e["exhibit"], e["file"], e["kind"]) for e in self.exhibits.values()):
            counts = claims.loc[claims["exhibit"] == exhibit, "verdict"].value_counts()
            counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts)
            verdict = counted or ("untested" if kind == "untested" else "no claim")
            rows.append(dict(exhibit=exhibit, kind=kind, file=file, verdict=verdict))
        summary = pd.DataFrame(rows)
        if self.rules:
            assets.write_text(folder / "claims.csv", claims.to_csv(index=False))
        assets.write_text(folder / "exhibits.csv", summary.to_csv(index=False))
        write_result(
            dict(
                paper=self.paper,
                parameters=dict(self.parameters),
                exhibits=rows,
                verdicts=claims["verdict"].value_counts().to_dict(),
                seconds=round(time.perf_counter() - self._start, 1),
            )
        )
        return summary

    def _exhibit_of(self, stem: str) -> str:
        for name in self.paper_exhibits:
            if f"{stem}_".startswith(f"{name}_"):
                return name
        if stem.startswith("beyond_"):
            return stem
        stems = f"one of {', '.join(self.paper_exhibits)}, or with beyond_"
        raise ValueError(f"{stem!r} names no exhibit of {self.paper}; a stem starts with {stems}.")


def quoted(claim: Any) -> str:
    """The paper's value of a claim as text, e.g. `11 to 52 percent`; a dash when the claim has no number."""
    numbers = [f"{x:g}" for x in (claim.value_low, claim.value_high) if not pd.isna(x)]
    if not numbers:
        return "-"
    unit = "" if pd.isna(claim.unit) or claim.unit == "trend" else f" {claim.unit}"
    return ("up to " if pd.isna(claim.value_low) else "") + " to ".join(dict.fromkeys(numbers)) + unit


def read_value(text: str) -> Value:
    """What a row's column `value` holds, as it was judged."""
    stored = json.loads(text)
    parts = [Estimate(**x, kind="quoted") if isinstance(x, dict) else x for x in np.atleast_1d(stored)]
    return parts if isinstance(stored, list) else parts[0]


def _stored(value: Value) -> Any:
    """Plain numbers where they are exact, else what `_STORED` names."""
    parts = [x.value if x.low == x.high else {key: getattr(x, key) for key in _STORED} for x in parts_of(value)]
    return parts if hasattr(value, "__len__") else parts[0]


def _kind(source: Any, given: str | None, name: str) -> str:
    """The kind that a table or value carries, which is also the given one; the given one where it carries none."""
    try:
        own = kind_of(source)
    except ValueError:
        if given is None:
            raise
        return kind_of(given)
    if given is not None and kind_of(given) != own:
        raise ValueError(f"{name} is {own}, not {given}.")
    return own


def _at_least_as_good(null: str, verdict: str) -> bool:
    """Whether a null's verdict is the same or a better one. Beside a claim that is contradicted or untested a null says
    nothing, and two that are undecided are not compared."""
    if verdict in ("contradicted", "untested") or null == verdict == "undecided":
        return False
    return VERDICTS.index(null) <= VERDICTS.index(verdict)


def _untested(why: str) -> dict[str, str]:
    empty = dict.fromkeys(("ours", "n", "drawn", "kind", "verdict", "null", "remark", "note", "value"), "")
    return {**empty, "verdict": "untested", "note": why}


def _samples(value: Value) -> str:
    """How many samples are behind a value, or behind its parts."""
    counts = sorted({x.n for x in parts_of(value) if x.n is not None})
    return " to ".join(map(str, dict.fromkeys([*counts[:1], *counts[-1:]])))


def shown(value: Value, unit: str) -> str:
    """Three significant digits and the interval; of more than four values, their range."""
    parts = parts_of(value)
    unit = f" {unit}" if unit else ""
    if len(parts) > _MANY:
        ends = [_short(end(x.value for x in parts)) for end in (min, max)]
        return f"{' to '.join(ends)}{unit} ({len(parts)} values)"
    ranges = [x.between(_short(x.low), _short(x.high)) for x in parts]
    if len(parts) == 1:
        return f"{_short(parts[0].value)}{unit}{ranges[0]}"
    return ", ".join(_short(x.value) + ends for x, ends in zip(parts, ranges, strict=True)) + unit


def _short(x: float) -> str:
    return "0" if abs(x) < 1e-12 else f"{x:.3g}" if abs(x) < 1000 else f"{x:.0f}"
