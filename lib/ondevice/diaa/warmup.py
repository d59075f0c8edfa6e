"""Warm-up: the tables of a corpus, from what the model says after each of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ondevice.causal_lm.tree import integers
from ondevice.diaa.tables import K, Tables
from ondevice.diaa.updates import Fresh, refreshed
from ondevice.speculation.largest import Likeliest

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.causal_lm import CausalLM

WINDOW = 512  # tokens a context
CHUNK = 256  # tokens a forward, so that n x V logits never exist


def warm_up(
    lm: CausalLM, corpus: ArrayLike, tokenizer: str = "", *, k: int = K, window: int = WINDOW, chunk: int = CHUNK
) -> Tables:
    """Tables of a corpus [n] of token ids, read in windows that know nothing of each other.

    A row holds the K tokens of the largest mean probability over all occurrences of its key. tokenizer: its digest.
    Raises ValueError on an empty corpus, a K above the vocabulary, and a window above the context.
    """
    ids = integers(corpus, "A corpus")
    if not len(ids):
        raise ValueError("There is no token to warm the tables up with.")
    means, find = Means(lm.vocabulary, k), Likeliest(k)
    for start in range(0, len(ids), window):
        part = ids[start : start + window]

        def read(position: int, logits: Tensor, part: NDArray[np.int64] = part) -> None:
            means.add(part[position : position + len(logits)], refreshed(logits, find))

        lm.start(len(part)).prefill(part, chunk, read)
    return means.tables(tokenizer)


class Means:
    """Mean probability of every candidate over the occurrences of its key: sum p / count(key).

    A token outside the K likeliest counts as 0 there. Sums are kept for the pairs that occurred only.
    """

    def __init__(self, vocabulary: int, k: int = K) -> None:
        Tables.empty(vocabulary, k)  # refuses a K that cannot be
        self.vocabulary, self.k = vocabulary, k
        self._counts = np.zeros(vocabulary, np.int64)
        self._pairs: NDArray[np.int64] = np.empty(0, np.int64)
        self._sums: NDArray[np.float64] = np.empty(0)
        self._waiting: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        self._waits = 0

    def add(self, keys: NDArray[np.int64], fresh: Fresh) -> None:
        """What the model said after tokens `keys` [n]."""
        np.add.at(self._counts, keys, 1)
        pairs = (keys[:, None] * self.vocabulary + fresh.tokens).ravel()
        self._waiting.append((pairs, fresh.probabilities.ravel().astype(np.float64)))
        self._waits += len(pairs)
        if self._waits > max(len(self._pairs), 2**18):  # sorted in batches that grow with what is kept
            self._sum_up()

    def tables(self, tokenizer: str = "") -> Tables:
        """The tables of all that was added."""
        self._sum_up()
        found = Tables.empty(self.vocabulary, self.k, tokenizer)
        keys, tokens = self._pairs // self.vocabulary, self._pairs % self.vocabulary
        means = (self._sums / self._counts[keys]).astype(np.float32)
        order = np.lexsort((tokens, -means, keys))
        keys, tokens, means = keys[order], tokens[order], means[order]
        ranks = np.arange(len(keys)) - np.searchsorted(keys, keys)
        kept = ranks < self.k
        found.tokens[keys[kept], ranks[kept]] = tokens[kept]
        found.probabilities[keys[kept], ranks[kept]] = means[kept]
        return found

    def _sum_up(self) -> None:
        pairs = np.concatenate([self._pairs, *(pairs for pairs, _ in self._waiting)])
        values = np.concatenate([self._sums, *(values for _, values in self._waiting)])
        self._pairs, places = np.unique(pairs, return_inverse=True)
        self._sums = np.bincount(places, weights=values).astype(np.float64)
        self._waiting, self._waits = [], 0
