"""What rerankers are asked: queries with their candidates, in four sets, each pool of one kind.

`documentation questions` (on a parameter) and `inverse cloze` (a summary, whose text is searched) are the pools that
the bundled rerankers are evaluated on: each has a relevant candidate, and none that answers as well without counting.
The others are the paper's applications (section 6.3), where search may miss. `RAG`: questions on documentation over all
passages of the split. `long context`: of a document that a model's context does not hold, the segments that answer a
question on it.

Questions and candidates are the same on every machine with the same package versions, but for ties of the embedder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from ondevice import corpus, retrieval
from ondevice.corpus import Document, Query, sections
from ondevice.corpus.modules import held_out
from ondevice.corpus.prompts import pick
from ondevice.evidence import load
from ondevice.retrieval.collection import Collection
from ondevice.retrieval.pools import CALIBRATION, CANDIDATES, CandidatePool, Evaluation, for_evaluation, modules_of_all
from ondevice.retrieval.texts import digest

QUESTIONS = "documentation questions"
CLOZE = "inverse cloze"
RAG, CONTEXT = "RAG", "long context"
_SPLITS = (CALIBRATION, "validation", "test")
SPLITS = {QUESTIONS: _SPLITS, CLOZE: _SPLITS, RAG: ("test",), CONTEXT: ("test",)}
KEPT = 5  # segments of some fourteen that are kept of a long document; the paper keeps 10 of 20
LONGER = 1024  # tokens; a long document has more
LONGEST = 2400  # tokens of a long document, at most
EACH = 4  # questions on a long document, at most
_KINDS = {QUESTIONS: "parameter", CLOZE: "summary"}
_RRF = 60  # the constant of reciprocal rank fusion, as in `retrieval.hybrid`


@dataclass(frozen=True, eq=False)
class RankingQuestion:
    """A query with its N candidates.

    name: the document that it is about; pools with the same one are not independent. documents: as
    rerankers read them: title, line break, text. relevant: [N] bool. ranks: [N] each candidate's by the search, 0
    the first; of a long document its place. answer: "" where there is none.
    """

    set: str
    split: str
    name: str
    query: str
    documents: tuple[str, ...]
    relevant: np.ndarray
    ranks: np.ndarray
    answer: str = ""


@cache
def pools(set_: str, split: str) -> list[RankingQuestion]:
    """All pools of a set. Raises ValueError on a set or a split that there is not."""
    if split not in SPLITS.get(set_, ()):
        there = "; ".join(f"{name} ({', '.join(splits)})" for name, splits in SPLITS.items())
        raise ValueError(f"There are no pools of {set_!r} on the {split} split; there are {there}.")
    if set_ in _KINDS and split == "test" and (recorded := as_recorded(set_)):
        return recorded
    makers: dict[str, Callable[[str, str], Iterator[RankingQuestion]]] = {
        QUESTIONS: evaluated,
        CLOZE: evaluated,
        RAG: answerable,
        CONTEXT: held,
    }
    return list(makers[set_](set_, split))


def as_recorded(set_: str) -> list[RankingQuestion]:
    """`evaluated` of the test split without a search, which would embed all of its passages for minutes.

    Empty where the passages are others than the record's, as with other versions of the corpus's packages.
    """
    recorded = load("grating", "candidates")
    texts = passages("test")
    questions = []
    row: Any
    for row in recorded[recorded["set"] == set_].itertuples():
        documents = tuple(texts[position] for position in row.candidates if position < len(texts))
        if digest(documents)[:12] != row.candidates_sha:
            return []
        relevant = np.asarray(row.relevant, bool)
        questions.append(RankingQuestion(set_, "test", row.name, row.query, documents, relevant, row.ranks, row.answer))
    return questions


@cache
def passages(split: str) -> Sequence[str]:
    """The texts of a split's passages."""
    return Collection.from_documents(corpus.documents(split), corpus.tokenizer()).texts


def evaluated(set_: str, split: str) -> Iterator[RankingQuestion]:
    """The evaluation pools of one kind, candidates in an order that says nothing."""
    for pool in of_kind(set_, split):
        query = pool.query
        ranks = fused(pool.bm25, pool.cosine)
        yield RankingQuestion(set_, split, query.name, query.text, pool.passages, pool.relevant, ranks, query.answer)


def of_kind(set_: str, split: str) -> list[CandidatePool]:
    """The evaluation pools of one of the two sets, with what the searches said of their candidates."""
    return [pool for pool in _evaluation(split).pools if pool.query.kind == _KINDS[set_]]


def answerable(set_: str, split: str) -> Iterator[RankingQuestion]:
    """Questions that one passage answers whole, on modules that no reranker was trained on, in an order set by hash.

    Relevant are the passages of the question's document that hold the answer; search may have found none of them.
    """
    documents = corpus.documents(split)
    module_of = modules_of_all()
    collection = Collection.from_documents(documents, corpus.tokenizer())
    tasks = sorted(corpus.tasks(documents, ["rag"]), key=lambda task: pick(task.name, "grating rag", 2**62))
    queries = [
        Query("parameter", task.turns[-1][0], task.name, task.answer)
        for task in tasks
        if held_out(module_of[task.name])
    ]
    queries = [query for query in queries if collection.relevant(query)]
    for query, positions in zip(queries, searched(collection.texts, [query.text for query in queries]), strict=True):
        texts = tuple(collection.texts[position] for position in positions)
        relevant = collection.relevant(query)
        ranks = np.arange(len(positions))
        yield RankingQuestion(
            set_, split, query.name, query.text, texts, np.isin(positions, relevant), ranks, query.answer
        )


def held(set_: str, split: str) -> Iterator[RankingQuestion]:
    """Questions on parameters and return values of long documents, in an order set by hash, among all their segments.

    A segment is relevant that holds the answer, the first sentence of the description, whole.
    """
    tokenizer = corpus.tokenizer()
    documents = corpus.documents(split)
    sizes = tokenizer([document.docstring for document in documents], verbose=False)["input_ids"]
    long = [document for document, ids in zip(documents, sizes, strict=True) if LONGER < len(ids) <= LONGEST]
    collection = Collection.from_documents(long, tokenizer)

    def order(query: Query) -> int:
        return pick(f"{query.name} {query.text}", "grating context", 2**62)

    chosen = [sorted(filter(collection.relevant, described(document)), key=order)[:EACH] for document in long]
    for query in sorted(chain.from_iterable(chosen), key=order):
        positions = collection.by_title[query.name]
        segments = tuple(collection.texts[position] for position in positions)
        relevant = collection.relevant(query)
        ranks = np.arange(len(positions))
        yield RankingQuestion(
            set_, split, query.name, query.text, segments, np.isin(positions, relevant), ranks, query.answer
        )


def described(document: Document) -> Iterator[Query]:
    """A question on each parameter and the return value, whose answers have 10 to 240 characters as those of tasks."""
    fields = [(f"the parameter {field.name}", field) for field in sections.parameters(document.docstring)]
    if result := sections.returned(document.docstring):
        fields.append(("the return value", result))
    for what, field in dict(fields).items():
        answer = sections.first_sentence(field.description)
        if 10 <= len(answer) <= 240:
            yield Query("parameter", f"What is {what} of {document.name}?", document.name, answer)


# Searching


def searched(texts: Sequence[str], queries: Sequence[str]) -> Iterator[list[int]]:
    """Places of each query's candidates, the best first: ten by BM25, ten by the embedder, filled to 20 in turns."""
    both = [
        index.search(queries, len(texts)) for index in (retrieval.sparse_index(texts), retrieval.dense_index(texts))
    ]
    half = CANDIDATES // 2
    for row in range(len(queries)):
        sparse, dense = (dict(zip(ids[row].tolist(), scores[row].tolist(), strict=True)) for scores, ids in both)
        first = list(sparse)
        second = list(dense)
        further = chain.from_iterable(zip(first[half:], second[half:], strict=True))
        chosen = list(dict.fromkeys([*first[:half], *second[:half], *further]))[:CANDIDATES]
        ranks = fused(*(np.array([scores[position] for position in chosen]) for scores in (sparse, dense)))
        yield [chosen[index] for index in np.argsort(ranks)]


def fused(bm25: np.ndarray, cosine: np.ndarray) -> np.ndarray:
    """[N] ranks of candidates by the sum of the reciprocal ranks of both scores, 0 the best."""
    total = np.sum([1 / (_RRF + 1 + _ranks(scores)) for scores in (bm25, cosine)], axis=0)
    return _ranks(total)


def _ranks(scores: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(-scores, kind="stable"), kind="stable")


@cache
def _evaluation(split: str) -> Evaluation:
    return for_evaluation(split)
