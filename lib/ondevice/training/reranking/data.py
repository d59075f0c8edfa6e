"""The documentation corpus as training examples and evaluation pools, without a module in both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ondevice import corpus, retrieval
from ondevice.corpus import Document
from ondevice.corpus.prompts import pick
from ondevice.training.precision import mixed_precision
from ondevice.training.reranking.collection import Collection
from ondevice.training.reranking.modules import held_out, modules
from ondevice.training.reranking.pools import Example, Pool, evaluation_pools, training_examples

_DOCUMENTS = 16_000  # of the train split that are mined: what the embedder reads in about three minutes


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Pools of a split. answerable: queries that some passage answers. dropped: of these, those not retrieved."""

    pools: Sequence[Pool]
    answerable: int

    @property
    def dropped(self) -> int:
        """Queries without a relevant candidate."""
        return self.answerable - len(self.pools)


def for_training() -> list[Example]:
    """Examples from train-split documents in modules that are not held out, in an order set by hash."""
    module_of = _modules()
    documents = _sample([d for d in corpus.documents("train") if not held_out(module_of[d.name])])
    collection = Collection.of(documents, corpus.tokenizer())
    queries = sorted(corpus.queries(documents), key=lambda query: pick(query.name, "example", 2**62))
    encoder = retrieval.embedder()
    # Three times as fast where it pays, and hard negatives need no exact cosine; cached apart from exact vectors.
    encoder = dataclasses.replace(encoder, key=f"{encoder.key}-mixed")
    with mixed_precision("cpu"):
        return training_examples(collection, queries, encoder, module_of)


def for_evaluation(split: str) -> Evaluation:
    """Pools over all passages of a split; the queries are about its documents in held-out modules."""
    module_of, documents = _modules(), corpus.documents(split)
    collection = Collection.of(documents, corpus.tokenizer())
    asked = [d for d in documents if held_out(module_of[d.name])]
    queries = [query for query in corpus.queries(asked) if collection.relevant(query)]
    return Evaluation(evaluation_pools(collection, queries, retrieval.embedder()), len(queries))


def _modules() -> dict[str, str]:
    return dict(modules(document for split in corpus.SPLITS for document in corpus.documents(split)))


def _sample(documents: Sequence[Document]) -> list[Document]:
    chosen = sorted(documents, key=lambda document: pick(document.name, "mined", 2**62))[:_DOCUMENTS]
    return sorted(chosen, key=lambda document: document.name)
