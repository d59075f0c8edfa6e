"""The documentation corpus as training examples, from modules that no evaluation pool asks of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np

from ondevice import corpus, retrieval
from ondevice.corpus import Document, Query
from ondevice.corpus.modules import held_out
from ondevice.corpus.natural import questions
from ondevice.corpus.prompts import pick
from ondevice.precision import mixed_precision
from ondevice.retrieval import Embedder
from ondevice.retrieval.collection import Collection
from ondevice.retrieval.pools import judged, modules_of_all, search

_DOCUMENTS = 16_000  # of the train split that are mined: what the embedder reads in about three minutes
_DEPTH = 40  # of either list
_HARD = 10  # negatives kept of either list
_REPEATS = 8  # of each question of our own
_EASY = 4  # of the same module, and of any


@dataclasses.dataclass(frozen=True)
class Example:
    """A query for training. positives: texts that answer. negatives: texts that do not, by where they come from."""

    query: Query
    positives: tuple[str, ...]
    negatives: Mapping[str, tuple[str, ...]]


def for_training(asked: bool = False) -> list[Example]:
    """Examples from train-split documents in modules that are not held out, in an order set by hash.

    asked: with the questions of our own, each several times, as they are few.
    """
    module_of = modules_of_all()
    every = [d for d in corpus.documents("train") if not held_out(module_of[d.name])]
    natural = questions(every) if asked else []
    documents = _sample(every, {query.name for query in natural})
    collection = Collection.from_documents(documents, corpus.tokenizer())
    queries = sorted(corpus.queries(documents), key=lambda query: pick(query.name, "example", 2**62))
    queries = [*natural * _REPEATS, *queries]
    encoder = retrieval.embedder()
    # Three times as fast where it pays, and hard negatives need no exact cosine; cached apart from exact vectors.
    encoder = dataclasses.replace(encoder, key=f"{encoder.key}-mixed")
    with mixed_precision("cpu"):
        return training_examples(collection, queries, encoder, module_of)


def training_examples(
    collection: Collection, queries: Sequence[Query], encoder: Embedder, module_of: Mapping[str, str]
) -> list[Example]:
    """Positives and negatives of every query that has a passage to answer it and enough that do not.

    module_of: by document. Negatives are hard (high in either list), near (of the same module) and random.
    """
    queries = [query for query in queries if collection.relevant(query)]
    sparse, dense = search(collection, queries, encoder, min(_DEPTH, len(collection.passages)))
    by_module: dict[str, list[int]] = {}
    for index, passage in enumerate(collection.passages):
        by_module.setdefault(module_of[passage.title], []).append(index)
    examples = []
    for row, query in enumerate(queries):
        relevant, fit = judged(collection, query)
        near = by_module[module_of[query.name]]
        rng = np.random.default_rng(pick(query.name, "negatives", 2**32))
        sources = {
            "sparse": sparse[1][row].tolist(),
            "dense": dense[1][row].tolist(),
            "module": rng.permutation(near)[:_DEPTH].tolist(),
            "random": rng.integers(len(collection.passages), size=4 * _EASY).tolist(),
        }
        negatives = {}
        used = set(relevant)
        for source, ids in sources.items():
            wanted = _HARD if source in ("sparse", "dense") else _EASY
            found = list(dict.fromkeys(islice((i for i in ids if i not in used and fit(i)), wanted)))
            used.update(found)
            negatives[source] = tuple(collection.texts[i] for i in found)
        examples.append(Example(query, tuple(collection.texts[i] for i in sorted(relevant)), negatives))
    return examples


def _sample(documents: Sequence[Document], named: frozenset[str] | set[str] = frozenset()) -> list[Document]:
    """Documents by hash, those that are named first."""
    chosen = sorted(documents, key=lambda document: (document.name not in named, pick(document.name, "mined", 2**62)))
    chosen = chosen[:_DOCUMENTS]
    return sorted(chosen, key=lambda document: document.name)
