"""When bytes that are sent over a link arrive: one model for a simulator's virtual clock and for the relay's real one.

A link is one direction between two processes that speak TCP: nothing is lost or overtaken for good, all that goes wrong
below comes out as time. Jitter and a busy wire delay what comes behind them on the same connection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

Direction = Literal["up", "down"]


@dataclass(frozen=True)
class Sinusoid:
    """A delay that swings: mean + amplitude sin(2 pi t / period), in seconds (section 7.4 of DRAGON: period 20 pi).

    Raises ValueError unless 0 <= amplitude <= mean and the period is positive, all of them finite.
    """

    mean: float
    amplitude: float
    period: float = 20 * math.pi

    def __post_init__(self) -> None:
        if not 0 <= self.amplitude <= self.mean < math.inf:
            raise ValueError(f"A delay of {self.mean} does not swing by {self.amplitude}: it would not be 0 or more.")
        if not 0 < self.period < math.inf:
            raise ValueError(f"A period is positive and finite, not {self.period}.")

    def __call__(self, now: float) -> float:
        return self.mean + self.amplitude * math.sin(2 * math.pi * now / self.period)


@dataclass(frozen=True)
class Link:
    """One direction of a link between two processes, first in, first out.

    delay: seconds, or a function of the time of sending. jitter: seconds; each message's delay is greater by up to
    that much, uniformly (netem's "D plus or minus J" is Link(D - J, 2 J)). bandwidth: bytes per second.
    Raises ValueError on what is negative or not finite, or no number.
    """

    delay: float | Callable[[float], float] = 0.0
    jitter: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        delay = 0.0 if callable(self.delay) else self.delay
        for name, seconds in (("delay", delay), ("jitter", self.jitter)):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"A link's {name} is finite and not negative, not {seconds}.")
        if not self.bandwidth > 0:
            raise ValueError(f"A link has a positive bandwidth, not {self.bandwidth}.")

    def arrival(self, sent: float) -> float:
        """When a message that is sent at that time arrives, without jitter, bandwidth and messages before it."""
        return sent + (self.delay(sent) if callable(self.delay) else self.delay)


PERFECT = Link()


class Wire:
    """What the connections over one link share: it carries their bytes one after the other."""

    def __init__(self) -> None:
        self.busy = 0.0  # until this time


class Line:
    """One connection's way over a link: each message's arrival depends on those before it.

    `link` may be replaced at any time; what is under way keeps its arrival. The seed, the direction and the number of
    the connection give the jitter, one draw for each message.
    """

    def __init__(
        self, link: Link, seed: int = 0, direction: Direction = "up", connection: int = 0, wire: Wire | None = None
    ) -> None:
        self.link = link
        self.wire = wire or Wire()
        self._random = Random(f"{seed} {direction} {connection}").random
        self._last = 0.0

    def arrival(self, now: float, amount: int) -> float:
        """When the last of `amount` bytes arrives that are sent now."""
        link = self.link
        wire = self.wire
        wire.busy = sent = max(now, wire.busy) + amount / link.bandwidth
        arrival = link.arrival(sent)
        if link.jitter:
            arrival += link.jitter * self._random()
        self._last = arrival = max(self._last, arrival)
        return arrival
