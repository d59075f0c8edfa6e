"""What the user sees while jobs run: a line at the start and the end of each, and how far it is in between."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ondevice.run.execute import Outcome
from ondevice.run.job import Job

_PLAIN_INTERVAL = 20.0  # seconds between two lines when the output is no terminal
_TAIL = 65536  # bytes of a log in which the running cell is looked for


class Progress:
    """Follows jobs by their logs, so that it does not matter where they run."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._waiting: dict[Path, tuple[Job, int]] = {}  # by folder, with the age of a log left by an earlier run
        self._running: dict[Path, tuple[Job, float, int]] = {}  # with the start and the number of cells
        self._last = time.monotonic()

    def expect(self, jobs: Sequence[Job]) -> None:
        """Watch for the start of these jobs."""
        self._waiting = {job.folder: (job, _changed(job.log)) for job in jobs}

    def refresh(self) -> None:
        """Say which jobs have started, and how far the running ones are."""
        for folder, (job, before) in list(self._waiting.items()):
            if _changed(job.log) != before:
                self._started(folder, job)
        now = time.monotonic()
        if self._live:
            line = " | ".join(self._state(*entry) for entry in self._running.values())
            print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        elif now - self._last >= _PLAIN_INTERVAL:
            self._last = now
            for entry in self._running.values():
                self.say(self._state(*entry))

    def ended(self, outcome: Outcome) -> None:
        """Say what came of a job."""
        job = outcome.job
        if job.folder in self._waiting and outcome.seconds:  # it was over before it was seen to start
            self._started(job.folder, job)
        self._running.pop(job.folder, None)
        self._waiting.pop(job.folder, None)
        if outcome.status == "skipped":
            self.say(
                f"{job.name}: skipped, {job.layout.relative(job.folder)} is finished and up to date "
                "(--force runs it again)"
            )
        elif outcome.status == "done":
            self.say(f"{job.name}: done in {outcome.seconds:.0f} s, {len(outcome.exhibits)} exhibits")
        else:
            self.say(f"{job.name}: FAILED after {outcome.seconds:.0f} s, {outcome.reason}")

    def say(self, line: str) -> None:
        """Print a line of its own, in place of the live one."""
        print(f"\r\033[K{line}" if self._live else line, flush=True)

    def _started(self, folder: Path, job: Job) -> None:
        del self._waiting[folder]
        notebook = job.layout.notebook(job.paper)
        cells = len(json.loads(notebook.read_text(encoding="utf-8"))["cells"]) + bool(job.changed)
        self._running[folder] = (job, time.monotonic(), cells)
        self.say(
            f"{job.name}: runs {job.layout.relative(notebook)} ({cells} cells, "
            f"{'these' if job.changed else 'its default'} parameters), log in {job.layout.relative(job.log)}"
        )

    @staticmethod
    def _state(job: Job, start: float, cells: int) -> str:
        return f"{job.name}: cell {_cell(job.log)} of {cells}, {time.monotonic() - start:.0f} s"


def _cell(log: Path) -> int:
    """Number of the cell that papermill last began, by its log; 0 before the first."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            found = re.findall(rb"^Executing Cell (\d+)-", file.read(), flags=re.MULTILINE)
    except FileNotFoundError:
        return 0
    return int(found[-1]) if found else 0


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
