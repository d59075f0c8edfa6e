"""The mixture with drafts sized by a recorded cost curve, on the first `PART` requests of each task.

`make record PAPER=diaa ARGS="--only sized"` records a file per curve: every machine, format and number of threads of
the record `formats`. Drafts depend on the curve, so each is run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ondevice import evidence
from ondevice.evidence import records
from ondevice.speculation import Drafter
from ondevice.speculation.bundled import mixture
from ondevice_studies.diaa import regimes
from ondevice_studies.diaa.spec_bench import PART, Method, name_of, recorded_requests, run
from ondevice_studies.diaa.workbench import Workbench
from ondevice_studies.speculation import plain, spec_bench
from ondevice_studies.speculation.spec_bench import KEYS, PARAMETERS, recordable

BUDGET = 32  # the most nodes of a draft


@dataclass(frozen=True)
class Sized(Method):
    """A mixture whose drafts are sized. seconds: T(1), T(2) .. T(1 + BUDGET), in any unit, without its own drafting."""

    seconds: tuple[float, ...] = ()

    def drafter(self, bench: Workbench) -> Drafter:
        """A new one."""
        return mixture(seconds=np.array(self.seconds))


def label(regime: regimes.Regime) -> str:
    """The method's name in records."""
    return f"mixture, sized: {regime.name}"


def load(model: str, answered: pd.DataFrame, regime: regimes.Regime) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """(answers, passes) of the mixture that a regime sizes, as the method `sized`; None where it is not recorded.

    answered: of `spec_bench.load`.
    """
    name = name_of(model, label(regime))
    if not records.exists("diaa", name):
        return None
    passes = evidence.load("diaa", name).assign(method="sized")
    counts = passes.groupby("request").size()
    plainly = answered[(answered["method"] == "vanilla") & answered["request"].isin(counts.index)]
    answers = plainly.assign(method="sized", passes=counts.loc[plainly["request"]].to_numpy())
    return evidence.derived(answers, answered, passes), evidence.derived(passes, passes)


def sized_by(regime: regimes.Regime) -> Sized:
    """The method that a regime's curve sizes."""
    seconds = tuple(regime.cost(np.arange(1, 2 + BUDGET)).tolist())
    return Sized("mixture", BUDGET, "part", seconds=seconds)


def again(name: str) -> evidence.Again | None:
    """How passes of a record are made again. None of another record."""
    methods = {
        label(regime): sized_by(regime)
        for model in plain.LABELS
        for regime in regimes.all_measured(model).values()
        if name == name_of(model, label(regime))
    }
    return spec_bench.again(methods, name, Workbench)


def record(model: str, curves: str = "") -> None:
    """Record what is missing, a curve after the other. curves: text in the names of those that are recorded."""
    bench = Workbench(model)
    answers = recordable(model)
    requests = recorded_requests(bench, answers, lambda task: PART)
    for regime in regimes.all_measured(model).values():
        name = label(regime)
        if curves not in name or records.exists("diaa", name_of(model, name)):
            continue
        method = sized_by(regime)
        parameters = PARAMETERS | {"nodes": BUDGET, "seconds": method.seconds}
        functions = spec_bench.made_by(method, bench)
        recorder = evidence.Recorder("diaa", name_of(model, name), KEYS, parameters, [model], functions=functions)
        for task in dict.fromkeys(request.task for request in requests):
            if (model, name, task) not in recorder.done:
                passes = run(bench, method, [request for request in requests if request.task == task])
                recorder.add(passes.assign(model=model, method=name, task=task))
                recorder.checkpoint()
                rate = passes.groupby("request")["emitted"].mean().mean()
                print(f"{name} {task}: {rate:.2f} tokens per pass", flush=True)
        print(recorder.finish(), flush=True)
