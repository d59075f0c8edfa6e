"""The race of two endpoints, drawn at random and in time."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice_papers.disco import dispatch
from ondevice_papers.disco.distributions import DEVICES, DeviceSpeed
from ondevice_papers.disco.policy import MOMENT, NEVER
from ondevice_papers.disco.race import Requests, expected, in_time, play, race
from ondevice_studies.disco import study, traces

PHONE = DEVICES["Pixel 7 Pro, Bloom-560M"]


@pytest.mark.parametrize(
    ("waits", "ttft", "first", "ran"),
    [
        ((0.0, 0.0), (2.0, 1.0), 1.0, (True, True)),
        ((1.5, 0.0), (2.0, 1.0), 1.0, (False, True)),  # the server answers before the device may start
        ((1.0, 0.0), (2.0, 1.0), 1.0, (False, True)),  # just then
        ((0.5, 0.0), (2.0, 4.0), 2.5, (True, True)),
        ((0.0, 3.0), (2.0, 1.0), 2.0, (True, False)),
        ((NEVER, 0.0), (2.0, 9.0), 9.0, (False, True)),
        ((0.0, 0.0), (1.0, 0.0), 0.0, (True, True)),  # who starts at once is charged, whatever comes
        ((MOMENT, 0.0), (1.0, 0.0), 0.0, (False, True)),
    ],
)
def test_the_first_token_wins_and_a_late_starter_may_never_run(waits, ttft, first, ran):
    raced = race(*(np.array([x]) for x in waits), *(np.array([x]) for x in ttft))
    assert (raced.ttft[0], (raced.device_ran[0], raced.server_ran[0])) == (first, ran)
    assert raced.device_won[0] == (first == waits[0] + ttft[0] and ran[0])


@pytest.mark.parametrize("series", ["together-70b", "replicate-70b"])
def test_played_requests_average_to_the_exact_expectation(series):
    lengths, server = traces.lengths(), traces.measured(series)
    drawn = Requests.draw((20, 2000), lengths, server, np.random.default_rng(0))
    for policy in study.policies(lengths)("device", server, PHONE, 0.3).values():
        raced, exact = play(policy, drawn, PHONE), expected(policy, lengths, server, PHONE)
        runs = raced.ttft.mean(axis=1)
        assert exact.mean == pytest.approx(runs.mean(), abs=4 * runs.std() / np.sqrt(20))
        assert (drawn.prompt * raced.device_ran).sum() / drawn.prompt.sum() == pytest.approx(exact.use, abs=0.02)


def test_in_time_is_the_race_where_requests_do_not_meet():
    lengths, server = traces.lengths(), traces.measured("replicate-70b")
    drawn = Requests.draw(300, lengths, server, np.random.default_rng(0))
    policy = dispatch.device_constrained(lengths, server, 0.3, 0.15)
    coins = np.random.default_rng(7).random(300)
    alone = play(policy, Requests(drawn.prompt, drawn.server_ttft, coins), PHONE)
    ttft = {"device": PHONE.ttft(drawn.prompt), "server": drawn.server_ttft}
    raced, ledger = in_time(study.Fixed(policy, 7), np.arange(300) * 1000.0, drawn.prompt, ttft)
    for name in ("ttft", "device_ran", "server_ran"):
        np.testing.assert_allclose(getattr(raced, name), getattr(alone, name))
    assert ledger[-1].tolist() == [drawn.prompt.sum(), drawn.prompt[raced.device_ran].sum()]


def test_a_phone_that_serves_one_at_a_time_is_waited_for_unless_it_lost():
    always = dispatch.random_race(traces.lengths(), "device", 1.0)
    ttft = {"device": np.full(3, 2.0), "server": np.array([9.0, 9.0, 1.0])}
    prompts, phone = np.full(3, 10), DeviceSpeed("d", 5.0, 1.0)
    assert phone.ttft(10) == 2.0
    raced, _ = in_time(study.Fixed(always, 0), np.array([0.0, 1.0, 8.0]), prompts, ttft, decoding=np.full(3, 3.0))
    assert raced.ttft.tolist() == [2.0, 6.0, 1.0]  # the second waits until 5 s, then prefills for 2
