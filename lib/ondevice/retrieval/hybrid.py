"""Hybrid search: the dense and the sparse list of a query, fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from ondevice.retrieval.dense import DenseIndex
from ondevice.retrieval.sparse import SparseIndex
from ondevice.retrieval.texts import best, check_k

Method = Literal["ranks", "scores"]
METHODS: tuple[Method, ...] = get_args(Method)
_DEPTH = 100  # of either list, or 4 k where that is more
_RRF = 60  # the constant of Cormack, Clarke and Buettcher (2009)


@dataclass(frozen=True)
class Hybrid:
    """Fusion of two indexes over the same texts.

    method: `ranks` (reciprocal rank fusion) or `scores` (each list scaled to [0, 1], then averaged).
    weight: of the dense list, in [0, 1]; the sparse one has the rest.
    """

    dense: DenseIndex
    sparse: SparseIndex
    method: Method = "ranks"
    weight: float = 0.5

    def __post_init__(self) -> None:
        if self.dense.size != self.sparse.size:
            raise ValueError(f"The dense index has {self.dense.size} texts, the sparse one {self.sparse.size}.")
        if self.method not in METHODS:
            raise ValueError(f"There is no fusion {self.method!r}; there are {', '.join(METHODS)}.")
        if not 0 <= self.weight <= 1:
            raise ValueError(f"The dense list's weight must be from 0 to 1, not {self.weight}.")

    @property
    def size(self) -> int:
        """Number of texts."""
        return self.dense.size

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Fused scores [q, k] in falling order and positions [q, k]; a text absent from a list gets 0 from it."""
        check_k(k, self.size)
        depth = min(self.size, max(_DEPTH, 4 * k))
        total = np.zeros((len(queries), self.size), np.float64)
        for index, weight in ((self.dense, self.weight), (self.sparse, 1 - self.weight)):
            scores, ids = index.search(queries, depth)
            parts = 1 / (_RRF + 1 + np.arange(depth)) if self.method == "ranks" else _scaled(scores)
            total[np.arange(len(queries))[:, None], ids] += weight * parts
        ids = np.array([best(row, k) for row in total], np.int64).reshape(len(queries), k)
        return np.take_along_axis(total, ids, axis=1), ids


def _scaled(scores: np.ndarray) -> np.ndarray:
    """Rows scaled to [0, 1], the last of a list to 0; a row of equal scores becomes 0."""
    low, high = scores[:, -1:], scores[:, :1]
    return (scores - low) / np.where(high > low, high - low, 1)
