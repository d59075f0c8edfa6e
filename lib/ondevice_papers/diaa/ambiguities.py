"""What the paper leaves open, read otherwise: each is a function that an experiment can take.

The readings in use are those of `tables`, `tree` and `drafter`; these here lost, or tie, in the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ondevice.speculation import Draft, Verified
from ondevice_papers.diaa.drafter import Learning, every_node
from ondevice_papers.diaa.tables import NONE, Fresh, Tables, likeliest
from ondevice_papers.diaa.tree import Tree, grow


def replace(tables: Tables, keys: Sequence[int], fresh: Fresh) -> None:
    """Fig. 6 read narrowly: only the likeliest fresh token comes in, and pushes out the least probable old one."""
    _merge(tables, keys, Fresh(fresh.tokens[:, :1], fresh.probabilities[:, :1]), keep=tables.k - 1)


def union(tables: Tables, keys: Sequence[int], fresh: Fresh) -> None:
    """The K most probable of fresh and old entries; where both have a token, with its fresh probability."""
    _merge(tables, keys, fresh, keep=tables.k)


def _merge(tables: Tables, keys: Sequence[int], fresh: Fresh, keep: int) -> None:
    """A row becomes the best of fresh entries and of the first `keep` old ones that are not among them."""
    for key, tokens, probabilities in zip(keys, fresh.tokens, fresh.probabilities, strict=True):
        old = np.flatnonzero((tables.tokens[key] != NONE) & ~np.isin(tables.tokens[key], tokens))[:keep]
        merged = np.concatenate([tokens, tables.tokens[key][old]])
        values = np.concatenate([probabilities, tables.probabilities[key][old]])
        best = np.argsort(-values, kind="stable")[: tables.k]
        tables.tokens[key] = NONE
        tables.probabilities[key] = 0
        tables.tokens[key, : len(best)] = merged[best]
        tables.probabilities[key, : len(best)] = values[best]


def accepted_only(step: Verified) -> list[int]:
    """Only the root and accepted nodes update the tables: "the generated tokens" read as those that came out."""
    return [0, *(node + 1 for node in step.path)]


def grow_counting_root(tables: Tables, root: int, budget: int) -> Tree:
    """The budget counts the root too."""
    return grow(tables, root, budget - 1)


class TwoTokens(Learning):
    """Tables of the same size, keyed by a hash of the last two tokens ("hashed embedding"), without a warm-up.

    While a tree grows, a node stands for the pair of its parent's token and its own.
    """

    name = "DIAA, keyed by two tokens"

    def __init__(self, vocabulary: int) -> None:
        super().__init__(Tables.empty(vocabulary))

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The tree below the last pair."""
        self._before = int(tokens[-2]) if len(tokens) > 1 else 0
        pairs: Any = _Pairs(self.tables)
        tree = grow(pairs, self._before * self.tables.vocabulary + int(tokens[-1]), budget)
        return Draft([pair % self.tables.vocabulary for pair in tree.tokens], tree.parents, tree.ranks)

    def observe(self, step: Verified) -> None:
        """Update the rows of the pairs that end at the root and at every node."""
        tokens = [step.root, *step.draft.tokens.tolist()]
        above = [self._before, *(tokens[parent + 1] for parent in step.draft.parents.tolist())]
        pairs = _Pairs(self.tables)
        rows = every_node(step)
        keys = [pairs.key(above[row] * self.tables.vocabulary + tokens[row]) for row in rows]
        fresh = likeliest(step.logits, self._find)
        self.update(self.tables, keys, Fresh(fresh.tokens[rows], fresh.probabilities[rows]))


class _Pairs:
    """Tables whose rows are asked for by pairs of tokens, a * V + b, and whose candidates are pairs, too."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def key(self, pair: int) -> int:
        """The row of a pair: a multiplicative hash, of 64 bits."""
        return (pair * 0x9E3779B97F4A7C15 % 2**64 >> 20) % self._tables.vocabulary

    def row(self, pair: int) -> list[tuple[int, float]]:
        """The candidates after a pair."""
        last = pair % self._tables.vocabulary * self._tables.vocabulary
        return [(last + token, p) for token, p in self._tables.row(self.key(pair))]
