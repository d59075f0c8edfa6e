"""The policies beyond the paper, by hand and on every measured series."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ondevice.disco import dispatch, optimal, traces
from ondevice.disco.distributions import DEVICES, Device, Latency, Lengths
from ondevice.disco.expectation import evaluate
from ondevice.disco.policy import NEVER

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
    assert evaluate(policy, Lengths.of([2]), BIMODAL, Device("d", 1.0, 1.0)).mean == pytest.approx(2.0)


def test_without_budget_the_optimum_never_starts_the_device_even_on_times_never_seen():
    policy = optimal.mean_optimal(Lengths.of([2, 3]), BIMODAL, MIDDLE, 0.0)
    assert np.isinf(policy.wait_device[0, 1:]).all()
    assert not (policy.chance * np.isfinite(policy.wait_device[1])).any()


@pytest.mark.parametrize("series", [*traces.series_names(), *traces.PAPER_SERVICES])
def test_the_optimum_is_never_above_disco_d_or_race_at_19_budgets(series, prompts):
    server = traces.server(series)
    for budget in GRID:
        best = evaluate(optimal.mean_optimal(prompts, server, MIDDLE, budget), prompts, server, MIDDLE)
        assert best.use_device == pytest.approx(budget, abs=1e-9)
        others = [dispatch.disco_d(prompts, server, budget, alpha) for alpha in (0.02, 0.2)]
        for other in (*others, dispatch.race(prompts, "device", budget)):
            assert best.mean <= evaluate(other, prompts, server, MIDDLE).mean + 1e-9, (other.name, budget)


@pytest.mark.parametrize("service", traces.PAPER_SERVICES)
def test_disco_d_with_the_best_alpha_stands_between_the_optimum_and_race(service, prompts):
    server = traces.server(service)
    for budget in (0.1, 0.5, 0.9):
        disco, best, race, alone = (
            min(evaluate(p, prompts, server, MIDDLE).mean for p in found) for found in (
                [dispatch.disco_d(prompts, server, budget, a) for a in (0.001, 0.01, 0.02, 0.05, 0.1, 0.2)],
                [optimal.mean_optimal(prompts, server, MIDDLE, budget)],
                [dispatch.race(prompts, "device", budget)],
                [dispatch.server_only(prompts)],
            )
        )
        assert best <= disco + 1e-9
        assert disco <= race + 1e-9
        assert race <= alone


def test_disco_s_is_the_server_side_optimum_without_overhead(prompts):
    for series, budget in itertools.product(("groq-70b", "replicate-70b"), (0.1, 0.5, 0.9)):
        server = traces.measured(series)
        disco, best = (evaluate(p, prompts, server, MIDDLE).mean for p in (
            dispatch.disco_s(prompts, budget), optimal.mean_optimal(prompts, server, MIDDLE, budget, "server")))
        assert disco == pytest.approx(best, abs=1e-12)


def test_with_a_cold_start_disco_s_is_no_longer_optimal():
    # D = 5 s + l / 100: every race saves about 4 s, so the short prompt is the cheaper one to race.
    cold, server, lengths = Device("cold", 100.0, 10.0, overhead=5.0), Latency.of([1.0]), Lengths.of([10, 90])
    disco, best = (evaluate(p, lengths, server, cold).mean for p in (
        dispatch.disco_s(lengths, 0.1), optimal.mean_optimal(lengths, server, cold, 0.1, "server")))
    assert best == pytest.approx((1.0 + 5.9) / 2)
    assert disco == pytest.approx((5.1 + (8 * 5.9 + 1.0) / 9) / 2)  # the longest first: one ninth of them
    assert best < disco - 1


@pytest.mark.parametrize("series", traces.series_names())
def test_the_deadline_rule_has_the_least_p99_on_every_series(series, prompts):
    server = traces.measured(series)
    for budget in GRID[::3]:
        policy, deadline = optimal.deadline_optimal(prompts, server, MIDDLE, budget)
        ours = evaluate(policy, prompts, server, MIDDLE)
        assert ours.use_device <= budget + 1e-9
        assert ours.p99 <= deadline + 1e-9
        for other in (dispatch.disco_d(prompts, server, budget), dispatch.stochastic(prompts, "device", budget),
                      dispatch.race(prompts, "device", budget),
                      optimal.mean_optimal(prompts, server, MIDDLE, budget)):
            assert deadline <= evaluate(other, prompts, server, MIDDLE).p99 + 1e-9, other.name


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


@pytest.mark.parametrize("service", ["LLaMA", "bedrock-13b", "replicate-70b"])
def test_the_frontier_trades_p99_for_mean_between_the_two_optima(service, prompts):
    server, budget = traces.server(service), 0.4
    tail, least = optimal.deadline_optimal(prompts, server, MIDDLE, budget)
    slack = np.array([1.02, 1.1, 1.3, 2.0, 4.0])
    found = [evaluate(p, prompts, server, MIDDLE)
             for p in optimal.frontier(prompts, server, MIDDLE, budget, slack)]
    assert len(found) == len(slack)
    fastest = evaluate(optimal.mean_optimal(prompts, server, MIDDLE, budget), prompts, server, MIDDLE).mean
    means = [evaluate(tail, prompts, server, MIDDLE).mean, *(f.mean for f in found), fastest]
    assert means == sorted(means, reverse=True)
    assert all(f.p99 <= least * s + 1e-9 for f, s in zip(found, slack, strict=True))
    assert all(f.use_device <= budget + 1e-9 for f in found)


@pytest.mark.parametrize("series", traces.series_names())
@pytest.mark.parametrize("constrained", ["device", "server"])
def test_the_clairvoyant_bounds_the_optimum_on_every_series(series, constrained, prompts):
    server = traces.measured(series)
    for budget in (0.1, 0.5, 0.9):
        best = evaluate(optimal.mean_optimal(prompts, server, MIDDLE, budget, constrained), prompts, server, MIDDLE)
        assert optimal.clairvoyant_mean(prompts, server, MIDDLE, budget, constrained) <= best.mean + 1e-9


def test_the_clairvoyant_spends_only_where_the_device_wins():
    # S = 10 s in half the cases; one token budget in two: each slow case is saved, the fast ones cost nothing.
    assert optimal.clairvoyant_mean(Lengths.of([2]), BIMODAL, Device("d", 1.0, 1.0), 0.5) == pytest.approx(1.5)


def test_prompts_of_a_length_never_seen_still_get_the_device():
    policy = optimal.mean_optimal(Lengths.of([10, 30]), BIMODAL, MIDDLE, 0.9)
    assert policy.decider()(20, 0.0)[0] < NEVER


@pytest.mark.parametrize("build", [optimal.mean_optimal, optimal.deadline_optimal, optimal.clairvoyant_mean])
@pytest.mark.parametrize("budget", [-0.1, 1.1, np.nan])
def test_a_bad_budget_is_refused(build, budget):
    with pytest.raises(ValueError, match="budget is a share"):
        build(Lengths.of([2]), BIMODAL, MIDDLE, budget)


@pytest.mark.parametrize("build", [optimal.mean_optimal, optimal.clairvoyant_mean])
def test_an_unknown_endpoint_is_refused(build):
    with pytest.raises(ValueError, match="device or server, not 'cloud'"):
        build(Lengths.of([2]), BIMODAL, MIDDLE, 0.5, "cloud")


@pytest.mark.parametrize("slack", [0.99, np.nan])
def test_a_deadline_below_the_least_one_is_refused(slack):
    with pytest.raises(ValueError, match="Slack factors"):
        optimal.frontier(Lengths.of([2]), BIMODAL, MIDDLE, 0.5, np.array([slack]))


def test_lengths_that_tip_at_the_same_price_do_not_overspend():
    # A first token at 0 s makes starting at once and a moment later equally fast: the choice is decided by rounding.
    lengths, server, device = Lengths.of([1, 3]), Latency.of([0.0, 1.75]), Device("d", 2.0, 10.0)
    found = evaluate(optimal.mean_optimal(lengths, server, device, 0.75), lengths, server, device)
    assert found.use_device == pytest.approx(0.75, abs=1e-12)
