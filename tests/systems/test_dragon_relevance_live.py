"""The bundled reranker and embedder on questions in natural words: which side gets the larger weight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ondevice.retrieval import SparseIndex, embedder
from ondevice_papers.dragon.aggregation import log_weight
from ondevice_programs.pair.node import WEIGHT_TEMPERATURE, Documents
from ondevice_programs.pair.relevance import MEMORY, RERANKER, TEMPERATURE, Scored, Scorer
from ondevice_programs.reranker import Reranker
from ondevice_studies.dragon import sides

EACH = 6  # questions of a side
PUBLIC = 600


@pytest.fixture(scope="module")
def plain() -> dict[str, Documents]:
    texts = sides.texts("validation", PUBLIC)
    return {side: Documents(those, SparseIndex.build(those)) for side, those in texts.items()}


@pytest.fixture(scope="module")
def scored(plain: dict[str, Documents]) -> Iterator[dict[str, Scored]]:
    with Reranker(RERANKER, memory_budget=MEMORY, mode="order", calibration=False) as reranker:
        scorer = Scorer(reranker, embedder())
        yield {side: Scored(one.texts, one.index, scorer=scorer) for side, one in plain.items()}


def larger(documents: dict[str, Documents], temperature: float, query: str) -> str:
    """The side of the larger weight, as two passages of each give it."""
    weights = {side: log_weight(one.places(query, 2)[1], temperature) for side, one in documents.items()}
    return max(weights, key=weights.__getitem__)


def test_the_side_that_holds_the_answer_has_the_larger_weight(
    plain: dict[str, Documents], scored: dict[str, Documents]
):
    asked = sides.questions("validation")
    some = [question for holder in ("device", "cloud")
            for question in [one for one in asked if one.holder == holder][:EACH]]  # fmt: skip
    right = [larger(scored, TEMPERATURE, question.text) == question.holder for question in some]
    by_share = [larger(plain, WEIGHT_TEMPERATURE, question.text) == question.holder for question in some]
    assert sum(right) >= len(some) - 1 > sum(by_share) + 2
