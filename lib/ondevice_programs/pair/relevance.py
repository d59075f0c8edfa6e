"""Relevance that two sides can compare: a model reads question and passage, and nothing else decides.

Scores of two searches do not compare, as a word's weight depends on the other texts of the collection. A cross-encoder
and an embedder see the question and one passage, so their scores mean the same on both sides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ondevice.retrieval import Embedder
from ondevice_papers.dragon.aggregation import Floats
from ondevice_programs.pair.node import Documents
from ondevice_programs.reranker import Reranker

RERANKER = "minilm-reranker"
MEMORY = 150.0  # MB of the reranker
# On the 72 validation questions of data/corpus/sides.jsonl these three give the larger weight to the side that holds
# the answer every time, with the widest margin of 2, 3, 5 or 10 candidates and 5, 10 or 20 logits; among ten candidates
# the reranker finds the passage of 27 of the 36 public answers, where BM25's first two have 34. The loss falls towards
# temperature 0, at which the larger side answers alone: of 1/2, 1 and 2, 1 is the largest with a mean loss below 0.005.
CANDIDATES = 3  # passages of BM25's search that are read, of which two are answered from
COSINE = 20.0  # logits that a cosine of 1 counts
_VECTORS = 1 << 13  # passages whose embedding stays in memory
TEMPERATURE = 1.0  # what relevance is divided by before passages are weighed


class Scorer:
    """A reranker's logit and COSINE times the cosine of an embedder, of a question and a passage.

    The reranker, trained on documentation, takes words of other subjects for its own; the embedder knows more
    subjects and is less exact. name: of the reranker, for people. key: the same with a digest of what scores depend on.
    """

    def __init__(self, reranker: Reranker, embedder: Embedder) -> None:
        self._reranker, self._embedder = reranker, embedder
        self._vectors: OrderedDict[str, Floats] = OrderedDict()  # of passages, the one used last at the end
        self.name = reranker.spec.rstrip("/").rpartition("/")[2][-32:]
        self.key = f"{self.name} ({reranker.fingerprint[:12]}, {embedder.key[-12:]})"

    def __call__(self, query: str, texts: Sequence[str]) -> Floats:
        """[n] relevance of texts for a question."""
        logits = self._reranker.predict([(query, text) for text in texts], activation_fn=torch.nn.Identity())
        missing = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        question, *vectors = self._embedder([query, *missing])
        self._vectors.update(zip(missing, vectors, strict=True))
        for text in texts:
            self._vectors.move_to_end(text)
        cosines = np.array([self._vectors[text] @ question for text in texts], float)
        while len(self._vectors) > _VECTORS:
            self._vectors.popitem(last=False)
        return np.asarray(logits, float) + COSINE * cosines


@dataclass(frozen=True, kw_only=True)
class Scored(Documents):
    """Documents whose best candidates of BM25 are scored by a model."""

    scorer: Scorer

    @property
    def relevance(self) -> str:
        """As of `Documents`."""
        return self.scorer.key

    def positions(self, query: str, k: int) -> tuple[list[int], list[float]]:
        """As of `Documents`."""
        candidates, _ = super().positions(query, max(k + 1, CANDIDATES))
        if not candidates:
            return [], []
        scores = self.scorer(query, [self.texts[index] for index in candidates])
        best = np.argsort(-scores, kind="stable")[:k]
        return [candidates[index] for index in best], scores[best].tolist()
