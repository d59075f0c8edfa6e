"""A query's candidates, found by BM25 and by the embedder: for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ondevice import retrieval
from ondevice.corpus import Query
from ondevice.corpus.prompts import pick
from ondevice.retrieval import Embedder
from ondevice.training.reranking.collection import Collection

CANDIDATES = 20
_DEPTH = 40  # of either list, when mining for training
_HARD = 10  # negatives kept of either list
_EASY = 4  # of the same module, and of any


@dataclass(frozen=True)
class Pool:
    """A query's candidates for evaluation, in an order that says nothing. Arrays are [candidates]."""

    query: Query
    passages: tuple[str, ...]
    relevant: np.ndarray
    bm25: np.ndarray
    cosine: np.ndarray


@dataclass(frozen=True)
class Example:
    """A query for training. positives: texts that answer. negatives: texts that do not, by where they come from."""

    query: Query
    positives: tuple[str, ...]
    negatives: Mapping[str, tuple[str, ...]]


def evaluation_pools(collection: Collection, queries: Sequence[Query], encoder: Embedder, seed: int = 0) -> list[Pool]:
    """Pools of 20: 10 by BM25, 10 by the embedder, filled from further down either list.

    A query is dropped when none of its candidates answers it.
    """
    sparse, dense = _search(collection, queries, encoder, len(collection.passages))
    pools = []
    for row, query in enumerate(queries):
        relevant, fit = _judged(collection, query)
        bm25, cosine = (
            dict(zip(ids[row].tolist(), scores[row].tolist(), strict=True)) for scores, ids in (sparse, dense)
        )
        chosen = np.array(_merged(list(filter(fit, bm25)), list(filter(fit, cosine))))
        if len(chosen) < CANDIDATES or relevant.isdisjoint(chosen.tolist()):
            continue
        np.random.default_rng([seed, pick(query.name, "pool", 2**32)]).shuffle(chosen)
        texts = tuple(collection.texts[i] for i in chosen)
        bm25s, cosines = (np.array([scores[i] for i in chosen.tolist()]) for scores in (bm25, cosine))
        pools.append(Pool(query, texts, np.isin(chosen, list(relevant)), bm25s, cosines))
    return pools


def training_examples(
    collection: Collection, queries: Sequence[Query], encoder: Embedder, module_of: Mapping[str, str]
) -> list[Example]:
    """Positives and negatives of every query that has a passage to answer it and enough that do not.

    module_of: by document. Negatives are hard (high in either list), near (of the same module) and random.
    """
    queries = [query for query in queries if collection.relevant(query)]
    sparse, dense = _search(collection, queries, encoder, min(_DEPTH, len(collection.passages)))
    by_module: dict[str, list[int]] = {}
    for index, passage in enumerate(collection.passages):
        by_module.setdefault(module_of[passage.title], []).append(index)
    examples = []
    for row, query in enumerate(queries):
        relevant, fit = _judged(collection, query)
        near, rng = by_module[module_of[query.name]], np.random.default_rng(pick(query.name, "negatives", 2**32))
        sources = {
            "sparse": sparse[1][row].tolist(),
            "dense": dense[1][row].tolist(),
            "module": rng.permutation(near)[:_DEPTH].tolist(),
            "random": rng.integers(len(collection.passages), size=4 * _EASY).tolist(),
        }
        negatives, used = {}, set(relevant)
        for source, ids in sources.items():
            wanted = _HARD if source in ("sparse", "dense") else _EASY
            found = list(dict.fromkeys(islice((i for i in ids if i not in used and fit(i)), wanted)))
            used.update(found)
            negatives[source] = tuple(collection.texts[i] for i in found)
        examples.append(Example(query, tuple(collection.texts[i] for i in sorted(relevant)), negatives))
    return examples


def _search(
    collection: Collection, queries: Sequence[Query], encoder: Embedder, depth: int
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(scores, positions), each [queries, depth], of BM25 and of the embedder."""
    asked = [query.text for query in queries]
    if not asked:
        raise ValueError("No query has a passage that answers it.")
    sparse = retrieval.sparse_index(collection.texts).search(asked, depth)
    return sparse, retrieval.dense_index(collection.texts, encoder=encoder).search(asked, depth)


def _judged(collection: Collection, query: Query) -> tuple[set[int], Callable[[int], bool]]:
    """Positions that answer the query, and whether a position may be among its candidates."""
    relevant, unfit = set(collection.relevant(query)), collection.unfit(query)
    return relevant, lambda index: index in relevant or not unfit(collection.passages[index])


def _merged(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Ten of each list, then from further down in turns, without repetition."""
    half = CANDIDATES // 2
    found = dict.fromkeys([*first[:half], *second[:half]])
    for pair in zip(first[half:], second[half:], strict=False):
        for index in pair:
            if len(found) < CANDIDATES:
                found.setdefault(index)
    return list(found)
