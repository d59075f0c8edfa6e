"""A side's passages for a question: by embedding alone, or by hybrid search and GRATING's reranker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.retrieval import DenseIndex, Hybrid, embedder
from ondevice_programs.pair.node import Documents
from ondevice_programs.reranker import Reranker

CANDIDATES = 10
K = 2  # passages that hybrid search hands to the reranker, and those that are read
RERANKER = "pydocs-reranker-deep"


@dataclass(frozen=True, kw_only=True)
class Embedded(Documents):
    """Those whose embeddings are nearest to the question's; relevance is the cosine."""

    dense: DenseIndex

    @property
    def relevance(self) -> str:
        """As of `Documents`."""
        return "the cosine of embeddings"

    def positions(self, query: str, k: int) -> tuple[list[int], list[float]]:
        """As of `Documents`."""
        scores, indices = self.dense.search([query], min(k, len(self.texts)))
        return indices[0].tolist(), scores[0].tolist()


@dataclass(frozen=True, kw_only=True)
class Reranked(Documents):
    """Those that a cross-encoder puts first among what hybrid search finds. Its scores, which depend on question and
    passage alone, are the relevance: those of two sides compare, as those of their searches do not."""

    hybrid: Hybrid
    reranker: Reranker

    @property
    def relevance(self) -> str:
        """As of `Documents`."""
        return f"{self.reranker.spec[-64:]} ({self.reranker.fingerprint})"

    def positions(self, query: str, k: int) -> tuple[list[int], list[float]]:
        """As of `Documents`."""
        candidates = self.hybrid.search([query], min(CANDIDATES, len(self.texts)))[1][0]
        best = self.reranker.rank(query, [self.texts[index] for index in candidates], min(k, len(candidates)))
        return [int(candidates[hit["corpus_id"]]) for hit in best], [hit["score"] for hit in best]


def picked(documents: Documents, vectors: NDArray[np.float32], reranker: Reranker | None) -> Embedded | Reranked:
    """The same documents, picked by embeddings [n, size] alone, or by hybrid search and a reranker."""
    dense = DenseIndex.build(vectors, embedder())
    if reranker is None:
        return Embedded(**vars(documents), dense=dense)
    return Reranked(**vars(documents), hybrid=Hybrid(dense, documents.index), reranker=reranker)
