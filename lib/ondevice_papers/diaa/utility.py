"""What a tree is worth: the expected number of accepted tokens, beside the utility and cost that the paper prints.

Eq. 1 sums the products of root-to-leaf paths only. Below a node with p = 0.9, a child with p = 0.8:
    printed utility falls from 0.9 to 0.9 * 0.8 = 0.72, so no depth would ever be drafted;
    expected accepted tokens rise from 0.9 to 0.9 + 0.72 = 1.62.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.speculation import Draft


def expected_accepted(paths: Sequence[float]) -> float:
    """Expected number of accepted nodes: the sum of all nodes' path products, as a node counts when its path holds."""
    return float(np.sum(paths))


def printed_utility(draft: Draft, paths: Sequence[float]) -> float:
    """U(T) of Eq. 1: the sum over root-to-leaf paths of their products."""
    return float(np.asarray(paths)[_leaves(draft)].sum())


def printed_cost(draft: Draft) -> int:
    """C(T) as printed: the sum over root-to-leaf paths of their lengths."""
    return int(draft.depths[_leaves(draft)].sum())


def _leaves(draft: Draft) -> np.ndarray:
    return np.setdiff1d(np.arange(len(draft)), draft.parents)
