"""Dispatch policies on random small instances: exact outcomes, budgets, and optimality against brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from ondevice_papers.disco import dispatch, optimal
from ondevice_papers.disco.distributions import DeviceSpeed, Latency, Lengths
from ondevice_papers.disco.policy import NEVER, DispatchPolicy
from ondevice_papers.disco.race import expected

# Eighths of a second and powers of two make sums exact, so that ties between endpoints are ties here too.
EIGHTHS = st.integers(1, 40).map(lambda n: n / 8)
TRACES = st.lists(EIGHTHS, min_size=1, max_size=10).map(Latency.from_seconds)  # few values: many ties
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(Lengths.from_tokens)
PREFILL_RATES = st.sampled_from([1.0, 2.0, 8.0])
PROPORTIONAL = PREFILL_RATES.map(lambda rate: DeviceSpeed("d", rate, 10.0))
DEVICES = st.builds(
    lambda rate, overhead: DeviceSpeed("d", rate, 10.0, overhead), PREFILL_RATES, st.sampled_from([0.0, 0.25, 2.0])
)
BUDGETS = st.floats(0, 1) | st.sampled_from([0.0, 0.05, 0.15000000000000002, 0.2, 0.5, 1.0])
ALPHAS = st.sampled_from([0.01, 0.05, 0.15, 0.2, 0.5, 0.9])
GRID = np.arange(0.05, 0.99, 0.05)
WAITS = st.just(0.0) | EIGHTHS | st.just(NEVER)


class Used(NamedTuple):
    mean: float
    p99: float
    use_device: float
    use_server: float

    def use(self, side: str) -> float:
        return self.use_device if side == "device" else self.use_server


def evaluate(policy: DispatchPolicy, lengths: Lengths, server: Latency, device: DeviceSpeed) -> Used:
    """What `race.expected` says, with the use of either side."""
    one, other = (expected(replace(policy, constrained=side), lengths, server, device) for side in ("device", "server"))
    return Used(one.mean, one.p99, one.use, other.use)


@st.composite
def any_policy(draw: st.DrawFn, size: int = 10) -> DispatchPolicy:
    """Arbitrary waits of both endpoints, and a coin."""
    device = np.array(draw(st.lists(WAITS, min_size=2 * size, max_size=2 * size))).reshape(2, size)
    server = np.array(draw(st.lists(WAITS, min_size=2 * size, max_size=2 * size))).reshape(2, size)
    server[np.isinf(device) & np.isinf(server)] = 0.0
    chance = np.array(draw(st.lists(st.floats(0, 1), min_size=size, max_size=size)))
    return DispatchPolicy("any", "device", 0.5, device, server, chance)


def enumerate_outcomes(policy: DispatchPolicy, lengths: Lengths, server: Latency, device: DeviceSpeed) -> np.ndarray:
    """[K, 5] weight, length, TTFT, device ran, server ran: every length, sample and coin, by the order of starts."""
    rows = []
    for (length, p), sample, coin in itertools.product(
        zip(lengths.support, lengths.probability, strict=True), server.samples, (0, 1)
    ):
        at = min(length, len(policy.chance) - 1)
        weight = p / server.samples.size * (policy.chance[at] if coin else 1 - policy.chance[at])
        wait_d, wait_s = policy.wait_device[coin, at], policy.wait_server[coin, at]
        runs = sorted(
            [
                (wait_d, wait_d + length / device.prefill_rate + device.overhead, "device"),
                (wait_s, wait_s + sample, "server"),
            ]
        )
        first_token, ran = np.inf, set()
        for start, token, name in runs:
            if start < np.inf and start < first_token:
                ran.add(name)
                first_token = min(first_token, token)
        rows.append((weight, length, first_token, "device" in ran, "server" in ran))
    return np.array(rows, dtype=float)


@given(any_policy(), LENGTHS, TRACES, DEVICES)
def test_evaluate_equals_the_enumeration_of_every_case(policy, lengths, server, device):
    weight, length, ttft, device_ran, server_ran = enumerate_outcomes(policy, lengths, server, device).T
    found = evaluate(policy, lengths, server, device)
    assert found.mean == pytest.approx(weight @ ttft, abs=1e-9)
    tokens = weight * length
    assert found.use_device == pytest.approx(tokens @ device_ran / tokens.sum(), abs=1e-9)
    assert found.use_server == pytest.approx(tokens @ server_ran / tokens.sum(), abs=1e-9)
    order = np.argsort(ttft)
    enough = np.cumsum(weight[order]) >= 0.99 - 1e-12
    assert found.p99 == pytest.approx(ttft[order][enough.argmax()], abs=1e-9)  # the least that 99 % stay within


def spending(
    lengths: Lengths, server: Latency, device: DeviceSpeed, budget: float, alpha: float
) -> list[DispatchPolicy]:
    """The policies that promise to spend their budget exactly."""
    return [
        dispatch.device_constrained(lengths, server, budget, alpha),
        dispatch.server_constrained(lengths, budget),
        *(
            f(lengths, side, budget)
            for f in (dispatch.stochastic, dispatch.random_race)
            for side in ("device", "server")
        ),
        optimal.mean_optimal(lengths, server, device, budget),
        optimal.mean_optimal(lengths, server, device, budget, "server"),
    ]


@given(LENGTHS, TRACES, DEVICES, BUDGETS, ALPHAS)
def test_every_corrected_policy_spends_exactly_its_budget(lengths, server, device, budget, alpha):
    for policy in spending(lengths, server, device, budget, alpha):
        assert evaluate(policy, lengths, server, device).use(policy.constrained) == pytest.approx(budget, abs=1e-9), (
            policy.name
        )


@given(st.lists(st.just(0.0) | EIGHTHS, min_size=1, max_size=8).map(Latency.from_seconds), LENGTHS, BUDGETS, ALPHAS)
def test_the_budget_holds_when_first_tokens_come_at_0_s(server, lengths, budget, alpha):
    device = DeviceSpeed("d", 2.0, 10.0)
    for policy in (
        dispatch.device_constrained(lengths, server, budget, alpha),
        optimal.mean_optimal(lengths, server, device, budget),
    ):
        assert evaluate(policy, lengths, server, device).use_device == pytest.approx(budget, abs=1e-9), policy.name


@given(LENGTHS, TRACES, DEVICES, ALPHAS)
def test_a_budget_of_0_is_the_unconstrained_endpoint_alone(lengths, server, device, alpha):
    for policy in spending(lengths, server, device, 0.0, alpha):
        alone = dispatch.stochastic(lengths, policy.constrained, 0.0)
        assert evaluate(policy, lengths, server, device) == evaluate(alone, lengths, server, device), policy.name
    best = optimal.mean_optimal(lengths, server, device, 0.0)  # nor does it start on times that were never seen
    assert np.isinf(best.wait_device[0, 1:]).all() and not (best.chance * np.isfinite(best.wait_device[1])).any()


@given(LENGTHS, TRACES, DEVICES, ALPHAS)
def test_a_budget_of_1_starts_both_endpoints_on_every_request(lengths, server, device, alpha):
    for policy in spending(lengths, server, device, 1.0, alpha):
        if not policy.name.startswith("Stoch"):  # which routes to the constrained endpoint alone
            waits = [policy.waits(int(length), 0.5) for length in lengths.support]
            assert waits == [(0.0, 0.0)] * len(waits), policy.name


@given(LENGTHS, TRACES, DEVICES, ALPHAS)
def test_more_budget_never_slows_the_mean_nor_lengthens_a_wait(lengths, server, device, alpha):
    previous = None
    for budget in np.linspace(0, 1, 8):
        found = [
            evaluate(policy, lengths, server, device).mean
            for policy in (
                dispatch.server_constrained(lengths, budget),
                optimal.mean_optimal(lengths, server, device, budget),
                optimal.mean_optimal(lengths, server, device, budget, "server"),
            )
        ]
        disco = dispatch.device_constrained(lengths, server, budget, alpha)
        waits = (1 - disco.chance) * np.minimum(disco.wait_device[0], 99) + disco.chance * np.minimum(
            disco.wait_device[1], 99
        )
        if previous is not None:
            assert np.all(np.array(found) <= np.array(previous[0]) + 1e-9)
            assert np.all(waits[lengths.support] <= previous[1][lengths.support] + 1e-9)
        previous = found, waits


def waits_by_linear_program(lengths: Lengths, server: Latency, device: DeviceSpeed, budget: float) -> float:
    """Least mean TTFT over all mixtures of the waits 0, every sample and never, by scipy."""
    cost, tokens, rows = [], [], []
    for u, (length, p, m) in enumerate(zip(lengths.support, lengths.probability, lengths.mass, strict=True)):
        for wait in [0.0, *np.unique(server.samples), np.inf]:
            cost.append(p * np.minimum(server.samples, wait + float(device.ttft(length))).mean())
            tokens.append(m * (1.0 if wait == 0 else (server.samples > wait).mean()))
            rows.append(u)
    one_each = (np.array(rows)[None, :] == np.arange(len(lengths.support))[:, None]).astype(float)
    found = linprog(cost, A_ub=[tokens], b_ub=[budget], A_eq=one_each, b_eq=np.ones(len(one_each)))
    assert found.status == 0
    return float(found.fun)


@given(LENGTHS, TRACES, DEVICES, BUDGETS)
def test_mean_optimal_equals_the_linear_program(lengths, server, device, budget):
    ours = evaluate(optimal.mean_optimal(lengths, server, device, budget), lengths, server, device)
    assert ours.mean == pytest.approx(waits_by_linear_program(lengths, server, device, budget), abs=1e-7)


@given(LENGTHS, TRACES, PROPORTIONAL, BUDGETS)
def test_disco_s_is_optimal_when_the_device_has_no_overhead(lengths, server, device, budget):
    disco = evaluate(dispatch.server_constrained(lengths, budget), lengths, server, device).mean
    best = evaluate(optimal.mean_optimal(lengths, server, device, budget, "server"), lengths, server, device).mean
    assert disco == pytest.approx(best, abs=1e-9)


@given(LENGTHS, TRACES, DEVICES, BUDGETS)
def test_the_server_side_optimum_equals_a_fractional_knapsack(lengths, server, device, budget):
    at = device.ttft(lengths.support)
    gain = lengths.probability * (at - np.minimum(server.samples[None, :], at[:, None]).mean(axis=1))
    found = linprog(-gain, A_ub=[lengths.mass], b_ub=[budget], bounds=(0, 1))
    ours = evaluate(optimal.mean_optimal(lengths, server, device, budget, "server"), lengths, server, device).mean
    assert ours == pytest.approx(float(lengths.probability @ at) + found.fun, abs=1e-7)


@given(LENGTHS, TRACES, DEVICES, BUDGETS, ALPHAS)
def test_no_policy_has_a_lower_p99_than_the_deadline_rule(lengths, server, device, budget, alpha):
    policy, deadline = optimal.deadline_optimal(lengths, server, device, budget)
    ours = evaluate(policy, lengths, server, device)
    assert ours.use_device <= budget + 1e-9
    assert ours.p99 <= deadline + 1e-9
    for other in (
        dispatch.device_constrained(lengths, server, budget, alpha),
        dispatch.stochastic(lengths, "device", budget),
        dispatch.random_race(lengths, "device", budget),
        optimal.mean_optimal(lengths, server, device, budget),
    ):
        assert deadline <= evaluate(other, lengths, server, device).p99 + 1e-9, other.name


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(Lengths.from_tokens),
    st.lists(EIGHTHS, min_size=1, max_size=4).map(Latency.from_seconds),
    DEVICES,
    BUDGETS,
    st.sampled_from([0.6, 0.75, 0.99]),
)
def test_the_least_deadline_is_the_least_that_a_linear_program_can_afford(lengths, server, device, budget, quantile):
    _, deadline = optimal.deadline_optimal(lengths, server, device, budget, quantile)

    def affordable(t: float) -> bool:
        at = device.ttft(lengths.support)
        slack = np.maximum(t - at, 0.0)
        cost = lengths.mass * np.where(slack > 0, (server.samples[None, :] > slack[:, None]).mean(axis=1), 1.0)
        late = lengths.probability * (server.samples > t).mean()
        # Cover each length with a chance: at most 1 - quantile of all requests late.
        found = linprog(cost, A_ub=[-late], b_ub=[1 - quantile - late.sum()], bounds=[(0, int(a <= t)) for a in at])
        return found.status == 0 and found.fun <= budget + 1e-9

    candidates = {s + d for s in [0.0, *server.samples] for d in [0.0, *device.ttft(lengths.support)]}
    assert deadline == pytest.approx(min(t for t in candidates if affordable(t)), abs=1e-9)


@given(LENGTHS, TRACES, DEVICES, BUDGETS)
def test_the_clairvoyant_equals_a_linear_program_over_lengths_and_server_times(lengths, server, device, budget):
    at = device.ttft(lengths.support)
    weight = np.repeat(lengths.probability, server.samples.size) / server.samples.size
    mass = np.repeat(lengths.mass, server.samples.size) / server.samples.size
    gain = np.maximum(0.0, np.tile(server.samples, len(at)) - np.repeat(at, server.samples.size))
    found = linprog(-weight * gain, A_ub=[mass], b_ub=[budget], bounds=(0, 1))
    assert optimal.clairvoyant_mean(lengths, server, device, budget) == pytest.approx(server.mean + found.fun, abs=1e-7)


@given(LENGTHS, TRACES, st.floats(0, 1), ALPHAS)
def test_eq_1_spends_its_budget_up_to_one_step_of_the_ramp(lengths, server, budget, alpha):
    use = evaluate(dispatch.ramp(lengths, server, budget, alpha), lengths, server, DeviceSpeed("d", 1.0, 1.0))
    ratios = (server.samples[None, :] / lengths.support[:, None]).ravel()  # where the ramp's slope crosses a sample
    mass = np.repeat(lengths.mass, server.samples.size) / server.samples.size
    tail = float((server.samples == server.quantile(1 - min(alpha, budget))).mean()) if budget > 0 else 0.0
    step = max(mass[np.isclose(ratios, r)].sum() for r in ratios)
    assert budget - max(step, tail) - 1e-9 <= use.use_device <= budget + 1e-9


@given(LENGTHS, TRACES, DEVICES, st.floats(0.02, 0.98))
def test_a_length_that_never_occurred_is_served_like_the_next_longer_one(lengths, server, device, budget):
    decide = optimal.mean_optimal(lengths, server, device, budget).waits
    for length in range(1, int(lengths.support[-1])):
        longer = int(lengths.support[np.searchsorted(lengths.support, length)])
        assert decide(length, 0.5) == decide(longer, 0.5)
