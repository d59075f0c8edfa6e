"""DRAGON's latency model: Table 1, Eqs. 6-9 and Theorem 3 against timelines of messages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ondevice.network.link import Link
from ondevice_papers.dragon.cost import (
    Costs,
    aggregation_times,
    latency_difference,
    latency_per_token,
    should_move,
    speedup,
)
from ondevice_studies.dragon.simulator import DEVICE, World, simulate

CASES = [Costs(2, 1, 1.5, 1.8), Costs(1, 2, 3, 0.5), Costs(5, 1, 1, 1), Costs(1, 1, 0, 0), Costs(3, 2, 0.25, 4)]


# Timelines: the simulator runs both sides' state machines


def simulated(costs: Costs, outcomes: np.ndarray) -> list[float]:
    """When each token is decided by the local side. outcomes: [n, 2] whether each side's draft is accepted."""
    links = Link(costs.send_local), Link(costs.send_remote)
    world = World(outcomes, costs.decode_local, costs.decode_remote, *links, lookahead=len(outcomes))
    return list(simulate(world, DEVICE).decided)


@pytest.mark.parametrize("costs", CASES)
def test_table_1_gives_the_timeline_of_every_outcome(costs):
    for outcome in itertools.product((True, False), repeat=6):
        local, remote = outcome[:3], outcome[3:]
        times = aggregation_times(costs, local, remote)
        assert times == pytest.approx(simulated(costs, np.array([(*local, True), (*remote, True)]).T))


def test_so_it_does_for_long_random_outcomes():
    random = np.random.default_rng(0)
    for _ in range(60):
        costs = Costs(*(random.integers(1, 20, 4) / 4))
        outcomes = random.random((41, 2)) < random.random(2)
        times = aggregation_times(costs, *map(tuple, outcomes[:40].T.tolist()))
        assert times == pytest.approx(simulated(costs, outcomes))


# Eq. 7


@pytest.mark.parametrize("costs", CASES)
def test_equation_7_is_the_pace_of_outcomes_that_repeat(costs):
    for accepted_local, accepted_remote in itertools.product((True, False), repeat=2):
        times = aggregation_times(costs, [accepted_local] * 60, [accepted_remote] * 60)
        assert (times[60] - times[40]) / 20 == pytest.approx(latency_per_token(costs, float(accepted_remote)))


# Eqs. 6 and 8


def random_points(count: int) -> list[tuple[Costs, float, float]]:
    """Some on the bounds between the cases of Eqs. 8 and 9, in quarters."""
    random = np.random.default_rng(2)
    return [
        (Costs(*(float(time) for time in random.integers(0, 16, 4) / 4)), *(float(a) for a in random.random(2)))
        for _ in range(count)
    ]


def test_equation_8_is_the_difference_of_both_sides_equation_7():
    seen = set()
    for costs, local, remote in random_points(4000):
        expected = latency_per_token(costs, remote) - latency_per_token(costs.exchanged, local)
        found = latency_difference(costs, local, remote)
        assert found == pytest.approx(expected, abs=1e-12)
        if abs(found) > 1e-9:
            assert should_move(costs, local, remote) == (found > 0)
        edges = (costs.decode_remote - costs.round_trip, costs.decode_remote, costs.decode_remote + costs.round_trip)
        seen.add(sum(costs.decode_local > edge for edge in edges))
    assert seen == {0, 1, 2, 3}


# Theorem 3


def test_theorem_3_is_the_ratio_of_equation_7():
    seen = set()
    for costs, _, remote in random_points(3000):
        if max(costs.decode_local, costs.decode_remote + costs.round_trip) == 0:
            continue
        token_wise, ours = latency_per_token(costs, 0.0), latency_per_token(costs, remote)
        assert speedup(costs, remote) == pytest.approx(token_wise / ours)
        edges = costs.decode_remote, costs.decode_remote + costs.round_trip
        seen.add(sum(costs.decode_local > edge for edge in edges))
    assert seen == {0, 1, 2}


def test_theorem_3_at_its_ends():
    assert speedup(Costs(1, 2, 1, 1), 1.0) == pytest.approx(2)  # all of the round trip is hidden
    assert speedup(Costs(9, 2, 1, 1), 1.0) == 1  # nothing to hide
    assert speedup(Costs(0, 0, 1, 1), 1.0) == np.inf


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="decode_local"):
        Costs(-1, 1, 1, 1)
    with pytest.raises(ValueError, match="1 and 0"):
        aggregation_times(Costs(2, 1, 1, 1), [True], [])
