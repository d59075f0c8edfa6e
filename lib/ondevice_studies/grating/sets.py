"""What rerankers are asked: queries with their candidates, in four sets.

`paragraphs`: a sentence of a paragraph of WikiText-2's test split asks for the rest of it (Lee et al. 2019, inverse
cloze). `notes and pages`: questions of our own on invented documents (`dragon.questions` has the same). Both have a
validation and a test split, which share no text. The others are the paper's applications (section 6.3). `RAG`: our own
questions over all paragraphs of WikiText-2's test split. `long context`: the same, over the paragraphs of one article.

No bundled reranker was trained on any of it. Questions and candidates are the same on every machine but for ties of the
embedder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ondevice import assets, retrieval
from ondevice.corpus import Query, wikitext
from ondevice.corpus.prompts import pick
from ondevice.corpus.wikitext import Paragraph
from ondevice.retrieval.pools import candidate_pools

PARAGRAPHS, NOTES, RAG, CONTEXT = "paragraphs", "notes and pages", "RAG", "long context"
VALIDATION, TEST = "validation", "test"
SPLITS = {PARAGRAPHS: (VALIDATION, TEST), NOTES: (VALIDATION, TEST), RAG: (TEST,), CONTEXT: (TEST,)}
MOST = {VALIDATION: 500, TEST: 300}  # paragraphs that are asked for
SEGMENTS = (10, 40)  # paragraphs of a long context, at least and at most
_WORDS = 8  # of a sentence that asks, at least
_RRF = 60  # the constant of reciprocal rank fusion, as in `retrieval.hybrid`


@dataclass(frozen=True, eq=False)
class QueryPool:
    """A query with its N candidates.

    name: pools with the same one have the same candidates. relevant: [N] bool. ranks: [N] each candidate's by the
    search, 0 the first; in a long context its position. nearest: the embedder's first candidate.
    """

    set: str
    split: str
    name: str
    query: str
    documents: tuple[str, ...]
    relevant: np.ndarray
    ranks: np.ndarray
    nearest: int


@cache
def pools(set_: str, split: str) -> list[QueryPool]:
    """All pools of a set. Raises ValueError on a set or a split that there is not."""
    if split not in SPLITS.get(set_, ()):
        there = "; ".join(f"{name} ({', '.join(splits)})" for name, splits in SPLITS.items())
        raise ValueError(f"There are no pools of {set_!r} on the {split} split; there are {there}.")
    if set_ == CONTEXT:
        return list(_of_articles())
    texts_of: dict[str, Callable[[str], _Searched]] = {PARAGRAPHS: _clozes, NOTES: _notes, RAG: _paragraphs}
    texts, queries, answers = texts_of[set_](split)
    retrieved = candidate_pools(texts, queries, [({index}, _any) for index in answers], retrieval.embedder())
    return [
        QueryPool(
            set_, split, pool.query.name, pool.query.text, pool.passages, pool.relevant,
            fused(pool.bm25, pool.cosine), int(pool.cosine.argmax()),
        )
        for pool in retrieved
    ]  # fmt: skip


_Searched = tuple[list[str], list[Query], list[int]]  # texts, queries, and which text answers each


def _any(_: int) -> bool:
    return True


def _clozes(split: str) -> _Searched:
    """Of half of the articles: every paragraph without the sentence that asks for it."""
    texts, clozes = list[str](), list[tuple[Query, int]]()
    for paragraph in wikitext.paragraphs("test"):
        heading, _, body = paragraph.text.partition("\n")
        if (pick(heading, "grating article", 2) == 0) == (split == TEST):
            continue
        sentences = body.split(". ")
        chosen = pick(str(paragraph.row), "grating sentence", len(sentences))
        if len(sentences) > 2 and len(sentences[chosen].split()) >= _WORDS:
            name = f"wikitext {paragraph.row}"
            clozes.append((Query("cloze", sentences[chosen], name, ""), len(texts)))
            body = ". ".join(sentences[:chosen] + sentences[chosen + 1 :])
        texts.append(f"{heading}\n{body}")
    clozes = sorted(clozes, key=lambda cloze: pick(cloze[0].name, "grating pool", 2**62))[: MOST[split]]
    return texts, [query for query, _ in clozes], [index for _, index in clozes]


def _notes(split: str) -> _Searched:
    """Of every second pair of a note and a page: both documents, and a question on each."""
    lines = assets.data("corpus", "both_sides.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = sorted(map(json.loads, lines), key=lambda pair: pick(pair["id"], "grating note", 2**62))
    texts, queries = list[str](), list[Query]()
    for pair in pairs[split == TEST :: 2]:
        for kind in ("note", "page"):
            queries.append(Query(kind, pair[f"{kind}_question"], f"{pair['id']} {kind}", ""))
            texts.append(pair[kind])
    return texts, queries, list(range(len(texts)))


def _paragraphs(_: str) -> _Searched:
    """All paragraphs, and our own questions."""
    every = wikitext.paragraphs("test")
    positions = {paragraph.row: position for position, paragraph in enumerate(every)}
    questions = [
        (Query("paragraph", text, f"wikitext {row}", ""), positions[row]) for row, text in wikitext.questions()
    ]
    return [paragraph.text for paragraph in every], [query for query, _ in questions], [index for _, index in questions]


def _of_articles() -> Iterator[QueryPool]:
    """Our own questions, with the paragraphs of the article that answers."""
    articles = dict[str, list[Paragraph]]()
    for paragraph in wikitext.paragraphs("test"):
        articles.setdefault(paragraph.text.partition("\n")[0], []).append(paragraph)
    heading_of = {paragraph.row: heading for heading, members in articles.items() for paragraph in members}
    encoder = retrieval.embedder()
    for row, text in wikitext.questions():
        members = articles[heading_of[row]]
        if SEGMENTS[0] <= len(members) <= SEGMENTS[1]:
            documents = tuple(paragraph.text for paragraph in members)
            relevant = np.array([paragraph.row == row for paragraph in members])
            question, *vectors = encoder([text, *documents])
            nearest = int(np.argmax([vector @ question for vector in vectors]))
            yield QueryPool(CONTEXT, TEST, heading_of[row], text, documents, relevant, np.arange(len(members)), nearest)


def fused(bm25: np.ndarray, cosine: np.ndarray) -> np.ndarray:
    """[N] ranks of candidates by the sum of the reciprocal ranks of both scores, 0 the best."""
    total = np.sum([1 / (_RRF + 1 + _ranks(scores)) for scores in (bm25, cosine)], axis=0)
    return _ranks(total)


def _ranks(scores: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(-np.asarray(scores), kind="stable"), kind="stable")
