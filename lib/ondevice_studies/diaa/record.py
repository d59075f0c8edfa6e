"""What every method does on hundreds of prompts, in float32: a row an answer and a row a pass of the model.

`make record PAPER=diaa` records all; it goes on where it was stopped. Several processes can share the work, one a
model: `python -m ondevice_studies.record diaa --models pydocs-lm-base`. A method begins each set and task with a fresh
drafter and answers its requests in order, so the first ones of a task can be run again, exactly: `run_again`.
The set "many" is for what lies beyond the paper. There, drafters that read no logits are replayed on the known answers
(`ondevice.speculation.replayed_model`), column `live`.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any

import numpy as np
import pandas as pd
import torch

from ondevice.evidence import Recorder
from ondevice.speculation import Drafter, greedy
from ondevice.speculation.replayed_model import ReplayedModel
from ondevice.speculation.suffix_automaton import Match, SuffixAutomaton
from ondevice_papers.diaa.warmup import TOKENS
from ondevice_studies.diaa import identity, quality, sized, spec_bench
from ondevice_studies.diaa.methods import (
    BASE,
    BUDGET,
    COSTS,
    FORGETFUL,
    METHODS,
    PLAIN,
    SETS,
    SMALL,
    TASKS,
    Workbench,
    recorded,
)
from ondevice_studies.speculation import plain, rerun
from ondevice_studies.speculation.prompts import digest, noting
from ondevice_studies.speculation.prompts import prompts as task_prompts
from ondevice_studies.speculation.request_set import FEWEST, Request, answered, redundancy

COUNT = 40  # requests of a task
MANY = 350  # or as many as there are
LONGEST = 128  # tokens of an answer
LONG_PROMPT = (600, 900)  # tokens
LONG_PROMPTS = {"rag": 16, "summary": 16}  # requests
LONG_ANSWER = 256  # at most; what is kept of one ends before its first loop, and is at least:
LONG_KEPT = 64
TRIED = 300  # prompts of the task with the longest answers
# Model, set and method whose second request has a tie in a tree. Zen 5 and Zen 3 break it differently, so does noise of
# 1e-6, and the tables keep the difference.
TIED = [SMALL, "long_answers", "DIAA"]


# The requests


def requests_of(bench: Workbench, request_set: str) -> list[Request]:
    """The requests of a set, those of a task together: its shortest answer first, then as `request_set` orders them."""
    counts = {
        "tasks": dict.fromkeys(TASKS, COUNT),
        "long_prompts": LONG_PROMPTS,
        "long_answers": {"parameters": TRIED},
        "many": dict.fromkeys(TASKS, MANY),
    }
    long = request_set == "long_answers"
    longest, fewest, tried = (LONG_ANSWER, LONG_KEPT, TRIED) if long else (LONGEST, FEWEST, None)
    ordered = []
    for task, count in counts[request_set].items():
        fitting = ((name, ids) for name, ids in prompts(request_set, task) if len(ids) <= bench.lm.context - longest)
        every = answered(task, fitting, count, bench.lm.model, bench.end, longest, tried)
        enough = [request for request in every if request.limit >= fewest]
        first = min(enough, key=lambda request: request.limit)
        members = [first, *(request for request in enough if request is not first)]
        ordered += [replace(request, prompt=number) for number, request in enumerate(members)]
    return ordered


def prompts(request_set: str, task: str, only: Collection[str] | None = None) -> Iterator[tuple[str, list[int]]]:
    """(document, token ids) of a set's prompts of a task. only: these documents'."""
    return task_prompts(task, only, LONG_PROMPT if request_set == "long_prompts" else None)


# A method on them


def run_method(
    bench: Workbench, method: str, request_set: str, requests: Sequence[Request], replayed: bool = False
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(answers, passes) of a method on requests, in the record's columns; `identical` is left out.

    replayed: whether the requests' known answers stand for the model. Raises ValueError on a method that there is not.
    """
    answers: list[dict[str, Any]] = []
    passes: list[dict[str, Any]] = []
    lm: Any = bench.lm
    if replayed:
        known = {request.ids: (*request.answer, *request.ends)[: request.limit] for request in requests}
        lm = ReplayedModel(known, bench.lm.vocabulary, bench.lm.context)
    for task, group in groupby(requests, lambda request: request.task):
        drafter, budget = bench.make(method)
        for request in group:
            keys = {"model": bench.model, "set": request_set, "task": task, "request": request.prompt, "method": method}
            margins: list[float] = []
            generation = bench.generate(
                lm,
                drafter,
                request.ids,
                request.limit,
                budget=budget,
                eos_token_ids=request.ends,
                choice=noting(margins) if method == PLAIN else greedy,
            )
            tokens = generation.tokens
            answers.append({
                **keys, "document": request.name, "prompt_sha": digest(request.ids), "answer_sha": digest(tokens),
                "prompt_tokens": generation.prompt, "tokens": len(tokens), "passes": len(generation.steps),
                "redundancy": redundancy(request.ids, tokens), "margin": min(margins, default=np.nan),
                "live": not replayed, "stored": request_set == "many" and _stands(tokens, bench.library),
            })  # fmt: skip
            passes += [
                {**keys, "step": number, "drafted": step.drafted, "accepted": step.accepted, "emitted": step.emitted,
                 "depth": step.depth, "drafting_passes": step.drafting, "cached": step.cached}
                for number, step in enumerate(generation.steps)
            ]  # fmt: skip
    return pd.DataFrame(answers), pd.DataFrame(passes)


def _stands(tokens: Sequence[int], library: SuffixAutomaton) -> bool:
    """Whether an answer stands in the stores, word for word."""
    match = Match()
    for token in tokens:
        match = library.advance(match, token)
    return match.length >= len(tokens)


def sample(bench: Workbench, answers: pd.DataFrame, request_set: str = "tasks", number: int = 1) -> list[Request]:
    """The first `number` requests of each task, made anew from the corpus and the record (`made_anew`)."""
    chosen = answers[(answers["model"] == bench.model) & (answers["set"] == request_set)]
    return made_anew(bench, chosen[(chosen["method"] == PLAIN) & (chosen["request"] < number)])


def made_anew(bench: Workbench, rows: pd.DataFrame) -> list[Request]:
    """The requests of a model's recorded answers (`speculation.rerun`)."""
    return rerun.made_anew(rows, lambda request_set, task, only: prompts(request_set, task, only), bench.end)


def drawn(answers: pd.DataFrame, seed: int, number: int) -> pd.DataFrame:
    """The recorded answers that the seed draws to run again (`speculation.rerun.drawn`), but for those of TIED."""
    tied = (answers[["model", "set", "method"]] == TIED).all(axis=1)
    return rerun.drawn(answers[~tied], seed, number, [name for name in METHODS if name.startswith(FORGETFUL)])


def run_again(benches: Mapping[str, Workbench], rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(answers, passes) of recorded answers' methods on their requests. benches: by model."""

    def requests_of(model: str, part: pd.DataFrame) -> list[Request]:
        bench = benches[model]
        requests = made_anew(bench, part)
        if part["set"].iloc[0] == "many":  # replays want the whole answer
            plain = [
                bench.generate(bench.lm, Drafter(), request.ids, request.limit, eos_token_ids=request.ends)
                for request in requests
            ]
            answered = zip(requests, plain, strict=True)
            requests = [replace(request, answer=tuple(log.tokens)) for request, log in answered]
        return requests

    ran = []
    for model, method, request_set, requests in rerun.runs(rows, requests_of):
        replayed = request_set == "many" and METHODS[method].replayed
        ran.append(run_method(benches[model], method, request_set, requests, replayed))
    answers, passes = (pd.concat(parts, ignore_index=True) for parts in zip(*ran, strict=True))
    return answers, passes


# The recording


def recorders() -> dict[str, Recorder]:
    """Of answers and of passes; a method on a set is the unit, and goes into both."""
    parameters = {
        "requests a task": COUNT,
        "of many": MANY,
        "tokens": LONGEST,
        "tokens of long prompts": LONG_PROMPT,
        "threads": 1,
        "dtype": "float32",
        "nodes": BUDGET,
        "warm-up tokens": TOKENS,
        "costs": {name: cost[[0, 8, 16, 32]].round(3).tolist() for name, cost in COSTS.items()},
    }
    return {
        name: Recorder("diaa", name, ["model", "set", "method"], parameters, [BASE, SMALL])
        for name in ("answers", "passes")
    }


def record(model: str) -> None:
    """Record what is missing, a set at a time, the main methods first."""
    bench = Workbench(model)
    for request_set in SETS:
        recorder = recorders()  # another process may have recorded some
        done = recorder["passes"].done
        missing = [method for method in recorded(model, request_set) if (model, request_set, method) not in done]
        if not missing:
            continue
        requests = requests_of(bench, request_set)
        plain = run_method(bench, PLAIN, request_set, requests)
        for method in missing:
            replayed = request_set == "many" and METHODS[method].replayed
            answers, passes = plain if method == PLAIN else run_method(bench, method, request_set, requests, replayed)
            right = plain[0][["margin", "answer_sha"]].to_numpy()
            answers = answers.assign(margin=right[:, 0].astype(float), identical=answers["answer_sha"] == right[:, 1])
            for name, table in (("answers", answers), ("passes", passes)):
                recorder[name].add(table)
                recorder[name].checkpoint()
            same = f"{answers['identical'].sum()} of {len(answers)} identical"
            rate = passes["emitted"].mean()
            print(f"{model} {request_set} {method}: {rate:.3f} tokens a pass, {same}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """The command; once nothing is missing, the record is written."""
    parser = argparse.ArgumentParser(prog="make record PAPER=diaa", description=__doc__)
    parser.add_argument("--models", nargs="+", default=[BASE, SMALL], choices=[BASE, SMALL])
    parser.add_argument("--public", choices=list(plain.LABELS), help="every drafter on Spec-Bench, by this model")
    parser.add_argument("--identity", choices=list(plain.LABELS), help="drafters against plain decoding, by this model")
    parser.add_argument("--quality", choices=list(plain.LABELS), help="perplexity in every format, of this model")
    parser.add_argument("--sized", choices=list(plain.LABELS), help="mixtures sized by recorded curves, of this model")
    parser.add_argument("--methods", nargs="+", choices=list(spec_bench.METHODS), default=list(spec_bench.METHODS))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.quality:
        quality.record(options.quality)
        return
    if options.sized:
        sized.record(options.sized)
        return
    if options.identity:
        identity.record(options.identity)
        return
    if options.public:
        spec_bench.record(options.public, options.methods)
        return
    for model in options.models:
        record(model)
    tables = recorders().values()
    if all(units() <= recorder.done for recorder in tables):
        print(*(recorder.finish() for recorder in tables), sep="\n")


def units() -> set[tuple[str, str, str]]:
    """All that is to be recorded: (model, set, method)."""
    sets = product((BASE, SMALL), SETS)
    return {(model, request_set, method) for model, request_set in sets for method in recorded(model, request_set)}


if __name__ == "__main__":
    main()
