"""What a language model is scored on: windows that roll over held-out texts, each with the passages found for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ondevice import corpus
from ondevice.corpus.prompts import pick
from ondevice_papers.dragon.aggregation import Floats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Window:
    """A stretch of a text. text: of the query, which passages are looked up with. query, scored: ids, one after the
    other. start: of the scored ones in the text's ids."""

    name: str
    start: int
    text: str
    query: tuple[int, ...]
    scored: tuple[int, ...]


@dataclass(frozen=True)
class Retrieved:
    """A window with its K passages, best first: all of them, and the relevance of each, scores [K]."""

    window: Window
    passages: tuple[corpus.Passage, ...]
    scores: Floats


class Index(Protocol):
    """Any of `ondevice.retrieval`."""

    @property
    def size(self) -> int: ...
    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]: ...


def windows(
    documents: Iterable[corpus.Document],
    tokenizer: PreTrainedTokenizerBase,
    count: int | None = None,
    *,
    query: int = 32,
    scored: int = 64,
) -> list[Window]:
    """The first `count` windows, or all, in an order set by a hash of the document's name and the place.

    In each the first `query` ids are given and the next `scored` are predicted (section 6.1: the first 1/8 of 512 or
    1,024 tokens is the query). A document's windows begin every `scored` tokens, so that none is scored twice; its
    first `query` ids and what is left at its end are not scored.
    Raises ValueError on lengths below 1, and where there are fewer windows than `count`.
    """
    if query < 1 or scored < 1:
        raise ValueError(f"A window has at least one token of query and one that is scored, not {query} and {scored}.")
    if count is not None and count < 1:
        raise ValueError(f"At least one window is scored, not {count}.")
    found = [one for document in documents for one in _rolled(document, tokenizer, query, scored)]
    if not found or (count or 0) > len(found):
        raise ValueError(f"The texts have {len(found)} windows of {query} + {scored} tokens, not {count or 1}.")
    found.sort(key=lambda one: (pick(f"{one.name} {one.start}", "dragon window", 2**62), one.name, one.start))
    return found[:count]


def retrieve(
    windows: Sequence[Window], passages: Sequence[corpus.Passage], index: Index, count: int = 16
) -> list[Retrieved]:
    """The `count` passages of the index nearest to each window's query.

    Raises ValueError where the index is not over these passages, or has fewer.
    """
    if index.size != len(passages):
        raise ValueError(f"The index has {index.size} texts, but there are {len(passages)} passages.")
    scores, places = index.search([window.text for window in windows], count)
    return [
        Retrieved(window, tuple(passages[place] for place in row), np.asarray(relevance, float))
        for window, row, relevance in zip(windows, places, scores, strict=True)
    ]


def _rolled(document: corpus.Document, tokenizer: PreTrainedTokenizerBase, query: int, scored: int) -> list[Window]:
    ids = list(tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids)
    found = []
    for start in range(query, len(ids) - scored + 1, scored):
        given = ids[start - query : start]
        text = str(tokenizer.decode(given))
        found.append(Window(document.name, start, text, tuple(given), tuple(ids[start : start + scored])))
    return found
