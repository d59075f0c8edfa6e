"""sd.npu's drafters on Spec-Bench's requests to public models (`speculation.spec_bench`), and why SAM's are rejected.

`make record PAPER=sdnpu ARGS="--parts spec-bench"` records what is missing. The paper takes summaries and retrieval, so
more of these are recorded than of the other tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from ondevice import evidence, models
from ondevice.evidence import records
from ondevice.speculation import Drafter
from ondevice_papers.sdnpu import drafter
from ondevice_papers.sdnpu.drafter import BASES, LMAX, MIXTURE, PUBLISHED
from ondevice_papers.sdnpu.rejections import Watched
from ondevice_studies.speculation import spec_bench
from ondevice_studies.speculation.spec_bench import KEYS, PARAMETERS, Bench, Method

_HERE = __name__
PARTS = ("calibration", "reuse", "both")
OF_THE_LARGER = ("SAM", "SAM+both", MIXTURE)  # methods that are recorded with the larger model, too


def _new(name: str) -> Callable[[Bench], Drafter]:
    def make(bench: Bench) -> Drafter:
        return drafter.methods(bench.lm.vocabulary)[name][0]()

    return make


pld, sam, suffix_decoding, mixture = map(_new, (*BASES, MIXTURE))
pld_calibration, pld_reuse, pld_both = (_new(f"PLD+{part}") for part in PARTS)
sam_calibration, sam_reuse, sam_both = (_new(f"SAM+{part}") for part in PARTS)

# In the order in which they are recorded; the first ones read no logits.
METHODS: dict[str, Method] = {
    "PLD": Method(f"{_HERE}:pld", PUBLISHED, "context", replayed=True),
    "SAM": Method(f"{_HERE}:sam", PUBLISHED, "context", replayed=True),
    "SuffixDecoding": Method(f"{_HERE}:suffix_decoding", PUBLISHED, "context", replayed=True),
    "SAM+both": Method(f"{_HERE}:sam_both", LMAX - 1, "context"),
    MIXTURE: Method(f"{_HERE}:mixture", LMAX - 1, "context"),
    "SAM+calibration": Method(f"{_HERE}:sam_calibration", LMAX - 1, "context"),
    "SAM+reuse": Method(f"{_HERE}:sam_reuse", LMAX - 1, "context"),
    "PLD+both": Method(f"{_HERE}:pld_both", LMAX - 1, "context"),
    "PLD+calibration": Method(f"{_HERE}:pld_calibration", LMAX - 1, "context"),
    "PLD+reuse": Method(f"{_HERE}:pld_reuse", LMAX - 1, "context"),
}


def record(model: str = models.SMOLLM2, names: Sequence[str] = ()) -> None:
    """Record what is missing: passes of each method, then the rejections of SAM."""
    bench = Bench(model)
    larger = model != models.SMOLLM2
    spec_bench.record("sdnpu", METHODS, bench, names or (OF_THE_LARGER if larger else list(METHODS)))
    if not records.exists("sdnpu", spec_bench.name_of(model, "rejections")):
        rejections(bench)


def rejections(bench: Bench) -> None:
    """A row per rejected tail of SAM: request, case, and its lengths (`ondevice_papers.sdnpu.rejections`)."""
    method = METHODS["SAM"]
    name = spec_bench.name_of(bench.model, "rejections")
    recorder = evidence.Recorder("sdnpu", name, KEYS, PARAMETERS | {"nodes": method.budget}, [bench.model])
    requests = spec_bench.recorded_requests(bench, spec_bench.recordable(bench.model), method.most)
    for task in dict.fromkeys(request.task for request in requests):
        if (bench.model, "SAM", task) in recorder.done:
            continue
        watched = Watched(method.drafter(bench))
        rows = []
        for request in (request for request in requests if request.task == task):
            spec_bench.drafted(bench, watched, [request], method.budget, replayed=True)
            rows += [{"request": request.name, **rejection._asdict()} for rejection in watched.rejections]
            watched.rejections = []
        recorder.add(pd.DataFrame(rows).assign(model=bench.model, method="SAM", task=task))
        recorder.checkpoint()
    print(recorder.finish(), flush=True)


def load(model: str = models.SMOLLM2) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(answers, passes) of all recorded methods of a model."""
    return spec_bench.load("sdnpu", list(METHODS), model)
