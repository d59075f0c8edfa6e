"""What the user sees: a line at the start and the end of each job, how far it is in between, and a table at last."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ondevice.run.execute import Outcome
from ondevice.run.job import Job, read_record

_PLAIN_INTERVAL = 20.0  # seconds between two lines when the output is no terminal
_COLUMNS = ("exhibit", "kind", "file", "verdict")
_LOG_LINES = 12  # of a failure
_TAIL = 65536  # bytes of a log in which the running cell is looked for


class Progress:
    """Follows jobs by the files in their folders, so that it does not matter where they run."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._live = sys.stdout.isatty()
        self._jobs = {job.folder: job for job in jobs}  # that have not ended
        self._seen: dict[Path, float] = {}  # since when
        self._last = time.monotonic()
        for job in jobs:
            if job.begun.is_file():
                self.say(f"{job.name}: takes up what a runner began that was ended")

    def refresh(self) -> None:
        """Say which jobs have started, and how far the running ones are."""
        running = [job for job in self._jobs.values() if job.begun.is_file()]
        for job in running:
            if job.folder not in self._seen:
                self._seen[job.folder] = time.monotonic()
                parameters = "these" if job.changed else "its default"
                log = job.layout.relative(job.log)
                self.say(f"{job.name}: runs notebooks/{job.paper}.ipynb ({parameters} parameters), log in {log}")
        if not self._live and time.monotonic() - self._last < _PLAIN_INTERVAL:
            return
        self._last = time.monotonic()
        states = [self.state(job) for job in running]
        if self._live:
            print(f"\r\033[K{' | '.join(states)[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        else:
            print("".join(f"{state}\n" for state in states), end="", flush=True)

    def state(self, job: Job) -> str:
        """The cell that papermill last began, by its log, and the progress bar there in short."""
        cells = (read_record(job.part / "output.ipynb") or {}).get("cells", [])
        log = ""
        with suppress(FileNotFoundError), open(job.log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            log = file.read().decode(errors="replace")
        _, *begun = re.split(r"^Executing Cell (\d+)-", log, flags=re.MULTILINE) if cells else [""]
        number = int(begun[-2]) if begun else 0
        bars = re.findall(r"([^\r\n]*?)\s*\d+%\|[^|\r\n]*\|\s*([^\r\n,\]]*)", begun[-1]) if begun else []  # tqdm's
        parts = [f"{job.name}: cell {number} of {len(cells)}", *(cell["id"] for cell in cells[number - 1 : number])]
        parts += [f"{' '.join(bars[-1]).strip()}]"] if bars else []
        return ", ".join([*parts, f"{time.monotonic() - self._seen[job.folder]:.0f} s"])

    def ended(self, outcome: Outcome) -> None:
        """Say what came of a job."""
        job = outcome.job
        self._jobs.pop(job.folder, None)
        self.say(
            f"{job.name}: "
            + {
                "skipped": f"skipped, {job.layout.relative(job.folder)} is finished and up to date "
                "(--force runs it again)",
                "done": f"done in {outcome.seconds:.0f} s, {len(outcome.exhibits)} exhibits",
                "failed": f"FAILED after {outcome.seconds:.0f} s, {outcome.reason}",
            }[outcome.status]
        )

    def say(self, line: str) -> None:
        """Print a line of its own, in place of the live one."""
        print(f"\r\033[K{line}" if self._live else line, flush=True)


def report(outcomes: Sequence[Outcome]) -> str:
    """The table of every run that succeeded, then each failure with the last lines of its log."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.status == "failed")
    parts = [_failure(outcome) if outcome.status == "failed" else _exhibits(outcome) for outcome in ordered]
    counts = [f"{sum(o.status == status for o in outcomes)} {status}" for status in ("done", "skipped", "failed")]
    return "\n" + "\n\n".join([*parts, ", ".join(counts)])


def _exhibits(outcome: Outcome) -> str:
    job = outcome.job
    rows = [_COLUMNS, *([str(row.get(name, "")) for name in _COLUMNS] for row in outcome.exhibits)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    figures = job.folder / "figures" / job.paper
    folder = figures if figures.is_dir() else figures.parent  # of a copy, the figures are its paper's
    return "\n".join([f"{job.name}: files in {job.layout.relative(folder)}", *lines])


def _failure(outcome: Outcome) -> str:
    job = outcome.job
    if outcome.refused:
        return f"{job.name}: {outcome.reason}"
    log = job.log.read_text(encoding="utf-8", errors="replace").splitlines() if job.log.is_file() else []
    lines = [f"  | {line}" for line in log[-_LOG_LINES:]]
    return "\n".join([f"{job.name}: FAILED, {outcome.reason}. Log: {job.layout.relative(job.log)}", *lines])
