"""Empirical distributions of TTFT and length, and the checks at their doors."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice_papers.disco.distributions import Device, Latency, Lengths
from ondevice_papers.disco.policy import check_budget, mixture, single

S = Latency.from_seconds([4.0, 1.0, 2.0, 2.0])


@pytest.mark.parametrize(("t", "share"), [(0.99, 0.0), (1.0, 0.25), (2.0, 0.75), (3.9, 0.75), (4.0, 1.0)])
def test_cdf_counts_the_samples_up_to_and_at_t(t, share):
    assert S.cdf(t) == share


@pytest.mark.parametrize(("q", "sample"), [(0.0, 1.0), (0.25, 1.0), (0.26, 2.0), (0.75, 2.0), (0.76, 4.0), (1.0, 4.0)])
def test_quantile_is_the_smallest_sample_with_enough_below(q, sample):
    assert S.quantile(q) == sample


def test_quantile_inverts_the_cdf_at_every_sample():
    server = Latency.from_seconds(np.random.default_rng(0).exponential(size=997))
    assert [server.quantile(float(server.cdf(s))) for s in server.samples] == server.samples.tolist()


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 2.5, 4.0, 9.0, np.inf])
def test_expected_minimum_averages_the_samples_cut_at_t(t):
    assert S.expected_minimum(t) == pytest.approx(np.minimum(S.samples, t).mean(), abs=1e-15)


def test_token_mass_weighs_a_prompt_by_its_tokens():
    lengths = Lengths.from_tokens([1, 1, 4])
    assert lengths.support.tolist() == [1, 4]
    assert lengths.probability.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert lengths.mean == pytest.approx(2.0)
    assert lengths.mass.tolist() == pytest.approx([2 / 6, 4 / 6])


def test_sampled_lengths_follow_the_histogram():
    drawn = Lengths.from_tokens([1, 1, 1, 4]).sample(4000, np.random.default_rng(0))
    assert set(drawn.tolist()) == {1, 4}
    assert (drawn == 1).mean() == pytest.approx(0.75, abs=0.03)


def test_a_device_takes_overhead_and_time_per_token():
    assert Device("d", 50.0, 10.0, 0.5).ttft([0, 100]).tolist() == [0.5, 2.5]


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ([], "one sample"),
        ([1.0, -0.5], "-0.5"),
        ([1.0, np.nan], "NaN"),
    ],
)
def test_bad_latency_traces_are_refused(seconds, message):
    with pytest.raises(ValueError, match=message):
        Latency.from_seconds(seconds)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "one prompt"),
        ([3, 0], "is 0"),
        ([2.5], "whole numbers"),
        ([2.0, np.nan], "whole numbers"),
    ],
)
def test_bad_lengths_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        Lengths.from_tokens(tokens)


@pytest.mark.parametrize(
    "numbers",
    [(0.0, 1.0), (1.0, -1.0), (np.nan, 1.0), (1.0, np.nan), (1.0, 1.0, -0.1), (1.0, 1.0, np.nan), (1.0, 1.0, np.inf)],
)
def test_bad_devices_are_refused(numbers):
    with pytest.raises(ValueError, match=r"phone.*rates"):
        Device("phone", *numbers)


@pytest.mark.parametrize("budget", [-1e-9, 1.0000001, np.nan, np.inf, -np.inf])
def test_a_budget_outside_0_to_1_is_refused(budget):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        check_budget(budget)


ONE = np.ones(3)


@pytest.mark.parametrize("wait", [-1.0, np.nan])
def test_a_policy_refuses_waits_that_are_no_times(wait):
    with pytest.raises(ValueError, match=r"bad.*wait"):
        single("bad", "device", 0.5, np.array([0.0, wait, 0.0]), ONE)


@pytest.mark.parametrize("chance", [-0.1, 1.1, np.nan])
def test_a_policy_refuses_a_chance_outside_0_to_1(chance):
    with pytest.raises(ValueError, match=r"bad.*chance"):
        mixture("bad", "device", 0.5, (ONE, ONE), (ONE, ONE), chance)


def test_the_decider_takes_the_second_alternative_below_its_chance():
    decide = mixture("coin", "device", 0.5, (ONE, 2 * ONE), (3 * ONE, 4 * ONE), 0.25).waits
    assert decide(1, 0.2499) == (3.0, 4.0)
    assert decide(1, 0.25) == (1.0, 2.0)


def test_prompts_longer_than_any_seen_are_served_like_the_longest():
    decide = single("rising", "device", 0.5, np.arange(3.0), np.zeros(3)).waits
    assert decide(2, 0.0) == decide(10_000, 0.0) == (2.0, 0.0)
