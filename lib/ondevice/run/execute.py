"""Execute one job: papermill in a process of its own, then the checks that papermill does not make."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Literal

import yaml

from ondevice import assets
from ondevice.run.job import Job, read_record
from ondevice.run.parameters import THREAD_VARIABLES

_POLL = 0.2  # seconds between two looks at a running process
_GRACE = 3.0  # seconds that an interrupted notebook has to clean up
_INTERRUPTED = "interrupted"
_REFUSED = "refused: "
_CHECKS = ("checked", "setup")  # a notebook's first cells, which refuse parameters that cannot be
# Kernels that start at once can draw the same port: one dies before it answers, and no cell has run.
_DEAD_KERNEL = b"Kernel died before replying to kernel_info"


@dataclass(frozen=True)
class Outcome:
    """What came of a job. reason: why it failed. exhibits: rows of exhibit, kind, file and verdict."""

    job: Job
    status: Literal["done", "skipped", "failed"]
    seconds: float = 0.0
    reason: str = ""
    exhibits: tuple[dict[str, Any], ...] = ()

    @property
    def refused(self) -> bool:
        """Whether the notebook's first cells refused its parameters."""
        return self.reason.startswith(_REFUSED)


def execute(job: Job, fresh: bool = False) -> Outcome:
    """Run a job unless it is finished. Never raises for what the notebook does.

    Where another process runs it, this waits and takes what comes of that: when a runner is killed, its notebook goes
    on without it. What such a one has finished is taken up, too. fresh: run it anew whatever there is.
    """
    start = time.monotonic()
    job.part.parent.mkdir(parents=True, exist_ok=True)
    with open(job.part.with_suffix(".lock"), "w") as lock:
        reason = _wait(job, lambda: _locked(lock), "another process runs it for") or _run(job, lock, fresh)
    if reason:
        return Outcome(job, "failed", time.monotonic() - start, reason)
    record = read_record(job.folder / "result.json") or {}
    return Outcome(job, "done", time.monotonic() - start, exhibits=tuple(record["exhibits"]))


def _run(job: Job, lock: IO[str], fresh: bool) -> str:
    """Run what is not finished, or take up what was left; return why it failed, or nothing."""
    made_from = job.made_from()  # before the run: later changes were not used
    if not fresh and job.record():
        return ""
    left = not fresh and read_record(job.begun) == made_from
    if reason := _unfinished(job) if left else _INTERRUPTED:
        shutil.rmtree(job.part, ignore_errors=True)
        job.part.mkdir()
        assets.write_text(job.begun, json.dumps(made_from))
        reason = _papermill(job, lock)
        if reason and _DEAD_KERNEL in job.log.read_bytes():
            reason = _papermill(job, lock)
        reason = reason or _unfinished(job)
    job.begun.unlink(missing_ok=True)
    if reason == _INTERRUPTED:  # papermill does not write its notebook whole, so half of one may lie there
        shutil.rmtree(job.part, ignore_errors=True)
    if not reason:
        record = {**(read_record(job.part / "result.json") or {}), "parameters": dict(job.parameters), **made_from}
        assets.write_text(job.part / "result.json", json.dumps(record, indent=1, default=str) + "\n")
        shutil.rmtree(job.folder, ignore_errors=True)
        job.part.rename(job.folder)
    return reason


def _locked(lock: IO[str]) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _wait(job: Job, over: Callable[[], Any], what: str) -> str:
    """Wait until it is over; return why there is no longer to wait, or nothing."""
    start = time.monotonic()
    while not over():
        if job.stop and job.stop.exists():
            return _INTERRUPTED
        if job.timeout and time.monotonic() - start > job.timeout:
            return f"timeout: {what} longer than {job.timeout:g} s"
        time.sleep(_POLL)
    return ""


def _papermill(job: Job, lock: IO[str]) -> str:
    """Run the notebook; return why it failed, or nothing."""
    paths = [
        str(path).replace("{", "{{").replace("}", "}}")  # papermill takes paths for format strings
        for path in (job.layout.notebook(job.paper), job.part / "output.ipynb")
    ]
    command = [sys.executable, "-m", "papermill", *paths, "-k", "python3", "--cwd", str(job.layout.notebooks),
               "--no-progress-bar", "--log-output"]  # fmt: skip
    if job.changed:
        file = job.part / "params.yaml"
        assets.write_text(file, yaml.safe_dump(dict(job.changed), allow_unicode=True))
        command += ["-f", str(file)]
    with open(job.log, "wb") as log:
        # A session of its own keeps the terminal's Ctrl-C away: the runner ends its runs itself.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(job),
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )
        try:
            reason = _wait(job, lambda: process.poll() is not None, "it ran")
            ended = f"papermill ended with exit code {process.returncode}" if process.returncode else ""
            return reason or (ended and (_refusal(job) or ended))
        finally:
            if process.poll() is None:
                _end(process)


def _refusal(job: Job) -> str:
    """The sentence with which one of the notebook's first cells refused its parameters, or nothing."""
    cells = (read_record(job.part / "output.ipynb") or {}).get("cells", [])
    errors = [(cell["id"], output) for cell in cells for output in cell.get("outputs", []) if "evalue" in output]
    return next((f"{_REFUSED}{error['evalue']}" for name, error in errors if name in _CHECKS), "")


def _environment(job: Job) -> dict[str, str]:
    # Without MPLBACKEND Jupyter draws inline; a value from outside would keep the figures out of the notebook.
    variables = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    variables |= dict.fromkeys(THREAD_VARIABLES, str(job.threads)) if job.threads else {}
    figures = str(job.part / "figures")
    result = str(job.part / "result.json")
    return variables | {assets.FIGURES_VARIABLE: figures, assets.RESULT_VARIABLE: result}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End papermill, its kernel (in a session of its own) and whatever that started.

    The kernel is interrupted first, so that it can remove its temporary files; then all are killed.
    """
    import psutil

    papermill = psutil.Process(process.pid)
    family = [papermill, *papermill.children(recursive=True)]
    for number, members, seconds in ((signal.SIGINT, papermill.children(), _GRACE), (signal.SIGKILL, family, 0)):
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)
        psutil.wait_procs(family, seconds)
    process.wait()


def _unfinished(job: Job) -> str:
    """Why a run that papermill calls a success is none: it calls sys.exit(0) one, and a result is our affair."""
    output = read_record(job.part / "output.ipynb") or {}
    state = output.get("metadata", {}).get("papermill", {})
    cells = output.get("cells", [])
    for number, cell in enumerate(cells, start=1):
        if cell["cell_type"] == "code" and "".join(cell["source"]).strip() and not cell["execution_count"]:
            return f"the notebook ended early: its cell {number} of {len(cells)} was never run"
    if not state.get("end_time") or state.get("exception"):
        return "papermill did not get to the notebook's end"
    record = read_record(job.part / "result.json") or {}
    complete = record.get("paper") and record.get("exhibits")  # the paper, where the notebook is a copy of another name
    return "" if complete else "the notebook wrote no result file (its last cell must call PaperRun.finish)"
