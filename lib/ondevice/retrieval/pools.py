"""A query's candidates, found by BM25 and by the embedder, and the pools that rerankers are evaluated on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from ondevice import corpus, retrieval
from ondevice.corpus import Query, wikitext
from ondevice.corpus.modules import held_out, modules
from ondevice.corpus.prompts import pick
from ondevice.retrieval import Embedder
from ondevice.retrieval.collection import Collection

CANDIDATES = 20


@dataclass(frozen=True)
class CandidatePool:
    """A query's candidates for evaluation, in an order that says nothing. Arrays are [candidates]."""

    query: Query
    passages: tuple[str, ...]
    relevant: np.ndarray
    bm25: np.ndarray
    cosine: np.ndarray


@dataclass(frozen=True)
class Evaluation:
    """Pools of a split. answerable: queries that some passage answers. dropped: of these, those not retrieved."""

    pools: Sequence[CandidatePool]
    answerable: int

    @property
    def dropped(self) -> int:
        """Queries without a relevant candidate."""
        return self.answerable - len(self.pools)


def evaluation_pools(
    collection: Collection, queries: Sequence[Query], encoder: Embedder, seed: int = 0
) -> list[CandidatePool]:
    """Pools of 20: 10 by BM25, 10 by the embedder, filled from further down either list.

    A query is dropped when none of its candidates answers it.
    """
    return candidate_pools(collection.texts, queries, [judged(collection, query) for query in queries], encoder, seed)


def paragraph_pools(encoder: Embedder, seed: int = 0) -> Evaluation:
    """Pools of WikiText-2's paragraphs for our own questions about them; one paragraph answers each."""
    every = wikitext.paragraphs("test")
    positions = {paragraph.row: index for index, paragraph in enumerate(every)}
    questions = [(positions[row], question) for row, question in wikitext.questions()]
    queries = [Query("paragraph", question, f"wikitext {every[index].row}", "") for index, question in questions]
    answers = [({index}, lambda candidate: True) for index, _ in questions]
    return Evaluation(
        candidate_pools([paragraph.text for paragraph in every], queries, answers, encoder, seed), len(queries)
    )


def candidate_pools(
    texts: Sequence[str],
    queries: Sequence[Query],
    answers: Sequence[tuple[set[int], Callable[[int], bool]]],
    encoder: Embedder,
    seed: int = 0,
) -> list[CandidatePool]:
    """Pools of 20 among the texts, but for queries without an answer in theirs: 10 by BM25, 10 by the embedder.

    answers: of each query the positions that answer it, and whether another may be among its candidates.
    """
    sparse, dense = search(texts, queries, encoder, len(texts))
    pools = []
    for row, (query, (relevant, fit)) in enumerate(zip(queries, answers, strict=True)):
        bm25, cosine = (
            dict(zip(ids[row].tolist(), scores[row].tolist(), strict=True)) for scores, ids in (sparse, dense)
        )
        chosen = np.array(_merged(filter(fit, bm25), filter(fit, cosine)))
        if len(chosen) < CANDIDATES or relevant.isdisjoint(chosen.tolist()):
            continue
        np.random.default_rng([seed, pick(query.name, "pool", 2**32)]).shuffle(chosen)
        bm25s, cosines = (np.array([scores[i] for i in chosen.tolist()]) for scores in (bm25, cosine))
        passages = tuple(texts[i] for i in chosen)
        pools.append(CandidatePool(query, passages, np.isin(chosen, list(relevant)), bm25s, cosines))
    return pools


def for_evaluation(split: str) -> Evaluation:
    """Pools over all passages of a split of the corpus; the queries are about its documents in held-out modules."""
    module_of = modules_of_all()
    documents = corpus.documents(split)
    held_out_documents = [document for document in documents if held_out(module_of[document.name])]
    collection = Collection.from_documents(documents, corpus.tokenizer())
    queries = [query for query in corpus.queries(held_out_documents) if collection.relevant(query)]
    return Evaluation(evaluation_pools(collection, queries, retrieval.embedder()), len(queries))


def modules_of_all() -> dict[str, str]:
    """The module of each document of the corpus."""
    return dict(modules(document for split in corpus.SPLITS for document in corpus.documents(split)))


def search(
    passages: Sequence[str], queries: Sequence[Query], encoder: Embedder, depth: int
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(scores, positions), each [queries, depth], of BM25 and of the embedder."""
    texts = [query.text for query in queries]
    if not texts:
        raise ValueError("No query has a passage that answers it.")
    sparse = retrieval.sparse_index(passages).search(texts, depth)
    return sparse, retrieval.dense_index(passages, encoder=encoder).search(texts, depth)


def judged(collection: Collection, query: Query) -> tuple[set[int], Callable[[int], bool]]:
    """Positions that answer the query, and whether a position may be among its candidates."""
    relevant = set(collection.relevant(query))
    unfit = collection.unfit(query)
    return relevant, lambda index: index in relevant or not unfit(collection.passages[index])


def _merged(first: Iterator[int], second: Iterator[int]) -> list[int]:
    """Ten of each list, then from further down in turns, without repetition. No more is read than is needed."""
    half = CANDIDATES // 2
    merged = dict.fromkeys([*islice(first, half), *islice(second, half)])
    for index in chain.from_iterable(zip(first, second, strict=False)):
        if len(merged) == CANDIDATES:
            break
        merged.setdefault(index)
    return list(merged)
