"""How well a reranker orders its pools, against BM25 and the embedder, and how early its layers agree with its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ondevice.retrieval.pools import CANDIDATES, CandidatePool, Evaluation
from ondevice_training.reranking.metrics import MeanAndError, correlations, ndcg, precision, ranked

MARGIN = 0.05  # of nDCG@10 over the better of the two baselines: what makes a model a reranker


def mean_ndcg(scores: Sequence[np.ndarray], pools: Sequence[CandidatePool]) -> MeanAndError:
    """nDCG@10 of one score [candidates] a candidate, over pools."""
    return MeanAndError.from_values(_ndcgs(scores, pools))


def report(evaluation: Evaluation, scores: Sequence[np.ndarray]) -> dict[str, Any]:
    """Every metric as JSON holds it. scores: [layers, candidates] of each pool. Errors are standard errors."""
    pools = evaluation.pools
    rankers = {
        "model": [layers[-1] for layers in scores],
        "bm25": [pool.bm25 for pool in pools],
        "embedder": [pool.cosine for pool in pools],
    }
    metrics = {name: _metrics(ranker_scores, pools) for name, ranker_scores in rankers.items()}
    better = max(("bm25", "embedder"), key=lambda name: metrics[name]["ndcg@10"]["mean"])
    pairs = zip(*(_ndcgs(rankers[name], pools) for name in ("model", better)), strict=True)
    margin = MeanAndError.from_values([model - baseline for model, baseline in pairs])
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


def _metrics(scores: Sequence[np.ndarray], pools: Sequence[CandidatePool]) -> dict[str, dict[str, float]]:
    orders = [ranked(pool_scores, pool.relevant) for pool_scores, pool in zip(scores, pools, strict=True)]
    estimates = {"ndcg@10": MeanAndError.from_values([ndcg(order) for order in orders])}
    estimates |= {
        f"precision@{k}": MeanAndError.from_values([precision(order, k) for order in orders]) for k in (1, 5, 10)
    }
    return {name: asdict(estimate) for name, estimate in estimates.items()}


def _ndcgs(scores: Sequence[np.ndarray], pools: Sequence[CandidatePool]) -> list[float]:
    return [ndcg(ranked(pool_scores, pool.relevant)) for pool_scores, pool in zip(scores, pools, strict=True)]


def _kind(rankers: dict[str, list[np.ndarray]], pools: Sequence[CandidatePool], kind: str) -> dict[str, Any]:
    chosen = [index for index, pool in enumerate(pools) if pool.query.kind == kind]
    few = [pools[index] for index in chosen]
    return {name: asdict(mean_ndcg([scores[index] for index in chosen], few)) for name, scores in rankers.items()}


def _layers(scores: Sequence[np.ndarray], pools: Sequence[CandidatePool]) -> list[dict[str, Any]]:
    """For each layer the nDCG@10 and the agreement of its order with the last layer's."""
    by_layer = []
    for layer in range(len(scores[0])):
        pairs = np.array([correlations(layers[layer], layers[-1]) for layers in scores])
        estimates = {
            "ndcg@10": mean_ndcg([layers[layer] for layers in scores], pools),
            "spearman": MeanAndError.from_values(pairs[:, 0]),
            "kendall": MeanAndError.from_values(pairs[:, 1]),
        }
        by_layer.append({"layer": layer + 1, **{name: asdict(estimate) for name, estimate in estimates.items()}})
    return by_layer
