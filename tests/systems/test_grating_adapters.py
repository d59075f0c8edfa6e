"""The reranker in LangChain, LlamaIndex, Haystack and rerankers: their own classes, the bundled model's order."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ondevice_programs.reranker import Reranker, adapters

pytestmark = pytest.mark.filterwarnings("default")  # hosts warn of each other's versions

QUERY = "How is a file opened?"
TEXTS = [
    "Sum of the elements of an array over an axis.", "Open file and return a corresponding file object.",
    "Draw samples from a normal distribution.", "Close the file, after which it cannot be read.",
    "Return the path of the current folder.",
]  # fmt: skip


@pytest.fixture(scope="module")
def reranker() -> Iterator[Reranker]:
    with Reranker("minilm-reranker") as opened:
        yield opened


@pytest.fixture(scope="module")
def best(reranker) -> list[tuple[int, float]]:
    """Places and scores, best first."""
    return [(one["corpus_id"], one["score"]) for one in reranker.rank(QUERY, TEXTS)]


def same(found: list[tuple[Any, Any]], best: list[tuple[int, float]], count: int) -> None:
    assert [place for place, _ in found] == [place for place, _ in best[:count]]
    assert all(type(score) is float for _, score in found)
    assert [score for _, score in found] == pytest.approx([score for _, score in best[:count]], rel=1e-5)


def test_langchain_cross_encoder_works_in_langchains_reranker(reranker, best):
    host = pytest.importorskip("langchain_classic.retrievers.document_compressors")
    documents = pytest.importorskip("langchain_core.documents")
    model = adapters.LangChainCrossEncoder(reranker)
    given = [documents.Document(text, metadata={"place": place}) for place, text in enumerate(TEXTS)]
    found = host.CrossEncoderReranker(model=model, top_n=3).compress_documents(given, QUERY)
    assert [one.metadata["place"] for one in found] == [place for place, _ in best[:3]]
    scores = model.score([(QUERY, text) for text in TEXTS])
    same([(place, scores[place]) for place, _ in best], best, len(TEXTS))
    assert model.score([]) == []


def test_langchain_compressor_works_behind_a_retriever(reranker, best):
    host = pytest.importorskip("langchain_classic.retrievers")
    documents = pytest.importorskip("langchain_core.documents")
    from langchain_core.retrievers import BaseRetriever

    given = [documents.Document(text, id=f"d{place}", metadata={"place": place}) for place, text in enumerate(TEXTS)]

    class Everything(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Any]:
            return given

    compressor = adapters.LangChainCompressor(reranker=reranker, top_n=2)
    retriever = host.ContextualCompressionRetriever(base_compressor=compressor, base_retriever=Everything())
    for found in (retriever.invoke(QUERY), asyncio.run(compressor.acompress_documents(given, QUERY))):
        same([(one.metadata["place"], one.metadata["relevance_score"]) for one in found], best, 2)
        assert [(one.id, one.page_content) for one in found] == [(f"d{p}", TEXTS[p]) for p, _ in best[:2]]
    assert all("relevance_score" not in one.metadata for one in given)
    assert compressor.compress_documents([], QUERY) == []


def test_llama_index_postprocessor_reads_what_an_embedder_reads(reranker, best):
    schema = pytest.importorskip("llama_index.core.schema")
    kept = {"excluded_embed_metadata_keys": ["place"]}
    given = [schema.TextNode(text=text, metadata={"place": place}, **kept) for place, text in enumerate(TEXTS)]
    nodes = [schema.NodeWithScore(node=node, score=0.5) for node in given]
    postprocessor = adapters.LlamaIndexPostprocessor(reranker=reranker, top_n=3)
    asked = asyncio.run(postprocessor.apostprocess_nodes(nodes, query_str=QUERY))
    for found in (postprocessor.postprocess_nodes(nodes, schema.QueryBundle(QUERY)), asked):
        same([(one.metadata["place"], one.score) for one in found], best, 3)
    assert {one.score for one in nodes} == {0.5} and postprocessor.postprocess_nodes([], query_str=QUERY) == []
    with pytest.raises(ValueError, match="query_bundle"):
        postprocessor.postprocess_nodes(nodes)


def test_haystack_ranker_runs_in_a_pipeline_and_is_saved_with_it(reranker, best, monkeypatch):
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    host = pytest.importorskip("haystack")
    given = [host.Document(id=f"d{place}", content=text, meta={"place": place}) for place, text in enumerate(TEXTS)]
    first, pipeline = adapters.HaystackRanker("minilm-reranker", top_k=2, settings={"max_length": 128}), host.Pipeline()
    pipeline.add_component("ranker", first)
    loaded = host.Pipeline.loads(pipeline.dumps(), allowed_modules=["ondevice.*"])
    for one in (pipeline, loaded):
        found = one.run({"ranker": {"query": QUERY, "documents": given}})["ranker"]["documents"]
        same([(one.meta["place"], one.score) for one in found], best, 2)
        assert [one.id for one in found] == [f"d{place}" for place, _ in best[:2]]
    opened = adapters.HaystackRanker(reranker, top_k=None)
    assert len(opened.run(QUERY, given)["documents"]) == len(TEXTS) and opened.run(QUERY, [])["documents"] == []
    assert len(opened.run(QUERY, given, top_k=1)["documents"]) == 1 and all(one.score is None for one in given)


def test_rerankers_ranker_gives_its_ranked_results(reranker, best):
    host = pytest.importorskip("rerankers.documents")
    from rerankers.models.ranker import BaseRanker

    ranker, names = adapters.RerankersRanker(reranker), [f"d{place}" for place in range(len(TEXTS))]
    assert isinstance(ranker, BaseRanker)
    for found in (ranker.rank(QUERY, TEXTS), asyncio.run(ranker.rank_async(QUERY, TEXTS))):
        same([(one.doc_id, one.score) for one in found], best, len(TEXTS))
    found = ranker.rank(query=QUERY, docs=TEXTS, doc_ids=names)
    assert [one.rank for one in found] == [1, 2, 3, 4, 5] and found.top_k(1)[0].doc_id == names[best[0][0]]
    assert type(ranker.score(QUERY, TEXTS[1])) is float
    assert ranker.score(QUERY, TEXTS[1]) == pytest.approx(found.get_score_by_docid("d1"), rel=1e-5)
    documents = [host.Document(text, name, {"of": name}) for text, name in zip(TEXTS, names, strict=True)]
    assert ranker.rank(QUERY, documents)[0].of == names[best[0][0]] and not ranker.rank(QUERY, []).results


def test_a_missing_host_is_one_sentence_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "haystack", None)
    monkeypatch.delitem(vars(adapters), "HaystackRanker", raising=False)
    with pytest.raises(ImportError, match=r"HaystackRanker .*\[hosts\].*haystack"):
        adapters.HaystackRanker  # noqa: B018
