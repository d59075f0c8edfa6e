"""The reranker as a part of retrieval frameworks: LangChain, LlamaIndex, Haystack and rerankers (AnswerDotAI).

    from ondevice_programs.reranker.adapters import LangChainCompressor

    compressor = LangChainCompressor(reranker=Reranker("minilm-reranker", memory_budget=100), top_n=3)

A class is made on its first use, from its host's base class, so that no host is imported that is not asked for; one
that is missing is an ImportError that names the extra. Scores are Python floats, errors those of `Reranker.rank`, and
documents keep their metadata. What is told how many documents are wanted can prune; what scores pairs cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ondevice.extras import needing
from ondevice_programs.reranker import Reranker


def _langchain_cross_encoder() -> type:
    from langchain_core.cross_encoders import BaseCrossEncoder

    class LangChainCrossEncoder(BaseCrossEncoder):
        """A `BaseCrossEncoder`, for `CrossEncoderReranker(model=...)`."""

        def __init__(self, reranker: Reranker) -> None:
            self.reranker = reranker

        def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
            return self.reranker.predict(text_pairs).tolist()

    return LangChainCrossEncoder


def _langchain_compressor() -> type:
    from langchain_core.documents import BaseDocumentCompressor

    class LangChainCompressor(BaseDocumentCompressor):
        """A `BaseDocumentCompressor`, for `ContextualCompressionRetriever`; the score is metadata["relevance_score"].

        reranker: a `Reranker`. top_n: None keeps all.
        """

        reranker: Any
        top_n: int | None = 3

        def compress_documents(self, documents: Sequence[Any], query: str, callbacks: Any = None) -> list[Any]:
            texts = [document.page_content for document in documents]
            return [
                document.model_copy(update={"metadata": document.metadata | {"relevance_score": score}})
                for document, score in _best(self.reranker, query, documents, texts, self.top_n)
            ]

    return LangChainCompressor


def _llama_index_postprocessor() -> type:
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeWithScore

    class LlamaIndexPostprocessor(BaseNodePostprocessor):
        """A `BaseNodePostprocessor`, for `node_postprocessors=[...]`; it reads what an embedder reads of a node.

        reranker: a `Reranker`. top_n: None keeps all.
        """

        reranker: Any
        top_n: int | None = 2

        def _postprocess_nodes(self, nodes: list[Any], query_bundle: Any = None) -> list[Any]:
            if query_bundle is None:
                raise ValueError("Reranking needs the query: give query_bundle or query_str.")
            texts = [scored.node.get_content(metadata_mode=MetadataMode.EMBED) for scored in nodes]
            best = _best(self.reranker, query_bundle.query_str, nodes, texts, self.top_n)
            return [NodeWithScore(node=scored.node, score=score) for scored, score in best]

    return LlamaIndexPostprocessor


def _haystack_ranker() -> type:
    from haystack import Document, component

    @component
    class HaystackRanker:
        """A component of pipelines; one that names its model can be saved with them.

        model: of `Reranker`, opened by warm_up or the first run, or a `Reranker` that is open. memory_budget, settings:
        more of a Reranker's arguments. top_k: None keeps all.
        """

        def __init__(
            self,
            model: str | Reranker,
            top_k: int | None = 10,
            memory_budget: float | str | None = None,
            settings: dict[str, Any] | None = None,
        ) -> None:
            self.model, self.top_k, self.memory_budget, self.settings = model, top_k, memory_budget, settings
            self._reranker: Any = None if isinstance(model, str) else model

        def warm_up(self) -> None:
            if isinstance(self.model, str) and self._reranker is None:
                self._reranker = Reranker(self.model, memory_budget=self.memory_budget, **(self.settings or {}))

        @component.output_types(documents=list[Document])
        def run(self, query: str, documents: list[Any], top_k: int | None = None) -> dict[str, list[Any]]:
            self.warm_up()
            texts = [document.content or "" for document in documents]
            best = _best(self._reranker, query, documents, texts, self.top_k if top_k is None else top_k)
            return {"documents": [replace(document, score=score) for document, score in best]}

    return HaystackRanker


def _rerankers_ranker() -> type:
    from rerankers.models.ranker import BaseRanker
    from rerankers.results import RankedResults, Result
    from rerankers.utils import prep_docs

    class RerankersRanker(BaseRanker):
        """A `BaseRanker`, which has `rank`, `rank_async`, `score` and `as_langchain_compressor`."""

        def __init__(self, reranker: Reranker, verbose: int = 0) -> None:
            self.reranker = reranker
            self.verbose = verbose

        def score(self, query: str, doc: str) -> float:
            return float(self.reranker.predict((query, doc)))

        def rank(self, query: str, docs: Any, doc_ids: Any = None, metadata: Any = None) -> Any:
            documents = prep_docs(docs, doc_ids, metadata) if docs else []
            best = _best(self.reranker, query, documents, [document.text for document in documents], None)
            ranked = [Result(document, score, rank) for rank, (document, score) in enumerate(best, 1)]
            return RankedResults(ranked, query, has_scores=True)

    return RerankersRanker


_MAKERS: dict[str, Callable[[], type]] = {
    "LangChainCrossEncoder": _langchain_cross_encoder,
    "LangChainCompressor": _langchain_compressor,
    "LlamaIndexPostprocessor": _llama_index_postprocessor,
    "HaystackRanker": _haystack_ranker,
    "RerankersRanker": _rerankers_ranker,
}


def __getattr__(name: str) -> Any:
    if name not in _MAKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needing("hosts", name):
        adapter = globals()[name] = _MAKERS[name]()  # one class for all, which saved pipelines find by its name
    adapter.__qualname__ = name
    return adapter


def _best(
    reranker: Reranker, query: str, documents: Sequence[Any], texts: list[str], count: int | None
) -> list[tuple[Any, float]]:
    """The best documents by their texts, best first, with their scores."""
    return [(documents[entry["corpus_id"]], entry["score"]) for entry in reranker.rank(query, texts, top_k=count)]
