"""The documentation corpus as training examples, from modules that no evaluation pool asks of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np

from ondevice import corpus, retrieval
from ondevice.corpus import Document, Query, wikitext
from ondevice.corpus.modules import held_out
from ondevice.corpus.natural import questions
from ondevice.corpus.prompts import pick
from ondevice.corpus.wikitext import Paragraph
from ondevice.precision import mixed_precision
from ondevice.retrieval import Embedder
from ondevice.retrieval.collection import Collection
from ondevice.retrieval.pools import judged, modules_of_all, search

_DOCUMENTS = 16_000  # of the train split that are mined: what the embedder reads in about three minutes
_FEWER = 5_000  # queries about them, beside questions of our own
_DEPTH = 40  # of either list
_HARD = 10  # negatives kept of either list
_REPEATS = 8  # of each question of our own
_WORDS = 6  # of a sentence that asks, at least
_EASY = 4  # of the same module, and of any


@dataclasses.dataclass(frozen=True)
class Example:
    """A query for training. positives: texts that answer. negatives: texts that do not, by where they come from."""

    query: Query
    positives: tuple[str, ...]
    negatives: Mapping[str, tuple[str, ...]]


def for_training(with_questions: bool = False) -> list[Example]:
    """Examples from train-split documents in modules that are not held out, in an order set by hash.

    with_questions: with the questions of our own, each several times, as they are few, and with sentences of
    WikiText-2's validation split, which ask for the paragraph that they were taken from (`clozes`). Their hard
    negatives are those of keywords alone, so that a long run can be resumed at once.
    """
    module_of = modules_of_all()
    every = [d for d in corpus.documents("train") if not held_out(module_of[d.name])]
    natural = questions(every) if with_questions else []
    documents = _sample(every, {query.name for query in natural})
    collection = Collection.from_documents(documents, corpus.tokenizer())
    queries = sorted(corpus.queries(documents), key=lambda query: pick(query.name, "example", 2**62))
    queries = [*natural * _REPEATS, *queries[: _FEWER if with_questions else None]]
    if with_questions:
        paragraphs = wikitext.paragraphs("validation")
        return training_examples(collection, queries, None, module_of) + clozes(paragraphs)
    encoder = retrieval.embedder()
    # Three times as fast where it pays, and hard negatives need no exact cosine; cached apart from exact vectors.
    encoder = dataclasses.replace(encoder, key=f"{encoder.key}-mixed")
    with mixed_precision("cpu"):
        return training_examples(collection, queries, encoder, module_of)


def clozes(paragraphs: Sequence[Paragraph]) -> list[Example]:
    """A sentence of each paragraph as a query; the rest of the paragraph answers (Lee et al. 2019, inverse cloze).

    Negatives are hard (by keywords), near (of the same article) and random.
    """
    queries = []
    answers = []
    for index, paragraph in enumerate(paragraphs):
        heading, _, body = paragraph.text.partition("\n")
        sentences = body.split(". ")
        chosen = pick(str(paragraph.row), "sentence", len(sentences))
        rest = ". ".join(sentences[:chosen] + sentences[chosen + 1 :])
        if len(sentences) > 2 and len(sentences[chosen].split()) >= _WORDS:
            queries.append(Query("cloze", sentences[chosen], str(index), ""))
            answers.append(f"{heading}\n{rest}")
    texts = [paragraph.text for paragraph in paragraphs]
    nearest = _by_keywords(texts, queries)
    articles: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        articles.setdefault(text.partition("\n")[0], []).append(index)
    examples = []
    for row, (query, answer) in enumerate(zip(queries, answers, strict=True)):
        own = int(query.name)
        rng = np.random.default_rng(pick(query.text, "negatives", 2**32))
        sources = {
            "sparse": nearest[row].tolist(),
            "module": rng.permutation(articles[texts[own].partition("\n")[0]]).tolist(),
            "random": rng.integers(len(texts), size=4 * _EASY).tolist(),
        }
        examples.append(Example(query, (answer,), _negatives(sources, {own}, lambda index: True, texts)))
    return examples


def training_examples(
    collection: Collection, queries: Sequence[Query], encoder: Embedder | None, module_of: Mapping[str, str]
) -> list[Example]:
    """Positives and negatives of every query that has a passage to answer it and enough that do not.

    encoder: None is no list of its own. module_of: by document. Negatives are hard (high in either list), near (of the
    same module) and random.
    """
    queries = [query for query in queries if collection.relevant(query)]
    if encoder is None:
        lists = {"sparse": _by_keywords(collection.texts, queries)}
    else:
        both = search(collection.texts, queries, encoder, min(_DEPTH, len(collection.passages)))
        lists = {name: positions for name, (_, positions) in zip(("sparse", "dense"), both, strict=True)}
    by_module: dict[str, list[int]] = {}
    for index, passage in enumerate(collection.passages):
        by_module.setdefault(module_of[passage.title], []).append(index)
    examples = []
    for row, query in enumerate(queries):
        relevant, fit = judged(collection, query)
        near = by_module[module_of[query.name]]
        rng = np.random.default_rng(pick(query.name, "negatives", 2**32))
        sources = {
            **{name: positions[row].tolist() for name, positions in lists.items()},
            "module": rng.permutation(near)[:_DEPTH].tolist(),
            "random": rng.integers(len(collection.passages), size=4 * _EASY).tolist(),
        }
        positives = tuple(collection.texts[i] for i in sorted(relevant))
        examples.append(Example(query, positives, _negatives(sources, relevant, fit, collection.texts)))
    return examples


def _by_keywords(texts: Sequence[str], queries: Sequence[Query]) -> np.ndarray:
    """[queries, depth] positions of the best by BM25."""
    index = retrieval.sparse_index(texts)
    positions: np.ndarray = index.search([query.text for query in queries], min(_DEPTH, len(texts)))[1]
    return positions


def _negatives(
    sources: Mapping[str, Sequence[int]], relevant: set[int], fit: Callable[[int], bool], texts: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Texts by where they come from, none twice. sources: positions in their order. fit: which of them may be taken."""
    negatives = {}
    used = set(relevant)
    for source, positions in sources.items():
        wanted = _HARD if source in ("sparse", "dense") else _EASY
        kept = list(dict.fromkeys(islice((i for i in positions if i not in used and fit(i)), wanted)))
        used.update(kept)
        negatives[source] = tuple(texts[i] for i in kept)
    return negatives


def _sample(documents: Sequence[Document], named: set[str]) -> list[Document]:
    """Documents by hash, those that are named first."""
    chosen = sorted(documents, key=lambda document: (document.name not in named, pick(document.name, "mined", 2**62)))
    chosen = chosen[:_DOCUMENTS]
    return sorted(chosen, key=lambda document: document.name)
