"""What every method does on hundreds of prompts, in float32: a row an answer and a row a pass of the model.

`make record PAPER=diaa` records all; it goes on where it was stopped. Several processes can share the work, one a
model: `python -m ondevice_studies.record diaa --models pydocs-lm-base`. A method begins each set and task with a fresh
drafter and answers its requests in order, so that the first of each task can be run again alone, exactly: `again`.
The set "many" is for what lies beyond the paper. There, drafters that read no logits are replayed on the known answers
(`speculation.told`), column `live`.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
import torch

from ondevice.evidence import Recorder
from ondevice.speculation import greedy
from ondevice.speculation.suffix_automaton import Match, SuffixAutomaton
from ondevice_papers.diaa.warmup import TOKENS
from ondevice_studies.diaa.methods import BASE, BUDGET, COSTS, SMALL, TASKS, Workbench, recorded
from ondevice_studies.speculation.prompts import digest, noting
from ondevice_studies.speculation.prompts import prompts as task_prompts
from ondevice_studies.speculation.request_set import FEWEST, Request, answered, redundancy
from ondevice_studies.speculation.told import Told

SETS = ("tasks", "long_prompts", "long_answers", "many")
COUNT = 40  # requests of a task
MANY = 350  # or as many as there are
LIVE = ("vanilla", "LogitSpec", "Goose")  # of "many": those that read logits, and the answers themselves
LONGEST = 128  # tokens of an answer
LONG_PROMPT = (600, 900)  # tokens
LONG_PROMPTS = {"rag": 16, "summary": 16}  # requests
LONG_ANSWER = 256  # at most; what is kept of one ends before its first loop, and is at least:
LONG_KEPT = 64
TRIED = 300  # prompts of the task with the longest answers
PLAIN = "vanilla"


# The requests


def requests(bench: Workbench, which: str) -> list[Request]:
    """The requests of a set, those of a task together: its shortest answer first, then as `request_set` orders them."""
    counts = {
        "tasks": dict.fromkeys(TASKS, COUNT),
        "long_prompts": LONG_PROMPTS,
        "long_answers": {"parameters": TRIED},
        "many": dict.fromkeys(TASKS, MANY),
    }
    longest, fewest, tried = (LONG_ANSWER, LONG_KEPT, TRIED) if which == "long_answers" else (LONGEST, FEWEST, None)
    ordered = []
    for task, count in counts[which].items():
        fitting = ((name, ids) for name, ids in prompts(which, task) if len(ids) <= bench.lm.context - longest)
        found = answered(task, fitting, count, bench.lm.model, bench.end, longest, tried)
        kept = [one for one in found if one.limit >= fewest]
        first = min(kept, key=lambda one: one.limit)
        members = [first, *(one for one in kept if one is not first)]
        ordered += [replace(one, prompt=number) for number, one in enumerate(members)]
    return ordered


def prompts(which: str, task: str, only: Collection[str] | None = None) -> Iterator[tuple[str, list[int]]]:
    """(document, token ids) of a set's prompts of a task. only: these documents'."""
    return task_prompts(task, only, LONG_PROMPT if which == "long_prompts" else None)


# A method on them


def again(
    bench: Workbench, method: str, which: str, asked: Iterable[Request], told: bool = False
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(answers, passes) of a method on requests, in the record's columns; `identical` is left out.

    told: whether the requests' known answers stand for the model. Raises ValueError on a method that there is not.
    """
    answers, passes, asked = [], [], list(asked)
    lm: Any = bench.lm
    if told:
        known = {one.ids: (*one.said[: one.limit], *one.ends)[: one.limit] for one in asked}
        lm = Told(known, bench.lm.vocabulary, bench.lm.context)
    for task, group in groupby(asked, lambda one: one.task):
        drafter, budget = bench.make(method)
        for request in group:
            keys = {"model": bench.model, "set": which, "task": task, "request": request.prompt, "method": method}
            margins: list[float] = []
            found = bench.generate(
                lm, drafter, request.ids, request.limit, budget=budget, ends=request.ends,
                choice=noting(margins) if method == PLAIN else greedy,
            )  # fmt: skip
            answers.append({
                **keys, "document": request.name, "prompt_sha": digest(request.ids), "answer_sha": digest(found.tokens),
                "prompt_tokens": found.prompt, "tokens": len(found.tokens), "passes": len(found.steps),
                "redundancy": redundancy(request.ids, found.tokens), "margin": min(margins, default=np.nan),
                "live": not told, "stored": which == "many" and _stands(found.tokens, bench.library),
            })  # fmt: skip
            passes += [
                {**keys, "step": number, "drafted": step.drafted, "accepted": step.accepted, "emitted": step.emitted,
                 "depth": step.depth, "drafting_passes": step.drafting, "cached": step.cached}
                for number, step in enumerate(found.steps)
            ]  # fmt: skip
    return pd.DataFrame(answers), pd.DataFrame(passes)


def _stands(tokens: Sequence[int], library: SuffixAutomaton) -> bool:
    """Whether an answer stands in the stores, word for word."""
    match = Match()
    for token in tokens:
        match = library.advance(match, token)
    return match.length >= len(tokens)


def sample(bench: Workbench, answers: pd.DataFrame, which: str = "tasks", number: int = 1) -> list[Request]:
    """The first `number` requests of each task, made anew from the corpus and the record of their answers' lengths.

    Raises ValueError where a prompt is not the recorded one, as after a change of the corpus.
    """
    mine = answers[(answers["model"] == bench.model) & (answers["set"] == which) & (answers["method"] == PLAIN)]
    mine = mine[mine["request"] < number].sort_values("request", kind="stable")
    found: list[Request] = []
    columns = ["request", "document", "prompt_sha", "tokens"]
    for task, rows in mine.groupby("task", sort=False):
        known = dict(prompts(which, str(task), set(rows["document"])))
        for number, document, sha, tokens in rows[columns].to_numpy().tolist():
            ids = tuple(known.get(document, ()))
            if digest(ids) != sha:
                raise ValueError(f"The prompt on {document} ({task}) is not the recorded one: the corpus changed.")
            found.append(Request(str(task), number, document, ids, (), tokens, frozenset({bench.end})))
    return found


# The recording


def recorders() -> dict[str, Recorder]:
    """Of answers and of passes; a method on a set is the unit, and goes into both."""
    parameters = {
        "requests a task": COUNT, "of many": MANY, "tokens": LONGEST, "tokens of long prompts": LONG_PROMPT,
        "threads": 1, "dtype": "float32", "nodes": BUDGET, "warm-up tokens": TOKENS,
        "costs": {name: cost[[0, 8, 16, 32]].round(3).tolist() for name, cost in COSTS.items()},
    }  # fmt: skip
    return {
        name: Recorder("diaa", name, ["model", "set", "method"], parameters, [BASE, SMALL])
        for name in ("answers", "passes")
    }


def record(model: str) -> None:
    """Record what is missing, a set at a time, the main methods first."""
    bench = Workbench(model)
    for which in SETS:
        kept = recorders()  # another process may have recorded some
        missing = [method for method in recorded(model, which) if (model, which, method) not in kept["passes"].done]
        if not missing:
            continue
        asked = requests(bench, which)
        plain = again(bench, PLAIN, which, asked)
        for method in missing:
            told = which == "many" and not method.startswith(LIVE)
            answers, passes = plain if method == PLAIN else again(bench, method, which, asked, told)
            right = plain[0][["margin", "answer_sha"]].to_numpy()
            answers = answers.assign(margin=right[:, 0].astype(float), identical=answers["answer_sha"] == right[:, 1])
            for name, table in (("answers", answers), ("passes", passes)):
                kept[name].add(table)
                kept[name].checkpoint()
            same = f"{answers['identical'].sum()} of {len(answers)} identical"
            rate = passes["emitted"].mean()
            print(f"{model} {which} {method}: {rate:.3f} tokens a pass, {same}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """The command; once nothing is missing, the record is written."""
    parser = argparse.ArgumentParser(prog="make record PAPER=diaa", description=__doc__)
    parser.add_argument("--models", nargs="+", default=[BASE, SMALL], choices=[BASE, SMALL])
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for model in options.models:
        record(model)
    kept = recorders()
    if all(units() <= recorder.done for recorder in kept.values()):
        print(*(recorder.finish() for recorder in kept.values()), sep="\n")


def units() -> set[tuple[str, str, str]]:
    """All that is to be recorded: (model, set, method)."""
    return {(model, which, method) for model in (BASE, SMALL) for which in SETS for method in recorded(model, which)}


if __name__ == "__main__":
    main()
