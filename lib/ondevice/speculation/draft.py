"""Drafts: candidate continuations of what has been said, as a tree below its last token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ondevice.causal_lm import TokenTree
from ondevice.causal_lm.tree import integers


class Draft:
    """Candidate continuations below the root, the newest token, which is itself not part of the draft.

    tokens: [n] token ids; n = 0 is a plain step.
    parents: [n] each node's parent, a node before it; -1 is the root.
    ranks: [n] rank of each node among its parent's candidates, from 1; for templates, tables and figures.
    Raises ValueError on anything else.
    """

    def __init__(self, tokens: ArrayLike, parents: ArrayLike, ranks: ArrayLike | None = None) -> None:
        n = len(np.asarray(tokens))
        self.tokens = integers(tokens, "A draft's tokens") if n else np.empty(0, np.int64)
        self.parents = integers(parents, "A draft's parents") if n else np.empty(0, np.int64)
        self.ranks = np.ones(n, np.int64) if ranks is None else np.asarray(ranks, np.int64)
        if not n == len(self.parents) == len(self.ranks):
            raise ValueError("A draft has one parent and one rank for each token.")
        if not ((self.parents >= -1) & (self.parents < np.arange(n))).all():
            raise ValueError("A draft's parents are -1 or earlier nodes.")

    @classmethod
    def chain(cls, tokens: Sequence[int] | NDArray[np.int64]) -> Draft:
        """A sequence draft: each token follows the one before it."""
        return cls(tokens, np.arange(-1, len(tokens) - 1))

    def __len__(self) -> int:
        return len(self.tokens)

    def below(self, root: int) -> TokenTree:
        """The tree to verify: row 0 is the root, row i + 1 the node i."""
        return TokenTree(np.concatenate([[root], self.tokens]), np.concatenate([[-1], self.parents + 1]))

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """[n] steps from the root to each node, at least 1."""
        return self.below(0).depths[1:] - 1 if len(self) else np.empty(0, np.int64)

    @property
    def depth(self) -> int:
        """The longest path, in nodes."""
        return int(self.depths.max(initial=0))

    def within(self, nodes: int, depth: int) -> Draft:
        """The draft cut to its first `nodes` nodes, less those deeper than `depth`."""
        kept = np.flatnonzero(self.depths[:nodes] <= depth)
        if len(kept) == len(self):
            return self
        row_of = np.full(len(self) + 1, -1)  # the last stands for the root, parent -1
        row_of[kept] = np.arange(len(kept))
        return Draft(self.tokens[kept], row_of[self.parents[kept]], self.ranks[kept])


EMPTY = Draft((), ())
