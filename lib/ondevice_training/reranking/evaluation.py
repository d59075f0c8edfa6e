"""How well a reranker orders its pools, against BM25 and the embedder, and how early its layers agree with its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ondevice.retrieval.pools import CANDIDATES, Evaluation, Pool
from ondevice_training.reranking.metrics import Estimate, correlations, ndcg, precision, ranked

MARGIN = 0.05  # of nDCG@10 over the better of the two baselines: what makes a model a reranker


def mean_ndcg(scores: Sequence[np.ndarray], pools: Sequence[Pool]) -> Estimate:
    """nDCG@10 of one score [candidates] a candidate, over pools."""
    return Estimate.of(_ndcgs(scores, pools))


def report(evaluation: Evaluation, scores: Sequence[np.ndarray]) -> dict[str, Any]:
    """Every metric as JSON holds it. scores: [layers, candidates] of each pool. Errors are standard errors."""
    pools = evaluation.pools
    rankers = {
        "model": [one[-1] for one in scores],
        "bm25": [pool.bm25 for pool in pools],
        "embedder": [pool.cosine for pool in pools],
    }
    metrics = {name: _metrics(found, pools) for name, found in rankers.items()}
    better = max(("bm25", "embedder"), key=lambda name: metrics[name]["ndcg@10"]["mean"])
    pairs = zip(*(_ndcgs(rankers[name], pools) for name in ("model", better)), strict=True)
    margin = Estimate.of([ours - theirs for ours, theirs in pairs])
    return {
        "queries": len(pools),
        "dropped": evaluation.dropped,
        "kinds": dict(Counter(pool.query.kind for pool in pools)),
        "candidates": CANDIDATES,
        "relevant_per_query": float(np.mean([pool.relevant.sum() for pool in pools])),
        "metrics": metrics,
        "better_baseline": better,
        "margin": asdict(margin),
        "passes": margin.mean >= MARGIN,
        "by_kind": {kind: _kind(rankers, pools, kind) for kind in sorted({pool.query.kind for pool in pools})},
        "layers": _layers(scores, pools),
    }


def _metrics(scores: Sequence[np.ndarray], pools: Sequence[Pool]) -> dict[str, dict[str, float]]:
    orders = [ranked(one, pool.relevant) for one, pool in zip(scores, pools, strict=True)]
    found = {"ndcg@10": Estimate.of([ndcg(order) for order in orders])}
    found |= {f"precision@{k}": Estimate.of([precision(order, k) for order in orders]) for k in (1, 5, 10)}
    return {name: asdict(estimate) for name, estimate in found.items()}


def _ndcgs(scores: Sequence[np.ndarray], pools: Sequence[Pool]) -> list[float]:
    return [ndcg(ranked(one, pool.relevant)) for one, pool in zip(scores, pools, strict=True)]


def _kind(rankers: dict[str, list[np.ndarray]], pools: Sequence[Pool], kind: str) -> dict[str, Any]:
    chosen = [index for index, pool in enumerate(pools) if pool.query.kind == kind]
    few = [pools[index] for index in chosen]
    return {name: asdict(mean_ndcg([scores[index] for index in chosen], few)) for name, scores in rankers.items()}


def _layers(scores: Sequence[np.ndarray], pools: Sequence[Pool]) -> list[dict[str, Any]]:
    """For each layer the nDCG@10 and the agreement of its order with the last layer's."""
    found = []
    for layer in range(len(scores[0])):
        pairs = np.array([correlations(one[layer], one[-1]) for one in scores])
        estimates = {
            "ndcg@10": mean_ndcg([one[layer] for one in scores], pools),
            "spearman": Estimate.of(pairs[:, 0]),
            "kendall": Estimate.of(pairs[:, 1]),
        }
        found.append({"layer": layer + 1, **{name: asdict(estimate) for name, estimate in estimates.items()}})
    return found
