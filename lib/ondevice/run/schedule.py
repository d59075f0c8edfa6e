"""Carry out jobs on an executor, the scoreboard after the others, and end them cleanly on an interrupt."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ondevice.run.execute import Outcome, execute, publish
from ondevice.run.job import Job
from ondevice.run.layout import SCOREBOARD
from ondevice.run.progress import Progress

_REFRESH = 1.0  # seconds between two looks at the running jobs
_CLEAN_UP = 20.0  # seconds that interrupted jobs have to end


def run_all(
    jobs: Sequence[Job], executor: Executor | None = None, workers: int = 1, force: bool = False
) -> list[Outcome]:
    """Run what is not finished yet (with `force`: everything) and say so line by line; one outcome a job, in order.

    executor: carries the jobs; by default `workers` threads, each of which waits for a process that gets its share of
    the cores. An error here, or KeyboardInterrupt, ends all runs, wherever they are, before it goes on.
    """
    if not jobs:
        return []
    threads = max(1, _cores() // workers) if workers > 1 else None
    stop = jobs[0].layout.runs / f".stop-{uuid.uuid4().hex}"
    jobs = [replace(job, threads=threads, stop=stop) for job in jobs]
    outcomes: dict[Path, Outcome] = {}
    with _own_or_given(executor, workers) as pool:
        for last in (False, True):
            stage = [job for job in jobs if (job.paper == SCOREBOARD) is last]
            outcomes |= {outcome.job.folder: outcome for outcome in _run_stage(stage, pool, stop, force)}
    return [outcomes[job.folder] for job in jobs]


def _run_stage(jobs: Sequence[Job], pool: Executor, stop: Path, force: bool) -> list[Outcome]:
    progress = Progress()
    outcomes = [] if force else [_skipped(job, record["exhibits"]) for job in jobs if (record := job.record())]
    finished = {outcome.job.folder for outcome in outcomes}
    for outcome in outcomes:
        progress.ended(outcome)
    waiting = [job for job in jobs if job.folder not in finished]
    progress.expect(waiting)
    futures: dict[Future[Outcome], Job] = {}
    try:
        for job in waiting:
            futures[pool.submit(execute, job)] = job
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=_REFRESH, return_when=FIRST_COMPLETED)
            for future in done:
                outcomes.append(_outcome(future, futures[future]))
                progress.ended(outcomes[-1])
            progress.refresh()
    except BaseException:  # an interrupt, or nobody reads any more what is said
        stop.parent.mkdir(exist_ok=True)
        stop.touch()
        for future in futures:
            future.cancel()
        with suppress(OSError):
            progress.say("Interrupted: ending the runs under way.")
        wait(futures, timeout=_CLEAN_UP)
        raise
    finally:
        stop.unlink(missing_ok=True)
    return outcomes


def _skipped(job: Job, exhibits: Sequence[dict[str, str]]) -> Outcome:
    publish(job, job.folder, only_missing=True)
    return Outcome(job, "skipped", exhibits=tuple(exhibits))


def _outcome(future: Future[Outcome], job: Job) -> Outcome:
    try:
        return future.result()
    except Exception as error:  # the executor's own failure, such as a cluster's lost worker
        return Outcome(job, "failed", reason=f"{type(error).__name__}: {error}")


@contextmanager
def _own_or_given(executor: Executor | None, workers: int) -> Iterator[Executor]:
    if executor is not None:
        yield executor
    else:
        with ThreadPoolExecutor(max_workers=workers) as own:
            yield own


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
