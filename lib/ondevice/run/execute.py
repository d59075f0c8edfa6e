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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import psutil
import yaml

from ondevice import assets, evidence
from ondevice.run.fingerprint import fingerprint, parameters_hash
from ondevice.run.job import Job, read_record
from ondevice.run.parameters import papermill_path

_POLL = 0.2  # seconds between two looks at a running process
_GRACE = 3.0  # seconds that an interrupted notebook has to clean up
_INTERRUPTED = "interrupted"
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_COLUMNS = ("exhibit", "kind", "file", "verdict")


@dataclass(frozen=True)
class Outcome:
    """What came of a job. reason: why it failed. exhibits: rows of exhibit, kind, file and verdict."""

    job: Job
    status: Literal["done", "skipped", "failed"]
    seconds: float = 0.0
    reason: str = ""
    exhibits: tuple[dict[str, Any], ...] = ()


def execute(job: Job) -> Outcome:
    """Run a job now, whether or not it was finished before. Never raises for what the notebook does."""
    start = time.monotonic()
    job.part.parent.mkdir(parents=True, exist_ok=True)
    with open(job.part.with_suffix(".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Outcome(job, "failed", reason="another process is running it now")
        made_from = fingerprint(job.layout, job.paper)  # before the run: what changes meanwhile was not used
        shutil.rmtree(job.part, ignore_errors=True)
        job.part.mkdir()
        reason = _papermill(job, lock) or _unfinished(job)
        if not reason:
            return Outcome(job, "done", time.monotonic() - start, exhibits=_finish(job, made_from))
        if reason == _INTERRUPTED:  # papermill does not write its notebook whole, so half of one may lie there
            shutil.rmtree(job.part, ignore_errors=True)
    return Outcome(job, "failed", time.monotonic() - start, reason)


def _finish(job: Job, made_from: str) -> tuple[dict[str, Any], ...]:
    """Publish, then mark the run as done, so that what is marked is also published; return its exhibits."""
    record = {
        **(read_record(job.part / "result.json") or {}),
        "parameters": dict(job.parameters),
        "parameters_hash": parameters_hash(job.parameters),
        "fingerprint": made_from,
    }
    assets.write_text(job.part / "result.json", json.dumps(record, indent=1, default=str) + "\n")
    publish(job, job.part)
    shutil.rmtree(job.folder, ignore_errors=True)
    job.part.rename(job.folder)
    return tuple(record["exhibits"])


def publish(job: Job, source: Path, *, only_missing: bool = False) -> None:
    """Copy the figures of a run with default parameters to figures/<paper>/, each file whole or not at all."""
    figures = source / "figures" / job.paper
    for path in sorted(figures.rglob("*")) if not job.changed else []:
        target = job.layout.figures / job.paper / path.relative_to(figures)
        if path.is_file() and not path.name.startswith(".") and not (only_missing and target.exists()):
            with assets.writing(target) as temporary:
                shutil.copyfile(path, temporary)


def _papermill(job: Job, lock: IO[str]) -> str:
    """Run the notebook; return why it failed, or nothing."""
    layout = job.layout
    command = [
        sys.executable,
        "-m",
        "papermill",
        papermill_path(layout.notebook(job.paper)),
        papermill_path(job.part / "output.ipynb"),
        "-k",
        "python3",
        "--cwd",
        str(layout.notebooks),
        "--no-progress-bar",
        "--log-output",
    ]
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
            return _wait(process, job)
        finally:
            if process.poll() is None:
                _end(process)


def _environment(job: Job) -> dict[str, str]:
    # Without MPLBACKEND Jupyter draws inline; a value from outside would keep the figures out of the notebook.
    variables = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    variables[assets.FIGURES_VARIABLE] = str(job.part / "figures")
    variables[evidence.RESULT_VARIABLE] = str(job.part / "result.json")
    if job.threads:
        variables.update(dict.fromkeys(_THREADS, str(job.threads)))
    return variables


def _wait(process: subprocess.Popen[bytes], job: Job) -> str:
    end = time.monotonic() + job.timeout if job.timeout else float("inf")
    while True:
        try:
            code = process.wait(_POLL)
        except subprocess.TimeoutExpired:
            if job.stop and job.stop.exists():
                return _INTERRUPTED
            if time.monotonic() > end:
                return f"timeout: it ran longer than {job.timeout:g} s"
        else:
            return f"papermill ended with exit code {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End papermill, its kernel (in a session of its own) and whatever that started.

    The kernel is interrupted first, so that it can remove its temporary files; then all are killed.
    """
    papermill = psutil.Process(process.pid)
    family = [papermill, *papermill.children(recursive=True)]
    for kernel in papermill.children():
        _signal(kernel, signal.SIGINT)
    psutil.wait_procs(family, _GRACE)
    for member in family:
        _signal(member, signal.SIGKILL)
    process.wait()


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _unfinished(job: Job) -> str:
    """Why a run that papermill calls a success is none: it calls sys.exit(0) one, and a result is our affair."""
    cells = json.loads((job.part / "output.ipynb").read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells, start=1):
        if cell["cell_type"] == "code" and "".join(cell["source"]).strip() and not cell["execution_count"]:
            return f"the notebook ended early: its cell {number} of {len(cells)} was never run"
    record = read_record(job.part / "result.json")
    if record is None:
        return "the notebook wrote no result file (its last cell must call PaperRun.finish)"
    rows = record.get("exhibits")
    if record.get("paper") != job.paper or not isinstance(rows, list) or not rows:
        return f"the result file is incomplete: it must name the paper {job.paper} and its exhibits"
    for row in rows:
        if not isinstance(row, dict) or not set(_COLUMNS) <= set(row):
            return f"the result file is incomplete: an exhibit needs {', '.join(_COLUMNS)}, not {row}"
        if row["file"] and not (job.part / "figures" / job.paper / row["file"]).is_file():
            return f"the result file names {row['file']}, which was not written"
    return ""
