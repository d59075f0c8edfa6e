"""DRAGON's state machine: under any delays and moves of the aggregator the tokens are those of token-wise aggregation.

The two sides here draft from what is really in their caches, and the target depends on all tokens before, so that one
stale draft, one wrong rollback or one lost token changes the output.
"""

from __future__ import annotations

import heapq
import itertools
from random import Random
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Scripted

from ondevice_papers.dragon import side as side_module
from ondevice_papers.dragon.scheduler import Greedy, Lagging, Randomly, Scheduler
from ondevice_papers.dragon.side import Decode, Done, DraftMessage, Emit, RollBack, Send, Side, Switch
from ondevice_studies.dragon.simulator import CLOUD, DEVICE, Link, World, oracle, simulate

VOCABULARY = 4


def number(*what: object) -> int:
    return crc32(repr(what).encode())


def draft_token(seed: int, side: int, context: tuple[int, ...]) -> int:
    """A side's token after a context; both sides often agree."""
    return number(seed, "draft", side * (number(seed, context) % 3 == 0), context) % VOCABULARY


def target_token(seed: int, context: tuple[int, ...], drafts: set[int]) -> int:
    """Mostly one of the drafts."""
    kind = number(seed, "target", context)
    return sorted(drafts)[kind % len(drafts)] if kind % 7 else kind % VOCABULARY


def token_wise(seed: int, limit: int, end: int | None) -> list[int]:
    """The output by definition: both sides draft from the decided tokens, one position after the other."""
    tokens: list[int] = []
    while len(tokens) < limit and (not tokens or tokens[-1] != end):
        context = tuple(tokens)
        tokens.append(target_token(seed, context, {draft_token(seed, side, context) for side in (0, 1)}))
    return tokens


class Network:
    """Two sides, caches that follow their actions, and links whose delays are drawn and keep the order."""

    def __init__(self, seed: int, limit: int, end: int | None, lookahead: int, first: int, moves, slow: float) -> None:
        self.seed, self.random, self.slow, self.lookahead = seed, Random(seed), slow, lookahead
        self.decided: list[int] = []
        self.sides = [
            Side("s", self.decide, aggregates=side == first, max_new_tokens=limit, eos_token_ids={end},
                 lookahead=lookahead, scheduler=Scripted(moves))
            for side in (0, 1)
        ]  # fmt: skip
        self.caches: list[list[int]] = [[], []]
        self.emitted: list[list[int]] = [[], []]
        self.ended = [False, False]
        self.last = [0.0, 0.0]
        self.events: list[tuple[float, int, int, object]] = []
        self.count = 0

    def decide(self, local: DraftMessage, remote: DraftMessage, position: int) -> tuple[int, bool, bool]:
        assert position == len(self.decided)  # once a position, in order, whichever side aggregates
        assert local.position == remote.position == position
        assert local.distribution == remote.distribution == bytes(self.decided)  # both drafted from the decided tokens
        token = target_token(self.seed, tuple(self.decided), {local.token, remote.token})
        self.decided.append(token)
        return token, local.token == token, remote.token == token

    def push(self, time: float, side: int, what: object) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, side, what))

    def send(self, now: float, side: int, message: object) -> None:
        self.last[side] = max(self.last[side], now + 3 * self.random.random() ** 3)
        self.push(self.last[side], 1 - side, message)

    def act(self, now: float, side: int, actions) -> None:
        machine, cache = self.sides[side], self.caches[side]
        for action in actions:
            assert not self.ended[side]
            if isinstance(action, RollBack):
                assert len(cache) >= action.position
                del cache[action.position :]
            elif isinstance(action, Decode):
                if action.token is not None:
                    cache.append(action.token)
                assert len(cache) == action.position
                assert action.position < len(machine.tokens) + self.lookahead
                token = draft_token(self.seed, side, tuple(cache))
                paces = (1.0, self.slow)
                self.push(now + paces[side] * self.random.random(), side, (action, token, bytes(cache)))
            elif isinstance(action, Emit):
                assert action.position == len(self.emitted[side])
                self.emitted[side].append(action.token)
            elif isinstance(action, Send):
                self.send(now, side, action.message)
            else:
                assert isinstance(action, Done)
                self.ended[side] = True

    def step(self) -> None:
        under_way = sum(isinstance(event[3], Switch) for event in self.events)
        assert sum(machine.aggregates for machine in self.sides) + under_way == 1
        now, _, side, what = heapq.heappop(self.events)
        if isinstance(what, tuple):
            action, token, distribution = what
            actions = self.sides[side].drafted(now, action.epoch, action.position, token, distribution)
        else:
            actions = self.sides[side].received(now, what)
        self.act(now, side, actions)

    def start(self) -> None:
        for side in (0, 1):
            self.act(0.0, side, self.sides[side].start(0.0))

    def lose(self) -> None:
        """The connection breaks: all messages under way are gone, and both sides resume."""
        now = self.events[0][0] if self.events else 0.0
        self.events = [event for event in self.events if isinstance(event[3], tuple)]
        heapq.heapify(self.events)
        known = [(len(machine.tokens), machine.aggregates) for machine in self.sides]
        for side in (0, 1):
            for message in self.sides[side].resume(*known[1 - side]):
                self.send(now, side, message)

    def check(self, expected: list[int]) -> None:
        assert self.decided == expected
        for side in (0, 1):
            assert self.ended[side]  # no deadlock
            assert self.emitted[side] == self.sides[side].tokens == expected


SESSIONS = {
    "seed": st.integers(0, 2**32),
    "limit": st.integers(1, 30),
    "end": st.sampled_from([None, None, 0, 3]),
    "lookahead": st.sampled_from([1, 2, 3, 5, 16]),
    "first": st.integers(0, 1),
    "moves": st.one_of(st.just(range(99)), st.frozensets(st.integers(0, 29))),
    "slow": st.sampled_from([0.05, 0.5, 1.0, 4.0]),
}


@given(breaks=st.lists(st.integers(1, 60), max_size=4), **SESSIONS)
def test_the_tokens_are_those_of_token_wise_aggregation(breaks, seed, limit, end, lookahead, first, moves, slow):
    """Whenever connections are lost, too."""
    network = Network(seed, limit, end, lookahead, first, moves, slow)
    network.start()
    for steps in breaks:
        for _ in range(min(steps, len(network.events))):
            network.step()
        network.lose()
    while network.events:
        network.step()
    network.check(token_wise(seed, limit, end))


def test_the_properties_can_fail(monkeypatch):
    """Stale drafts are taken here, as in the authors' program, which tags drafts with their position only."""

    def queue(side: Side, now: float, draft: DraftMessage) -> None:
        if side.aggregates and draft.position == len(side.tokens) + len(side.peer):
            side.peer.append(draft)

    monkeypatch.setattr(side_module, "RULES", side_module.Rules(queue=queue))
    failures = 0
    for seed in range(20):
        network = Network(seed, 30, None, 5, 0, [], 0.5)
        network.start()
        try:
            while network.events:
                network.step()
        except AssertionError:
            failures += 1
    assert failures > 10


# Simulated time

SECONDS = st.sampled_from([0.0, 0.01, 0.02, 0.05, 0.1, 0.13, 0.3, 0.4])


@st.composite
def worlds(draw, most: int = 40):
    n = draw(st.integers(1, most))
    rates = draw(st.tuples(*[st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0])] * 2))
    accepted = np.random.default_rng(draw(st.integers(0, 2**32))).random((n, 2)) < rates
    paces, links = [draw(SECONDS) for _ in range(2)], [Link(draw(SECONDS)) for _ in range(2)]
    return World(accepted, *paces, *links, lookahead=draw(st.integers(1, 6)))


def changed(world: World, **fields) -> World:
    return World(**{**vars(world), **fields})


def schedulers(name: str, rtt: float):
    make = {"stay": Scheduler, "random": Randomly, "paper": lambda: Greedy(rtt), "ours": lambda: Lagging(rtt)}[name]
    return make(), make()


@given(worlds(), st.sampled_from(["stay", "random", "paper", "ours"]), st.integers(0, 1), st.data())
def test_every_run_keeps_the_rules_and_none_beats_the_oracle(world, name, first, data):
    links = [Link(link.delay, data.draw(SECONDS), data.draw(st.sampled_from([1e3, 1e5, float("inf")])))
             for link in (world.up, world.down)]  # fmt: skip
    rough = changed(world, up=links[0], down=links[1])
    rtt = world.up.arrival(0) + world.down.arrival(0)
    run = simulate(rough, first, schedulers(name, rtt), seed=1)
    n = len(world.accepted)
    assert run.tokens == list(range(0, 2 * n, 2))
    assert len(run.seen) == len(run.decided) == n
    assert (np.diff(run.decided) >= 0).all() and (run.seen >= run.decided).all()
    assert max(run.ahead) <= world.lookahead
    assert run.moves >= np.count_nonzero(np.diff(run.side))
    assert run.total >= oracle(world, first).total - 1e-9


@given(worlds(most=25), st.integers(0, 1))
def test_the_oracle_is_reached_by_its_moves(world, first):
    wide = changed(world, lookahead=len(world.accepted))
    best = oracle(wide, first)
    run = simulate(wide, first, (Scripted(best.moves), Scripted(best.moves)))
    assert run.total == pytest.approx(best.total)


@given(worlds(most=6), st.integers(0, 1))
def test_the_oracle_is_the_least_over_all_schedules(world, first):
    wide, n = changed(world, lookahead=len(world.accepted)), len(world.accepted)
    subsets = [[i for i in range(n - 1) if mask >> i & 1] for mask in range(2 ** (n - 1))]
    totals = [simulate(wide, first, (Scripted(moves), Scripted(moves))).total for moves in subsets]
    assert min(totals) == pytest.approx(oracle(wide, first).total)


@given(worlds(), st.integers(0, 1))
def test_looking_further_ahead_is_never_slower(world, first):
    """So speculation never loses against token-wise aggregation (lookahead 1)."""
    totals = [simulate(changed(world, lookahead=ahead), first).total for ahead in (1, 2, 3, 8)]
    assert all(later <= before + 1e-9 for before, later in itertools.pairwise(totals))


@given(worlds(), st.integers(0, 1))
def test_the_two_sides_are_alike(world, first):
    """The device and the cloud exchanged, with their links: every token is decided at the same time."""
    mirrored = World(world.accepted[:, ::-1], world.cloud, world.device, world.down, world.up, world.lookahead)
    one, two = simulate(world, first), simulate(mirrored, 1 - first)
    assert one.decided == pytest.approx(two.decided)
    assert {DEVICE, CLOUD} >= set(one.side.tolist())
