"""A side's passages for a question: by embedding alone, or by hybrid search and GRATING's reranker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.retrieval import DenseIndex, Hybrid, embedder
from ondevice_programs.pair.node import Documents
from ondevice_programs.pair.relevance import COSINE, Scorer

CANDIDATES = 10  # passages that hybrid search finds and the reranker reads
K = 2  # passages that are answered from


@dataclass(frozen=True, kw_only=True)
class Embedded(Documents):
    """Those whose embeddings are nearest to the question's; relevance is the cosine, in logits."""

    dense: DenseIndex

    @property
    def relevance(self) -> str:
        """As of `Documents`."""
        return f"{COSINE:g} times the cosine of embeddings"

    def positions(self, query: str, k: int) -> tuple[list[int], list[float]]:
        """As of `Documents`."""
        scores, indices = self.dense.search([query], min(k, len(self.texts)))
        return indices[0].tolist(), (COSINE * scores[0]).tolist()


@dataclass(frozen=True, kw_only=True)
class Reranked(Documents):
    """Those that a cross-encoder and the embedder put first among what hybrid search finds. Their scores depend on
    question and passage alone, so those of two sides compare, as those of their searches do not."""

    hybrid: Hybrid
    scorer: Scorer

    @property
    def relevance(self) -> str:
        """As of `Documents`."""
        return self.scorer.key

    def positions(self, query: str, k: int) -> tuple[list[int], list[float]]:
        """As of `Documents`."""
        candidates = self.hybrid.search([query], min(CANDIDATES, len(self.texts)))[1][0]
        scores = self.scorer(query, [self.texts[index] for index in candidates])
        best = np.argsort(-scores, kind="stable")[:k]
        return candidates[best].tolist(), scores[best].tolist()


def picked(documents: Documents, vectors: NDArray[np.float32], scorer: Scorer | None) -> Embedded | Reranked:
    """The same documents, picked by embeddings [n, size] alone, or by hybrid search and a reranker."""
    dense = DenseIndex.build(vectors, embedder())
    if scorer is None:
        return Embedded(**vars(documents), dense=dense)
    return Reranked(**vars(documents), hybrid=Hybrid(dense, documents.index), scorer=scorer)
