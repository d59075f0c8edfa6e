"""The records behind the notebook: drafters on public models, why drafts are rejected, likeness, graphs and times.

`make record PAPER=sdnpu` records all; it goes on where it was stopped. `--parts spec-bench --methods SAM` records a
part, so that several processes share the work; times (`ondevice_studies.sdnpu.timing`) need a quiet machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd
import torch

from ondevice import models
from ondevice.evidence import Recorder
from ondevice.speculation.live import Watched
from ondevice_papers.sdnpu.rejections import classify, rejected
from ondevice_studies.sdnpu import compiler, similarity, spec_bench, timing
from ondevice_studies.speculation import plain
from ondevice_studies.speculation.request_set import Request
from ondevice_studies.speculation.spec_bench import (
    KEYS,
    PARAMETERS,
    Bench,
    drafted,
    name_of,
    plain_answer,
    recordable,
    recorded_requests,
)


def requests(bench: Bench) -> list[Request]:
    """The requests that SAM is recorded on, each with its plain answer."""
    chosen = recorded_requests(bench, recordable(bench.model), spec_bench.METHODS["SAM"].most)
    return [replace(request, answer=tuple(plain_answer(bench, request))) for request in chosen]


def rejections(bench: Bench) -> None:
    """A row per rejected tail of SAM: task, request, case and lengths (`ondevice_papers.sdnpu.rejections`).

    elsewhere: the case by the output of the task's next request in its place. Only chance puts the tail there.
    """
    method = spec_bench.METHODS["SAM"]
    name = name_of(bench.model, "rejections")
    recorder = Recorder("sdnpu", name, KEYS, PARAMETERS | {"nodes": method.budget}, [bench.model])
    given = requests(bench)
    rows = []
    for task in dict.fromkeys(request.task for request in given):
        of_task = [request for request in given if request.task == task]
        watched = Watched(method.drafter(bench))
        for request, other in zip(of_task, [*of_task[1:], of_task[0]], strict=True):
            watched.steps.clear()
            drafted(bench, watched, [request], method.budget, replayed=True)
            position = 1  # tokens of the answer before the step; the first one came with the prefill
            for step in watched.steps:
                tail = rejected(step.draft, step.path)
                at = position + (tail.accepted if tail else 0)
                if tail and at < request.limit:
                    case = classify(tail.tokens, request.answer[at:])
                    elsewhere = classify(tail.tokens, other.answer[at % len(other.answer) :]).case
                    rows.append({"task": task, "request": request.name, **case._asdict(), "elsewhere": elsewhere})
                position += len(step.emitted)
    recorder.add(pd.DataFrame(rows).assign(model=bench.model, method="SAM"))
    print(recorder.finish(), flush=True)


def likeness(bench: Bench) -> None:
    """Figure 3: cosines of answers' and contexts' embeddings, their overlaps, and what is copied."""
    model, tokenizer = bench.model, bench.loaded.tokenizer
    given = requests(bench)
    for name, table in {
        "cosines": similarity.of_answers(given, model, tokenizer),
        "contexts": similarity.of_contexts(given, model, tokenizer, "summarization"),
        "copied": similarity.copied(given, model),
    }.items():
        recorder = Recorder("sdnpu", name_of(model, name), ["model"], {}, [model])
        recorder.add(table)
        print(recorder.finish(), flush=True)


DRAFTS: dict[str, Callable[[Bench], None]] = {
    "spec-bench": spec_bench.record,
    "own": spec_bench.own,
    "rejections": rejections,
    "likeness": likeness,
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parts = [*DRAFTS, *timing.PARTS, *compiler.PARTS]
    parser = argparse.ArgumentParser(prog="make record PAPER=sdnpu", description=__doc__)
    parser.add_argument("--model", default=models.SMOLLM2, choices=list(plain.LABELS), help="of all but the compiler")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[],
        choices=list(spec_bench.METHODS),
        metavar="NAME",
        help="of spec-bench; all without it",
    )
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    bench = Bench(options.model)
    for part in options.parts:
        if part == "spec-bench":
            spec_bench.record(bench, options.methods)
        elif part in DRAFTS:
            DRAFTS[part](bench)
        elif part in timing.PARTS:
            timing.PARTS[part](options.model)
        else:
            compiler.PARTS[part]()


if __name__ == "__main__":
    main()
