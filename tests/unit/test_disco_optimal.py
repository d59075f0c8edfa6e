"""The policies beyond the paper, by hand and on every measured series."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ondevice.disco import dispatch, optimal, traces
from ondevice.disco.distributions import DEVICES, Device, Latency, Lengths
from ondevice.disco.policy import NEVER
from ondevice.disco.race import expected

GRID = np.arange(0.05, 0.99, 0.05)  # 19 points
MIDDLE = DEVICES["Pixel 7 Pro, Bloom-560M"]
BIMODAL = Latency.of([1.0, 10.0])


@pytest.fixture(scope="module")
def prompts() -> Lengths:
    return traces.lengths()


def test_a_slow_mode_is_worth_waiting_for():
    # One length, D = 2 s. Waiting 1 s sees whether the server is slow: TTFT 1 or 3, at half the tokens.
    policy = optimal.mean_optimal(Lengths.of([2]), BIMODAL, Device("d", 1.0, 1.0), 0.5)
    assert policy.decider()(2, 0.5) == (1.0, 0.0)
    assert expected(policy, Lengths.of([2]), BIMODAL, Device("d", 1.0, 1.0)).mean == pytest.approx(2.0)


def test_without_budget_the_optimum_never_starts_the_device_even_on_times_never_seen():
    policy = optimal.mean_optimal(Lengths.of([2, 3]), BIMODAL, MIDDLE, 0.0)
    assert np.isinf(policy.wait_device[0, 1:]).all()
    assert not (policy.chance * np.isfinite(policy.wait_device[1])).any()


@pytest.mark.parametrize("series", [*traces.series_names(), *traces.PAPER_SERVICES])
def test_the_optimum_is_never_above_disco_d_or_race_at_19_budgets(series, prompts):
    server = traces.server(series)
    for budget in GRID:
        best = expected(optimal.mean_optimal(prompts, server, MIDDLE, budget), prompts, server, MIDDLE)
        assert best.use == pytest.approx(budget, abs=1e-9)
        others = [dispatch.device_constrained(prompts, server, budget, alpha) for alpha in (0.02, 0.2)]
        for other in (*others, dispatch.random_race(prompts, "device", budget)):
            assert best.mean <= expected(other, prompts, server, MIDDLE).mean + 1e-9, (other.name, budget)


@pytest.mark.parametrize("service", traces.PAPER_SERVICES)
def test_disco_d_with_the_best_alpha_stands_between_the_optimum_and_race(service, prompts):
    server = traces.server(service)
    for budget in (0.1, 0.5, 0.9):
        disco, best, race, alone = (
            min(expected(p, prompts, server, MIDDLE).mean for p in found)
            for found in (
                [dispatch.device_constrained(prompts, server, budget, a) for a in (0.001, 0.01, 0.02, 0.05, 0.1, 0.2)],
                [optimal.mean_optimal(prompts, server, MIDDLE, budget)],
                [dispatch.random_race(prompts, "device", budget)],
                [dispatch.server_only(prompts)],
            )
        )
        assert best <= disco + 1e-9
        assert disco <= race + 1e-9
        assert race <= alone


def test_disco_s_is_the_server_side_optimum_without_overhead(prompts):
    for series, budget in itertools.product(("groq-70b", "replicate-70b"), (0.1, 0.5, 0.9)):
        server = traces.measured(series)
        disco, best = (
            expected(p, prompts, server, MIDDLE).mean
            for p in (
                dispatch.server_constrained(prompts, budget),
                optimal.mean_optimal(prompts, server, MIDDLE, budget, "server"),
            )
        )
        assert disco == pytest.approx(best, abs=1e-12)


def test_with_a_cold_start_disco_s_is_no_longer_optimal():
    # D = 5 s + l / 100: every race saves about 4 s, so the short prompt is the cheaper one to race.
    cold, server, lengths = Device("cold", 100.0, 10.0, overhead=5.0), Latency.of([1.0]), Lengths.of([10, 90])
    disco, best = (
        expected(p, lengths, server, cold).mean
        for p in (dispatch.server_constrained(lengths, 0.1), optimal.mean_optimal(lengths, server, cold, 0.1, "server"))
    )
    assert best == pytest.approx((1.0 + 5.9) / 2)
    assert disco == pytest.approx((5.1 + (8 * 5.9 + 1.0) / 9) / 2)  # the longest first: one ninth of them
    assert best < disco - 1


@pytest.mark.parametrize("series", traces.series_names())
def test_the_deadline_rule_has_the_least_p99_on_every_series(series, prompts):
    server = traces.measured(series)
    for budget in GRID[::3]:
        policy, deadline = optimal.deadline_optimal(prompts, server, MIDDLE, budget)
        ours = expected(policy, prompts, server, MIDDLE)
        assert ours.use <= budget + 1e-9
        assert ours.p99 <= deadline + 1e-9
        for other in (
            dispatch.device_constrained(prompts, server, budget, 0.15),
            dispatch.stochastic(prompts, "device", budget),
            dispatch.random_race(prompts, "device", budget),
            optimal.mean_optimal(prompts, server, MIDDLE, budget),
        ):
            assert deadline <= expected(other, prompts, server, MIDDLE).p99 + 1e-9, other.name


def test_the_deadline_rule_waits_less_on_longer_prompts(prompts):
    policy, deadline = optimal.deadline_optimal(prompts, traces.measured("bedrock-13b"), MIDDLE, 0.3)
    waits = policy.wait_device[1][prompts.support]
    covered = waits[np.isfinite(waits)]
    assert len(covered) > 10
    assert np.all(np.diff(covered) <= 0)
    assert covered[0] == pytest.approx(deadline - MIDDLE.ttft(prompts.support[0]))


def test_without_budget_the_least_deadline_is_the_servers_p99(prompts):
    server = traces.measured("bedrock-13b")
    assert optimal.deadline_optimal(prompts, server, MIDDLE, 0.0)[1] == pytest.approx(server.quantile(0.99))


def test_the_clairvoyant_spends_only_where_the_device_wins():
    # S = 10 s in half the cases; one token budget in two: each slow case is saved, the fast ones cost nothing.
    assert optimal.clairvoyant_mean(Lengths.of([2]), BIMODAL, Device("d", 1.0, 1.0), 0.5) == pytest.approx(1.5)


def test_prompts_of_a_length_never_seen_still_get_the_device():
    policy = optimal.mean_optimal(Lengths.of([10, 30]), BIMODAL, MIDDLE, 0.9)
    assert policy.decider()(20, 0.0)[0] < NEVER


def test_lengths_that_tip_at_the_same_price_do_not_overspend():
    # A first token at 0 s makes starting at once and a moment later equally fast: the choice is decided by rounding.
    lengths, server, device = Lengths.of([1, 3]), Latency.of([0.0, 1.75]), Device("d", 2.0, 10.0)
    found = expected(optimal.mean_optimal(lengths, server, device, 0.75), lengths, server, device)
    assert found.use == pytest.approx(0.75, abs=1e-12)
