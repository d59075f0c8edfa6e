"""The prompts that records of speculative decoding are made on, and what a record keeps of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256

import numpy as np
from torch import Tensor

from ondevice import corpus
from ondevice.corpus.prompts import quotation
from ondevice.speculation.loop import Choice, greedy
from ondevice_studies.speculation.request_set import spread


def prompts(
    task: str, only: Collection[str] | None = None, lengths: tuple[int, int] | None = None, split: str = "test"
) -> Iterator[tuple[str, list[int]]]:
    """(document, token ids) of a task's prompts, in an order set by hash. only: these documents'.

    lengths: tokens, least and most, to which quotations of other documents are put in front.
    """
    documents = corpus.documents(split)
    tokenizer = corpus.tokenizer()
    for example in tasks_in_order(task, split):
        if only is None or example.name in only:
            text = example.prompt if lengths is None else _lengthened(example, documents, tokenizer, lengths[0])
            ids = tokenizer(text, verbose=False)["input_ids"]
            if lengths is None or lengths[0] <= len(ids) <= lengths[1]:
                yield example.name, ids


@cache
def tasks_in_order(task: str, split: str) -> list[corpus.Task]:
    """All of a split's examples of a task, in the order of `spread`."""
    return spread(corpus.tasks(corpus.documents(split), [task]))


def _lengthened(task: corpus.Task, documents: Sequence[corpus.Document], tokenizer: object, least: int) -> str:
    """The task's prompt behind quotations of the documents that follow its own, as many as it takes."""
    own = next(number for number, document in enumerate(documents) if document.name == task.name)
    passages = list(task.passages)
    for step in range(10, len(documents)):
        text = replace(task, passages=tuple(passages)).prompt
        if len(tokenizer(text, verbose=False)["input_ids"]) >= least:  # type: ignore[operator]
            return text
        passages.insert(0, quotation(documents[(own + step) % len(documents)]))
    return task.prompt


def digest(ids: Sequence[int]) -> str:
    """12 hex digits of token ids."""
    return sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()[:12]


def noting(margins: list[float]) -> Choice:
    """Greedy choice, noting by how much the likeliest token's logit leads."""

    def choice(logits: Tensor) -> int:
        first, second = logits.topk(2).values.tolist()
        margins.append(first - second)
        return greedy(logits)

    return choice
