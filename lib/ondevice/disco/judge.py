"""A third judge of answers that is neither of the two models: an interpolated Kneser-Ney model of the corpus's tokens.

It counts n-grams of the train split's task texts. It tells documentation from nonsense by the last few tokens alone,
knows nothing of the question, and likes what is common: a judge of fluency, not of truth.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ondevice.corpus import task_tokens, tokenizer
from ondevice.corpus.prompts import ASSISTANT, END

_DISCOUNT = 0.75


@dataclass(frozen=True)
class _Level:
    """Counts of n-grams of one order: keys [k] sorted, and per context [c] the total and the number of successors."""

    keys: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    successors: np.ndarray


class NgramJudge:
    """Log-likelihood of token ids by an interpolated Kneser-Ney model; ids are below `vocabulary`."""

    def __init__(self, ids: np.ndarray, vocabulary: int, order: int = 4) -> None:
        if vocabulary**order >= 2**63:
            raise ValueError(f"{order}-grams of {vocabulary} tokens do not fit in 64 bits.")
        self.vocabulary, self.order = vocabulary, order
        tokens = np.asarray(ids, dtype=np.int64)
        keys = np.zeros(max(0, len(tokens) - order + 1), dtype=np.int64)
        for place in range(order):
            keys = keys * vocabulary + tokens[place : place + len(keys)]
        keys, counts = np.unique(keys, return_counts=True)
        levels = []
        for length in range(order, 0, -1):
            if length < order:  # how many different tokens stand before, instead of how often it stands
                keys, counts = np.unique(keys % vocabulary**length, return_counts=True)
            contexts, starts, successors = np.unique(keys // vocabulary, return_index=True, return_counts=True)
            levels.append(_Level(keys, counts, contexts, np.add.reduceat(counts, starts), successors))
        self._levels = levels[::-1]

    def log_probabilities(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """[n] nats: each token's, given those before it (at most order - 1)."""
        tokens = np.asarray(ids, dtype=np.int64)
        chance = np.full(len(tokens), 1 / self.vocabulary)
        key, context = tokens, np.zeros(len(tokens), dtype=np.int64)
        for length, level in enumerate(self._levels, start=1):
            if length > 1:  # one token further back
                before = np.concatenate([np.zeros(length - 1, dtype=np.int64), tokens[: 1 - length]])[: len(tokens)]
                context = context + before * self.vocabulary ** (length - 2)
                key = context * self.vocabulary + tokens
            count = _find(level.keys, level.counts, key)
            total = _find(level.contexts, level.totals, context)
            kinds = _find(level.contexts, level.successors, context)
            total[: length - 1] = 0  # there is no such context yet
            found = np.maximum(count - _DISCOUNT, 0) + _DISCOUNT * kinds * chance
            chance = np.where(total > 0, found / np.maximum(total, 1), chance)
        return np.log(chance)


def _find(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """values of the wanted keys, 0 where there is none; keys are sorted."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


@functools.cache
def corpus_judge() -> NgramJudge:
    """The judge of the documentation corpus, from its train split's task texts (some seconds)."""
    return NgramJudge(task_tokens("train"), len(tokenizer()))


def likelihood(answer: str, judge: NgramJudge | None = None) -> float:
    """Mean log-likelihood (nats a token) of an answer and its end, as the assistant's words in the corpus's tasks."""
    ids = tokenizer()(f"{ASSISTANT}{answer}{END}")["input_ids"]
    return float((judge or corpus_judge()).log_probabilities(ids)[1:].mean())
