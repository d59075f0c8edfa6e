"""Drafters on Spec-Bench's requests to a public model: a row per forward pass, one record per drafter.

A drafter is new at the beginning of a task and answers its requests in their order. Drafters that read no logits are
replayed on the known plain answers (`replayed`). Answers are compared with plain decoding by their hashes. Each record
is whole on its own, and a task that was begun is begun again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pkgutil import resolve_name
from typing import Any, Literal

import numpy as np
import pandas as pd

from ondevice import evidence, models, prompts
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.lean import engine
from ondevice.evidence import checks, records
from ondevice.speculation import Drafter, generate
from ondevice.speculation.drafters import DRAFTERS, create
from ondevice.speculation.replayed_model import ReplayedModel
from ondevice_studies.speculation import plain
from ondevice_studies.speculation.prompts import digest
from ondevice_studies.speculation.request_set import Request

PART = 20  # requests of a task for what is recorded on a part of them
OF_CONTEXT = {"summarization": 40, "rag": 40}  # of the tasks whose answers lean on a long prompt; of the others:
FEW = 10
SMALLER = 2  # a larger model is recorded on one in so many of these requests
KEYS = ["model", "method", "task"]
COMPARED = ["answer_sha", "step", "drafted", "accepted", "emitted", "depth", "cached", "drafting_passes"]
PARAMETERS = {"threads": 1, "dtype": "float32", "part": PART}


@dataclass
class Bench:
    """A model in float32 on one thread. model: a spec of `models.load`."""

    model: str

    @cached_property
    def loaded(self) -> models.Loaded:
        """The model with its tokenizer."""
        return models.load(self.model)

    @cached_property
    def lm(self) -> CausalLM:
        """Its engine."""
        return engine(self.loaded, threads=1)


@dataclass(frozen=True)
class Method:
    """A drafter that is recorded.

    make: a name in the library's table of drafters, or a function of a `Bench`, as `module:name`. budget: most nodes
    of a draft. requests: all of Spec-Bench's, the first `PART` of each task, by task as many as `OF_CONTEXT` and
    `FEW` say, or one in `SMALLER` of these. replayed: whether it reads no logits, so that known answers can stand for
    the model.
    """

    make: str
    budget: int
    requests: Literal["all", "part", "context", "smaller"] = "all"
    replayed: bool = False

    @property
    def source(self) -> str:
        """`module:name` of what makes it."""
        return DRAFTERS[self.make].make if self.make in DRAFTERS else self.make

    def drafter(self, bench: Any) -> Drafter:
        """A new one."""
        if self.make in DRAFTERS:
            return create(self.make, bench.lm.vocabulary)
        make: Callable[[Any], Drafter] = resolve_name(self.make)
        return make(bench)

    def most(self, task: str) -> int | None:
        """How many requests of a task; None is all."""
        of_context = OF_CONTEXT.get(task, FEW)
        return {"all": None, "part": PART, "context": of_context, "smaller": of_context // SMALLER}[self.requests]


def name_of(model: str, method: str) -> str:
    """The record of a method on a model's requests."""
    slug = "".join(letter if letter.isalnum() else "-" for letter in method.lower())
    return f"{plain.LABELS[model]}-{'-'.join(part for part in slug.split('-') if part)}"


def recordable(model: str) -> pd.DataFrame:
    """A model's recorded plain answers, without those to prompts that are split into other tokens today."""
    answers = plain.load(model)
    return answers[~answers["request"].isin(plain.SPLIT_ANEW)]


def recorded_requests(
    bench: Bench, answers: pd.DataFrame, most: Callable[[str], int | None] = lambda task: None
) -> list[Request]:
    """The recorded requests of a model, a task together, in Spec-Bench's order. most: of a task; None is all.

    Raises ValueError where a prompt is not the recorded one.
    """
    texts = {prompt.id: prompt for prompt in prompts.spec_bench()}
    chosen = answers.assign(number=answers["request"].str.rpartition("-")[2].astype(int)).sort_values("number")
    rendered = []
    for task, rows in chosen.groupby("task", sort=False):
        first = rows[["request", "limit", "prompt_sha"]].head(most(str(task)) or len(rows))
        for name, limit, sha in first.itertuples(index=False):
            request = plain.rendered(bench.loaded, texts[name], limit)
            if digest(request.ids) != sha:
                raise ValueError(f"{name} ({task}) is not the recorded prompt: the model or the question changed.")
            rendered.append(request)
    return rendered


def drafted(
    bench: Bench, drafter: Drafter, requests: Sequence[Request], budget: int, replayed: bool = False
) -> pd.DataFrame:
    """The passes of a drafter on requests of one task: request, answer_sha, live, step and its counts."""
    rows: list[dict[str, Any]] = []
    for request in requests:
        lm: Any = bench.lm
        if replayed:
            lm = ReplayedModel({request.ids: plain_answer(bench, request)}, bench.lm.vocabulary, bench.lm.context)
        generation = generate(lm, drafter, request.ids, request.limit, budget=budget, eos_token_ids=request.ends)
        columns = {
            "request": request.name,
            "answer_sha": digest(generation.tokens),
            "live": not replayed,
        }
        rows += [
            {
                **columns,
                "step": number,
                "drafted": step.drafted,
                "accepted": step.accepted,
                "emitted": step.emitted,
                "depth": step.depth,
                "cached": step.cached,
                "drafting_passes": step.drafting,
            }
            for number, step in enumerate(generation.steps)
        ]
    return pd.DataFrame(rows)


def plain_answer(bench: Bench, request: Request) -> list[int]:
    """The plain answer to a request, up to its limit, from the cache or decoded now."""
    sha = digest(request.ids)
    answer = plain.kept(bench.model, sha)
    if answer is None:
        answer = plain.answered(bench.lm, request)["answer"]
        plain.keep(bench.model, sha, answer)
    return answer[: request.limit]


def record(paper: str, methods: Mapping[str, Method], bench: Bench, names: Sequence[str]) -> None:
    """Record the named methods that have no record of today's code yet, each in a file of its own."""
    answers = recordable(bench.model)
    for name in names:
        method = methods[name]
        if is_recorded(paper, name_of(bench.model, name), method):
            continue
        recorder = evidence.Recorder(
            paper,
            name_of(bench.model, name),
            KEYS,
            PARAMETERS | {"nodes": method.budget},
            [bench.model],
            functions=made_by(method, bench),
        )
        requests = recorded_requests(bench, answers, method.most)
        for task in dict.fromkeys(request.task for request in requests):
            if (bench.model, name, task) in recorder.done:
                continue
            of_task = [request for request in requests if request.task == task]
            passes = drafted(bench, method.drafter(bench), of_task, method.budget, method.replayed)
            recorder.add(passes.assign(model=bench.model, method=name, task=task))
            recorder.checkpoint()
            right = answers.set_index("request")["answer_sha"]
            each = passes.drop_duplicates("request")
            same = int((each["answer_sha"] == right.loc[each["request"]].to_numpy()).sum())
            rate = passes.groupby("request")["emitted"].mean().mean()
            print(f"{name} {task}: {rate:.2f} tokens per pass, {same} of {len(each)} identical", flush=True)
        print(recorder.finish(), flush=True)


def is_recorded(paper: str, name: str, method: Method) -> bool:
    """Whether there is a record by the code of today, or one that was checked against it."""
    if not records.exists(paper, name):
        return False
    origin, note = records.sidecar(paper, name), checks.noted(paper).get(name)
    today = checks.is_today(origin) or (note is not None and checks.is_today(note))
    return today and bool(origin["parameters"]["nodes"] == method.budget)


def made_by(method: Method, bench: Bench) -> list[Callable[..., Any] | str]:
    """What makes the rows of a method's record."""
    return [drafted, recorded_requests, type(bench), method.source]


def again(methods: Mapping[str, Method], name: str, bench_of: Callable[[str], Bench] = Bench) -> evidence.Again | None:
    """How passes of a record are made again: the first two requests of a task that chance draws.

    name: of a record. None where it is of none of the methods.
    """
    known = {name_of(model, label): (model, method) for model in plain.LABELS for label, method in methods.items()}
    if name not in known:
        return None
    model, method = known[name]
    bench = bench_of(model)
    margins = recordable(model).set_index("request")["margin"]

    def draw(table: pd.DataFrame, random: np.random.Generator) -> pd.DataFrame:
        tasks = table["task"].unique()
        of_task = table[(table["task"] == random.choice(tasks)) & table["request"].isin(margins.index)]
        first = of_task.drop_duplicates("request")["request"].head(2)
        drawn = of_task[of_task["request"].isin(first)]
        return drawn.assign(margin=margins.loc[drawn["request"]].to_numpy())

    def make(rows: pd.DataFrame) -> pd.DataFrame:
        names = set(rows["request"])
        requests = [each for each in recorded_requests(bench, recordable(model), method.most) if each.name in names]
        return drafted(bench, method.drafter(bench), requests, method.budget, method.replayed)

    return evidence.Again(made_by(method, bench), ["request"], draw, make, COMPARED, margin="margin")


def load(paper: str, methods: Sequence[str], model: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(answers, passes) of all recorded methods of a model; plain decoding is the method `vanilla`.

    answers: task, request, method, tokens, passes, prompt_tokens, identical, live, margin, redundancy, prompt_sha.
    """
    first = plain.load(model)
    names = [name_of(model, name) for name in methods]
    tables = [evidence.load(paper, name) for name in names if records.exists(paper, name)]
    passes = pd.concat(tables, ignore_index=True)
    columns = ["request", "prompt_sha", "prompt_tokens", "limit", "margin", "redundancy", "answer_sha"]
    each = (
        passes.groupby([*KEYS, "request"], sort=False)
        .agg(passes=("step", "size"), decoded=("emitted", "sum"), live=("live", "first"), sha=("answer_sha", "first"))
        .reset_index()
        .merge(first[columns], on="request")
    )
    plainly = first.assign(method="vanilla", passes=first["limit"] - 1, decoded=first["limit"] - 1, live=True)
    plainly["sha"] = plainly["answer_sha"]
    answers = pd.concat([plainly, each], ignore_index=True)
    answers = answers.assign(identical=answers["sha"] == answers["answer_sha"], tokens=answers["limit"])
    return evidence.derived(answers, first, *tables), evidence.derived(passes, *tables)
