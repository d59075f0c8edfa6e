"""Pruning with a promise: the test behind it, the model of errors, and what is certified on which pools."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from tiny import random_pools

from ondevice_papers.grating import margins
from ondevice_papers.grating.margins import (
    CHANCES,
    ErrorModel,
    MarginRule,
    certify,
    fit,
    gaps,
    last_certified,
    p_value,
    parted,
    require,
)
from ondevice_papers.grating.pools import measure
from ondevice_papers.grating.pruning import ACCEPT, DEFER, DROP

K = 3


# The test


@pytest.mark.parametrize(
    ("losses", "risk", "binary", "p"),
    [
        ([0.0] * 10 + [0.1], 0.1, False, 0.9**10),  # a loss as large as the risk says nothing
        ([0.0] * 10 + [0.5], 0.1, False, 0.9**11 / 0.5),
        ([0.0] * 500 + [1.0], 0.01, False, 1),  # a total loss ends a bet
        ([0.0] * 9 + [1.0], 0.3, True, 0.7**10 + 10 * 0.3 * 0.7**9),
    ],
)
def test_p_values_by_hand(losses, risk, binary, p):
    assert p_value(np.array(losses), risk, binary) == pytest.approx(p)


@pytest.mark.parametrize(("pools", "risk"), [(1, 0.3), (30, 0.1), (120, 0.02)])
def test_the_binomial_level_is_exact(pools, risk):
    p = np.array([p_value(np.arange(pools) < errors, risk, binary=True) for errors in range(pools + 1)])
    chance = stats.binom.pmf(np.arange(pools + 1), pools, risk)
    for level in (0.01, 0.05, 0.5):
        assert chance[p <= level].sum() <= level + 1e-12


def test_settings_are_tested_up_to_the_first_failure():
    good, bad = np.zeros(60), np.full(60, 0.2)
    assert last_certified([good, good, bad, good], 0.1, 0.95) == (1, pytest.approx(0.9**60), 0)
    assert last_certified(iter([bad, good]), 0.1, 0.95) == (-1, 1, 0)
    assert last_certified([good, np.append(good[1:], 0.5)], 0.1, 0.95)[::2] == (1, pytest.approx(0.5 / 60))


@pytest.mark.parametrize(("recall", "confidence", "certifying", "asked"), [(0.99, 0.95, 299, 399), (0.9, 0.9, 22, 30)])
def test_as_many_queries_are_asked_for_as_no_error_among_them_would_certify(recall, confidence, certifying, asked):
    require(certifying, recall, confidence)
    assert p_value(np.zeros(certifying), 1 - recall) <= 1 - confidence < p_value(np.zeros(certifying - 1), 1 - recall)
    message = f" {asked} .* {certifying} .* 20 "
    with pytest.raises(ValueError, match=message):
        require(20, recall, confidence)
    assert len(parted(range(asked))[1]) == certifying


@pytest.mark.parametrize(
    ("values", "name"), [((1.0, 0.9), "recall"), ((np.nan, 0.9), "recall"), ((0.9, 0), "confidence")]
)
def test_promises_that_cannot_be_kept_are_refused(values, name):
    with pytest.raises(ValueError, match=name):
        require(1000, *values)


# The model of errors


def test_margins_are_signed_distances_to_the_boundary():
    scores = np.array([1.0, 5.0, 3.0, 4.0])
    assert gaps(scores, 2).tolist() == [-3.0, 2.0, -1.0, 1.0]
    assert gaps(np.zeros(3), 1).tolist() == [0, 0, 0]
    rule = MarginRule(np.array([[1.0, 0], [0, 1.0]]), np.array([1.5, np.inf]))
    assert rule(scores[None], 2).tolist() == [DROP, ACCEPT, DEFER, DEFER]
    assert rule(np.stack([scores, scores]), 2).tolist() == [DEFER] * 4


def test_a_margin_is_where_the_chance_of_an_error_is_the_one_asked_for():
    model = ErrorModel(np.eye(3), np.array([0.5, 9, 0]), np.array([2.0, 1, -1]))
    margin = model.rule(0.1).margins[0]
    assert 1 / (1 + np.exp(0.5 + 2 * margin)) == pytest.approx(0.1)
    assert model.rule(0.1).margins[1:].tolist() == [0, np.inf]  # sure at once; a distance that says nothing


def test_a_model_is_fitted_on_validation_pools_of_more_than_k():
    with pytest.raises(ValueError, match=r"validation.*test"):
        fit(random_pools(9, 0, split="test"), K)
    with pytest.raises(ValueError, match="K = 8"):
        fit(random_pools(9, 0), 8)
    small = random_pools(5, 1, n=K)
    assert np.array_equal(fit(random_pools(9, 0) + small, K).weights, fit(random_pools(9, 0), K).weights)


# The certificate


@pytest.mark.parametrize("exact_order", [False, True])
def test_what_is_certified_is_said_of_the_pools_that_nothing_was_fitted_on(exact_order):
    pools = random_pools(120, 2)
    found = certify(pools, K, 0.9, exact_order=exact_order)
    fitted, certifying = parted(pools)
    losses = 1 - measure(certifying, K, found.rule, exact_order)["overlap"]
    assert {pool.name for pool in fitted}.isdisjoint(pool.name for pool in certifying)
    assert (len(fitted), len(certifying)) == (30, found.tested)
    assert (found.recall, found.p_value) == pytest.approx((1 - losses.mean(), p_value(losses, 0.1)))
    assert found.p_value <= 0.05
    assert np.array_equal(found.rule.margins, fit(fitted, K).rule(found.chance).margins)
    after = fit(fitted, K).rule(CHANCES[CHANCES.index(found.chance) + 1])
    assert p_value(1 - measure(certifying, K, after, exact_order)["overlap"], 0.1) > 0.05


def test_where_nothing_can_be_certified_nothing_is_pruned(monkeypatch):
    pools = random_pools(60, 3)
    monkeypatch.setattr(margins, "CHANCES", (0.49999,))
    for pool in pools:
        pool.scores[:-1] = -pool.scores[-1] + np.random.default_rng(0).normal(0, 9, pool.scores[:-1].shape)
    found = certify(pools, K, 0.93)
    assert (found.rule, found.chance, found.p_value, found.tested, found.recall) == (None, 0, 1, 45, 1)


def test_too_few_pools_and_test_pools_are_not_certified():
    with pytest.raises(ValueError, match=" 199 "):
        certify(random_pools(190, 0), K)
    with pytest.raises(ValueError, match="test"):
        certify(random_pools(60, 0, split="test"), K, 0.9)
