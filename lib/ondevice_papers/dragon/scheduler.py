"""Profiler and schedulers: which side does the next aggregation (section 5).

The paper's rule takes both sides' paces per token for granted (Eq. 7) and moves as soon as the other side's is less,
whatever a move costs. Ours follows one quantity. Let b be the slower side, o the other, c their paces, R the round
trip. b drafts without a break until one of its drafts is rejected; so the time for n tokens is n c_b plus, at each
rejection of b's draft, the lag: how long ago b drafted the token. With b aggregating, a rejection of o's draft adds
R + c_o to the lag, and each token takes c_b from it. With o aggregating, o's rejections cost nothing, but the lag is
at least R. Moving to o takes R, except when o's draft has just been rejected, for then o must hear of it anyway; moving
to b takes nothing. `plan` finds the moves of the least mean cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import log2
from random import Random

import numpy as np
from numpy.typing import NDArray

from ondevice_papers.dragon.cost import Costs, should_move

Moves = NDArray[np.bool_]
LEVELS = 32  # of lag in a plan, from 0 to `top`
ROUNDS = 60  # of value iteration; the moves settle in 40


class Scheduler:
    """One side's choice of the aggregator; this one leaves it where it is, as the paper's Device and Cloud.

    Only `moves` asks; the others report what happened. Times in seconds.
    """

    def drafted(self, position: int, pace: float) -> None:
        """This side decoded a draft in `pace`."""

    def peer_drafted(self, position: int, pace: float) -> None:
        """The other side did, and its draft is here."""

    def answered(self, seconds: float) -> None:
        """The other side's new draft after a rejection is here; `seconds` after it, without the time to decode."""

    def moves(self, position: int, local: bool, remote: bool, own: int, peer: int) -> bool:
        """Whether the other side aggregates from position + 1 on.

        local, remote: whether each draft of `position` was accepted. own, peer: drafts that are queued behind it.
        """
        return False

    def profile(self) -> tuple[float, ...]:
        """The estimates, for the other side's `adopt`."""
        return ()

    def adopt(self, profile: tuple[float, ...]) -> None:
        """This side aggregates now. Raises ValueError on what is no profile of this scheduler."""


class Randomly(Scheduler):
    """Each aggregation is on either side with the same chance: the paper's Random."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def moves(self, position: int, local: bool, remote: bool, own: int, peer: int) -> bool:
        """Whether the next number drawn is below one half."""
        return self._random.random() < 0.5


class Profiler(Scheduler):
    """Estimates of paces, round trip and acceptance, on the side that aggregates and moving with it.

    rtt: seconds, as measured in the handshake. memory: in how many tokens a sample of acceptance loses all but 1/e of
    its weight; inf is the paper's mean over all. prior: of acceptance, with the weight of one token; None for none.
    Paces and round trip forget by a quarter a sample. Raises ValueError on a memory or a prior that cannot be.
    """

    def __init__(self, rtt: float, memory: float = 24.0, prior: float | None = 0.8) -> None:
        if not 0 <= rtt < float("inf"):
            raise ValueError(f"A round trip is finite and not negative, not {rtt}.")
        if not memory >= 1:
            raise ValueError(f"A memory is at least one token, not {memory}.")
        if prior is not None and not 0 <= prior <= 1:
            raise ValueError(f"A prior of acceptance is from 0 to 1, not {prior}.")
        self.rtt = rtt
        self._keep = 1 - 1 / memory
        self.pace: list[float | None] = [None, None]  # local, remote
        self._weight = 0.0 if prior is None else 1.0
        self._accepted = [prior or 0.0] * 2

    @property
    def acceptance(self) -> tuple[float, float]:
        """Rates of the local and the remote drafts; NaN before the first token if there is no prior."""
        return self._share(0), self._share(1)

    def _share(self, side: int) -> float:
        return self._accepted[side] / self._weight if self._weight else float("nan")

    def drafted(self, position: int, pace: float) -> None:
        """Revise the estimate of the local pace."""
        self._paced(0, pace)

    def peer_drafted(self, position: int, pace: float) -> None:
        """Revise the estimate of the remote pace."""
        self._paced(1, pace)

    def _paced(self, side: int, pace: float) -> None:
        before = self.pace[side]
        self.pace[side] = pace if before is None else before + 0.25 * (pace - before)

    def answered(self, seconds: float) -> None:
        """Revise the estimate of the round trip."""
        self.rtt += 0.25 * (seconds - self.rtt)

    def decided(self, local: bool, remote: bool) -> None:
        """Count a token's two drafts in the rates of acceptance."""
        self._weight = self._keep * self._weight + 1
        self._accepted = [
            self._keep * before + now for before, now in zip(self._accepted, (local, remote), strict=True)
        ]

    def profile(self) -> tuple[float, ...]:
        """(round trip, pace, weight, accepted local, accepted remote)."""
        return self.rtt, self.pace[0] or 0.0, self._weight, *self._accepted

    def adopt(self, profile: tuple[float, ...]) -> None:
        """Take over the other side's profile, seen from here."""
        if len(profile) != 5 or not all(0 <= value < float("inf") for value in profile):
            raise ValueError(f"{profile} is no profile of a DRAGON scheduler.")
        self.rtt, self.pace[1], self._weight, remote, local = profile
        self._accepted = [local, remote]


class Greedy(Profiler):
    """The paper's rule: move when Eq. 7's time per token is less on the other side (Eqs. 6 and 8).

    With the corrected round trip, acceptance as the mean of all tokens so far, and no cost of moving. should_move: of
    `cost`, or an experiment's.
    """

    def __init__(
        self,
        rtt: float,
        memory: float = float("inf"),
        prior: float | None = None,
        should_move: Callable[[Costs, float, float], bool] = should_move,
    ) -> None:
        super().__init__(rtt, memory, prior)
        self._should_move = should_move

    def moves(self, position: int, local: bool, remote: bool, own: int, peer: int) -> bool:
        """Whether Delta Z > 0."""
        self.decided(local, remote)
        (c_l, c_r) = (pace or 0.0 for pace in self.pace)
        (alpha_l, alpha_r) = self.acceptance
        return self._should_move(Costs(c_l, c_r, self.rtt / 2, self.rtt / 2), alpha_l, alpha_r)


class Lagging(Profiler):
    """Our rule: the plan of the least mean cost in lag, at the present estimates.

    Which side is slower is only revised when the other is by a tenth: where both paces are alike, it does not matter.
    plan: the function below, or an experiment's.
    """

    def __init__(
        self, rtt: float, memory: float = 24.0, prior: float | None = 0.8, plan: Callable[..., Moves] | None = None
    ) -> None:
        super().__init__(rtt, memory, prior)
        self._plan = plan
        self._slower: bool | None = None  # whether the local side is

    def moves(self, position: int, local: bool, remote: bool, own: int, peer: int) -> bool:
        """Whether the plan moves at the present lag, which is known from the drafts that are queued."""
        self.decided(local, remote)
        c_l, c_r = (pace or 1e-9 for pace in self.pace)
        if self._slower is None or max(c_l, c_r) > 1.1 * min(c_l, c_r):
            self._slower = c_l >= c_r
        c_b = max(c_l, c_r)
        c_o = min(c_l, c_r)
        rejected = [1 - share for share in self.acceptance]
        if self._slower:
            side, lag, kept_b, kept_o, (q_b, q_o) = 0, float(own), local, remote, rejected
        else:
            side, lag, kept_b, kept_o, (q_o, q_b) = 1, self.rtt / c_b + peer, remote, local, rejected
        estimates = _half_octaves(self.rtt / c_b), round(8 * c_o / c_b), _level(q_b), _level(q_o)
        trip, table = _rounded(*estimates, self._plan or plan)
        return bool(table[side, int(kept_b), int(kept_o), min(LEVELS - 1, round(lag / top(trip) * (LEVELS - 1)))])

    def adopt(self, profile: tuple[float, ...]) -> None:
        """Take over the profile; which side is slower is decided anew, from both paces."""
        super().adopt(profile)
        self._slower = None


def top(trip: float) -> float:
    """The greatest lag of a plan, in paces of the slower side; a round trip is `trip` of them."""
    return max(4 * trip, 8.0)


def plan(trip: float, pace: float, rejected_b: float, rejected_o: float) -> Moves:
    """[2, 2, 2, LEVELS] whether to move: by where the aggregator is (0 slower side, 1 faster), whether the slower and
    the faster side's draft was accepted, and the lag, from 0 to `top(trip)`.

    trip: round trip, pace: of the faster side, both in paces of the slower; rejected_*: rates of the slower and faster
    side. The optimum of the lag model in the mean, by relative value iteration.
    """
    lag = np.linspace(0, top(trip), LEVELS)
    after = np.empty((2, 2, 2, 2, LEVELS))  # lag at the next token, by aggregator, drafts accepted, and next aggregator
    for b in (0, 1):
        for o in (0, 1):
            base = lag * b - 1
            redo = 0 if o else pace
            after[0, b, o, 0] = base + pace + (0 if o else trip)
            after[0, b, o, 1] = np.maximum(trip, base + trip + redo)
            after[1, b, o, 0] = base + redo
            after[1, b, o, 1] = np.maximum(trip, base + redo)
    where = after.clip(0, lag[-1]) / lag[1]
    low = np.minimum(where.astype(int), LEVELS - 2)
    part = where - low
    low += LEVELS * np.arange(2)[:, None]  # into the values, flat
    chance = np.outer([rejected_b, 1 - rejected_b], [rejected_o, 1 - rejected_o])
    cost = rejected_b * lag
    value = np.zeros(2 * LEVELS)
    for _ in range(ROUNDS):
        ahead = value[low] * (1 - part) + value[low + 1] * part
        new = np.einsum("bo,pbol->pl", chance, ahead.min(3)) + cost
        value = (new - new.min()).ravel()
    ahead = value[low] * (1 - part) + value[low + 1] * part
    stay = np.stack([ahead[0, :, :, 0], ahead[1, :, :, 1]])
    move = np.stack([ahead[0, :, :, 1], ahead[1, :, :, 0]])
    return move < stay - 1e-9


# Estimates are rounded before they are looked up: the moves hardly depend on them, and few plans are computed.
_RATES = (0.02, 0.08, 0.2, 0.35, 0.55, 0.8)


def _level(rate: float) -> int:
    return min(range(len(_RATES)), key=lambda i: abs(_RATES[i] - rate))


def _half_octaves(trip: float) -> int:
    return round(2 * log2(min(max(trip, 1 / 16), 256)))


@lru_cache(4096)
def _rounded(trip: int, pace: int, rejected_b: int, rejected_o: int, plan: Callable[..., Moves]) -> tuple[float, Moves]:
    """(round trip, moves) of a plan at rounded estimates."""
    rounded = 2 ** (trip / 2)
    return rounded, plan(rounded, pace / 8, _RATES[rejected_b], _RATES[rejected_o])
