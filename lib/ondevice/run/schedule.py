"""Carry out jobs on an executor, and end them cleanly on an interrupt."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import replace

from ondevice import cores
from ondevice.run.execute import Outcome, execute
from ondevice.run.job import Job
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
    threads = max(1, cores.usable() // workers) if workers > 1 else None
    stop = jobs[0].layout.runs / f".stop-{uuid.uuid4().hex}"
    jobs = [replace(job, threads=threads, stop=stop) for job in jobs]
    outcomes = {
        job.folder: Outcome(job, "skipped", exhibits=tuple(record["exhibits"]))
        for job in jobs
        if not force and (record := job.record())
    }
    waiting = [job for job in jobs if job.folder not in outcomes]
    progress = Progress(waiting)
    for outcome in outcomes.values():
        progress.ended(outcome)
    futures: dict[Future[Outcome], Job] = {}
    with nullcontext(executor) if executor else ThreadPoolExecutor(workers) as pool:
        try:
            for job in waiting:
                futures[pool.submit(execute, job, force)] = job
            pending = set(futures)
            while pending:
                done, pending = wait(pending, timeout=_REFRESH, return_when=FIRST_COMPLETED)
                for future in done:
                    job = futures[future]
                    error = future.exception()  # the executor's, such as a cluster's lost worker
                    failed = Outcome(job, "failed", reason=f"{type(error).__name__}: {error}")
                    outcomes[job.folder] = failed if error else future.result()
                    progress.ended(outcomes[job.folder])
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
    return [outcomes[job.folder] for job in jobs]
