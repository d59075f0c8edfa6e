"""Exhibits (a figure or table, its numbers and their source) and claims (what the paper says, what we saw).

A notebook opens a `PaperRun`, saves each exhibit, judges each claim and finishes. Files are
written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ondevice import __version__, assets

KINDS = ("measured", "simulated", "replayed", "analytic", "quoted")
VERDICTS = ("reproduced", "trend", "contradicted", "untested")
RESULT_VARIABLE = "ONDEVICE_RESULT"
_PACKAGES = ("numpy", "scipy", "pandas", "matplotlib", "torch", "transformers", "scikit-learn", "xgboost-cpu")

Value = float | Sequence[float]


@dataclass(frozen=True)
class Rule:
    """When a value supports a claim; stated in code, beside a value that it must reject.

    text: the rule in words. reproduced, trend: tests of the value. wrong: a value that both must reject.
    """

    text: str
    wrong: Value
    reproduced: Callable[[Any], bool]
    trend: Callable[[Any], bool] = lambda value: False

    def verdict(self, value: Value) -> str:
        """`reproduced`, `trend` or `contradicted`; raises ValueError on a value that is not finite."""
        if not np.all(np.isfinite(np.asarray(value, dtype=float))):
            raise ValueError(f"A claim cannot be judged by {value!r}.")
        if self.reproduced(value):
            return "reproduced"
        return "trend" if self.trend(value) else "contradicted"


@dataclass(frozen=True)
class Untested:
    """A claim that this repository cannot test, and why."""

    why: str


@dataclass
class PaperRun:
    """One run of one paper's notebook: its parameters, exhibits and verdicts.

    rules: one entry for every claim of the paper in data/paper/claims.csv.
    """

    paper: str
    parameters: Mapping[str, Any]
    rules: Mapping[str, Rule | Untested]
    exhibits: dict[str, dict[str, Any]] = field(default_factory=dict)
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.claims = assets.paper_list("claims", self.paper).set_index("claim_id")
        self.known_exhibits = assets.paper_list("exhibits", self.paper).set_index("exhibit")
        if set(self.rules) != set(self.claims.index):
            raise ValueError(f"Rules and claims differ: {sorted(set(self.rules) ^ set(self.claims.index))}.")
        self._start = self._last = time.perf_counter()

    def save(
        self,
        stem: str,
        table: pd.DataFrame,
        figure: Figure | None = None,
        *,
        kind: str,
        inputs: Sequence[str] = (),
        note: str = "",
    ) -> str:
        """Write <stem>.csv, <stem>.json and, for a figure, <stem>.png; return one line that says so.

        stem: the paper's name of the exhibit, then words: fig_06_mean_ttft. kind: one of KINDS, or several joined by +.
        inputs: names of the traces, models or tables used. seconds counts from the previous exhibit.
        """
        exhibit = self._exhibit_of(stem)
        unknown = set(kind.split("+")) - set(KINDS)
        if unknown:
            raise ValueError(f"Unknown kind {sorted(unknown)}; kinds are {', '.join(KINDS)}, joined by '+'.")
        if table.empty:
            raise ValueError(f"Exhibit {stem} has no numbers.")
        now = time.perf_counter()
        folder = assets.figures_folder(self.paper)
        record = {
            "exhibit": exhibit,
            "title": str(self.known_exhibits.loc[exhibit, "title"]) if exhibit in self.known_exhibits.index else stem,
            "kind": kind,
            "inputs": list(inputs),
            "note": note,
            "parameters": dict(self.parameters),
            "seconds": round(now - self._last, 2),
            **environment(),
        }
        file = _write_exhibit(folder, stem, table, figure, record)
        self._last = now
        self.exhibits[stem] = {"exhibit": exhibit, "kind": kind, "file": file}
        return f"{exhibit}: {kind}, figures/{self.paper}/{file}"

    def skip(self, exhibit: str, why: str) -> str:
        """Record that an exhibit is not regenerated here, and why."""
        self._exhibit_of(exhibit)
        self.exhibits[exhibit] = {"exhibit": exhibit, "kind": "untested", "file": "", "why": why}
        return f"{exhibit}: untested. {why}"

    def judge(self, claim_id: str, value: Value, *, kind: str, what: str = "", note: str = "") -> str:
        """Apply the claim's rule to our value; return one line with the paper's value, ours and the verdict.

        what: what our value is, where it is in other units than the paper's. note: what to say beside the rule.
        """
        rule = self.rules[claim_id]
        if isinstance(rule, Untested):
            raise ValueError(f"{claim_id} is declared untested ({rule.why}); give it a rule before judging it.")
        verdict = rule.verdict(value)
        self.verdicts[claim_id] = {
            "ours": f"{_short(value)} {what}".strip(),
            "kind": kind,
            "verdict": verdict,
            "note": f"{note}. Rule: {rule.text}" if note else rule.text,
            "value": json.dumps(value, default=_plain),
        }
        claim = pd.Series(self.claims.loc[claim_id])
        ours = self.verdicts[claim_id]["ours"]
        return f"{verdict:12} {claim_id}  {claim.statement}: paper {quoted(claim)}, ours {ours} ({kind})"

    def leave(self, claim_id: str, why: str) -> str:
        """Record that a claim which has a rule is not tested in this run, and why."""
        self.verdicts[claim_id] = {"ours": "", "kind": "", "verdict": "untested", "note": why, "value": ""}
        return f"{'untested':12} {claim_id}  {pd.Series(self.claims.loc[claim_id]).statement}. {why}"

    def verdict_table(self) -> pd.DataFrame:
        """Every claim with the paper's value, ours, the kind and the verdict, in the order of claims.csv."""
        rows = []
        for claim_id, claim in self.claims.iterrows():
            rule = self.rules[str(claim_id)]
            row = self.verdicts.get(str(claim_id))
            if row is None:
                why = rule.why if isinstance(rule, Untested) else "not judged in this run"
                row = {"ours": "", "kind": "", "verdict": "untested", "note": why, "value": ""}
            rows.append(
                {
                    "claim": claim_id,
                    "exhibit": claim.exhibit,
                    "statement": claim.statement,
                    "paper": quoted(claim),
                    **row,
                }
            )
        return pd.DataFrame(rows)

    def finish(self) -> pd.DataFrame:
        """Write claims.csv and the result record, and return one row per exhibit: exhibit, kind, file, verdict.

        Raises ValueError when an exhibit of the paper was neither saved nor skipped, or a testable claim not judged.
        """
        needed = [
            name
            for name in self.known_exhibits.index
            if name.startswith(("fig_", "table_")) and self.known_exhibits.loc[name, "kind"] != "diagram"
        ]
        missing = sorted(set(needed) - {row["exhibit"] for row in self.exhibits.values()})
        if missing:
            raise ValueError(f"Not saved and not skipped: {', '.join(missing)}.")
        unjudged = sorted(c for c, rule in self.rules.items() if isinstance(rule, Rule) and c not in self.verdicts)
        if unjudged:
            raise ValueError(f"Claims with a rule but without a value: {', '.join(unjudged)}.")
        claims = self.verdict_table()
        folder = assets.figures_folder(self.paper)
        assets.write_text(folder / "claims.csv", claims.to_csv(index=False))
        summary = self._summary(claims)
        assets.write_text(folder / "exhibits.csv", summary.to_csv(index=False))
        _write_result(
            {
                "paper": self.paper,
                "parameters": dict(self.parameters),
                "exhibits": summary.to_dict("records"),
                "verdicts": claims["verdict"].value_counts().to_dict(),
                "seconds": round(time.perf_counter() - self._start, 1),
            }
        )
        return summary

    def _summary(self, claims: pd.DataFrame) -> pd.DataFrame:
        rows = []
        for entry in sorted(self.exhibits.values(), key=lambda e: (e["exhibit"], e["file"])):
            verdicts = claims.loc[claims["exhibit"] == entry["exhibit"], "verdict"].value_counts()
            counted = ", ".join(f"{verdicts[v]} {v}" for v in VERDICTS if v in verdicts)
            rows.append(
                {
                    "exhibit": entry["exhibit"],
                    "kind": entry["kind"],
                    "file": entry["file"],
                    "verdict": counted or ("untested" if entry["kind"] == "untested" else "no claim"),
                }
            )
        return pd.DataFrame(rows)

    def _exhibit_of(self, stem: str) -> str:
        for name in self.known_exhibits.index:
            if stem == name or stem.startswith(f"{name}_"):
                return str(name)
        if stem.startswith("beyond_"):
            return stem
        raise ValueError(
            f"{stem!r} names no exhibit of {self.paper}; a stem starts with one of "
            f"{', '.join(self.known_exhibits.index)}, or with beyond_."
        )


def scoreboard() -> pd.DataFrame:
    """Every paper's published verdicts (figures/<paper>/claims.csv), with a column `paper` in front.

    The paper's own value is in the column `printed`.
    """
    tables = []
    for path in sorted((assets.ROOT / "figures").glob("*/claims.csv")):
        table = pd.read_csv(path, keep_default_na=False).rename(columns={"paper": "printed"})
        table.insert(0, "paper", path.parent.name)
        tables.append(table)
    if not tables:
        raise FileNotFoundError("No figures/<paper>/claims.csv: run a paper's notebook first.")
    return pd.concat(tables, ignore_index=True)


def save_scoreboard(counts: pd.DataFrame, figure: Figure, parameters: Mapping[str, Any]) -> pd.DataFrame:
    """Write the scoreboard's own exhibit and result record; return its row of exhibit, kind, file and verdict."""
    record = {"exhibit": "verdicts", "kind": "measured", "parameters": dict(parameters), **environment()}
    file = _write_exhibit(assets.figures_folder("scoreboard"), "verdicts", counts, figure, record)
    summary = pd.DataFrame([{"exhibit": "verdicts", "kind": "all", "file": file, "verdict": "no claim"}])
    _write_result({"paper": "scoreboard", "parameters": dict(parameters), "exhibits": summary.to_dict("records")})
    return summary


def _write_exhibit(
    folder: Path, stem: str, table: pd.DataFrame, figure: Figure | None, record: Mapping[str, Any]
) -> str:
    """Numbers, picture and provenance, in this order; returns the name of the file to look at."""
    numbers = table.to_csv(index=False, float_format="%.6g")
    record = {**record, "csv_sha256": hashlib.sha256(numbers.encode()).hexdigest()}
    assets.write_text(folder / f"{stem}.csv", numbers)
    if figure is not None:
        with assets.writing(folder / f"{stem}.png") as path:
            figure.savefig(path, dpi=150)
    assets.write_text(folder / f"{stem}.json", json.dumps(record, indent=1, default=_plain) + "\n")
    return f"{stem}.png" if figure is not None else f"{stem}.csv"


def _write_result(record: Mapping[str, Any]) -> None:
    """The record a runner asks for by $ONDEVICE_RESULT; without it, nothing."""
    path = os.environ.get(RESULT_VARIABLE)
    if path:
        assets.write_text(Path(path), json.dumps({**record, **environment()}, indent=1, default=_plain) + "\n")


def quoted(claim: pd.Series) -> str:
    """The paper's value of a claim as text, e.g. `11 to 52 percent`; a dash when the claim has no number."""
    low, high = claim.value_low, claim.value_high
    numbers = [f"{x:g}" for x in (low, high) if not pd.isna(x)]
    if not numbers:
        return "-"
    span = numbers[0] if len(set(numbers)) == 1 else " to ".join(numbers)
    if pd.isna(low):
        span = f"up to {span}"
    unit = "" if pd.isna(claim.unit) or claim.unit == "trend" else f" {claim.unit}"
    return span + unit


def environment() -> dict[str, Any]:
    """What produced a result: library, package versions, Python, processor and its core count."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "library": __version__,
        "versions": versions,
        "python": platform.python_version(),
        "machine": {"system": platform.system(), "processor": _processor(), "cores": os.cpu_count()},
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _short(value: Value) -> str:
    """Three significant digits; of more than four values, their range."""
    numbers = np.atleast_1d(np.asarray(value, dtype=float))
    if numbers.size > 4:
        return f"{_short(numbers.min())} to {_short(numbers.max())} ({numbers.size} values)"
    return ", ".join(f"{0 if abs(x) < 1e-12 else x:.3g}" for x in numbers)


def _plain(value: Any) -> Any:
    """JSON form of NumPy scalars and arrays."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON.")
