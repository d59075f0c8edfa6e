"""The mixture with drafts sized by a recorded cost curve, on the first `PART` requests of each task.

`make record PAPER=diaa ARGS="--sized smollm2-135m-instruct"` records a file per curve: every machine, format and number
of threads of the record `formats` in which trees can be verified. Drafts depend on the curve, so each is run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ondevice import evidence
from ondevice.evidence import records
from ondevice.speculation import Drafter
from ondevice.speculation.bundled import mixture
from ondevice_studies.diaa import regimes
from ondevice_studies.diaa.spec_bench import PART, Method, name_of, recorded_requests, run
from ondevice_studies.diaa.workbench import Bench
from ondevice_studies.speculation import plain
from ondevice_studies.speculation.spec_bench import KEYS, PARAMETERS

BUDGET = 32  # the most nodes of a draft


@dataclass(frozen=True)
class Sized(Method):
    """A mixture whose drafts are sized. seconds: T(1), T(2) .. T(1 + BUDGET), in any unit, without its own drafting."""

    seconds: tuple[float, ...] = ()

    def drafter(self, bench: Bench) -> Drafter:
        """A new one."""
        return mixture(seconds=np.array(self.seconds))


def label(regime: regimes.Regime) -> str:
    """The method's name in records."""
    return f"mixture, sized: {regime.name}"


def record(model: str) -> None:
    """Record what is missing, a curve after the other."""
    bench = Bench(model)
    answers = plain.load(model)
    requests = recorded_requests(bench, answers, lambda task: PART)
    for regime in regimes.all_measured(model).values():
        name = label(regime)
        if records.exists("diaa", name_of(model, name)):
            continue
        seconds = tuple(regime.cost(np.arange(1, 2 + BUDGET)).tolist())
        method = Sized("ondevice.speculation.bundled:mixture", BUDGET, "part", seconds=seconds)
        parameters = PARAMETERS | {"nodes": BUDGET, "seconds": seconds}
        recorder = evidence.Recorder("diaa", name_of(model, name), KEYS, parameters, [model])
        for task in dict.fromkeys(request.task for request in requests):
            if (model, name, task) not in recorder.done:
                passes = run(bench, method, [request for request in requests if request.task == task])
                recorder.add(passes.assign(model=model, method=name, task=task))
                recorder.checkpoint()
                rate = passes.groupby("request")["emitted"].mean().mean()
                print(f"{name} {task}: {rate:.2f} tokens per pass", flush=True)
        print(recorder.finish(), flush=True)
