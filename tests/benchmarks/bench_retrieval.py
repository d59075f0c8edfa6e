"""Search on passages of the documentation corpus (test split): times, recall of approximate indexes, and which is best.

Every n-th document is cut into passages of 64 tokens, with titles. Queries are `corpus.queries` of the same documents
that some passage answers. A summary query quotes the first passage of its document, so that passage is left out of its
list; what counts as relevant is a later one. Vectors come from the cache after the first run. All on one thread: on a
busy machine two of them wait for each other.

Run: python tests/benchmarks/bench_retrieval.py [--passages N] [--scaled N]
"""
# ruff: noqa: E402

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before numpy is imported

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ondevice import corpus, retrieval
from ondevice.retrieval import DenseIndex, Hybrid, SparseIndex

K = 10
TIMED = 100  # queries timed one by one


def sample(count: int) -> tuple[list[corpus.Passage], list[corpus.Query], list[set[int]], list[int]]:
    """Passages; queries; the positions that answer each; the position to leave out of each one's list, or -1."""
    documents = corpus.documents("test")
    everything = len(corpus.passages(documents, corpus.tokenizer()))
    chosen = documents[:: max(1, round(everything / count))]
    passages = corpus.passages(chosen, corpus.tokenizer())
    places: dict[str, list[int]] = {}
    for index, passage in enumerate(passages):
        places.setdefault(passage.title, []).append(index)
    asked, answers, quoted = [], [], []
    for query in corpus.queries(chosen):
        relevant = {index for index in places.get(query.name, []) if query.relevant(passages[index])}
        if relevant:
            asked.append(query)
            answers.append(relevant)
            quoted.append(places[query.name][0] if query.kind == "summary" else -1)
    return passages, asked, answers, quoted


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    made = run()
    return made, time.perf_counter() - start


def each(run: Callable[[Any], object], queries: Sequence[Any]) -> str:
    """Median and 95 % quantile of the time of a query, in ms."""
    run(queries[0])
    found = [1000 * timed(lambda query=query: run(query))[1] for query in queries[:TIMED]]
    return f"{np.median(found):8.3f} {np.quantile(found, 0.95):8.3f}"


def times(title: str, vectors: np.ndarray, asked: np.ndarray, encoder: retrieval.Embedder) -> None:
    """Build and query times of each kind of dense index, and recall@10 against the exact one."""
    print(f"\n{title}\n{'index':8} {'build s':>8} {'ms/query':>8} {'95 %':>8} {'recall@10':>10}")
    exact: set[tuple[int, int]] = set()
    for kind in retrieval.KINDS:
        index, seconds = timed(lambda kind=kind: DenseIndex.build(vectors, encoder, kind))
        _, ids = index.nearest(asked, K)
        found = {(row, index) for row, line in enumerate(ids.tolist()) for index in line}
        exact = exact or found
        one = each(lambda vector, index=index: index.nearest(vector[None], K), list(asked))
        print(f"{kind:8} {seconds:8.2f} {one} {len(found & exact) / len(exact):10.3f}")


def scaled(vectors: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """[count, size]: the vectors with noise, at cosines of about 0.8 to where they came from."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(count, vectors.shape[1])).astype(np.float32) / vectors.shape[1] ** 0.5
    made = vectors[rng.integers(0, len(vectors), count)] + 0.75 * noise
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def reciprocal_ranks(ids: np.ndarray, answers: Sequence[set[int]], quoted: Sequence[int]) -> np.ndarray:
    """[q] 1 / rank of the first relevant position among the best K, the quoted one left out; 0 without one."""
    found = np.zeros(len(ids))
    for row, (line, relevant, left_out) in enumerate(zip(ids.tolist(), answers, quoted, strict=True)):
        kept = [index for index in line if index != left_out][:K]
        found[row] = max((1 / rank for rank, index in enumerate(kept, 1) if index in relevant), default=0)
    return found


def quality(indexes: dict[str, Any], asked: Sequence[corpus.Query], answers: list[set[int]], quoted: list[int]) -> None:
    """MRR@10 and recall@10 (a relevant passage among the best 10), with standard errors, by kind of query."""
    kinds = np.array([query.kind for query in asked])
    groups = [(kind, kinds == kind) for kind in ("parameter", "summary")] + [("all", kinds != "")]
    print("\nWhich finds the relevant passage\n" + " " * 20, end="")
    print("".join(f"{f'{name} ({mask.sum()})':>34}" for name, mask in groups))
    print(f"{'':20}" + f"{'MRR@10':>18}{'recall@10':>16}" * len(groups))
    for name, index in indexes.items():
        ranks = reciprocal_ranks(index.search([query.text for query in asked], K + 1)[1], answers, quoted)
        cells = [cell for _, mask in groups for cell in (ranks[mask], ranks[mask] > 0)]
        print(f"{name:20}" + "".join(f"{c.mean():10.3f} ± {c.std() / len(c) ** 0.5:.3f}" for c in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--passages", type=int, default=1500)
    parser.add_argument("--scaled", type=int, default=20_000, help="noisy copies of the vectors for a larger pool")
    options = parser.parse_args()
    passages, asked, answers, quoted = sample(options.passages)
    texts = [query.text for query in asked]
    encoder, loading = timed(retrieval.embedder)
    print(f"{len(passages)} passages, {len(asked)} queries; {platform.machine()}, {torch.get_num_threads()} thread")
    vectors, seconds = timed(lambda: retrieval.embeddings(passages, encoder))
    queries, _ = timed(lambda: retrieval.embeddings(texts, encoder))
    _, fresh = timed(lambda: encoder(retrieval.plain(passages[:100])))
    print(f"embedder: loaded in {loading:.1f} s; {100 / fresh:.0f} passages/s; all, or from cache, {seconds:.1f} s")
    sparse, building = timed(lambda: SparseIndex.build(passages))
    print(f"{'':8} {'build s':>8} {'ms/query':>8} {'95 %':>8}")
    print(f"{'embed':8} {'':8} {each(lambda text: encoder([text]), texts)}")
    print(f"{'bm25':8} {building:8.2f} {each(lambda text: sparse.search([text], K), texts)}")
    times(f"Dense indexes, {len(passages)} passages (given the query's vector)", vectors, queries, encoder)
    times(f"The same, {options.scaled} noisy copies", scaled(vectors, options.scaled), queries, encoder)
    dense = DenseIndex.build(vectors, encoder)
    named = {"dense": dense, "sparse": sparse, "hybrid, ranks": Hybrid(dense, sparse)}
    weighted = {f"hybrid, scores {w}": Hybrid(dense, sparse, "scores", w) for w in (0.3, 0.5, 0.7)}
    quality(named | weighted, asked, answers, quoted)


if __name__ == "__main__":
    main()
