"""A request that speculative decoding is measured on: a prompt, and how far its answer is decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ondevice import corpus
from ondevice.corpus.prompts import pick

_GRAM = 4  # tokens


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
