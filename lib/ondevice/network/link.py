"""When bytes that are sent over a link arrive: one model for a simulator's virtual clock and for the relay's real one.

A link is one direction between two processes that speak TCP: nothing is lost or overtaken for good, all that goes wrong
below comes out as time. Jitter, a lost segment and a busy wire delay what comes behind them on the same connection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

Direction = Literal["up", "down"]

SEGMENT = 1448  # bytes that one TCP segment carries over Ethernet, with timestamps
RETRANSMISSION = 0.2  # seconds: Linux waits no less before it sends a segment again


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
    loss: probability that a segment of `SEGMENT` bytes is lost. TCP sends it again, here once and with success, after
    `retransmission` seconds; a message arrives when its last segment does, and what is behind it waits for it.
    Raises ValueError on what is negative or not finite, or no number, and on a loss outside [0, 1].
    """

    delay: float | Callable[[float], float] = 0.0
    jitter: float = 0.0
    bandwidth: float = math.inf
    loss: float = 0.0
    retransmission: float = RETRANSMISSION

    def __post_init__(self) -> None:
        delay = 0.0 if callable(self.delay) else self.delay
        for name, seconds in (("delay", delay), ("jitter", self.jitter), ("retransmission", self.retransmission)):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"A link's {name} is finite and not negative, not {seconds}.")
        if not self.bandwidth > 0 or not 0 <= self.loss <= 1:
            wrong = f"{self.bandwidth}, {self.loss}"
            raise ValueError(f"A link has a positive bandwidth and a loss from 0 to 1, not {wrong}.")

    def arrival(self, sent: float) -> float:
        """When a message that is sent at that time arrives, without jitter, loss, bandwidth and messages before it."""
        return sent + (self.delay(sent) if callable(self.delay) else self.delay)


PERFECT = Link()


class Wire:
    """What the connections over one link share: it carries their bytes one after the other."""

    def __init__(self) -> None:
        self.busy = 0.0  # until this time


class Line:
    """One connection's way over a link: each message's arrival depends on those before it.

    `link` may be replaced at any time; what is under way keeps its arrival. The seed, the direction and the number of
    the connection give the jitter and the losses, one draw of each for each message.
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
        if link.loss and self._random() >= (1 - link.loss) ** max(1, math.ceil(amount / SEGMENT)):
            arrival += link.retransmission
        self._last = arrival = max(self._last, arrival)
        return arrival
