"""The policies beyond the paper, by hand and on every measured series."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice_papers.disco import dispatch, optimal
from ondevice_papers.disco.distributions import DEVICES, Device, Latency, Lengths
from ondevice_papers.disco.policy import NEVER
from ondevice_papers.disco.race import expected

MIDDLE = DEVICES["Pixel 7 Pro, Bloom-560M"]
BIMODAL = Latency.from_seconds([1.0, 10.0])


def test_a_slow_mode_is_worth_waiting_for():
    # One length, D = 2 s. Waiting 1 s sees whether the server is slow: TTFT 1 or 3, at half the tokens.
    policy = optimal.mean_optimal(Lengths.from_tokens([2]), BIMODAL, Device("d", 1.0, 1.0), 0.5)
    assert policy.waits(2, 0.5) == (1.0, 0.0)
    assert expected(policy, Lengths.from_tokens([2]), BIMODAL, Device("d", 1.0, 1.0)).mean == pytest.approx(2.0)


def test_without_budget_the_optimum_never_starts_the_device_even_on_times_never_seen():
    policy = optimal.mean_optimal(Lengths.from_tokens([2, 3]), BIMODAL, MIDDLE, 0.0)
    assert np.isinf(policy.wait_device[0, 1:]).all()
    assert not (policy.chance * np.isfinite(policy.wait_device[1])).any()


def test_with_a_cold_start_disco_s_is_no_longer_optimal():
    # D = 5 s + l / 100: every race saves about 4 s, so the short prompt is the cheaper one to race.
    cold, server, lengths = (
        Device("cold", 100.0, 10.0, overhead=5.0),
        Latency.from_seconds([1.0]),
        Lengths.from_tokens([10, 90]),
    )
    disco, best = (
        expected(p, lengths, server, cold).mean
        for p in (dispatch.server_constrained(lengths, 0.1), optimal.mean_optimal(lengths, server, cold, 0.1, "server"))
    )
    assert best == pytest.approx((1.0 + 5.9) / 2)
    assert disco == pytest.approx((5.1 + (8 * 5.9 + 1.0) / 9) / 2)  # the longest first: one ninth of them
    assert best < disco - 1


def test_prompts_of_a_length_never_seen_still_get_the_device():
    policy = optimal.mean_optimal(Lengths.from_tokens([10, 30]), BIMODAL, MIDDLE, 0.9)
    assert policy.waits(20, 0.0)[0] < NEVER


def test_lengths_that_tip_at_the_same_price_do_not_overspend():
    # A first token at 0 s makes starting at once and a moment later equally fast: the choice is decided by rounding.
    lengths, server, device = Lengths.from_tokens([1, 3]), Latency.from_seconds([0.0, 1.75]), Device("d", 2.0, 10.0)
    found = expected(optimal.mean_optimal(lengths, server, device, 0.75), lengths, server, device)
    assert found.use == pytest.approx(0.75, abs=1e-12)
