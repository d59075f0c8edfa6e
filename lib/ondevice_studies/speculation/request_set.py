"""The requests that speculative decoding is measured on: task prompts, answered until the answer ends or loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedModel

from ondevice import corpus
from ondevice.causal_lm.generation import LONGEST, greedy, loop_start
from ondevice.corpus.prompts import pick

_GRAM = 4  # tokens
FEWEST = 8  # tokens of an answer that is worth timing
_LOOKED_AT = 4  # prompts for every request that is asked for: then the search for long enough ones ends


@dataclass(frozen=True)
class Request:
    """A prompt, and how far its answer is decoded.

    task: its family. prompt: its place in its task. name: of its document. ids: the prompt's tokens.
    answer: the model's greedy answer, whole and without the end token.
    limit: tokens to decode: those before a loop, else the answer with its end token where that came. Every method that
    is lossless decodes the same ones, so text that repeats itself flatters none.
    ends: ids that end an answer.
    """

    task: str
    prompt: int
    name: str
    ids: tuple[int, ...]
    answer: tuple[int, ...]
    limit: int
    ends: frozenset[int]

    @property
    def timed(self) -> bool:
        """Whether the answer is long enough to be timed."""
        return self.limit >= FEWEST


def spread(tasks: Iterable[corpus.Task]) -> list[corpus.Task]:
    """In an order set by hash, one of every module or class before a second of any."""
    ordered = sorted(tasks, key=lambda task: pick(task.name, f"speculation {task.family}", 2**62))
    seen: Counter[str] = Counter()
    turns = []
    for task in ordered:
        home = task.name.rpartition(".")[0]
        turns.append((seen[home], task))
        seen[home] += 1
    return [task for _, task in sorted(turns, key=lambda turn: turn[0])]


def answered(
    task: str,
    prompts: Iterable[tuple[str, Sequence[int]]],
    count: int,
    model: PreTrainedModel,
    end: int | None,
    longest: int = LONGEST,
    tried: int | None = None,
) -> list[Request]:
    """Requests from (name, ids) of prompts, until `count` are long enough to be timed or `tried` prompts were.

    end: the id that ends an answer; None: only `longest` does. tried: by default four times as many.
    """
    coming = islice(prompts, tried or _LOOKED_AT * count)
    requests: list[Request] = []
    while (missing := count - sum(request.timed for request in requests)) > 0 and (
        batch := list(islice(coming, missing))
    ):
        outputs = greedy(model, [ids for _, ids in batch], end, longest)
        for (name, ids), output in zip(batch, outputs, strict=True):
            ends = frozenset(() if end is None else (end,))
            start = loop_start(output.ids)
            limit = len(output.ids) + output.ended if start is None else start
            requests.append(Request(task, len(requests), name, tuple(ids), output.ids, limit, ends))
    return requests


def redundancy(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Share of an answer's 4-grams that stand in the prompt or earlier in the answer; NaN where it has none."""
    text = [*prompt, *answer]
    grams = [tuple(text[end - _GRAM : end]) for end in range(_GRAM, len(text) + 1)]
    seen = set(grams[: len(prompt)])  # those that begin in the prompt
    repeated = []
    for gram in grams[len(prompt) :]:
        repeated.append(gram in seen)
        seen.add(gram)
    return sum(repeated) / len(repeated) if repeated else float("nan")
