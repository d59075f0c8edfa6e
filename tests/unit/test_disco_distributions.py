"""Empirical distributions of TTFT and length, and the checks at their doors."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice_papers.disco.distributions import DeviceSpeed, Latency, Lengths
from ondevice_papers.disco.policy import check_budget, mixture, single

S = Latency.from_seconds([4.0, 1.0, 2.0, 2.0])


def test_the_cdf_the_quantile_and_the_expected_minimum_are_by_definition():
    for t in (0.0, 0.99, 1.0, 2.0, 3.9, 4.0, np.inf):
        assert S.cdf(t) == (S.samples <= t).mean()
        assert S.expected_minimum(t) == pytest.approx(np.minimum(S.samples, t).mean(), abs=1e-15)
    for q in (0.0, 0.25, 0.26, 0.75, 0.76, 1.0):
        assert S.quantile(q) == min(sample for sample in S.samples if (S.samples <= sample).mean() >= q)


def test_quantile_inverts_the_cdf_at_every_sample():
    server = Latency.from_seconds(np.random.default_rng(0).exponential(size=997))
    assert [server.quantile(float(server.cdf(s))) for s in server.samples] == server.samples.tolist()


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


ONE = np.ones(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Latency.from_seconds([]), "sample"),
        (lambda: Latency.from_seconds([1.0, -0.5]), "-0.5"),
        (lambda: Latency.from_seconds([1.0, np.nan]), "NaN"),
        (lambda: Lengths.from_tokens([]), "prompt"),
        (lambda: Lengths.from_tokens([3, 0]), "0"),
        (lambda: Lengths.from_tokens([2.0, np.nan]), "whole"),
        (lambda: DeviceSpeed("phone", 0.0, 1.0), "phone"),
        (lambda: DeviceSpeed("phone", 1.0, np.nan), "phone"),
        (lambda: DeviceSpeed("phone", 1.0, 1.0, -0.1), "phone"),
        (lambda: check_budget(1.0000001), "budget"),
        (lambda: check_budget(np.nan), "budget"),
        (lambda: single("bad", "device", 0.5, np.array([0.0, -1.0, 0.0]), ONE), "bad.*wait"),
        (lambda: single("bad", "device", 0.5, np.array([0.0, np.nan, 0.0]), ONE), "bad.*wait"),
        (lambda: mixture("bad", "device", 0.5, (ONE, ONE), (ONE, ONE), np.nan), "bad.*chance"),
    ],
)
def test_what_is_no_distribution_device_or_policy_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_decider_takes_the_second_alternative_below_its_chance():
    decide = mixture("coin", "device", 0.5, (ONE, 2 * ONE), (3 * ONE, 4 * ONE), 0.25).waits
    assert decide(1, 0.2499) == (3.0, 4.0)
    assert decide(1, 0.25) == (1.0, 2.0)


def test_prompts_longer_than_any_seen_are_served_like_the_longest():
    decide = single("rising", "device", 0.5, np.arange(3.0), np.zeros(3)).waits
    assert decide(2, 0.0) == decide(10_000, 0.0) == (2.0, 0.0)
