"""Warm-up: the tables of a text, from what the model says after each of its tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ondevice.causal_lm import CausalLM
from ondevice.speculation.largest import Likeliest
from ondevice_papers.diaa.tables import Fresh, K, Tables, likeliest

WINDOW = 512  # tokens of a context
CHUNK = 256  # tokens per forward, so n x V logits never exist


def means(keys: NDArray[np.int64], fresh: Fresh, vocabulary: int) -> Tables:
    """Tables of the K largest mean probabilities over all occurrences of each key: sum p / count(key).

    keys: [n]. fresh: [n, K] what the model said there; a token outside the K likeliest counts as 0.
    """
    pairs, inverse = np.unique(keys[:, None] * vocabulary + fresh.tokens, return_inverse=True)
    rows, tokens = np.divmod(pairs, vocabulary)
    sums = np.bincount(inverse.ravel(), weights=fresh.probabilities.ravel())
    mean = (sums / np.bincount(keys)[rows]).astype(np.float32)
    order = np.lexsort((tokens, -mean, rows))
    rows, tokens, mean = rows[order], tokens[order], mean[order]
    ranks = np.arange(len(rows)) - np.searchsorted(rows, rows)
    in_row = ranks < K
    tables = Tables.empty(vocabulary)
    tables.tokens[rows[in_row], ranks[in_row]] = tokens[in_row]
    tables.probabilities[rows[in_row], ranks[in_row]] = mean[in_row]
    return tables


def top_k_after_each_token(lm: CausalLM, text: NDArray[np.int64]) -> Fresh:
    """The K likeliest next tokens after each token of a text [n], read in windows that know nothing of each other."""
    parts: list[Fresh] = []
    find = Likeliest(K)

    def read(start: int, logits: Tensor) -> None:
        parts.append(likeliest(logits, find))

    size = min(WINDOW, lm.context)
    for start in range(0, len(text), size):
        window = text[start : start + size]
        lm.start(len(window)).prefill(window, CHUNK, read)
    return Fresh(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def warm_up(lm: CausalLM, text: NDArray[np.int64]) -> Tables:
    """The tables of a text [n], by a model that reads it once."""
    return means(text, top_k_after_each_token(lm, text), lm.vocabulary)


def bigrams(text: NDArray[np.int64], vocabulary: int) -> Tables:
    """Tables counted from a text without any model: the share of each next token."""
    return means(text[:-1], Fresh(text[1:, None], np.ones((len(text) - 1, 1), np.float32)), vocabulary)
