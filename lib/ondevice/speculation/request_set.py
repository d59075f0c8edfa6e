"""The requests that speculative decoding is measured on: task prompts, answered until the answer ends or loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import pandas as pd
from tqdm import tqdm

from ondevice import corpus, models
from ondevice.corpus.prompts import pick
from ondevice.training.evaluation.generation import LONGEST, Output, greedy, repeated

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOOP = 8  # tokens: an n-gram of this length that stands for the third time is a loop
TIMES = 3
_GRAM = 4  # tokens
FEWEST = 8  # tokens of an answer that is worth timing
_LOOKED_AT = 4  # prompts for every request that is asked for: then the search for long enough ones ends


@dataclass(frozen=True)
class Request:
    """A prompt, and how far its answer is decoded.

    task: its family. prompt: its place in its task. name: of its document. ids: the prompt's tokens.
    said: the model's greedy answer, whole and without the end token.
    limit: tokens to decode: those before a loop, else the answer with its end token where that came. Every method that
    is lossless decodes the same ones, so text that repeats itself flatters none.
    ends: ids that end an answer.
    """

    task: str
    prompt: int
    name: str
    ids: tuple[int, ...]
    said: tuple[int, ...]
    limit: int
    ends: frozenset[int]

    @property
    def timed(self) -> bool:
        """Whether the answer is long enough to be timed."""
        return self.limit >= FEWEST


def loop_start(ids: Sequence[int]) -> int | None:
    """Where a loop begins, or None: the second place of the n-gram that is first to stand for the third time.

    What is before it holds no loop. Occurrences may overlap, so a loop of a short period begins with its second period.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - LOOP + 1):
        seen = places.setdefault(tuple(ids[start : start + LOOP]), [])
        seen.append(start)
        if len(seen) == TIMES:
            return seen[1]
    return None


def requests(
    families: Sequence[str], count: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[corpus.Document], longest: int = LONGEST,
) -> list[Request]:  # fmt: skip
    """For every family `count` requests that are long enough to be timed, and the shorter ones that came before them.

    documents: one split, `corpus.documents("test")`; to prime drafters, "validation". model: in float32, whose greedy
    answers hardly depend on the machine. longest: most tokens of an answer. A family may have fewer such requests.
    Raises ValueError on random weights, an unknown family, and a count below one.
    """
    models.require_trained(model, "the answers to requests")
    if count < 1:
        raise ValueError(f"At least one request a family is needed, not {count}.")
    room = int(model.config.max_position_embeddings) - longest
    groups: dict[str, list[corpus.Task]] = {family: [] for family in families}
    for task in corpus.tasks(documents, list(families)):
        groups[task.family].append(task)
    end = tokenizer.eos_token_id
    found: list[Request] = []
    for family in tqdm(families, desc="answers", unit="task", delay=5, leave=False):
        found += answered(family, _prompts(spread(groups[family]), tokenizer, room), count, model, end, longest)
    return found


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
    task: str, prompts: Iterable[tuple[str, Sequence[int]]], count: int, model: PreTrainedModel, end: int | None,
    longest: int = LONGEST,
) -> list[Request]:  # fmt: skip
    """Requests from (name, ids) of prompts, until `count` are long enough to be timed or four times as many were tried.

    end: the id that ends an answer; None: only `longest` does.
    """
    coming = islice(prompts, _LOOKED_AT * count)
    found: list[Request] = []
    while (missing := count - sum(one.timed for one in found)) > 0 and (batch := list(islice(coming, missing))):
        outputs = greedy(model, [ids for _, ids in batch], end, longest)
        for (name, ids), output in zip(batch, outputs, strict=True):
            ends = frozenset(() if end is None else (end,))
            found.append(Request(task, len(found), name, tuple(ids), output.ids, _limit(output), ends))
    return found


def timed(requests: Iterable[Request]) -> list[Request]:
    """Those with answers of at least `FEWEST` tokens before the loop."""
    return [request for request in requests if request.timed]


def repetition(requests: Iterable[Request], model: str) -> pd.DataFrame:
    """How much the answers repeat themselves, and what is left out of the measurement for it; one row a task.

    Columns: model, task, requests, loops (share of the requests); repeated_4grams and repeated_4grams_kept (share that
    stands earlier in its answer, of whole answers and of what is kept of them); redundancy (share of the kept 4-grams
    that stands earlier in its answer or in the prompt); tokens (of whole answers), cut (of these), too_short (requests
    that are not timed).
    """
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.task, []).append(request)
    rows = []
    for task, members in groups.items():
        looped = [one for one in members if loop_start(one.said) is not None]
        rows.append({
            "model": model, "task": task, "requests": len(members), "loops": len(looped) / len(members),
            "repeated_4grams": _repeated(one.said for one in members),
            "repeated_4grams_kept": _repeated(one.said[: one.limit] for one in members),
            "redundancy": _redundancy(members),
            "tokens": sum(len(one.said) for one in members), "cut": sum(len(one.said) - one.limit for one in looped),
            "too_short": sum(not one.timed for one in members),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _limit(output: Output) -> int:
    start = loop_start(output.ids)
    return len(output.ids) + output.ended if start is None else start


def _prompts(
    tasks: Iterable[corpus.Task], tokenizer: PreTrainedTokenizerBase, room: int
) -> Iterator[tuple[str, list[int]]]:
    """Names and ids of the prompts of at most `room` tokens; encoded only as far as they are asked for."""
    for task in tasks:
        ids = tokenizer(task.prompt, verbose=False)["input_ids"]
        if len(ids) <= room:
            yield task.name, ids


def _redundancy(members: Iterable[Request]) -> float:
    """Share of the kept answers' 4-grams that prompt or answer held before; NaN where there is none."""
    known = []
    for one in members:
        text = [*one.ids, *one.said[: one.limit]]
        grams = [tuple(text[end - _GRAM : end]) for end in range(_GRAM, len(text) + 1)]
        seen = set(grams[: len(one.ids)])  # those that begin in the prompt
        for gram in grams[len(one.ids) :]:
            known.append(gram in seen)
            seen.add(gram)
    return sum(known) / len(known) if known else float("nan")


def _repeated(rows: Iterable[Sequence[int]]) -> float:
    """Share of the 4-grams that occurred before in their answer; NaN where no answer has one."""
    counts = [repeated(row) for row in rows]
    total = sum(count for _, count in counts)
    return sum(again for again, _ in counts) / total if total else float("nan")
