"""The closing report: each paper's exhibits with their verdicts, and why runs failed."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.run.execute import Outcome

_COLUMNS = ("exhibit", "kind", "file", "verdict")
_LOG_LINES = 12


def report(outcomes: Sequence[Outcome]) -> str:
    """The table of every run that succeeded, then each failure with the last lines of its log."""
    parts = [_exhibits(outcome) for outcome in outcomes if outcome.status != "failed"]
    parts += [_failure(outcome) for outcome in outcomes if outcome.status == "failed"]
    counts = [f"{sum(o.status == status for o in outcomes)} {status}" for status in ("done", "skipped", "failed")]
    return "\n" + "\n\n".join([*parts, ", ".join(counts)])


def _exhibits(outcome: Outcome) -> str:
    job = outcome.job
    where = job.layout.relative(job.folder / "figures" if job.changed else job.layout.figures)
    rows = [_COLUMNS, *(tuple(str(row[name]) for name in _COLUMNS) for row in outcome.exhibits)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([f"{job.name}: files in {where}/{job.paper}", *lines])


def _failure(outcome: Outcome) -> str:
    job = outcome.job
    log = job.log.read_text(encoding="utf-8", errors="replace").splitlines() if job.log.is_file() else []
    lines = [f"  | {line}" for line in log[-_LOG_LINES:]]
    return "\n".join([f"{job.name}: FAILED, {outcome.reason}. Log: {job.layout.relative(job.log)}", *lines])
