"""Token Recycling (Luo et al., 2024): a static tree filled from the candidates last seen after each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.largest import largest

K = 8  # candidates of a token
# The published template "2.2.2": how many children each node has, level by level in the order of drafting, the root's
# first; trailing zeros are left out. Children have the ranks from 1 on, so these counts are the whole tree.
TEMPLATE = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1),
    (2, 0, 0, 1),
)


class TokenRecycling(Drafter):
    """Drafts the template's tree, each child by its rank in its parent's row of the matrix [V, 8].

    A row is the token's likeliest next tokens where it was last verified, accepted or not. The matrix outlives
    requests, as in the original; the prompt's logits are not read, as there.

    A row never seen holds zeros, and zeros are drafted: the template is verified whole from the first step on, as
    published, so that its cost is that of the original, and token 0 learns what the original's does.
    vocabulary: V, at least 8, else ValueError. A smaller budget takes the template's first nodes, the shallow ones.
    """

    name = "TR"
    drafts_trees = True

    def __init__(self, vocabulary: int) -> None:
        if vocabulary < K:
            raise ValueError(f"Token Recycling needs at least {K} token ids, not {vocabulary}.")
        self.vocabulary = vocabulary
        self.matrix = np.zeros((vocabulary, K), np.int64)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The template's first `budget` nodes, filled breadth-first."""
        filled = np.empty(1 + len(PARENTS), np.int64)
        filled[0] = tokens[-1]
        for level in LEVELS:
            filled[1:][level] = self.matrix[filled[PARENTS[level] + 1], RANKS[level] - 1]
        return Draft(filled[1 : budget + 1], PARENTS[:budget], RANKS[:budget])

    def observe(self, step: Verified) -> None:
        """Overwrite the rows of the root and of every node; of equal tokens, the later node counts.

        The original leaves that to the scatter, whose order is undefined on CUDA.
        """
        candidates = largest(step.logits, K)[1].cpu().numpy()
        tokens = np.concatenate([[step.root], step.draft.tokens])[::-1]
        rows, first_rows = np.unique(tokens, return_index=True)  # the first of equals, here the last
        self.matrix[rows] = candidates[::-1][first_rows]


def _template() -> tuple[NDArray[np.int64], NDArray[np.int64], list[slice]]:
    """parents [80], -1 the root; ranks [80] from 1; the nodes of each level."""
    parents: list[int] = []
    ranks: list[int] = []
    levels: list[slice] = []
    above = -1  # first node of the level above
    for counts in TEMPLATE:
        first = len(parents)
        for node, count in enumerate(counts, above):
            parents += [node] * count
            ranks += range(1, count + 1)
        levels.append(slice(first, len(parents)))
        above = first
    return np.array(parents), np.array(ranks), levels


PARENTS, RANKS, LEVELS = _template()
