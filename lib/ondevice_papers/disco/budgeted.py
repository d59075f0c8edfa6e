"""Dispatch that keeps a budget and learns from traffic: one price a token, solved anew as lengths and TTFTs change.

The budget holds exactly, whatever comes: an account is asked before every start. The price only decides who deserves
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice_papers.disco import optimal
from ondevice_papers.disco.distributions import Latency
from ondevice_papers.disco.migration import Migration, Prices, expected_remaining
from ondevice_papers.disco.policy import SIDES, Side, check_budget, check_constrained
from ondevice_papers.disco.traffic import KEPT, Traffic, survived

VERSION = 1  # of what `state` gives
EVERY = 20  # requests from one price to the next
HORIZON = 100  # mean prompts, over which a surplus is spent and a gap is filled
LONGEST_ANSWER = 4096  # tokens


class Account:
    """A budget of b of the input tokens: never overdrawn, in the order of time and in that of the requests.

    Requests have numbers, from 0 in the order of their arrival. slack: for each from the oldest open one on, what of
    the budget of all requests up to it those requests have left; a start of one takes from it and from all later ones.
    """

    def __init__(self, b: float, arrived: float = 0.0, spent: float = 0.0) -> None:
        self.b, self.arrived, self.spent = b, arrived, spent
        self.first = -1
        self.slack = deque([b * arrived - spent])

    def arrive(self, tokens: int) -> int:
        """Count a request of so many tokens in, and return its number."""
        self.arrived += tokens
        self.slack.append(self.slack[-1] + self.b * tokens)
        return self.first + len(self.slack) - 1

    def start(self, number: int, tokens: int) -> bool:
        """Charge a request's start with so many tokens, if the budget holds them."""
        at = number - self.first
        if tokens > min(islice(self.slack, at, None)) + 1e-9:
            return False
        self.take(number, tokens)
        return True

    def take(self, number: int, tokens: int) -> None:
        """Charge a start, or with a minus give a charge back."""
        self.spent += tokens
        for index in range(max(0, number - self.first), len(self.slack)):
            self.slack[index] -= tokens

    def forget(self, number: int) -> None:
        """No request before this number can start any more."""
        while self.first < number - 1:
            self.slack.popleft()
            self.first += 1


def reserve(b: float, prompt: float) -> float:
    """Tokens kept for starts that are promised to requests whose server may turn out slow: 4 + 20 b mean prompts."""
    return (4 + 20 * b) * prompt


def rate(b: float, free: float, prompt: float, waiting: bool) -> float:
    """The share of tokens that the price is set for: b, and a surplus spent over HORIZON prompts of mean length.

    free: tokens not spent, not pledged. waiting: whether starts are promised, for which `reserve` is kept.
    """
    return b + (free - waiting * reserve(b, prompt)) / (HORIZON * prompt)


def choose(
    ttft: NDArray[np.float64], share: NDArray[np.float64], tokens: int, price: float, free: float, prompt: float
) -> int:
    """The choice of least E[TTFT] + price l P(start), among those that the account can promise.

    ttft, share: [G] E[TTFT] and P(start) of each choice. free: tokens not spent, not pledged. A start that is likely
    must leave something for those that are not: up to 5 b mean prompts.
    """
    cost = ttft + price * tokens * share
    return int(np.argmin(np.where((share == 0) | (tokens + prompt * share <= free), cost, np.inf)))


@dataclass
class Order:
    """One request's dispatch. waits: seconds before each side starts, NEVER where it does not; one of them is 0.

    tokens: of the prompt. pledged: tokens that the constrained side is expected to take.
    """

    number: int
    tokens: int
    waits: Mapping[Side, float]
    pledged: float
    closed: bool = False


class Dispatcher:
    """Decides when each side starts, keeps the constrained side within b of all input tokens, and learns from traffic.

    state: what `state()` gave. Raises ValueError, one clear sentence, where it is none of this version.
    """

    def __init__(
        self,
        constrained: Side,
        budget: float,
        state: Mapping[str, Any] | None = None,
        *,
        account: Callable[..., Account] = Account,
        survived: Callable[..., Latency] = survived,
        rate: Callable[..., float] = rate,
        choose: Callable[..., int] = choose,
    ) -> None:
        check_budget(budget)
        check_constrained(constrained)
        self.constrained, self.budget, self._rate, self._choose = constrained, budget, rate, choose
        self.other: Side = SIDES[1 - SIDES.index(constrained)]
        kept, spent = (None, {}) if state is None else _read(state, constrained)
        self.traffic = Traffic(kept, survived)
        self.account = account(budget, **spent)
        self._open: deque[Order] = deque()
        self._pledged = 0.0
        self._solve()

    def arrive(self, tokens: int, device_free_in: float = 0.0) -> Order:
        """Count a request and decide its waits.

        device_free_in: seconds until a device that serves one request at a time is free.
        """
        number = self.account.arrive(tokens)
        self.traffic.kept["prompts"].append(tokens)
        if number % EVERY == EVERY - 1:
            self.traffic.fit()
            self._solve()
        device_at = self.traffic.device_ttft(tokens)
        if self.constrained == "device":
            ttft = self.traffic.server.expected_minimum(np.maximum(self._waits, device_free_in) + device_at)
        else:
            ttft = optimal.choices(self.traffic.server, np.array([device_at + device_free_in]), "server")[2][0]
        free = self.account.slack[-1] - self._pledged
        price = self._prices[free < tokens + self._reserve]  # equal prompts are all worth it, or none, at one price
        choice = self._choose(ttft, self._share, tokens, price, free, self._spare)
        pledged = tokens * float(self._share[choice])
        order = Order(number, tokens, {self.constrained: float(self._waits[choice]), self.other: 0.0}, pledged)
        self._pledged += pledged
        self._open.append(order)
        return order

    def _solve(self) -> None:
        tokens = self.traffic.prompts
        waiting = self.constrained == "device"
        self._prompt = float(tokens.mean())
        self._spare = 5 * self.budget * self._prompt * waiting
        self._reserve = reserve(self.budget, self._prompt) if waiting else self._prompt  # for counts that are corrected
        choices = optimal.choices(self.traffic.server, self.traffic.device_ttft(tokens), self.constrained)
        self._waits, self._share, _ = choices
        target = self._rate(self.budget, self.account.slack[-1] - self._pledged, self._prompt, waiting)
        self._prices = optimal.prices(choices, tokens, tokens / tokens.sum(), target, 1e-2)  # (low, high)

    def start(self, order: Order, side: Side, tokens: int) -> bool:
        """Ask before every start of a side (race, fallback, migration), on a prompt and prefix of `tokens` together.

        False where the constrained side may not: the budget does not hold it. True has charged it.
        """
        if side != self.constrained:
            return True
        self.settled(order)
        return self.account.start(order.number, tokens)

    def refund(self, order: Order, side: Side, tokens: int) -> None:
        """A start that reached nobody (connection refused): take its charge back."""
        if side == self.constrained:
            self.account.take(order.number, -tokens)

    def correct(self, order: Order, tokens: int, starts: int) -> None:
        """Enter an endpoint's own count of a request's prompt.

        starts: of the constrained side, that were charged. Where more was spent than was known, the constrained side
        does not start until the budget holds it.
        """
        account, more = self.account, tokens - order.tokens
        account.arrived += more
        for index in range(max(0, order.number - account.first), len(account.slack)):
            account.slack[index] += account.b * more
        account.take(order.number, more * starts)

    def first_token(self, order: Order, side: Side, seconds: float) -> None:
        """A side's first token came `seconds` after that side was started."""
        self._note(order, side, seconds, True)

    def cut_off(self, order: Order, side: Side, seconds: float) -> None:
        """A side that was running was stopped before its first token, after `seconds`: it would have taken longer."""
        self._note(order, side, seconds, False)

    def settled(self, order: Order) -> None:
        """The race is decided: no wait of this request will start anything, though a failure still may."""
        self._pledged = self._pledged - order.pledged
        order.pledged = 0.0

    def close(self, order: Order, answer: int | None = None) -> None:
        """The request is over and starts nothing more. answer: tokens, if complete."""
        self.settled(order)
        order.closed = True
        while self._open and self._open[0].closed:
            self.account.forget(self._open.popleft().number)
        if answer:
            self.traffic.kept["answers"].append(answer)

    def migration(self, source: Prices, target: Prices, pace: float) -> Migration | None:
        """When an answer leaves the constrained side, by what was learned; None where decoding is no cheaper there."""
        if source.decode <= target.decode:
            return None
        traffic, slowest = self.traffic, self.traffic.server.quantile(0.99)
        remaining = expected_remaining(list(traffic.kept["answers"]), LONGEST_ANSWER)
        return Migration(
            source,
            target,
            remaining,
            (lambda tokens: slowest) if self.constrained == "device" else traffic.device_ttft,
            pace,
        )

    @property
    def left(self) -> float:
        """Tokens of the constrained side's budget that are neither used nor expected to be."""
        return max(0.0, self.account.slack[-1] - self._pledged)

    def state(self) -> dict[str, Any]:
        """What was learned and spent, as JSON: numbers only, no text."""
        kept = {name: list(values) for name, values in self.traffic.kept.items()}
        spent = {"arrived": self.account.arrived, "spent": self.account.spent}
        return {"version": VERSION, "constrained": self.constrained, "kept": kept, "account": spent}

    def _note(self, order: Order, side: Side, seconds: float, seen: bool) -> None:
        row = [seconds, seen] if side == "server" else [order.tokens, seconds, seen]
        self.traffic.kept[side].append(row)


def _read(state: Mapping[str, Any], constrained: Side) -> tuple[dict[str, Any], dict[str, float]]:
    """(what was learned, the account) of a kept state; the account of another constrained side is not this one's."""
    try:
        kept = {name: list(state["kept"][name]) for name in KEPT}
        spent = dict(state["account"])
        fits = state["version"] == VERSION and set(spent) == {"arrived", "spent"} and min(spent.values()) >= 0.0
        Traffic(kept)
    except (KeyError, TypeError, ValueError, IndexError):
        fits = False
    if not fits:
        raise ValueError("The kept state is of another version or damaged: move it away to learn anew.")
    return kept, spent if state["constrained"] == constrained else {}
