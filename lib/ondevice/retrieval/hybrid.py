"""Hybrid search: the dense and the sparse list of a query, fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ondevice.retrieval.dense import DenseIndex
from ondevice.retrieval.sparse import SparseIndex
from ondevice.retrieval.texts import best, check_k

_DEPTH = 100  # of either list, or 4 k where that is more
_RRF = 60  # the constant of Cormack, Clarke and Buettcher (2009)


@dataclass(frozen=True)
class Hybrid:
    """Reciprocal rank fusion of two indexes over the same texts."""

    dense: DenseIndex
    sparse: SparseIndex

    def __post_init__(self) -> None:
        if self.dense.size != self.sparse.size:
            raise ValueError(f"The dense index has {self.dense.size} texts, the sparse one {self.sparse.size}.")

    @property
    def size(self) -> int:
        """How many texts are indexed."""
        return self.dense.size

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Fused scores [q, k] in falling order and positions [q, k]; a text absent from a list gets 0 from it."""
        check_k(k, self.size)
        depth = min(self.size, max(_DEPTH, 4 * k))
        total = np.zeros((len(queries), self.size), np.float64)
        for index in (self.dense, self.sparse):
            _, ids = index.search(queries, depth)
            total[np.arange(len(queries))[:, None], ids] += 0.5 / (_RRF + 1 + np.arange(depth))
        ids = np.array([best(row, k) for row in total], np.int64).reshape(len(queries), k)
        return np.take_along_axis(total, ids, axis=1), ids
