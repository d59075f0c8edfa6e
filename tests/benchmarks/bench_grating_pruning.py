"""Pruning rules on recorded scores: what each saves, chosen on validation pools, reported on test pools.

A recording is scores_{model}_{split}.npz with `scores` [pools, layers, N] and `relevance` [pools, N], from
`ondevice.retrieval.layer_scores.pool_scores`. Savings are of layer-candidates; they do not depend on the
machine. Intervals are 95 % bootstrap over test pools.

Run: python tests/benchmarks/bench_grating_pruning.py FOLDER [--prefix grating_scores] [--models ...] [--k 1 5 10]
"""
# ruff: noqa: E402

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before numpy is imported

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np

from ondevice.grating.calibration import calibrate, curve, intervals
from ondevice.grating.clustering import kmeans, sum_of_squares
from ondevice.grating.guarantee import certify, choose, fit, guarantee
from ondevice.grating.pruning import ClusterRule, Rule, around_boundary
from ondevice.grating.replay import Pools, measure

MODELS = {"pydocs-reranker": "last-layer loss", "pydocs-reranker-deep": "deep supervision", "minilm-reranker": "BERT"}
RULES = {
    "paper: CV of probabilities": ClusterRule(np.inf),
    "std of logits": ClusterRule(np.inf, "std", on="logit"),
    "IQR of logits": ClusterRule(np.inf, "iqr", on="logit"),
}
OVERLAP, POINT, SAVED = 0.98, 0.01, 0.35  # the bars
SAFETY = 0.25  # of the pools, which set the grid of thresholds to certify on the others


def compare(valid: Pools, test: Pools, k: int) -> None:
    """Print each rule with the threshold that its target sets."""
    for name, rule in RULES.items():
        found = curve(valid, k, rule)
        for target, value in (("overlap", OVERLAP), ("precision", found.full - POINT)):
            tau = calibrate(found, value, target)
            show(f"{name}, {target}", f"tau {tau:.3f}", test, k, dataclasses.replace(rule, threshold=tau))
    chance = choose(valid, k, OVERLAP)
    show("margin, overlap", f"c {chance:.4f}", test, k, fit(valid, k).rule(chance) if chance else None)


def promised(valid: Pools, test: Pools, k: int) -> None:
    """Print certified rules: margins, and the paper's rule on a grid of thresholds that other pools set."""
    order = np.random.default_rng(0).permutation(len(valid))
    first, rest = (valid.take(part) for part in np.split(order, [round(SAFETY * len(valid))]))
    for recall in (0.99, 0.98, 0.95):
        found = guarantee(valid, k, recall)
        show(f"margin, certified {recall}", f"c {found.chance:.4f}", test, k, found.rule)
    for name, rule in list(RULES.items())[:2]:
        taken = curve(first, k, rule).thresholds
        grid = np.unique(np.quantile(taken[np.isfinite(taken)], np.linspace(0, 1, 60)))[::-1]
        rules = [dataclasses.replace(rule, threshold=float(tau)) for tau in grid]
        for recall in (0.99, 0.98, 0.95):
            last, _ = certify(rules, rest, k, recall)
            tau = grid[last] if last >= 0 else np.inf
            show(f"{name}, certified {recall}", f"tau {tau:.3f}", test, k, rules[last] if last >= 0 else None)


def show(name: str, setting: str, test: Pools, k: int, rule: Rule | None) -> None:
    """Print a row."""
    found = intervals(measure(test, k, rule))
    saved, overlap, change = (found[column] for column in ("saved", "overlap", "change"))
    met = saved.mean >= SAVED and overlap.mean >= OVERLAP and abs(change.mean) <= POINT
    print(
        f"  {k:>2} {name:<46}{setting:>11}  saved {saved.mean:6.1%} [{saved.low:5.1%}, {saved.high:5.1%}]"
        f"  overlap {overlap.mean:.3f} [{overlap.low:.3f}, {overlap.high:.3f}]"
        f"  P@K {100 * change.mean:+.2f} [{100 * change.low:+.2f}, {100 * change.high:+.2f}]"
        f"  {'bars met' if met else ''}",
        flush=True,
    )


def clusters(test: Pools, k: int = 5, seeds: int = 3) -> None:
    """Print how often K-means with one start misses the optimum, or decides otherwise, and the time of either."""
    from sklearn.cluster import KMeans

    rule, worse, other, unstable, times = ClusterRule(0), 0, 0, 0, [0.0, 0.0]
    cases = [scores for pool in range(0, len(test), 4) for scores in test.pool(pool)[5:-1:3]]
    for logits in cases:
        start = time.process_time()
        exact = rule.partition(logits)
        times[0] += time.process_time() - start
        p = 1 / (1 + np.exp(-logits))
        verdicts = []
        for seed in range(seeds):
            start = time.process_time()
            raw = KMeans(3, n_init=1, random_state=seed).fit(p[:, None])
            times[1] += (time.process_time() - start) / seeds
            rank = np.argsort(np.argsort(-raw.cluster_centers_[:, 0]))
            verdicts.append(around_boundary(rank[raw.labels_], logits, k))
        least = sum_of_squares(p, exact)
        worse += raw.inertia_ > least * (1 + 1e-6) + 1e-12
        other += bool((verdicts[-1] != around_boundary(exact, logits, k)).any())
        unstable += any((one != verdicts[0]).any() for one in verdicts)
    shares = [f"{count / len(cases):.0%}" for count in (worse, other, unstable)]
    exact_us, lloyd_us = (1e6 * seconds / len(cases) for seconds in times)
    print(f"  k-means with one start, {len(cases)} cases: not optimal {shares[0]}")
    print(f"  other verdicts than exact {shares[1]}; verdicts differ among {seeds} seeds {shares[2]}")
    print(f"  CPU time: exact {exact_us:.0f} us, k-means {lloyd_us:.0f} us")
    for size in (20, 200, 2000, 10_000):
        values = np.random.default_rng(0).normal(size=size)
        start = time.process_time()
        kmeans(values, 3)
        print(f"  exact, {size} values: {1e3 * (time.process_time() - start):.2f} ms")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prefix", default="scores")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--k", type=int, nargs="+", default=[1, 5, 10])
    arguments = parser.parse_args()
    for model in arguments.models:
        both = []
        for split in ("validation", "test"):
            with np.load(arguments.folder / f"{arguments.prefix}_{model}_{split}.npz") as kept:
                both.append(Pools(kept["scores"], kept["relevance"]))
        print(f"{model} ({MODELS.get(model, '')}): {len(both[0])} validation pools, {len(both[1])} test pools")
        for k in arguments.k:
            compare(*both, k)
            promised(*both, k)
        clusters(both[1])


if __name__ == "__main__":
    main()
