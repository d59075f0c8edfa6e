"""Requests to public models: Spec-Bench's first turns, and the plain answer to each, until it ends or loops.

`make record PAPER=speculation` records the answers' lengths and hashes, never a text. A whole answer stays in the
user's cache, so that drafters that read no logits can be replayed on it. An answer that is there already is checked
against the model in one pass, a row after each of its tokens, rather than decoded once more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ondevice import assets, chat, evidence, models, prompts
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.lean import engine
from ondevice.causal_lm.loops import loop_start
from ondevice.speculation import Draft, Drafter, generate
from ondevice_studies.speculation.prompts import digest, noting
from ondevice_studies.speculation.request_set import Request, redundancy

LONGEST = 256  # tokens of an answer
# Prompts that are split into other tokens than those recorded, since the file's own pre-tokenizer is followed.
SPLIT_ANEW = ("spec-bench-311", "spec-bench-420")
CLOSE = 1e-3  # of two logits: rows of one pass may differ by less from a row alone
LABELS = {models.SMOLLM2: "smollm2", models.QWEN: "qwen"}  # in names of records
FIRST = {models.QWEN: 120}  # requests of a model, the tasks in turns; all of a model that is not here
KEYS = ["model", "request"]
PARAMETERS = {"tokens": LONGEST, "threads": 1, "dtype": "float32"}


def rendered(loaded: models.Loaded, prompt: prompts.Prompt, limit: int, answer: Sequence[int] = ()) -> Request:
    """A prompt, rendered by the model's template, whose answer is decoded up to `limit` tokens."""
    ids = chat.prompt_ids(loaded.tokenizer, prompt.text)
    number = int(prompt.id.rpartition("-")[2])
    return Request(prompt.task, number, prompt.id, tuple(ids), tuple(answer), limit, loaded.eos_token_ids)


class AnswerDrafter(Drafter):
    """Drafts an answer that was decoded before. answer: its tokens."""

    def __init__(self, answer: Sequence[int]) -> None:
        super().__init__()
        self.answer = [*answer]
        self._prompt = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Note where the answer begins."""
        self._prompt = len(prompt)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The rest of the answer, as long as it has been right."""
        done = [*tokens[self._prompt :]]
        right = done == self.answer[: len(done)]
        return Draft.chain(self.answer[len(done) :][:budget] if right else [])


def answered(lm: CausalLM, request: Request, earlier: Sequence[int] = ()) -> dict[str, Any]:
    """The columns of an answer, decoded plainly; `answer` has its tokens, whole.

    earlier: its tokens where it was decoded before: they are checked, and decoded again where a choice was close.
    limit: tokens before a loop, else all, the end token with them. margin: by how much the likeliest logit led, at
    least, among these. redundancy: see `request_set`. checked: whether it was decoded before.
    """
    margins: list[float] = []
    generation = generate(
        lm,
        AnswerDrafter(earlier),
        request.ids,
        request.limit,
        choice=noting(margins),
        eos_token_ids=request.ends,
        budget=request.limit,
    )
    tokens = list(generation.tokens)
    if earlier and (len(generation.steps) > 1 or min(margins) < CLOSE):
        return answered(lm, request)
    start = loop_start(tokens)
    limit = len(tokens) if start is None else start
    return {
        "prompt_sha": digest(request.ids),
        "prompt_tokens": len(request.ids),
        "whole": len(tokens),
        "ended": generation.ended,
        "limit": limit,
        "answer_sha": digest(tokens[:limit]),
        "margin": min(margins[:limit], default=np.nan),
        "redundancy": redundancy(request.ids, tokens[:limit]),
        "checked": bool(earlier),
        "answer": tokens,
    }


MADE_BY: tuple[Callable[..., Any], ...] = (answered, rendered, engine, models.load)


def record(model: str, recorder: evidence.Recorder) -> None:
    """Answer the missing requests, Spec-Bench's tasks in turn."""
    requests = in_turns(prompts.spec_bench())[: FIRST.get(model)]
    missing = [prompt for prompt in requests if (model, prompt.id) not in recorder.done]
    if not missing:
        return
    loaded = models.load(model)
    lm = engine(loaded, threads=1)
    for number, prompt in enumerate(missing):
        request = rendered(loaded, prompt, LONGEST)
        columns = answered(lm, request, kept(model, digest(request.ids)) or ())
        keep(model, columns["prompt_sha"], columns.pop("answer"))
        recorder.add([{"model": model, "task": prompt.task, "request": prompt.id, **columns}])
        if number % 20 == 0:
            print(f"{model}: {number} of {len(missing)} answered", flush=True)


def in_turns(requests: Iterable[prompts.Prompt]) -> list[prompts.Prompt]:
    """The first prompt of every task, then the second of each, and so on: any beginning holds all tasks alike."""
    tasks: dict[str, list[prompts.Prompt]] = {}
    for prompt in requests:
        tasks.setdefault(prompt.task, []).append(prompt)
    columns = [(number, prompt) for several in tasks.values() for number, prompt in enumerate(several)]
    return [prompt for _, prompt in sorted(columns, key=lambda column: column[0])]


def keep(model: str, prompt_sha: str, answer: Sequence[int]) -> None:
    """Put a whole answer into the user's cache."""
    assets.write_text(assets.cache_folder("answers") / model / f"{prompt_sha}.json", json.dumps(list(answer)))


def kept(model: str, prompt_sha: str) -> list[int] | None:
    """A whole answer from the user's cache; None where it is not there."""
    path = assets.cache_folder("answers") / model / f"{prompt_sha}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def recorder(model: str) -> evidence.Recorder:
    """Of a model's plain answers."""
    name = f"plain-{LABELS[model]}"
    return evidence.Recorder("speculation", name, KEYS, PARAMETERS, [model], functions=MADE_BY)


def again(name: str) -> evidence.Again | None:
    """How two answers of a record are made again. None of another record."""
    model = {f"plain-{label}": model for model, label in LABELS.items()}.get(name)
    if model is None:
        return None

    def draw(table: pd.DataFrame, random: np.random.Generator) -> pd.DataFrame:
        return evidence.some(["request"], 2)(table[~table["request"].isin(SPLIT_ANEW)], random)

    def make(rows: pd.DataFrame) -> pd.DataFrame:
        loaded = models.load(model)
        lm = engine(loaded, threads=1)
        texts = {prompt.id: prompt for prompt in prompts.spec_bench()}
        asked = [rendered(loaded, texts[request], LONGEST) for request in rows["request"]]
        return pd.DataFrame([{"request": each.name, **answered(lm, each)} for each in asked])

    columns = ["prompt_sha", "whole", "ended", "limit", "answer_sha"]
    return evidence.Again(MADE_BY, ["request"], draw, make, columns, margin="margin")


def load(model: str) -> pd.DataFrame:
    """The recorded plain answers of a model."""
    return evidence.load("speculation", f"plain-{LABELS[model]}")
