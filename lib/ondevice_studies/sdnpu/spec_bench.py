"""sd.npu's drafters on Spec-Bench's requests to public models (`speculation.spec_bench`).

`make record PAPER=sdnpu ARGS="--parts spec-bench"` records what is missing. The paper takes summaries and retrieval, so
more of these are recorded than of the other tasks. `own` has answers to our own prompts, which any clone can run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd

from ondevice import models
from ondevice.speculation import Drafter
from ondevice_papers.sdnpu import drafter
from ondevice_papers.sdnpu.drafter import BASES, LMAX, MIXTURE, PUBLISHED
from ondevice_studies.speculation import own_prompts, spec_bench
from ondevice_studies.speculation.spec_bench import Bench, Method

OWN = ("PLD", "SAM", "SAM+both", "PLD+both", MIXTURE)  # methods on our own prompts
OWN_TASKS = ("summarization", "rag", "qa", "translation")  # of them, as in Part I of the notebook
OF_THE_LARGER = ("SAM", "SAM+both", MIXTURE)  # methods that are recorded with the larger model, too, on fewer requests


# In the order in which they are recorded; the first ones read no logits.
NAMES = (*BASES, "SAM+both", MIXTURE, "SAM+calibration", "SAM+reuse", "PLD+both", "PLD+calibration", "PLD+reuse")


def _new(name: str) -> Callable[[Bench], Drafter]:
    return lambda bench: drafter.methods(bench.lm.vocabulary)[name][0]()


def _method(name: str) -> Method:
    budget = PUBLISHED if name in BASES else LMAX - 1
    return Method(f"{__name__}:MAKE.{_attribute(name)}", budget, "context", replayed=name in BASES)


def _attribute(name: str) -> str:
    return name.replace("+", "_")


MAKE = SimpleNamespace(**{_attribute(name): _new(name) for name in NAMES})
METHODS = {name: _method(name) for name in NAMES}


def recorded_with(model: str) -> dict[str, Method]:
    """The methods that a model is recorded with, and the requests of each."""
    if model == models.SMOLLM2:
        return METHODS
    return {name: replace(METHODS[name], requests="smaller") for name in OF_THE_LARGER}


def record(bench: Bench, names: Sequence[str] = ()) -> None:
    """Record what is missing. names: all methods that the model is recorded with, without any."""
    methods = recorded_with(bench.model)
    if unknown := [name for name in names if name not in methods]:
        raise ValueError(f"With {bench.model} {', '.join(methods)} are recorded, not {unknown[0]}.")
    spec_bench.record("sdnpu", methods, bench, names or list(methods))


def own(bench: Bench) -> None:
    """Record drafters live on our own prompts of four tasks, in float32."""
    methods = {name: METHODS[name] for name in OWN}
    name = spec_bench.name_of(bench.model, "own")
    own_prompts.record("sdnpu", name, bench, methods, [("float32", "float32")], OWN_TASKS)


def load(model: str = models.SMOLLM2) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(answers, passes) of all recorded methods of a model."""
    return spec_bench.load("sdnpu", list(METHODS), model)
