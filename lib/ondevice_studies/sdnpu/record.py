"""The records behind the notebook: drafters on public models, why drafts are rejected, likeness, graphs and times.

`make record PAPER=sdnpu` records all; it goes on where it was stopped. `--parts spec-bench --methods SAM` records a
part, so that several processes share the work; times (`ondevice_studies.sdnpu.timing`) need a quiet machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from ondevice import models
from ondevice.evidence import Again, Recorder, some
from ondevice_papers.sdnpu.rejections import classify, rejected
from ondevice_studies.sdnpu import compiler, similarity, spec_bench, timing
from ondevice_studies.speculation import own_prompts, plain
from ondevice_studies.speculation import spec_bench as shared
from ondevice_studies.speculation.live import Watched
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


def requests(bench: Bench, tasks: Collection[str] = ()) -> list[Request]:
    """The requests that SAM is recorded on, each with its plain answer. tasks: some alone."""
    answers = recordable(bench.model)
    answers = answers[answers["task"].isin(tasks)] if tasks else answers
    chosen = recorded_requests(bench, answers, spec_bench.METHODS["SAM"].most)
    return [replace(request, answer=tuple(plain_answer(bench, request))) for request in chosen]


def rejected_tails(bench: Bench, of_task: Sequence[Request]) -> pd.DataFrame:
    """A row per rejected tail of SAM on the requests of a task, each with its plain answer.

    Columns: task, request, case and lengths (`ondevice_papers.sdnpu.rejections`), and elsewhere: the case by the output
    of the task's next request in its place. Only chance puts the tail there.
    """
    method = spec_bench.METHODS["SAM"]
    rows = []
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
                rows.append({"task": request.task, "request": request.name, **case._asdict(), "elsewhere": elsewhere})
            position += len(step.emitted)
    return pd.DataFrame(rows)


def rejections(bench: Bench) -> None:
    """The rejected tails of all tasks."""
    parameters = PARAMETERS | {"nodes": spec_bench.METHODS["SAM"].budget}
    name = name_of(bench.model, "rejections")
    recorder = Recorder("sdnpu", name, KEYS, parameters, [bench.model], functions=[rejected_tails, requests, Bench])
    given = requests(bench)
    for task in dict.fromkeys(request.task for request in given):
        rows = rejected_tails(bench, [request for request in given if request.task == task])
        recorder.add(rows.assign(model=bench.model, method="SAM"))
    print(recorder.finish(), flush=True)


LIKENESS: dict[str, list[Callable[..., Any]]] = {
    "cosines": [similarity.of_answers],
    "contexts": [similarity.of_contexts],
    "copied": [similarity.copied],
}


def likeness(bench: Bench) -> None:
    """Figure 3: cosines of answers' and contexts' embeddings, their overlaps, and what is copied."""
    model, tokenizer = bench.model, bench.loaded.tokenizer
    given = requests(bench)
    for name, table in {
        "cosines": similarity.of_answers(given, model, tokenizer),
        "contexts": similarity.of_contexts(given, model, tokenizer, "summarization"),
        "copied": similarity.copied(given, model),
    }.items():
        functions: list[Callable[..., Any] | str] = [*LIKENESS[name], requests, Bench]
        recorder = Recorder("sdnpu", name_of(model, name), ["model"], {}, [model], functions=functions)
        recorder.add(table)
        print(recorder.finish(), flush=True)


DRAFTS: dict[str, Callable[[Bench], None]] = {
    "spec-bench": spec_bench.record,
    "own": spec_bench.own,
    "rejections": rejections,
    "likeness": likeness,
}


def again(name: str) -> Again | None:
    """How a part of a record is made again: drafts on two requests, or all of one short task.

    None where nothing here makes it, or it takes longer.
    """
    own = {name_of(model, "own"): model for model in plain.LABELS}
    if name in own:
        return own_prompts.again(Bench(own[name]), {method: spec_bench.METHODS[method] for method in spec_bench.OWN})
    of_tasks = {name_of(model, kind): (model, kind) for model in plain.LABELS for kind in ("rejections", "copied")}
    if name not in of_tasks:
        return shared.again(spec_bench.METHODS, name)
    model, kind = of_tasks[name]
    bench = Bench(model)

    def draw(table: pd.DataFrame, random: np.random.Generator) -> pd.DataFrame:
        short = table[~table["task"].isin(shared.OF_CONTEXT)]
        return some(["task"], 1)(short, random)

    def make(rows: pd.DataFrame) -> pd.DataFrame:
        given = requests(bench, rows["task"].unique())
        return rejected_tails(bench, given) if kind == "rejections" else similarity.copied(given, model)

    functions = [rejected_tails] if kind == "rejections" else LIKENESS[kind]
    columns = ["case", "rejected", "elsewhere"] if kind == "rejections" else ["copied", "grams"]
    return Again([*functions, requests, Bench], ["task"], draw, make, columns)


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
