"""What the paper leaves open, read otherwise: each is a function or a drafter that an experiment can take.

The readings in use are those of `tables`, `tree` and `drafter`; these here lost, or tie, in the record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ondevice.diaa.drafter import Diaa
from ondevice.diaa.tables import NONE, Fresh, Tables, likeliest
from ondevice.diaa.tree import ROOT, Tree, grow
from ondevice.speculation import Draft, Verified

Row = Callable[[int, int], list[tuple[int, float]]]


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
        tables.tokens[key], tables.probabilities[key] = NONE, 0
        tables.tokens[key, : len(best)], tables.probabilities[key, : len(best)] = merged[best], values[best]


def accepted_only(step: Verified) -> list[int]:
    """Only the root and accepted nodes update the tables: "the generated tokens" read as those that came out."""
    return [0, *(node + 1 for node in step.path)]


def grow_counting_root(tables: Tables, root: int, budget: int) -> Tree:
    """The budget counts the root too."""
    return grow(tables, root, budget - 1)


def grow_counting_paths(tables: Tables, root: int, budget: int) -> Tree:
    """The budget limits C(T) as printed, the lengths of all paths to leaves, in which shared nodes count repeatedly."""
    return _grown(lambda before, token: tables.row(token), NONE, root, budget, paths=True)


def grow_summing_ranks(tables: Tables, root: int, budget: int) -> Tree:
    """Eq. 2's rank is summed over the path, not the last node's alone, so that scores fall along every path."""
    return _grown(lambda before, token: tables.row(token), NONE, root, budget, summed=True)


def _grown(row: Row, before: int, root: int, budget: int, paths: bool = False, summed: bool = False) -> Tree:
    """`tree.grow` with these readings. row: candidates of a token and the one before it."""
    tree, spent, queue, widths = Tree(), 0, [(-1.0, ROOT)], {ROOT: 1.0}
    while queue and spent < budget:
        _, node = heappop(queue)
        token, path, depth = tree.at(node, root)
        above = before if node == ROOT else tree.at(tree.parents[node], root)[0]
        for rank, (candidate, p) in enumerate(row(above, token)):
            width = (widths[node] if summed else 1.0) * 0.7**rank
            score = path * p * 0.8**depth * width
            price = depth + 1 if paths and rank else 1  # a first child makes a path longer, others begin one
            if spent + price > budget or (score < 5e-3 and node != ROOT):
                break
            spent += price
            child = tree.add(candidate, node, rank + 1, path * p)
            widths[child] = width
            heappush(queue, (-score, child))
    return tree


def pairs(window: NDArray[np.int64], vocabulary: int = 8192) -> NDArray[np.int64]:
    """The key of a row is a hash of the last two tokens ("a fixed-length token prefix"), into as many rows."""
    before = np.concatenate([[0], window[:-1]])
    return (before * 1_000_003 + window * 7919) % vocabulary


class ByPairs(Diaa):
    """DIAA whose rows are keyed by `pairs`; its tables are warmed up with the same key."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt, whose last token is the root's neighbour."""
        super().begin(prompt)
        self._before = prompt[-1]

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A tree by Eq. 2, each node's candidates from the row of its parent's token and its own."""
        self._before = tokens[-2] if len(tokens) > 1 else 0
        return _grown(self._row, self._before, tokens[-1], budget).draft()

    def _row(self, before: int, token: int) -> list[tuple[int, float]]:
        return self.tables.row(int(pairs(np.array([before, token]), self.tables.vocabulary)[1]))

    def observe(self, step: Verified) -> None:
        """Update the rows of the pairs that end with the root and with each node."""
        tokens = [self._before, step.root, *step.draft.tokens.tolist()]
        above = [0, *(step.draft.parents + 2).tolist()]  # places in `tokens`, which begins one before the root
        rows = self.learns(step)
        keys = [int(pairs(np.array([tokens[above[row]], tokens[row + 1]]), self.tables.vocabulary)[1]) for row in rows]
        fresh = likeliest(step.logits, self._find)
        self.update(self.tables, keys, Fresh(fresh.tokens[rows], fresh.probabilities[rows]))
