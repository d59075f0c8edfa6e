"""Drafters on our own prompts, live, against plain decoding in the same format: any clone can run these answers again.

A drafter is new at the beginning of a task. A difference counts as a near-tie where the plain answer's two likeliest
logits were closer than 1e-4 at the first token that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ondevice import evidence, models, prompts
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.lean import Arithmetic, Weights, engine
from ondevice.causal_lm.loops import loop_start
from ondevice.speculation import Drafter, generate
from ondevice.speculation.loop import Generation
from ondevice_studies.speculation import plain
from ondevice_studies.speculation.prompts import digest, noting
from ondevice_studies.speculation.request_set import Request
from ondevice_studies.speculation.spec_bench import Bench, Method

NEAR = 1e-4  # a logit's lead, below which two tokens are a tie that rounding decides
CLOSE = 0.05  # the same in integer arithmetic on another processor
KEYS = ["model", "weights", "arithmetic", "method"]
Formats = Sequence[tuple[Weights, Arithmetic]]


def plain_answers(lm: CausalLM, requests: Sequence[Request]) -> dict[str, tuple[list[int], list[float]]]:
    """By request: the tokens of its plain answer before any loop, and by how much the likeliest logit led at each."""
    answers = {}
    for request in requests:
        margins: list[float] = []
        tokens = generate(lm, Drafter(), request.ids, request.limit, choice=noting(margins), eos_token_ids=request.ends)
        answer = list(tokens.tokens)
        limit = loop_start(answer) or len(answer)
        answers[request.name] = answer[:limit], margins[:limit]
    return answers


def compared(
    drafter: Drafter, budget: int, lm: CausalLM, request: Request, right: tuple[list[int], list[float]]
) -> dict[str, Any]:
    """The columns of one answer: tokens, passes, identical, near_tie, the plain answer's least margin and its hash."""
    answer, margins = right
    generation = generate(lm, drafter, request.ids, len(answer), budget=budget, eos_token_ids=request.ends)
    tokens = list(generation.tokens)
    apart = next((index for index, pair in enumerate(zip(tokens, answer, strict=False)) if pair[0] != pair[1]), None)
    return {
        "request": request.name,
        "task": request.task,
        "prompt_sha": digest(request.ids),
        "answer_sha": digest(answer),
        "tokens": len(answer),
        "passes": len(generation.steps),
        "identical": tokens == answer,
        "near_tie": apart is not None and margins[apart] < NEAR,
        "margin": min(margins),
    }


def run_again(
    lm: CausalLM,
    loaded: models.Loaded,
    rows: pd.DataFrame,
    drafters: Mapping[str, tuple[Callable[[], Drafter], int]],
    decode: Callable[..., Generation] = generate,
) -> pd.DataFrame:
    """Recorded answers decoded once more: task, method, request, prompt_sha, answer_sha, tokens and passes.

    rows: of a record, in its order; a drafter is new at the beginning of a task, so the first ones of a task are known
    exactly. drafters: by method, what makes a new one, and the most nodes of its drafts. decode: the loop.
    """
    texts = {prompt.id: prompt for prompt in prompts.own()}
    live = []
    for (task, name), part in rows.groupby(["task", "method"], sort=False):
        make, budget = drafters[str(name)]
        drafter = make()
        for row in part.itertuples():
            request = plain.rendered(loaded, texts[str(row.request)], plain.LONGEST)
            log = decode(lm, drafter, request.ids, row.tokens, budget=budget, eos_token_ids=request.ends)
            shas = digest(request.ids), digest(list(log.tokens))
            live.append((task, name, row.request, *shas, len(log.tokens), len(log.steps)))
    columns = ["task", "method", "request", "prompt_sha", "answer_sha", "tokens", "passes"]
    return evidence.born(pd.DataFrame(live, columns=columns), "measured")


def made_by(methods: Mapping[str, Method], bench: Bench) -> list[Callable[..., Any] | str]:
    """What makes the rows of a record."""
    return [plain_answers, compared, type(bench), *sorted({method.source for method in methods.values()})]


def again(
    bench: Bench, methods: Mapping[str, Method], asked: Callable[[], Sequence[prompts.Prompt]] = prompts.own
) -> evidence.Again:
    """How answers of a record are made again: the first two of a task, by one method, drawn by chance. asked: all.

    In float32 where the record has that, so its integer rows are not compared. Of a record in integers a lead of the
    likeliest logit below `CLOSE` is a near-tie, as its answers may differ on another processor.
    """

    def draw(table: pd.DataFrame, random: np.random.Generator) -> pd.DataFrame:
        exact = table[table["arithmetic"] == "float32"]
        rows = exact if len(exact) else table
        drawn = evidence.some(["weights", "arithmetic", "method", "task"], 1)(rows, random).head(2)
        close = (drawn["arithmetic"] != "float32") & (drawn["margin"] < CLOSE)
        return drawn.assign(margin=drawn["margin"].mask(close, 0.0))

    def make(rows: pd.DataFrame) -> pd.DataFrame:
        texts = {prompt.id: prompt for prompt in asked()}
        weights, arithmetic, name = rows.iloc[0][["weights", "arithmetic", "method"]]
        lm = engine(bench.loaded, threads=1, weights=weights, arithmetic=arithmetic)
        requests = [plain.rendered(bench.loaded, texts[request], plain.LONGEST) for request in rows["request"]]
        answers = plain_answers(lm, requests)
        drafter = methods[name].drafter(bench)
        return pd.DataFrame(
            [compared(drafter, methods[name].budget, lm, request, answers[request.name]) for request in requests]
        )

    columns = ["prompt_sha", "answer_sha", "tokens", "passes", "identical"]
    return evidence.Again(made_by(methods, bench), ["request"], draw, make, columns, margin="margin")


def record(
    paper: str,
    name: str,
    bench: Bench,
    methods: Mapping[str, Method],
    formats: Formats,
    tasks: Sequence[str] = prompts.TASKS,
    asked: Sequence[prompts.Prompt] = (),
) -> None:
    """Record what is missing, a format and a method at a time, under `name`. asked: other prompts than our own."""
    model = bench.model
    recorder = evidence.Recorder(
        paper,
        name,
        KEYS,
        {"tokens": plain.LONGEST, "threads": 1, "near": NEAR},
        [model],
        functions=made_by(methods, bench),
    )
    chosen = [prompt for prompt in asked or prompts.own() if prompt.task in tasks]
    requests = [plain.rendered(bench.loaded, prompt, plain.LONGEST) for prompt in chosen]
    for weights, arithmetic in formats:
        missing = [method for method in methods if (model, weights, arithmetic, method) not in recorder.done]
        if not missing:
            continue
        lm = engine(bench.loaded, threads=1, weights=weights, arithmetic=arithmetic)
        answers = plain_answers(lm, requests)
        for drafter_name in missing:
            method = methods[drafter_name]
            rows = []
            for task in tasks:
                drafter = method.drafter(bench)
                of_task = [request for request in requests if request.task == task]
                rows += [compared(drafter, method.budget, lm, request, answers[request.name]) for request in of_task]
            keys = {"model": model, "weights": weights, "arithmetic": arithmetic, "method": drafter_name}
            recorder.add([keys | row for row in rows])
            recorder.checkpoint()
            same = sum(row["identical"] for row in rows)
            print(f"{weights}, {arithmetic}, {drafter_name}: {same} of {len(rows)} identical", flush=True)
    print(recorder.finish())
