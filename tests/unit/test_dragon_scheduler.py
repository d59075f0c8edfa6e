"""DRAGON's schedulers: estimates by hand, the paper's rule, the plan in lag, and what each reaches on traces."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ondevice_papers.dragon.scheduler import LEVELS, Greedy, Lagging, Profiler, plan, top
from ondevice_studies.dragon.simulator import CLOUD, DEVICE, Link, World, independent, oracle, regimes, simulate

# Profiler


def test_estimates_forget():
    profiler = Profiler(0.1, memory=2, prior=0.5)
    assert profiler.acceptance == (0.5, 0.5)
    profiler.decided(True, False)
    assert profiler.acceptance == pytest.approx((1.25 / 1.5, 0.25 / 1.5))
    profiler.decided(False, True)
    assert profiler.acceptance == pytest.approx((0.625 / 1.75, 1.125 / 1.75))
    for pace in (1.0, 2.0):
        profiler.drafted(0, pace)
    profiler.peer_drafted(0, 0.5)
    profiler.answered(0.5)
    assert (profiler.pace, profiler.rtt) == ([1.25, 0.5], pytest.approx(0.2))


def test_the_paper_counts_all_tokens_alike():
    profiler = Greedy(0.1)
    assert math.isnan(profiler.acceptance[0])
    for local in (True, False, False, False):
        profiler.decided(local, True)
    assert profiler.acceptance == (0.25, 1.0)


def test_estimates_move_with_the_aggregator():
    one, two = Profiler(0.1), Profiler(9.0)
    one.drafted(0, 0.2)
    one.peer_drafted(0, 0.7)
    one.decided(True, False)
    two.drafted(0, 0.6)
    two.adopt(one.profile())
    assert (two.rtt, two.pace, two.acceptance) == (0.1, [0.6, 0.2], one.acceptance[::-1])
    for wrong in ((1.0,) * 4, (-1.0, 0.0, 0.0, 0.0, 0.0)):
        with pytest.raises(ValueError, match="profile"):
            two.adopt(wrong)


@pytest.mark.parametrize("fields", [{"rtt": -1.0}, {"memory": 0.5}, {"prior": 1.5}])
def test_bad_profilers_are_refused(fields):
    with pytest.raises(ValueError, match=str(next(iter(fields.values())))):
        Profiler(**{"rtt": 0.1, **fields})


def test_the_profiler_measures_what_the_simulator_does():
    """0.3 s there and back and both paces, learnt from messages alone, whatever it was told first."""
    pair = Greedy(5.0), Greedy(5.0)
    simulate(World(independent(400, 0.6, 0.6), 0.13, 0.02, Link(0.1), Link(0.2)), DEVICE, pair)
    assert pair[DEVICE].rtt == pytest.approx(0.3)
    assert pair[DEVICE].pace == pytest.approx([0.13, 0.02])
    assert pair[DEVICE].acceptance == pytest.approx((0.6, 0.6), abs=0.07)


# Rules


def test_the_papers_rule():
    """Its case study: after one token, the device's draft accepted and the cloud's not, it moves to the cloud."""
    rule = Greedy(1.0)
    rule.drafted(0, 0.23)
    rule.peer_drafted(0, 0.02)
    assert rule.moves(0, True, False, 0, 0)
    assert not Greedy(1.0).moves(0, False, True, 0, 0)


def lagging(local: float, remote: float, rtt: float) -> Lagging:
    rule = Lagging(rtt)
    rule.drafted(0, local)
    rule.peer_drafted(0, remote)
    return rule


def test_ours_moves_where_moving_is_free():
    slow, fast = (0.13, 0.02, 0.3), (0.02, 0.13, 0.3)
    assert lagging(*slow).moves(0, True, False, 3, 0)  # the other side must hear of its rejection anyway
    assert not lagging(*slow).moves(0, True, True, 3, 0)
    assert not lagging(*slow).moves(0, False, True, 0, 3)
    assert lagging(*fast).moves(0, True, False, 3, 0)  # back at the slower side's rejection, or when nothing is queued
    assert lagging(*fast).moves(0, True, True, 9, 0)
    assert not lagging(*fast).moves(0, True, True, 9, 9)


def mean_cost(moves, trip: float, pace: float, accepted) -> float:
    """Lag paid at the slower side's rejections, by the model of the module, one token after the other."""
    place, lag, paid = 0, 0.0, 0.0
    for b, o in accepted.astype(int).tolist():
        to = place ^ int(moves[place, b, o, min(LEVELS - 1, round(lag / top(trip) * (LEVELS - 1)))])
        paid += lag * (not b)
        base, redo = lag * b - 1, 0 if o else pace
        if place == 0:
            lag = max(trip, base + trip + redo) if to else max(0, base + pace + (0 if o else trip))
        else:
            lag = max(trip * to, base + redo)
        lag, place = min(lag, top(trip)), to
    return paid / len(accepted)


@pytest.mark.parametrize("trip", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("rates", [(0.1, 0.1), (0.5, 0.02), (0.05, 0.5), (0.4, 0.4)])
def test_no_simple_rule_is_better_than_the_plan(trip, rates):
    accepted = ~independent(5_000, *rates, seed=5)
    best = mean_cost(plan(trip, 0.15, *rates), trip, 0.15, accepted)
    stay, always = np.zeros((2, 2, 2, LEVELS), bool), np.ones((2, 2, 2, LEVELS), bool)
    at_fast, follow = stay.copy(), stay.copy()
    at_fast[0] = True
    follow[0, 1, 0] = follow[1, 0] = True  # to the side whose draft was rejected
    for other in (stay, always, at_fast, follow):
        assert best <= 1.05 * mean_cost(other, trip, 0.15, accepted) + 0.01


# Traces: totals in the simulator

STATIONARY = {"published": (0.49, 0.99), "alike": (0.8, 0.8), "device better": (0.95, 0.6), "poor": (0.5, 0.5)}
PACES = {"fast device": (0.13, 0.02), "slow device": (0.23, 0.02), "equal": (0.1, 0.1)}


def totals(world: World, rtt: float) -> dict[str, float]:
    """In seconds, of the two sides and our rule, which is told the round trip."""
    ours = simulate(world, DEVICE, (Lagging(rtt), Lagging(rtt)))
    return {"device": simulate(world, DEVICE).total, "cloud": simulate(world, CLOUD).total, "ours": ours.total}


@pytest.mark.parametrize("paces", PACES.values(), ids=PACES)
@pytest.mark.parametrize("rates", STATIONARY.values(), ids=STATIONARY)
def test_never_worse_than_the_best_static_side(rates, paces):
    """With jitter, which the rule is not told of."""
    for delay in (0.05, 0.3):
        link = Link(delay, 0.2 * delay)
        found = totals(World(independent(300, *rates, seed=1), *paces, link, link), 2 * delay)
        assert found["ours"] <= 1.01 * min(found["device"], found["cloud"])


@pytest.mark.parametrize(("paces", "delay"), [((0.13, 0.02), 0.15), ((0.23, 0.02), 0.3), ((0.1, 0.1), 0.05)])
def test_better_than_both_sides_where_acceptance_changes(paces, delay):
    accepted = regimes(300, [(0.97, 0.4), (0.4, 0.97)], 40, seed=2)
    world = World(accepted, *paces, Link(delay), Link(delay))
    found, best = totals(world, 2 * delay), oracle(world).total
    paper = simulate(world, DEVICE, (Greedy(2 * delay), Greedy(2 * delay))).total
    assert found["ours"] <= 0.95 * min(found["device"], found["cloud"])
    assert found["ours"] <= 1.05 * best
    assert paper > found["ours"]  # its mean over all tokens hides the change
