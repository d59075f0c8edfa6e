"""The promise of a recall holds in as many draws of validation pools as it says, and what it rests on is needed."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ondevice.grating.guarantee import (
    CHANCES,
    MarginRule,
    certify,
    choose,
    fit,
    gaps,
    guarantee,
    last_certified,
    p_value,
    require,
)
from ondevice.grating.pruning import ACCEPT, DEFER, DROP, ClusterRule, ranking
from ondevice.grating.replay import Pools, measure, replay

K, DRAWS = 3, 400


def drawn(pools: int, seed: int, noise: float = 1.0, layers: int = 6, n: int = 10) -> Pools:
    """Exchangeable pools; some are harder, and one layer's error stays for the next ones."""
    rng = np.random.default_rng(seed)
    final = rng.normal(0, 2, (pools, 1, n))
    errors = noise * rng.gamma(2, 0.5, (pools, 1, 1)) * rng.normal(size=(pools, layers, n)).cumsum(1)[:, ::-1]
    errors = errors * (np.arange(layers)[::-1] / layers)[:, None] / 2
    return Pools(final + errors, np.zeros((pools, n)))


@cache
def losses() -> np.ndarray:
    """[settings, pools] of a population, by rules that were fitted on other pools."""
    model, population = fit(drawn(60, 1), K), drawn(400, 2)
    return np.array([1 - measure(population, K, model.rule(chance)).overlap for chance in np.geomspace(0.002, 0.4, 8)])


def risk() -> float:
    """Just below what one of the settings loses: the hardest promise to keep."""
    return 0.97 * float(losses()[5].mean())


def broken(choice: str, pools: int = 150) -> float:
    """Share of draws of validation pools after which the population's mean loss is above the promised one."""
    found, rng, count = losses(), np.random.default_rng(3), 0
    for _ in range(DRAWS):
        sample = found[:, rng.integers(found.shape[1], size=pools)]
        if choice == "certified":
            last, _ = last_certified(sample, risk(), 0.95)
        else:  # the most aggressive that looks good enough
            last = int(np.flatnonzero(sample.mean(1) <= risk()).max(initial=-1))
        count += last >= 0 and found[last].mean() > risk()
    return count / DRAWS


def test_the_promise_is_broken_in_at_most_one_draw_of_twenty():
    assert broken("certified") <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / DRAWS)


def test_without_the_test_the_promise_is_broken_far_more_often():
    assert broken("looks good") > 0.2


def test_the_certificate_is_not_empty():
    last, p = last_certified(losses()[:, :150], risk(), 0.95)
    assert last >= 2
    assert 0 < p <= 0.05


@settings(deadline=None, max_examples=15, derandomize=True)
@given(st.integers(2, 10), st.floats(0.01, 0.1), st.integers(20, 300), st.floats(0, 1), st.integers(0, 2**16))
def test_p_values_are_valid_where_the_mean_is_exactly_the_risk(k, risk, pools, skew, seed):
    """Losses are 0, 1 / k or a larger step, of mean `risk`: p is below delta in at most a share delta of draws."""
    high = math.ceil(1 + skew * (k - 1)) / k
    rng, draws = np.random.default_rng(seed), 1000
    samples = high * (rng.random((draws, pools)) < risk / high)
    p = np.array([p_value(row, risk) for row in samples])
    for delta in (0.05, 0.2):
        assert np.mean(p <= delta) <= delta + 4 * math.sqrt(delta * (1 - delta) / draws)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 120), st.floats(0.005, 0.5))
def test_the_binomial_p_value_is_valid_exactly(pools, risk):
    p = np.array([p_value(np.arange(pools) < errors, risk, binary=True) for errors in range(pools + 1)])
    chance = stats.binom.pmf(np.arange(pools + 1), pools, risk)
    for delta in (0.01, 0.05, 0.5):
        assert chance[p <= delta].sum() <= delta + 1e-12


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 400), st.floats(0.005, 0.5))
def test_without_a_loss_both_tests_agree(pools, risk):
    zeros = np.zeros(pools)
    assert p_value(zeros, risk) == pytest.approx((1 - risk) ** pools)
    assert p_value(zeros, risk, binary=True) == pytest.approx((1 - risk) ** pools)


def test_one_total_loss_ends_a_bet():
    assert p_value([0.0] * 500 + [1.0], 0.01) == 1


def test_a_promise_does_not_follow_for_pools_of_another_kind():
    found = guarantee(drawn(120, 4), K, recall=0.9, fitted=0.3)
    assert found.rule is not None
    assert measure(drawn(120, 5), K, found.rule).overlap.mean() >= 0.9
    assert measure(drawn(120, 5, noise=8.0), K, found.rule).overlap.mean() < 0.9


@settings(deadline=None, max_examples=15, derandomize=True)
@given(st.integers(0, 2**16), st.integers(1, 8), st.sampled_from(CHANCES), st.booleans())
def test_margin_rules_leave_as_many_as_there_are_places(seed, k, chance, exact_order):
    pools = drawn(12, seed)
    rule = fit(pools, k).rule(chance)
    for index in range(3):
        outcome = replay(pools.pool(index), k, rule, exact_order)
        assert len(set(outcome.chosen)) == k
        assert outcome.work <= pools.pool(index).size


def test_margins_are_signed_distances_to_the_boundary():
    scores = np.array([1.0, 5.0, 3.0, 4.0])
    assert gaps(scores, 2).tolist() == [-3.0, 2.0, -1.0, 1.0]
    rule = MarginRule(np.array([[1.0, 0], [0, 1.0]]), np.array([1.5, np.inf]))
    assert rule.verdicts(scores[None], 2).tolist() == [DROP, ACCEPT, DEFER, DEFER]
    assert not rule.verdicts(np.stack([scores, scores]), 2).any()
    with pytest.raises(ValueError, match="3 layers"):
        rule.verdicts(np.zeros((3, 4)), 2)


def test_a_larger_chance_has_smaller_margins_and_decides_more():
    model = fit(drawn(80, 6), K)
    margins = np.array([model.rule(chance).margins for chance in CHANCES])
    assert (np.diff(margins, axis=0) <= 0).all()
    saved = [measure(drawn(30, 7), K, model.rule(chance)).saved.mean() for chance in (0.001, 0.05, 0.4)]
    assert saved[0] < saved[1] < saved[2]


def test_the_model_of_errors_is_calibrated_where_the_data_follow_it():
    """On other pools, of those whose stated chance of an error is near 10 %, about 10 % are errors."""
    model, others = fit(drawn(300, 8), K), drawn(300, 9)
    stated, wrong = [], []
    for scores in map(others.pool, range(len(others))):
        found = gaps(model.weights[2, :3] @ scores[:3], K)
        stated.append(1 / (1 + np.exp(model.intercepts[2] + model.slopes[2] * np.abs(found))))
        wrong.append((found > 0) != (gaps(scores[-1], K) > 0))
    near = np.abs(np.concatenate(stated) - 0.1) < 0.04
    assert near.sum() > 200
    assert np.concatenate(wrong)[near].mean() == pytest.approx(0.1, abs=0.05)


def test_layers_that_say_nothing_decide_nothing():
    pools = drawn(60, 10)
    scores = pools.scores.copy()
    scores[:, :2] = 0.5
    margins = fit(Pools(scores, pools.relevance), K).rule(0.2).margins
    assert np.isinf(margins[:2]).all()
    assert np.isfinite(margins[2:]).all()


def test_a_chosen_chance_reaches_its_overlap_on_new_pools():
    pools = drawn(60, 11)
    chance = choose(pools, K, 0.95, folds=2)
    found = measure(drawn(120, 12), K, fit(pools, K).rule(chance))
    assert found.overlap.mean() > 0.93
    assert found.saved.mean() > measure(drawn(120, 12), K, fit(pools, K).rule(chance / 4)).saved.mean() > 0


def test_a_rule_of_the_paper_can_be_certified_too():
    rules = [ClusterRule(tau, "std", on="logit") for tau in (3.0, 2.6, 2.2, 1.8, 0.0)]
    last, p = certify(rules, drawn(200, 13), K, recall=0.9)
    assert 0 <= last < 4
    assert p <= 0.05
    assert certify(rules[-1:], drawn(200, 13, noise=4.0), K, recall=0.99, confidence=0.8) == (-1, 0.0)


def test_too_few_pools_for_a_promise_are_refused():
    require(299, 0.99, 0.95)
    with pytest.raises(ValueError, match="at least 299 pools to certify, not 298"):
        require(298, 0.99, 0.95)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: guarantee(drawn(9, 0), K, recall=1.0), "promised recall"),
        (lambda: guarantee(drawn(9, 0), K, confidence=0.0), "promised confidence"),
        (lambda: guarantee(drawn(9, 0), K, fitted=1.0), "share of pools"),
        (lambda: fit(drawn(9, 0), 10), "more candidates"),
        (lambda: fit(drawn(9, 0), K).rule(0.5), "between 0 and 0.5"),
        (lambda: p_value([1.5], 0.1), "Losses are in"),
        (lambda: p_value([0.5], 0.1, binary=True), "Losses are 0 or 1"),
    ],
)
def test_bad_values_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_boundary_of_a_perfect_layer_is_the_models_own():
    scores = drawn(1, 0).pool(0)
    assert set(np.flatnonzero(gaps(scores[-1], K) > 0)) == set(ranking(scores[-1])[:K])
