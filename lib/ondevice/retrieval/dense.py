"""Dense search: FAISS over unit vectors, exact, or approximate for large pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import faiss
import numpy as np

from ondevice.retrieval.embedding import Embedder
from ondevice.retrieval.texts import check_k

Kind = Literal["flat", "ivf", "hnsw"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_POINTS_A_LIST = 39  # what FAISS asks for to train an IVF list
_LINKS, _BUILD_WIDTH, _SEARCH_WIDTH = 32, 200, 128  # HNSW


@dataclass(frozen=True)
class DenseIndex:
    """Inner products of unit vectors, that is cosines. index: FAISS's."""

    index: Any
    embedder: Embedder

    @classmethod
    def build(cls, vectors: np.ndarray, embedder: Embedder, kind: Kind = "flat") -> DenseIndex:
        """Index vectors [n, size] of `embedder`. flat: exact; ivf: k-means lists, a few searched; hnsw: a graph."""
        if len(vectors) == 0:
            raise ValueError("There are no texts to index.")
        if kind not in KINDS:
            raise ValueError(f"There is no kind of index {kind!r}; there are {', '.join(KINDS)}.")
        index = _EMPTY[kind](vectors.shape[1], len(vectors))
        rows = np.ascontiguousarray(vectors, dtype=np.float32)
        index.train(rows)
        index.add(rows)
        return cls(index, embedder)

    @property
    def size(self) -> int:
        """Number of texts."""
        return self.index.ntotal

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines [q, k] in falling order and positions [q, k] of the texts nearest to each query."""
        return self.nearest(self.embedder(queries), k)

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """`search` for queries that are vectors [q, size] already."""
        check_k(k, self.size)
        scores, ids = self.index.search(vectors, k, params=self._width(k))
        short = np.flatnonzero((ids < 0).any(axis=1))  # fewer than k texts met: look everywhere
        if len(short):
            scores[short], ids[short] = self.index.search(vectors[short], k, params=self._width(self.size))
        if (ids < 0).any():
            raise ValueError(f"The approximate index finds fewer than {k} of its {self.size} texts: use a flat one.")
        return scores, ids

    def save(self, path: Path) -> None:
        """Write the FAISS index to a file."""
        faiss.write_index(self.index, str(path))

    @classmethod
    def load(cls, path: Path, embedder: Embedder) -> DenseIndex:
        """Read what `save` wrote; raises ValueError when the file is no index of this embedder."""
        try:
            index = faiss.read_index(str(path))
        except RuntimeError as error:
            raise ValueError(f"{path.name} is no whole FAISS index: {str(error).splitlines()[0][:200]}") from None
        if index.d != embedder.size:
            raise ValueError(f"{path.name} holds vectors of length {index.d}, the embedder's have {embedder.size}.")
        return cls(index, embedder)

    def _width(self, k: int) -> Any:
        """How much of an approximate index a search for k texts looks at; None for an exact one."""
        made: Any = faiss  # whose type stubs do not know these classes
        if isinstance(self.index, faiss.IndexIVFFlat):
            lists = self.index.nlist
            return made.SearchParametersIVF(nprobe=lists if k == self.size else min(lists, max(16, lists // 8)))
        if isinstance(self.index, faiss.IndexHNSWFlat):
            return made.SearchParametersHNSW(efSearch=max(_SEARCH_WIDTH, 2 * k))
        return None


def _flat(size: int, _: int) -> Any:
    return faiss.IndexFlatIP(size)


def _ivf(size: int, texts: int) -> Any:
    lists = max(1, min(int(4 * texts**0.5), texts // _POINTS_A_LIST))
    return faiss.IndexIVFFlat(faiss.IndexFlatIP(size), size, lists, faiss.METRIC_INNER_PRODUCT)


def _hnsw(size: int, _: int) -> Any:
    index = faiss.IndexHNSWFlat(size, _LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = _BUILD_WIDTH
    return index


_EMPTY = {"flat": _flat, "ivf": _ivf, "hnsw": _hnsw}
