"""The requests that drafters are recorded on, and a drafter on them: a row an answer, a pass, a rejected draft.

A method begins each set and task with a fresh drafter and answers its requests in order, so that the first ones of a
task can be run again, exactly: `run_again`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from ondevice import corpus, models
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.lean import engine
from ondevice.speculation import Drafter, greedy, loop
from ondevice_papers.sdnpu.drafter import methods
from ondevice_papers.sdnpu.rejections import Watched
from ondevice_studies.speculation import rerun
from ondevice_studies.speculation.prompts import digest, noting, prompts
from ondevice_studies.speculation.request_set import Request, answered

BASE = "pydocs-lm-base"
SMALL = "pydocs-lm-small"
# Our families, and the paper's data sets that they stand for.
TASKS = {"summary": "summary", "rag": "rag", "parameters": "ui", "turns": "tweet"}
SETS = ("tasks", "long")
COUNT = 40  # requests of a task
LONGEST = 128  # tokens of an answer
LONG_PROMPT = (600, 768)  # tokens, least and most
LONG_ANSWER = (64, 256)
LONG_COUNT, LONG_TRIED = 20, {"parameters": 320, "turns": 128}  # requests; prompts, of the tasks with long answers
PLAIN = "vanilla"
# Methods that keep nothing from request to request.
FORGETFUL = (PLAIN, "PLD", "PLD+calibration", "PLD+reuse", "PLD+both")
REQUEST = rerun.REQUEST


@dataclass
class Workbench:
    """A model and what it is asked. generate, functions: the loop, and parts of `drafter.sdnpu`, or an experiment's."""

    model: str = BASE
    generate: Callable[..., loop.Generation] = loop.generate
    functions: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def lm(self) -> CausalLM:
        """The model."""
        return engine(models.load(self.model).model)

    @cached_property
    def end(self) -> int:
        """The id that ends an answer."""
        return int(corpus.tokenizer().eos_token_id)

    def make(self, method: str) -> tuple[Drafter, int]:
        """A new drafter by its name, and the most nodes of its drafts."""
        new, budget = methods(self.lm.vocabulary, **self.functions)[method]
        return new(), budget


def requests(bench: Workbench, request_set: str) -> list[Request]:
    """The requests of a set, those of a task together."""
    chosen = []
    for task in TASKS if request_set == "tasks" else LONG_TRIED:
        long = request_set == "long"
        room = bench.lm.context - (LONG_ANSWER[1] if long else LONGEST)
        named = prompts(task, lengths=LONG_PROMPT if long else None)
        candidates = ((name, ids) for name, ids in named if len(ids) <= room)
        if long:
            tried = LONG_TRIED[task]
            several = answered(task, candidates, tried, bench.lm.model, bench.end, LONG_ANSWER[1], tried)
            chosen += [request for request in several if request.limit >= LONG_ANSWER[0]][:LONG_COUNT]
        else:
            several = answered(task, candidates, COUNT, bench.lm.model, bench.end, LONGEST)
            chosen += [request for request in several if request.timed]
    return chosen


def run_method(
    bench: Workbench, method: str, request_set: str, requests: Iterable[Request]
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """(answers, passes, rejections) of a method on requests, in the record's columns; `identical` is left out."""
    answers, passes, rejections = [], [], []
    for task, group in groupby(requests, lambda request: request.task):
        drafter, budget = bench.make(method)
        watched = Watched(drafter) if method == "SAM" else None
        for request in group:
            keys = {"model": bench.model, "set": request_set, "task": task, "request": request.prompt, "method": method}
            margins: list[float] = []
            generation = bench.generate(
                bench.lm,
                watched or drafter,
                request.ids,
                request.limit,
                budget=budget,
                eos_token_ids=request.ends,
                choice=noting(margins) if method == PLAIN else greedy,
            )
            answers.append(
                {
                    **keys,
                    "document": request.name,
                    "prompt_sha": digest(request.ids),
                    "answer_sha": digest(generation.tokens),
                    "prompt_tokens": generation.prompt,
                    "tokens": len(generation.tokens),
                    "passes": len(generation.steps),
                    "margin": min(margins, default=np.nan),
                }
            )
            passes += [
                {**keys, "step": number, "drafted": step.drafted, "accepted": step.accepted, "emitted": step.emitted,
                 "cached": step.cached} for number, step in enumerate(generation.steps)
            ]  # fmt: skip
            if watched is not None:
                rejections += [{**keys, **rejection._asdict()} for rejection in watched.rejections]
                watched.rejections = []
    return pd.DataFrame(answers), pd.DataFrame(passes), pd.DataFrame(rejections)


def sample(bench: Workbench, answers: pd.DataFrame, request_set: str = "tasks", number: int = 1) -> list[Request]:
    """The first `number` requests of each task, made anew from the corpus and the record (`made_anew`)."""
    chosen = answers[(answers["model"] == bench.model) & (answers["set"] == request_set) & (answers["method"] == PLAIN)]
    return made_anew(bench, chosen[chosen.groupby("task")["request"].rank() <= number])


def made_anew(bench: Workbench, rows: pd.DataFrame) -> list[Request]:
    """The requests of a model's recorded answers (`speculation.rerun`)."""

    def of_task(request_set: str, task: str, only: Collection[str]) -> Iterator[tuple[str, list[int]]]:
        return prompts(task, only, LONG_PROMPT if request_set == "long" else None)

    return rerun.made_anew(rows, of_task, bench.end)


def drawn(answers: pd.DataFrame, seed: int, number: int) -> pd.DataFrame:
    """The recorded answers that the seed draws to run again (`speculation.rerun.drawn`)."""
    return rerun.drawn(answers, seed, number, FORGETFUL)


def run_again(benches: Mapping[str, Workbench], rows: pd.DataFrame) -> pd.DataFrame:
    """Passes of recorded answers' methods on their requests. benches: by model."""
    runs = rerun.runs(rows, lambda model, part: made_anew(benches[model], part))
    ran = [run_method(benches[model], method, request_set, some)[1] for model, method, request_set, some in runs]
    return pd.concat(ran, ignore_index=True)
