"""Deciding on scores: exact clusters, the decision after a layer, the worked example, and what becomes of a pool."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy.special import expit, logit
from tiny import random_pools

from ondevice import assets
from ondevice_papers.grating.clustering import kmeans
from ondevice_papers.grating.pools import Pool, replay
from ondevice_papers.grating.pruning import (
    ACCEPT,
    DEFER,
    DROP,
    PoolOutcome,
    around_boundary,
    cluster_rule,
    dispersion,
    ranking,
)

ALWAYS = cluster_rule(-np.inf)


def pool(scores: np.ndarray) -> Pool:
    return Pool("q", "test", scores, np.zeros(scores.shape[1], bool))


# Clusters


def brute_force(values: np.ndarray, k: int) -> float:
    ordered = np.sort(values)
    cuts = (np.split(ordered, cut) for cut in combinations(range(1, len(values)), k - 1))
    return min(sum(((part - part.mean()) ** 2).sum() for part in parts) for parts in cuts)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_clusters_are_the_optimum_of_all_partitions(seed, k):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=9) if seed % 2 else rng.integers(0, 6, 9).astype(float)
    labels = kmeans(values, k)
    assert sorted(set(labels)) == list(range(min(k, len(np.unique(values)))))
    within = sum(((part - part.mean()) ** 2).sum() for part in (values[labels == one] for one in set(labels)))
    assert within == pytest.approx(brute_force(values, labels.max() + 1), abs=1e-9)


@pytest.mark.parametrize(
    ("values", "labels"),
    [([0.1, 0.9, 0.5, 0.9, 0.1, 0.52], [2, 0, 1, 0, 2, 1]), ([1.0, 2.0, 1.0], [1, 0, 1]), ([5.0], [0])],
)
def test_labels_fall_with_the_value_and_equal_values_share_one(values, labels):
    assert kmeans(np.array(values), 3).tolist() == labels


def test_a_common_offset_does_not_change_clusters():
    values = np.random.default_rng(1).normal(size=40)
    np.testing.assert_array_equal(kmeans(values + 1e6, 3), kmeans(values, 3))


# The decision after a layer


def test_dispersion_is_the_standard_deviation_over_the_mean():
    assert dispersion(np.array([0.2, 0.4, 0.6])) == pytest.approx(np.sqrt(0.08 / 3) / 0.4)
    assert dispersion(np.zeros(3)) == 0


def test_a_decision_needs_more_than_the_threshold():
    scores = logit(np.array([[0.9, 0.5, 0.1]]))
    at = dispersion(expit(scores[0]))
    assert cluster_rule(at)(scores, 1).tolist() == [DEFER] * 3
    assert cluster_rule(np.nextafter(at, 0))(scores, 1).tolist() == [DEFER, DROP, DROP]


def test_above_the_boundary_is_accepted_and_below_it_dropped():
    labels, scores = np.array([2, 0, 1, 1, 0, 2]), np.array([1.0, 9, 5, 4, 8, 2])
    assert around_boundary(labels, scores, 3).tolist() == [DROP, ACCEPT, DEFER, DEFER, ACCEPT, DROP]
    assert around_boundary(labels, scores, 2).tolist() == [DROP, DEFER, DROP, DROP, DEFER, DROP]


def test_the_papers_example_is_decided_as_it_says():
    """Section 4.5: 20 candidates and K = 10; two of each, then nothing, then the deferred fill the places."""
    rank = np.arange(20)
    p = 0.5 + 0.002 * np.arange(1, 13)[:, None] * (9.5 - rank) / 9.5  # the paper prints no scores
    p[8:, :2] = 0.97
    p[8:, 18:] = 0.03
    p[10:, 2:10] = 0.9 - 0.002 * rank[2:10]
    p[10:, 10:18] = 0.2 - 0.002 * rank[10:18]
    outcome = replay(pool(logit(p)), 10, cluster_rule(0.3))
    assert np.flatnonzero(outcome.kept).tolist() == list(range(10))
    for step in assets.paper_table("grating", "worked_example").itertuples():
        now = outcome.layer == step.after_layer
        assert outcome.active[step.after_layer - 1] == step.active
        assert (len(outcome.active) == step.after_layer) == (step.stops == "yes")
        if step.stops == "no":
            assert ((now & outcome.kept).sum(), (now & ~outcome.kept).sum()) == (step.selected, step.dropped)


# What becomes of a pool


def test_an_outcome_by_hand():
    history = np.array([[4.0, 1, 3, 5], [2, np.nan, 6, np.nan], [np.nan] * 4])
    found = PoolOutcome(history, np.array([True, False, True, True]), np.array([2, 1, 2, 1]))
    assert found.active.tolist() == [4, 2]
    assert found.saved == 0.5
    assert found.score.tolist() == [2, 1, 6, 5]
    assert found.chosen.tolist() == [3, 2, 0]  # decided first, then by score


@pytest.mark.parametrize("exact_order", [False, True])
@pytest.mark.parametrize("rule", [None, cluster_rule(np.inf)])
def test_without_pruning_the_models_own_top_k_is_chosen_in_order(rule, exact_order):
    (given,) = random_pools(1, 3)
    outcome = replay(given, 5, rule, exact_order)
    assert outcome.chosen.tolist() == ranking(given.scores[-1])[:5].tolist()
    np.testing.assert_array_equal(outcome.history, given.scores)
    assert outcome.saved == 0


@pytest.mark.parametrize("exact_order", [False, True])
def test_equal_scores_cannot_be_decided_before_the_end_and_go_by_position(exact_order):
    outcome = replay(pool(np.zeros((3, 6))), 2, ALWAYS, exact_order)
    assert (outcome.chosen.tolist(), outcome.saved) == ([0, 1], 0)
