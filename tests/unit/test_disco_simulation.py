"""Requests played one by one, on a few requests that can be checked by hand, and against exact expectation."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.disco import dispatch, optimal, traces
from ondevice.disco.budget import TokenBucket
from ondevice.disco.distributions import DEVICES, Device, Lengths
from ondevice.disco.expectation import evaluate
from ondevice.disco.online import Decision, OnlineDispatcher
from ondevice.disco.policy import NEVER, single
from ondevice.disco.simulation import play, play_online, play_user

PHONE = Device("phone", 10.0, 5.0)
MIDDLE = DEVICES["Pixel 7 Pro, Bloom-560M"]
RNG = np.random.default_rng


def waiting(device: float, server: float, size: int = 41):
    return single("waiting", "device", 0.5, np.full(size, device), np.full(size, server))


def test_the_first_token_wins_and_the_late_starter_may_never_run():
    played = play(waiting(1.0, 0.0), np.array([10, 10, 10]), np.array([0.5, 1.5, 2.5]), PHONE, RNG(0))
    assert played.ttft.tolist() == [0.5, 1.5, 2.0]
    assert played.device_ran.tolist() == [False, True, True]
    assert played.device_won.tolist() == [False, False, True]
    assert played.server_ran.all()
    assert played.use("device") == pytest.approx(2 / 3)


def test_a_server_that_waits_is_spared_when_the_device_answers_first():
    played = play(waiting(0.0, 1.5), np.array([10, 20]), np.array([0.1, 0.1]), PHONE, RNG(0))
    assert played.server_ran.tolist() == [False, True]
    assert played.ttft.tolist() == [1.0, 1.6]


def test_p99_is_a_ttft_that_occurred():
    played = play(waiting(NEVER, 0.0), np.full(200, 5), np.arange(1.0, 201.0), PHONE, RNG(0))
    assert played.p99() == 198.0


def test_prompts_longer_than_the_histogram_are_served_like_its_longest():
    policy = dispatch.disco_s(Lengths.of([1, 2, 3]), 0.5)
    assert play(policy, np.array([3, 400]), np.array([0.01, 0.01]), PHONE, RNG(0)).server_ran.all()


@pytest.mark.parametrize("series", ["bedrock-13b", "replicate-70b"])
def test_played_requests_average_to_the_exact_expectation(series):
    server, prompts, rng = traces.measured(series), traces.lengths(), RNG(5)
    drawn, ttft = prompts.sample(40_000, rng), rng.choice(server.samples, 40_000)
    for policy in (dispatch.disco_d(prompts, server, 0.3), dispatch.disco_s(prompts, 0.3),
                   dispatch.stochastic(prompts, "server", 0.3), optimal.mean_optimal(prompts, server, MIDDLE, 0.3)):
        exact, played = evaluate(policy, prompts, server, MIDDLE), play(policy, drawn, ttft, MIDDLE, rng)
        assert played.ttft.mean() == pytest.approx(exact.mean, rel=0.03), policy.name
        assert played.use("device") == pytest.approx(exact.use_device, abs=0.015), policy.name
        assert played.use("server") == pytest.approx(exact.use_server, abs=0.015), policy.name


def test_a_burst_queues_on_the_users_one_device():
    # Both prompts come at 0 s; the first is answered (1 s) and decoded (10 tokens, 2 s) before the second prefills.
    played = play_user(waiting(0.0, NEVER), np.zeros(2), np.array([10, 10]), np.array([10, 10]), np.ones(2), PHONE,
                       RNG(0))
    assert played.ttft.tolist() == [1.0, 4.0]


def test_a_device_that_loses_is_free_when_the_server_answers():
    played = play_user(waiting(0.0, 0.0), np.zeros(2), np.array([40, 10]), np.array([10, 10]), np.array([0.5, 9.0]),
                       PHONE, RNG(0))
    assert played.ttft.tolist() == [0.5, 1.5]


def test_a_busy_device_is_not_started_once_the_server_has_answered():
    played = play_user(waiting(0.0, 0.0), np.zeros(2), np.array([10, 10]), np.array([50, 10]), np.array([5.0, 2.0]),
                       PHONE, RNG(0))
    assert played.device_ran.tolist() == [True, False]


def test_requests_far_apart_do_not_queue():
    drawn, ttft = np.full(50, 10), RNG(0).exponential(size=50)
    policy = waiting(0.2, 0.0)
    alone = play(policy, drawn, ttft, PHONE, RNG(1))
    user = play_user(policy, 1e4 * np.arange(50), drawn, np.full(50, 20), ttft, PHONE, RNG(1))
    np.testing.assert_array_equal(user.ttft, alone.ttft)


def test_the_bucket_admits_once_the_allowance_covers_the_request():
    bucket = TokenBucket(0.5)
    admitted = []
    for _ in range(6):
        admitted.append(bucket.arrive(10))
        if admitted[-1]:
            bucket.spend(10)
    assert admitted == [False, True] * 3


def test_the_bucket_saves_up_no_more_than_its_burst():
    bucket = TokenBucket(0.5, burst=30)
    for _ in range(100):
        bucket.arrive(10)
    admitted = []
    for _ in range(4):
        admitted.append(bucket.arrive(15))
        if admitted[-1]:
            bucket.spend(15)
    assert admitted == [True, True, True, False]


@pytest.mark.parametrize("budget", [0.4, 1.0])
def test_a_prompt_longer_than_the_burst_is_admitted_in_the_end(budget):
    bucket = TokenBucket(budget, burst=100)
    assert any(bucket.arrive(250) for _ in range(3))


def test_with_all_the_budget_the_bucket_admits_everything():
    bucket = TokenBucket(1.0)
    for tokens in (7, 5000, 1, 3):
        assert bucket.arrive(tokens)
        bucket.spend(tokens)


def test_the_online_dispatcher_learns_the_distribution_from_censored_times():
    # The server answers after 1 s in 19 of 40 requests and after 8 s once; in the others the device wins at 2 s.
    dispatcher = OnlineDispatcher(PHONE, 0.5)
    for i in range(40):
        dispatcher.decide(10)
        ttft = 8.0 if i == 0 else 2.0 if i % 2 else 1.0
        dispatcher.observe(Decision(10, 1.0, 1.0), ttft, server_answered=ttft != 2.0, device_started=ttft > 1.0)
    dispatcher._fit()
    assert dispatcher._weights[dispatcher._times == 1.0].sum() == pytest.approx(19 / 40)
    assert dispatcher._weights[dispatcher._times == 8.0].sum() == pytest.approx(21 / 40)
    assert not (dispatcher._times == 2.0).any()


def test_the_online_dispatcher_never_starts_the_device_without_budget():
    prompts, rng = traces.lengths(), RNG(0)
    played = play_online(OnlineDispatcher(MIDDLE, 0.0), prompts.sample(300, rng), rng.exponential(size=300), MIDDLE)
    assert not played.device_ran.any()


def test_the_online_dispatcher_races_everything_when_it_may():
    prompts, rng = traces.lengths(), RNG(0)
    drawn, ttft = prompts.sample(300, rng), rng.exponential(size=300)
    played = play_online(OnlineDispatcher(MIDDLE, 1.0), drawn, ttft, MIDDLE)
    np.testing.assert_array_equal(played.ttft, np.minimum(ttft, MIDDLE.ttft(drawn)))


@pytest.mark.parametrize("series", ["bedrock-13b", "replicate-70b"])
def test_online_comes_within_a_tenth_of_the_static_optimum(series):
    server, prompts, rng = traces.measured(series), traces.lengths(), RNG(11)
    drawn, ttft = prompts.sample(6000, rng), rng.choice(server.samples, 6000)
    played = play_online(OnlineDispatcher(MIDDLE, 0.3), drawn, ttft, MIDDLE)
    best = play(optimal.mean_optimal(prompts, server, MIDDLE, 0.3), drawn, ttft, MIDDLE, rng)
    alone = ttft[3000:].mean()
    assert played.ttft[3000:].mean() <= 1.1 * best.ttft[3000:].mean()
    assert played.ttft[3000:].mean() < 0.8 * alone


@pytest.mark.parametrize("run", [
    lambda lengths, ttft: play(waiting(0.0, 0.0), lengths, ttft, PHONE, RNG(0)),
    lambda lengths, ttft: play_user(waiting(0.0, 0.0), np.zeros(2), lengths, np.ones(2), ttft, PHONE, RNG(0)),
    lambda lengths, ttft: play_online(OnlineDispatcher(PHONE, 0.5), lengths, ttft, PHONE),
])
@pytest.mark.parametrize(
    ("lengths", "ttft", "message"),
    [
        ([3, 0], [1.0, 1.0], "smallest length given is 0"),
        ([3, 4], [1.0, np.nan], "negative or not a number"),
        ([3, 4], [1.0, -1.0], "negative or not a number"),
        ([3, 4], [1.0], "2 prompts and 1 server TTFTs"),
        ([], [], "0 prompts"),
    ],
)
def test_impossible_requests_are_refused(run, lengths, ttft, message):
    with pytest.raises(ValueError, match=message):
        run(np.array(lengths, dtype=int), np.array(ttft))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TokenBucket(1.5), "budget is a share"),
        (lambda: TokenBucket(np.nan), "budget is a share"),
        (lambda: TokenBucket(0.5, burst=0), "positive number of tokens, not 0"),
        (lambda: TokenBucket(0.5, burst=np.nan), "positive number of tokens"),
        (lambda: OnlineDispatcher(PHONE, -0.1), "budget is a share"),
        (lambda: OnlineDispatcher(PHONE, 0.5).decide(0), "at least one token, not 0"),
    ],
)
def test_a_bad_budget_or_length_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_server_whose_wait_ends_with_the_devices_first_token_is_spared():
    policy, lengths = waiting(0.0, 1.0), Lengths.of([10])  # D = 1 s
    assert evaluate(policy, lengths, traces.measured("groq-70b"), PHONE).use_server == 0.0
    assert not play(policy, np.array([10]), np.array([0.2]), PHONE, RNG(0)).server_ran.any()


def test_a_device_started_at_once_is_charged_even_if_the_server_took_no_time():
    dispatcher = OnlineDispatcher(PHONE, 1.0)
    decision = dispatcher.decide(10)
    dispatcher.observe(decision, 0.0, server_answered=True, device_started=True)
    assert decision.wait == 0.0
    assert dispatcher.bucket.level == 0.0
