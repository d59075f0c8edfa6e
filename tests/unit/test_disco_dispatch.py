"""DiSCo-D and DiSCo-S on instances small enough to do by hand, and on the measured series."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice_papers.disco import dispatch
from ondevice_papers.disco.distributions import DeviceSpeed, Latency, Lengths
from ondevice_papers.disco.policy import NEVER
from ondevice_papers.disco.race import Requests, expected, play

TEN = Latency.from_seconds(np.arange(1.0, 11.0))  # 1 s .. 10 s
EVEN = Lengths.from_tokens([1, 2, 3, 4])  # token mass .1 .2 .3 .4
PHONE = DeviceSpeed("phone", 10.0, 10.0)


def test_disco_d_below_alpha_waits_for_the_tail_on_every_length():
    policy = dispatch.device_constrained(EVEN, TEN, 0.2, alpha=0.2)
    assert policy.wait_device[:, 1:].tolist() == [[8.0] * 4] * 2


def test_disco_d_spends_what_is_above_alpha_on_the_shortest_prompts():
    # b - alpha = .3 buys (1 - alpha) m for the lengths 1 and 2 (.08 + .16) and .06 of length 3's .24.
    policy = dispatch.device_constrained(EVEN, TEN, 0.5, alpha=0.2)
    assert policy.wait_device[0, 1:].tolist() == [0.0, 0.0, 6.0, 8.0]  # P(S > 6) = .4 = .2 + .8 (.06 / .24)


def test_disco_d_mixes_neighbouring_samples_to_spend_a_fraction_of_one():
    policy = dispatch.device_constrained(EVEN, TEN, 0.13, alpha=0.2)
    assert (policy.wait_device[0, 1], policy.wait_device[1, 1], policy.chance[1]) == (9.0, 8.0, pytest.approx(0.3))


def test_disco_d_crosses_equal_samples_together():
    tied = Latency.from_seconds([1, 2, 2, 2])
    policy = dispatch.device_constrained(EVEN, tied, 0.25, alpha=0.5)
    assert (policy.wait_device[0, 1], policy.wait_device[1, 1], policy.chance[1]) == (NEVER, 1.0, pytest.approx(1 / 3))


def test_corrected_line_18_shortens_the_wait_as_more_budget_is_left():
    waits = [
        dispatch.device_constrained(Lengths.from_tokens([5]), TEN, b, alpha=0.2).wait_device[0, 5]
        for b in (0.3, 0.5, 0.7, 0.9)
    ]
    assert waits == [7.0, 5.0, 3.0, 1.0]


def test_printed_line_18_lengthens_the_wait_as_more_budget_is_left():
    waits = [
        dispatch.device_constrained(Lengths.from_tokens([5]), TEN, b, 0.2, dispatch.printed).wait_device[0, 5]
        for b in (0.3, 0.5, 0.7, 0.9)
    ]
    assert waits == sorted(waits)
    assert waits[0] == 2.0  # F(w) = .1 / .8: hardly any budget left, and the device starts almost at once


def test_eq_1_is_a_ramp_cut_at_the_tail():
    wait = dispatch.ramp(EVEN, TEN, 0.6, 0.1).wait_device[0]
    assert wait[2] == pytest.approx(2 * wait[1])
    assert wait.max() <= 9.0


def test_disco_s_races_the_long_prompts_and_a_share_of_the_boundary():
    policy = dispatch.server_constrained(EVEN, 0.6)  # .4 of length 4, and .2 of length 3's .3
    assert policy.wait_server[0, 1:].tolist() == [NEVER, NEVER, NEVER, 0.0]
    assert policy.wait_server[1, 1:].tolist() == [NEVER, NEVER, 0.0, 0.0]
    assert policy.chance[3] == pytest.approx(2 / 3)
    assert not policy.wait_device.any()


def test_stochastic_baselines_route_exclusively_and_races_add_the_other_endpoint():
    one = Requests(np.full(4, 4), np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 0.4, 0.6, 0.9]))  # half the coins < b
    for side in ("device", "server"):
        alone = play(dispatch.stochastic(EVEN, side, 0.5), one, PHONE)
        both = play(dispatch.random_race(EVEN, side, 0.5), one, PHONE)
        assert (alone.device_ran ^ alone.server_ran).all()
        assert alone.ran(side).tolist() == both.ran(side).tolist() == [True, True, False, False]
        assert both.ran("server" if side == "device" else "device").all()


def test_p99_of_a_delayed_server_is_not_pushed_up_by_rounding():
    server = Latency.from_seconds(np.arange(1, 301) / 10)
    late = dispatch.single("late", "server", 1.0, np.full(5, NEVER), np.full(5, 5.6))
    assert expected(late, EVEN, server, PHONE).p99 == pytest.approx(5.6 + 29.7)


def test_the_scenario_is_named_by_the_endpoint_whose_every_cost_is_higher():
    assert dispatch.scenario((2.0, 3.0), (0.5, 1.9)) == "device"
    assert dispatch.scenario((0.5, 1.9), (2.0, 3.0)) == "server"
    assert dispatch.scenario((0.5, 2.0), (2.0, 3.0)) == "mixed"  # equal is not dearer
