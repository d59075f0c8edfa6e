"""Dense search: FAISS over unit vectors, exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

from ondevice.retrieval.embedding import Embedder
from ondevice.retrieval.texts import check_k


@dataclass(frozen=True)
class DenseIndex:
    """Inner products of unit vectors, that is cosines. index: FAISS's."""

    index: Any
    embedder: Embedder

    @classmethod
    def build(cls, vectors: np.ndarray, embedder: Embedder) -> DenseIndex:
        """Index vectors [n, size] of `embedder`."""
        if len(vectors) == 0:
            raise ValueError("There are no texts to index.")
        index: Any = faiss.IndexFlatIP(vectors.shape[1])
        index.add(np.ascontiguousarray(vectors, dtype=np.float32))
        return cls(index, embedder)

    @property
    def size(self) -> int:
        """How many texts are indexed."""
        return self.index.ntotal

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines [q, k] in falling order and positions [q, k] of the texts nearest to each query."""
        return self.nearest(self.embedder(queries), k)

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """`search` for queries that are vectors [q, size] already."""
        check_k(k, self.size)
        return self.index.search(vectors, k)
