"""Two sides on a virtual clock: the live processes' state machine between simulated decoders and links (section 7.4).

Time 0 is when both prompts are prefilled. Acceptance is given by position: a valid draft of position i is accepted as
`World.accepted[i]` says, whenever and wherever it is decided, so that all schedules face the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ondevice.network.link import PERFECT, Line, Link
from ondevice_papers.dragon.scheduler import Scheduler
from ondevice_papers.dragon.side import (
    Action,
    Decide,
    Decode,
    DraftMessage,
    Emit,
    Message,
    Rules,
    Send,
    Side,
    Switch,
    Target,
)

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Pace = float | Sequence[float] | Floats

DEVICE = 0
CLOUD = 1
SIDES = ("device", "cloud")
HEADER = 40  # bytes of a message without a distribution: frame, tags, token
DISTRIBUTION = 512  # bytes: the codec's cap


# Whose drafts are accepted: [n, 2], device and cloud


def independent(n: int, device: float, cloud: float, seed: int = 0) -> Bools:
    """Each draft is accepted with its side's rate, whatever the others are (the authors' simulation)."""
    return _draw(np.tile([device, cloud], (n, 1)), seed)


def regimes(n: int, rates: Sequence[tuple[float, float]], length: float, seed: int = 0) -> Bools:
    """The rates (device, cloud) hold for a time, then the next ones do, in turn.

    length: tokens of a regime, in the mean of a geometric distribution.
    Raises ValueError on no rates, rates outside [0, 1], and a length below 1.
    """
    if not rates or not length >= 1:
        raise ValueError(f"Regimes have rates and last at least one token, not {len(rates)} rates for {length}.")
    random = np.random.default_rng(seed)
    regime = np.repeat(np.arange(n), random.geometric(1 / length, n))[:n] % len(rates)
    return _draw(np.asarray(rates, float)[regime], seed + 1)


def replayed(device: ArrayLike, cloud: ArrayLike, n: int | None = None) -> Bools:
    """Recorded decisions, from the start again where n is more. Raises ValueError unless both are [m] of 0 and 1."""
    flags = np.column_stack([np.atleast_1d(device), np.atleast_1d(cloud)])
    if not len(flags) or not np.isin(flags, (0, 1)).all():
        raise ValueError("Recorded decisions are 0 or 1, at least one for each side.")
    return np.resize(flags.astype(bool), (len(flags) if n is None else n, 2))


def _draw(rates: Floats, seed: int) -> Bools:
    wrong = rates[~((rates >= 0) & (rates <= 1))]
    if wrong.size:
        raise ValueError(f"A rate of acceptance is from 0 to 1, not {wrong[0]}.")
    return np.random.default_rng(seed).random(rates.shape) < rates


# The world


@dataclass(frozen=True, eq=False)
class World:
    """All that a session meets.

    accepted: [n, 2] decisions about the device's and the cloud's drafts. device, cloud: seconds to decode a position:
    a number or [n]. up, down: the links from and to the device. lookahead: as of `Side`;
    1 is DRDG/TW. A decode that became void stops at once.
    Raises ValueError on other shapes, and on paces that are negative or not finite.
    """

    accepted: Bools
    device: Pace = 0.13
    cloud: Pace = 0.02
    up: Link = PERFECT
    down: Link = PERFECT
    lookahead: int = 16

    def __post_init__(self) -> None:
        shape = np.shape(self.accepted)
        if len(shape) != 2 or shape[1] != 2 or not shape[0]:
            raise ValueError(f"Decisions are [n, 2] for device and cloud with n from 1, not {shape}.")
        self.paces()

    def paces(self) -> tuple[list[float], list[float]]:
        """Seconds of the device and the cloud at each position."""
        return self._pace("device", self.device), self._pace("cloud", self.cloud)

    def _pace(self, name: str, pace: Pace) -> list[float]:
        n = len(self.accepted)
        seconds = np.asarray(pace, float)
        seconds = np.full(n, seconds) if seconds.ndim == 0 else seconds
        if seconds.shape != (n,) or not (np.isfinite(seconds) & (seconds >= 0)).all():
            raise ValueError(f"The {name} has one pace, or {n}, all finite and not negative.")
        return seconds.tolist()


@dataclass(frozen=True, eq=False)
class Run:
    """What happened. Seconds from the start; n tokens; sides are 0 device, 1 cloud.

    seen: [n] when the device has each token. decided: [n] when it was decided, side: [n] and where. tokens: [n].
    drafted: by side, decodes that were not void when they ended. sent: by side, bytes. moves: of the aggregator.
    ahead: by side, most undecided drafts at a time, the one being decoded included.
    """

    seen: Floats
    decided: Floats
    side: Ints
    tokens: list[int]
    drafted: tuple[int, int]
    sent: tuple[int, int]
    moves: int
    ahead: tuple[int, int]

    @property
    def total(self) -> float:
        """Until the device has the last token."""
        return float(self.seen[-1])


def simulate(
    world: World,
    aggregator: int = DEVICE,
    schedulers: tuple[Scheduler, Scheduler] | None = None,
    seed: int = 0,
    rules: Rules | None = None,
) -> Run:
    """Run one session.

    aggregator: the side that aggregates first. schedulers: the device's and the cloud's, new ones for each session;
    None: it stays. seed: of jitter. rules: of both sides, as of
    `Side`. Raises ValueError on an aggregator that is no side.
    """
    if aggregator not in (DEVICE, CLOUD):
        raise ValueError(f"The aggregator starts on side 0 (device) or 1 (cloud), not {aggregator}.")
    return _Simulation(world, aggregator, schedulers or (Scheduler(), Scheduler()), seed, rules).run()


class _Simulation:
    """The event loop. An event is (time, number, side, what happens there); numbers keep equal times in order."""

    def __init__(
        self,
        world: World,
        aggregator: int,
        schedulers: tuple[Scheduler, Scheduler],
        seed: int,
        rules: Rules | None = None,
    ) -> None:
        accepted = np.asarray(world.accepted, bool)
        self.drafts = (2 * np.arange(len(accepted))[:, None] + ~accepted).tolist()
        self.paces = world.paces()
        self.lines = Line(world.up, seed, "up"), Line(world.down, seed, "down")
        self.sides = [
            Side(
                "simulated",
                _flags(accepted.tolist(), side),
                aggregates=side == aggregator,
                max_new_tokens=len(accepted),
                lookahead=world.lookahead,
                scheduler=schedulers[side],
                rules=rules,
            )
            for side in (DEVICE, CLOUD)
        ]
        self.events: list[tuple[float, int, int, Decode | Message]] = []
        self.number = 0
        self.seen: list[float] = []
        self.decided: list[tuple[float, int]] = []
        self.drafted, self.sent, self.ahead, self.moves = [0, 0], [0, 0], [0, 0], 0

    def run(self) -> Run:
        sides = self.sides
        events = self.events
        for side in (DEVICE, CLOUD):
            self._act(0.0, side, sides[side].start(0.0))
        while events:
            now, _, side, what = heappop(events)
            machine = sides[side]
            if isinstance(what, Decode):
                self.drafted[side] += what.epoch == machine.epoch and not machine.done
                actions = machine.drafted(now, what.epoch, what.position, self.drafts[what.position][side])
            else:
                actions = machine.received(now, what)
            self._act(now, side, actions)
        if not all(side.done for side in sides):
            raise RuntimeError(f"Both sides wait for each other after {[len(side.tokens) for side in sides]} tokens.")
        times, deciders = zip(*self.decided, strict=True)
        return Run(
            np.array(self.seen),
            np.array(times),
            np.array(deciders),
            sides[DEVICE].tokens,
            (self.drafted[0], self.drafted[1]),
            (self.sent[0], self.sent[1]),
            self.moves,
            (self.ahead[0], self.ahead[1]),
        )

    def _act(self, now: float, side: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Decode):
                self._schedule(now + self.paces[side][action.position], side, action)
                self.ahead[side] = max(self.ahead[side], action.position + 1 - len(self.sides[side].tokens))
            elif isinstance(action, Send):
                self._send(now, side, action.message)
            elif isinstance(action, Emit) and side == DEVICE:
                self.seen.append(now)

    def _send(self, now: float, side: int, message: Message) -> None:
        if isinstance(message, Target):
            self.decided.append((now, side))
        elif isinstance(message, Switch):
            self.moves += 1
        amount = size(message)
        self.sent[side] += amount
        self._schedule(self.lines[side].arrival(now, amount), 1 - side, message)

    def _schedule(self, time: float, side: int, what: Decode | Message) -> None:
        self.number += 1
        heappush(self.events, (time, self.number, side, what))


def _flags(accepted: list[list[bool]], side: int) -> Decide:
    """The aggregation rule of a side. Position i has the target 2 i; drafts that are not accepted are 2 i + 1."""

    def decide(local: DraftMessage, remote: DraftMessage, position: int) -> tuple[int, bool, bool]:
        flags = accepted[position]
        return 2 * position, flags[side], flags[1 - side]

    return decide


def size(message: Message) -> int:
    """Bytes of a message on the wire, with distributions as large as they may be."""
    if isinstance(message, DraftMessage):
        return HEADER + DISTRIBUTION
    return HEADER + sum(map(size, message.drafts)) if isinstance(message, Switch) else HEADER


# The oracle


class Oracle(NamedTuple):
    """total: seconds. moves: positions after which the aggregator moves."""

    total: float
    moves: list[int]


class State(NamedTuple):
    """What the future depends on, after a decision."""

    decided: float  # when the last token was
    device: float  # when the device has drafted the next one
    cloud: float
    trail: tuple | None  # the moves before, last first


def oracle(world: World, aggregator: int = DEVICE) -> Oracle:
    """The least total of all schedules, knowing all decisions, paces and delays beforehand.

    No bound on lookahead, no jitter, links of infinite bandwidth, decodes that stop at once: each of these only
    helps, so the total is a lower bound for every scheduler in the world as it is, and exact in a world without them
    (`Scripted` reaches it). All times grow with the times before, so of two states with the aggregator on the same
    side, one that is later in everything is dropped; what is left is exact, not a heuristic. Links must keep the order
    of sending by themselves.
    """
    device, cloud = world.paces()
    ways = (world.up.arrival, world.down.arrival)
    flags = world.accepted.tolist()
    first = State(0.0, device[0], cloud[0], None)
    after = [*zip(device, cloud, strict=True), (0.0, 0.0)][1:]  # paces of the position after each
    front = [decided_on(first, aggregator, ways, flags[0], after[0])]
    fronts = [front, []] if aggregator == DEVICE else [[], front]
    for i in range(1, len(flags)):
        paces = after[i]
        reached: list[list[State]] = [[], []]
        for side in (DEVICE, CLOUD):
            for state in fronts[side]:
                reached[side].append(decided_on(state, side, ways, flags[i], paces))
                moved = state._replace(decided=ways[side](state.decided), trail=(i - 1, state.trail))
                reached[1 - side].append(decided_on(moved, 1 - side, ways, flags[i], paces))
        fronts = [undominated(states) for states in reached]
    ends = [(state.decided, state.trail) for state in fronts[DEVICE]]
    ends += [(ways[CLOUD](state.decided), state.trail) for state in fronts[CLOUD]]
    total, trail = min(ends, key=lambda end: end[0])
    return Oracle(total, list(moves_of(trail))[::-1])


def decided_on(
    state: State, side: int, ways: Sequence[Callable[[float], float]], flags: Sequence[bool], paces: Sequence[float]
) -> State:
    """The next token is decided on a side, as soon as it can be; paces: of the token after it."""
    drafted = [state.device, state.cloud]
    now = max(state.decided, drafted[side], ways[1 - side](drafted[1 - side]))
    heard = (now, ways[DEVICE](now)) if side == DEVICE else (ways[CLOUD](now), now)
    # the decode after an accepted draft began with that draft, the one after a rejected one begins with the news
    device, cloud = ((drafted[s] if flags[s] else heard[s]) + paces[s] for s in (DEVICE, CLOUD))
    return State(now, device, cloud, state.trail)


def undominated(states: Iterable[State]) -> list[State]:
    """Those that no other one is as early as in everything."""
    kept: list[State] = []
    for state in sorted(states, key=lambda state: state[:3]):
        if not any(other.device <= state.device and other.cloud <= state.cloud for other in kept):
            kept.append(state)
    return kept


def moves_of(trail: tuple | None) -> Iterable[int]:
    """The positions of a state's trail, last first."""
    while trail is not None:
        position, trail = trail
        yield position
