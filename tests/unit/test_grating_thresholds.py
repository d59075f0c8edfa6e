"""What a rule does to pools, and the paper's threshold from validation pools: the lowest that is safe."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scipy import stats
from tiny import random_pools

from ondevice_papers.grating.pools import Pool, kendall, measure, measured, replay, same_decisions, sweep, validation
from ondevice_papers.grating.pruning import ACCEPT, DROP, cluster_rule
from ondevice_papers.grating.thresholds import THRESHOLDS, curve, lowest

INF = np.inf


def drawn(pools: int, split: str = "validation") -> list[Pool]:
    """Those whose final score is high are relevant, more or less."""
    found, rng = random_pools(pools, 0, 2.0, split, n=12), np.random.default_rng(1)
    return [replace(pool, relevant=pool.scores[-1] + rng.normal(size=12) > 2) for pool in found]


def narrow_rule(threshold):
    """Drops what lies below a band of logits, as wide as the threshold, and decides nothing at the ends."""

    def verdicts(history, slots):
        least = np.sort(history[-1])[-slots] - (threshold if 0 < threshold < 1 else INF)
        return np.where(history[-1] < least, DROP, 0).astype(np.int8)

    return verdicts


@pytest.mark.parametrize("rule", [cluster_rule, narrow_rule, lambda t: narrow_rule(t), partial(narrow_rule)])
def test_a_sweep_has_the_outcome_of_each_threshold_whatever_the_rule_does_with_it(rule):
    distinct = []
    for pool in random_pools(12, 0, layers=8, n=20):
        outcomes = [replay(pool, 5, rule(threshold)) for threshold in THRESHOLDS]
        assert all(map(same_decisions, sweep(pool, 5, rule, THRESHOLDS), outcomes))
        distinct.append(len({outcome.layer.tobytes() for outcome in outcomes}))
    assert max(distinct) > 2


# Measures

TWO_LAYERS = np.array([[3.0, 2, 1, 0], [3, 0, 1, 2]])  # after the first layer 1 is second, after the last 3 is


def first_two(history, slots):
    return np.array([ACCEPT, ACCEPT, DROP, DROP], np.int8)


@pytest.mark.parametrize(
    ("relevant", "precision", "full"),
    [([1, 1, 0, 0], 1, 0.5), ([1, 1, 1, 1], 1, 1), ([0, 1, 0, 1], 0.5, 0.5), ([0, 0, 0, 1], 0, 1), ([0] * 4, 0, 0)],
)
def test_precision_is_out_of_k_or_of_the_relevant_where_these_are_fewer(relevant, precision, full):
    pool = Pool("q", "test", TWO_LAYERS, np.array(relevant, bool))
    found = measured(pool, 2, replay(pool, 2, first_two))
    assert (found.precision, found.full) == (precision, full)


def test_overlap_is_out_of_the_full_models_top_k_and_saved_of_all_work():
    pool = Pool("q", "test", TWO_LAYERS, np.zeros(4, bool))
    found = measured(pool, 2, replay(pool, 2, first_two))
    assert (found.overlap, found.saved) == (0.5, 0.5)
    assert measured(pool, 9, replay(pool, 9)).overlap == 1  # of 4


def test_pools_of_any_size_are_measured_in_their_order():
    pools = [Pool("q", "test", np.zeros((3, n)), np.arange(n) == relevant) for n, relevant in ((7, 0), (2, 1))]
    assert measure(pools, 1, None)["precision"].tolist() == [1, 0]


def test_kendalls_tau_counts_ties_and_is_0_where_nothing_is_ranked():
    one, other = np.random.default_rng(0).integers(0, 4, (2, 5, 9))
    right = [stats.kendalltau(*pair).statistic for pair in zip(one, other, strict=True)]
    assert kendall(one, other) == pytest.approx(right)
    assert kendall(np.ones(4), np.arange(4)) == 0


# The threshold


@pytest.mark.parametrize(
    ("values", "threshold"),
    [
        ([1, 0.99, 0.97, 0.99, 0.9], 4),  # 2 would meet it again, but 3 does not
        ([1, 0.97, 1, 1, 1], INF),
        ([1, 0.99, 0.98, 0.98, 0.97], 2),
        ([1, 0.99, 0.98, 0.98, 0.98], 1),
    ],
)
def test_the_lowest_threshold_is_above_the_first_that_misses(values, threshold):
    assert lowest((INF, 4, 3, 2, 1), values, 0.98) == threshold


def test_a_target_above_the_full_model_is_refused():
    with pytest.raises(ValueError, match=r"0\.4000.*0\.4500"):
        lowest((INF, 1), (0.4, 0.5), 0.45)


@pytest.mark.parametrize("exact_order", [False, True])
def test_the_lowest_threshold_meets_its_target_on_its_pools_and_the_next_one_does_not(exact_order):
    pools = drawn(30)
    target = float(measure(pools, 3, None)["precision"].mean()) - 0.02
    found = lowest(THRESHOLDS, curve(pools, 3, exact_order=exact_order)["precision"].mean(1).tolist(), target)
    after = THRESHOLDS[THRESHOLDS.index(found) + 1]
    assert measure(pools, 3, cluster_rule(found), exact_order)["precision"].mean() >= target - 1e-12
    assert measure(pools, 3, cluster_rule(after), exact_order)["precision"].mean() < target
    assert measure(pools, 3, cluster_rule(found), exact_order)["saved"].mean() > 0.1


@pytest.mark.parametrize(("pools", "which"), [(drawn(3) + drawn(1, split="test"), "test"), ([], "none")])
def test_only_validation_pools_are_calibrated_on(pools, which):
    with pytest.raises(ValueError, match=which):
        validation(pools)
