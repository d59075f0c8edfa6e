"""Long-context selection (section 6.3, Figure 14): of a text longer than the model's context, what a question needs.

Texts are documents of the corpus's test split, longer than the language model's context, and questions on their
parameters and return values. A document is cut into segments; a reranker keeps K, and the model answers from them, in
the document's order. The paper's model without a reranker reads all of the text; ours reads what fits of its beginning.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ondevice import corpus, retrieval
from ondevice.corpus import answers
from ondevice.corpus.prompts import pick
from ondevice.grating import applications
from ondevice.grating.applications import ANSWER, ANSWER_TOKENS, EMBEDDING, RERANKER, Methods, Tables, Write
from ondevice.grating.printed import CONTEXT, NONE
from ondevice.retrieval.collection import LENGTH

KEPT = 2  # segments, as passages in `rag`
FIRST, EMBEDDER = "first segments", "embedder"  # methods that keep K without a reranker


@dataclass(frozen=True)
class Text:
    """A question on a long text. task: without passages. right: [n] whether each segment holds the answer."""

    task: corpus.Task
    segments: tuple[str, ...]
    right: np.ndarray

    @property
    def titled(self) -> list[str]:
        """[n] segments as they are ranked: title, line break, text."""
        return [f"{self.task.name}\n{segment}" for segment in self.segments]

    def prompt(self, kept: Sequence[int]) -> str:
        """What the model reads: these segments, then the question."""
        shown = tuple((self.task.name, self.segments[place]) for place in kept)
        return dataclasses.replace(self.task, passages=shown).prompt


def texts(
    documents: Sequence[corpus.Document], count: int, longer: int = 1024, longest: int = 2400, length: int = LENGTH
) -> list[Text]:  # fmt: skip
    """Questions on documents of more than `longer` and at most `longest` tokens, in an order set by hash.

    At most two questions a document; a segment holds the answer whole. length: tokens of a segment. Raises ValueError
    where there are fewer than `count`.
    """
    applications.check(count, 1)
    tokenizer = corpus.tokenizer()
    sizes = tokenizer([document.docstring for document in documents], verbose=False)["input_ids"]
    long = {d.name: d for d, ids in zip(documents, sizes, strict=True) if longer < len(ids) <= longest}
    found: dict[tuple[str, str], Text] = {}
    tasks = (task for task in corpus.tasks(documents, ["question", "rag"]) if task.name in long)
    for task in sorted(tasks, key=lambda task: pick(task.name, f"grating context {task.family}", 2**62)):
        segments = tuple(p.text for p in corpus.passages([long[task.name]], tokenizer, length))
        right = applications.right(segments, task.answer)
        if right.any():
            asked = dataclasses.replace(task, passages=())
            found.setdefault((task.name, task.turns[-1][0]), Text(asked, segments, right))
    if len(found) < count:
        raise ValueError(f"There are {len(found)} questions on documents of such lengths, not {count}.")
    return list(found.values())[:count]


def selecting(
    asked: Sequence[Text], rerankers: Mapping[str, Methods], write: Write, length: Callable[[str], int], context: int,
    k: int = KEPT,
) -> Tables:  # fmt: skip
    """Answer every question with every method of every reranker, from the first K segments, from those nearest by the
    embedder, and without a selection, from all that fits.

    asked: of `texts`. write, length (tokens of a text), context: of a `Writer`. times: parts reranker, embedding search
    (of the segments too, as a text is new), answer. precision: right answers (the reference's words, or nearly). cases:
    also f1 (over words), holds (whether the answer is in what the model read), segments, kept (places).
    """
    applications.check(len(asked), k)
    cases: list[dict[str, Any]] = []
    for number, text in enumerate([asked[0], *asked]):
        fits = _fitting(text, length, context)
        for setting, methods in rerankers.items():
            for method, kept, spent in _kept(text, methods, number, k, fits):
                case = _case(text, sorted(kept), write)
                case["seconds"] = spent | {ANSWER: case["seconds"]}
                cases += [{"setting": setting, "method": method, **case}] if number else []  # 0 warms up
    return applications.tables(CONTEXT, cases)


def _kept(
    text: Text, methods: Methods, number: int, k: int, fits: list[int]
) -> Iterator[tuple[str, list[int], dict[str, float]]]:
    """(method, places of the kept segments, seconds by part)."""
    question, segments = text.task.turns[-1][0], text.titled
    k = min(k, len(segments))
    for method, rank in applications.turns(methods, number):
        best, seconds = applications.timed(rank, question, segments, k)
        yield method, [place for place, _ in best], {RERANKER: seconds}
    began = time.perf_counter()
    encoder = retrieval.embedder()
    vectors = encoder([question, *segments])
    near = np.argsort(-(vectors[1:] @ vectors[0]), kind="stable")[:k].tolist()
    yield EMBEDDER, near, {EMBEDDING: time.perf_counter() - began}
    yield FIRST, list(range(k)), {}
    yield NONE, fits, {}


def _fitting(text: Text, length: Callable[[str], int], context: int) -> list[int]:
    """As many segments from the first on as fit the context, with the question and room for an answer."""
    for count in range(len(text.segments), 0, -1):
        if length(text.prompt(range(count))) + ANSWER_TOKENS <= context:
            return list(range(count))
    raise ValueError(f"Not one segment of {text.task.name} fits a context of {context} tokens.")


def _case(text: Text, kept: list[int], write: Write) -> dict[str, Any]:
    said, seconds = write(text.prompt(kept))
    answer = text.task.answer
    return {
        "question": f"{text.task.name}: {text.task.turns[-1][0]}", "precision": float(answers.hit(said, answer)),
        "f1": answers.f1(said, answer), "holds": bool(text.right[kept].any()), "segments": len(text.segments),
        "kept": kept, "seconds": seconds,
    }  # fmt: skip
