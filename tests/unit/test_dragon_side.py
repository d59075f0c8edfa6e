"""DRAGON's side: a session by hand, what it refuses, and the simulator's sources."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice_papers.dragon.side import Decode, Done, DraftMessage, Emit, RollBack, Send, Side, Switch, Target
from ondevice_studies.dragon.simulator import World, independent, regimes, replayed, simulate


def even(local: DraftMessage, remote: DraftMessage, position: int) -> tuple[int, bool, bool]:
    """The target of position i is 10 i."""
    return 10 * position, local.token == 10 * position, remote.token == 10 * position


def side(**fields) -> Side:
    return Side("s", even, **{"aggregates": True, "max_new_tokens": 9, **fields})


def draft(epoch: int, position: int, token: int, pace: float = 1.0) -> DraftMessage:
    return DraftMessage("s", epoch, position, token, pace=pace)


# One side


def test_a_session_by_hand_on_the_side_that_does_not():
    one = side(aggregates=False, lookahead=2, eos_token_ids={20, 21})
    assert one.start(0.0) == [Decode(0, 0, None)]
    assert one.drafted(1.0, 0, 0, 0) == [Send(draft(0, 0, 0)), Decode(0, 1, 0)]
    assert one.drafted(3.0, 0, 1, 11) == [Send(draft(0, 1, 11, 2.0))]  # two ahead: it waits
    assert one.received(4.0, Target("s", 0, 0, 0, True)) == [Emit(0, 0), Decode(0, 2, 11)]
    assert one.received(5.0, Target("s", 1, 1, 10, False)) == [Emit(1, 10), RollBack(1), Decode(1, 2, 10)]
    assert one.received(5.0, Target("s", 1, 1, 10, False)) == []  # repeated
    assert one.drafted(6.0, 1, 2, 20) == [Send(draft(1, 2, 20))]  # its own end token: nothing to draft after it
    assert one.received(7.0, Target("s", 2, 2, 21, False)) == [Emit(2, 21), RollBack(2), Done()]  # the other one


@pytest.mark.parametrize(
    ("aggregates", "message", "said"),
    [
        (True, DraftMessage("other", 0, 0, 0), "'other'"),
        (True, draft(0, 1, 0), "0, 0"),
        (True, Target("s", 0, 0, 0, True), "aggregates"),
        (False, Target("s", 0, 1, 0, True), "aggregate"),
        (False, Target("s", 0, 0, 0, True), "None"),
        (False, Target("s", 0, 0, 0, False), "epoch 0"),
        (False, Switch("s", 0, 3), "position 0"),
        (False, Switch("s", 0, 0, (draft(0, 1, 0),)), r"\[\(0, 1\)\]"),
    ],
)
def test_what_no_peer_of_this_kind_sends_is_refused(aggregates, message, said):
    one = side(aggregates=aggregates)
    one.start(0.0)
    with pytest.raises(ValueError, match=said):
        one.received(1.0, message)


def test_bad_arguments_are_refused():
    for wrong in ("max_new_tokens", "lookahead"):
        with pytest.raises(ValueError, match="not 0"):
            side(**{wrong: 0})
    started = side()
    started.start(0.0)
    for again in (lambda: started.start(1.0), lambda: started.resume(0, True)):
        with pytest.raises(ValueError, match="'s'"):
            again()


# The simulator

ALL = np.ones((12, 2), bool)


def test_sources_of_acceptance():
    flags = independent(20_000, 0.49, 0.99, seed=3)
    assert flags.mean(0) == pytest.approx([0.49, 0.99], abs=0.01)
    assert (independent(50, 0.5, 0.5, seed=1) == independent(50, 0.5, 0.5, seed=1)).all()
    swapping = regimes(90, [(0.0, 1.0), (1.0, 0.0)], 30)
    assert swapping[0].tolist() == [False, True] and (swapping.sum(axis=1) == 1).all()
    changes = np.count_nonzero(np.diff(regimes(30_000, [(0, 1), (1, 0)], 30)[:, 0]))
    assert changes == pytest.approx(1000, rel=0.15)
    assert replayed([1, 0], [0, 0], 5).tolist() == [[True, False], [False, False]] * 2 + [[True, False]]


@pytest.mark.parametrize(
    "build",
    [lambda: independent(5, 1.1, 0.5), lambda: regimes(5, [], 3), lambda: replayed([2], [1]),
     lambda: World(np.ones((0, 2), bool)), lambda: World(ALL, [0.1] * 11), lambda: simulate(World(ALL), 2)],
)  # fmt: skip
def test_bad_worlds_are_refused(build):
    with pytest.raises(ValueError):
        build()
