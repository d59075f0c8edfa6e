"""The promise of a recall is broken in no more draws of pools than it says, and the test is what keeps it."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_pools

from ondevice_papers.grating.margins import MarginRule, certify, fit, last_certified, p_value
from ondevice_papers.grating.pools import Pool, measure

K, DRAWS, DELTA = 2, 400, 0.05
SIZES = {"layers": 4, "n": 6}


def loss(pools: list[Pool], rule: MarginRule) -> np.ndarray:
    return 1 - measure(pools, K, rule)["overlap"]


@cache
def losses() -> np.ndarray:
    """[settings, pools] of a population, by rules that were fitted on other pools."""
    model, population = fit(random_pools(60, 1, **SIZES), K), random_pools(400, 2, **SIZES)
    return np.array([loss(population, model.rule(chance)) for chance in np.geomspace(0.002, 0.4, 8)])


def risk() -> float:
    """Just below what one of the settings loses: the hardest promise to keep."""
    return 0.97 * float(losses()[5].mean())


def broken(certified: bool, pools: int = 150) -> float:
    """Share of draws of validation pools after which the population's mean loss is above the promised one."""
    found, rng, count = losses(), np.random.default_rng(3), 0
    for _ in range(DRAWS):
        sample = found[:, rng.integers(found.shape[1], size=pools)]
        looks_good = int(np.flatnonzero(sample.mean(1) <= risk()).max(initial=-1))
        last = last_certified(sample, risk(), 1 - DELTA)[0] if certified else looks_good
        count += last >= 0 and found[last].mean() > risk()
    return count / DRAWS


def allowed(draws: int) -> float:
    """Share of draws in which the promise may be broken, and three standard errors."""
    return DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / draws)


def test_the_promise_is_broken_in_at_most_one_draw_of_twenty():
    assert broken(certified=True) <= allowed(DRAWS)


def test_without_the_test_it_is_broken_far_more_often():
    assert broken(certified=False) > 0.2


@pytest.mark.long  # statistics
def test_it_holds_with_fitting_and_certifying_on_each_draw_and_prunes():
    population, draws, recall = random_pools(200, 4, noise=3.0, **SIZES), 25, 0.9
    rules = [certify(random_pools(90, 100 + draw, noise=3.0, **SIZES), K, recall).rule for draw in range(draws)]
    found = [loss(population, rule).mean() if rule else 0.0 for rule in rules]
    assert np.mean(np.array(found) > 1 - recall) <= allowed(draws)
    assert np.median(found) > (1 - recall) / 3  # near enough to what was promised to be broken by less


@settings(max_examples=15)
@given(st.integers(2, 10), st.floats(0.01, 0.1), st.integers(20, 300), st.floats(0, 1), st.integers(0, 2**16))
def test_p_values_are_valid_where_the_mean_is_exactly_the_risk(k, risk, pools, skew, seed):
    """Losses are 0, 1 / k or a larger step, of mean `risk`: p is below delta in at most a share delta of draws."""
    high = math.ceil(1 + skew * (k - 1)) / k
    rng, draws = np.random.default_rng(seed), 1000
    samples = high * (rng.random((draws, pools)) < risk / high)
    p = np.array([p_value(row, risk) for row in samples])
    for delta in (0.05, 0.2):
        assert np.mean(p <= delta) <= delta + 4 * math.sqrt(delta * (1 - delta) / draws)
