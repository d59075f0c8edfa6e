"""DRAGON's latency model: Table 1, Eqs. 6-9 and Theorem 3 against timelines of messages."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from ondevice_papers.dragon.cost import (
    Costs,
    aggregation_times,
    latency_difference,
    latency_per_token,
    should_move,
    speedup,
)

CASES = [Costs(2, 1, 1.5, 1.8), Costs(1, 2, 3, 0.5), Costs(5, 1, 1, 1), Costs(1, 1, 0, 0), Costs(3, 2, 0.25, 4)]


# Timelines by brute force: two sides that decode, send, drop and roll back, in ticks of 0.05


@dataclass
class Decoder:
    """Decodes draft after draft; `restart` drops what was drafted and begins again after a delay."""

    ticks: int
    delay: int  # from a finished draft to its arrival at the aggregator
    begins: int = 0
    ends: deque[int] = field(default_factory=deque)  # arrivals of the drafts in the queue and on the way

    def run_to(self, now: int) -> None:
        while self.begins + self.ticks + self.delay <= now:
            self.begins += self.ticks
            self.ends.append(self.begins + self.delay)

    def restart(self, at: int) -> None:
        self.ends.clear()
        self.begins = at


def ticked(costs: Costs, accepted_local: tuple[bool, ...], accepted_remote: tuple[bool, ...]) -> list[float]:
    """At every tick: is there a draft of both sides?"""
    decode_local, decode_remote, send_local, send_remote = (
        round(20 * time) for time in (costs.decode_local, costs.decode_remote, costs.send_local, costs.send_remote)
    )
    local, remote = Decoder(decode_local, 0), Decoder(decode_remote, send_remote)
    outcomes, times, now = iter(zip(accepted_local, accepted_remote, strict=True)), [], 0
    while True:
        local.run_to(now)
        remote.run_to(now)
        if local.ends and remote.ends:
            times.append(now / 20)
            outcome = next(outcomes, None)
            if outcome is None:
                return times
            for side, kept, delay in ((local, outcome[0], 0), (remote, outcome[1], send_local)):
                if kept:
                    side.ends.popleft()
                else:
                    side.restart(now + delay)
            continue  # there may be a next pair already
        now += 1


@pytest.mark.parametrize("costs", CASES)
def test_table_1_gives_the_timeline_of_every_outcome(costs):
    for length in range(4):
        for outcome in itertools.product((True, False), repeat=2 * length):
            local, remote = outcome[:length], outcome[length:]
            assert aggregation_times(costs, local, remote) == pytest.approx(ticked(costs, local, remote))


def test_so_it_does_for_long_random_outcomes():
    random = np.random.default_rng(0)
    for _ in range(60):
        costs = Costs(*(random.integers(1, 20, 4) / 4))
        local, remote = (tuple(random.random(40) < random.random()) for _ in range(2))
        assert aggregation_times(costs, local, remote) == pytest.approx(ticked(costs, local, remote))


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
