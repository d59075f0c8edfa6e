"""Being written: dispatch that keeps a budget and learns from traffic. The interface below stands; see its docstrings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ondevice.disco.migration import Migration, Prices
from ondevice.disco.policy import Side


@dataclass
class Order:
    """One request's dispatch. waits: seconds before each side starts, NEVER where it does not; one of them is 0.

    tokens: of the prompt. reserved: of the constrained side's budget, until it starts or the order is closed.
    """

    tokens: int
    waits: Mapping[Side, float]
    reserved: int = 0
    started: set[Side] = field(default_factory=set)


class Dispatcher:
    """Decides when each side starts, keeps the constrained side within b of all input tokens, and learns from traffic."""

    constrained: Side
    budget: float

    def __init__(self, constrained: Side, budget: float, state: Mapping[str, Any] | None = None) -> None:
        """state: what `state()` gave. Raises ValueError, one clear sentence, where it is none of this version."""

    def arrive(self, tokens: int, device_free_in: float = 0.0) -> Order:
        """Count a request and decide its waits. device_free_in: seconds until a device that serves one at a time is free."""

    def start(self, order: Order, side: Side, tokens: int) -> bool:
        """Ask before every start of a side (race, fallback, migration), on a prompt and prefix of `tokens` together.

        False where the constrained side may not: the budget does not hold it. True has charged it.
        """

    def refund(self, order: Order, side: Side, tokens: int) -> None:
        """A start that reached nobody (connection refused): take its charge back."""

    def first_token(self, order: Order, side: Side, seconds: float) -> None:
        """A side's first token came `seconds` after that side was started."""

    def cut_off(self, order: Order, side: Side, seconds: float) -> None:
        """A side that was running was stopped before its first token, after `seconds`: it would have taken longer."""

    def close(self, order: Order, answer: int | None = None) -> None:
        """The race is decided or the request is over: nothing more will start by its waits. answer: tokens, if complete."""

    def migration(self, source: Prices, target: Prices, pace: float) -> Migration | None:
        """When an answer leaves the constrained side, from what was learned; None where the prices never make it pay.

        `Migration.due(prompt, generated, shown) -> bool` is asked after every token.
        """

    @property
    def left(self) -> float:
        """Tokens of the constrained side's budget that are neither used nor reserved."""

    def state(self) -> dict[str, Any]:
        """What was learned and spent, as JSON: numbers only, no text."""
