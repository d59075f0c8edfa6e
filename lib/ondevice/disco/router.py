"""The router: two endpoints behind one stream, dispatched by a policy (Sun et al. 2025, section 4)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from ondevice.disco.budget import TokenBucket
from ondevice.disco.delivery import Delivery, Token
from ondevice.disco.endpoints import SIDES, Endpoint, EndpointClient, Side, Source
from ondevice.disco.handoff import HandoffRule
from ondevice.disco.ledger import Ledger
from ondevice.disco.online import OnlineDispatcher
from ondevice.disco.policy import Constrained, DispatchPolicy
from ondevice.disco.request import Message, Request, estimate_tokens, parse
from ondevice.disco.session import Session, Setup, Summary, Timeouts

Waits = Callable[[int], tuple[float, float]]  # prompt tokens -> (device wait, server wait), seconds
# prompt tokens -> (its waits, whom to tell of its first token and the sides that were started)
Plan = Callable[[int], tuple[tuple[float, float], Callable[[Token, Collection[Side]], None]]]


class Router:
    """Streams each answer from whichever endpoint is first, within the policy's budget.

    policy: a DispatchPolicy, an OnlineDispatcher, which learns from every first token, or a function from prompt tokens
        to (device wait, server wait) in seconds, inf = never.
    constrained: the endpoint that a budget limits and a migration leaves; taken from a DispatchPolicy.
    bucket: an optional hard cap on the constrained endpoint's input tokens, fallbacks included; it is charged the
        prompt of each request that starts that endpoint, once, which is how section 5.1 defines the budget.
    pace: r_c, tokens/s shown to the reader; None forwards at once.
    migration: when to leave the constrained endpoint mid-answer; needs a pace, which is what fills the buffer.
    count_tokens: counts a prompt's tokens for the policy and the ledger; the default is a cheap estimate.
    seed: of the coins that spend a policy's budget to the token.
    """

    def __init__(
        self,
        device: Endpoint | Source,
        server: Endpoint | Source,
        policy: DispatchPolicy | OnlineDispatcher | Waits,
        *,
        constrained: Constrained | None = None,
        timeouts: Timeouts | None = None,
        bucket: TokenBucket | None = None,
        pace: float | None = None,
        migration: HandoffRule | None = None,
        count_tokens: Callable[[str], int] = estimate_tokens,
        seed: int | None = None,
    ) -> None:
        if isinstance(policy, DispatchPolicy):
            constrained = policy.constrained
        elif isinstance(policy, OnlineDispatcher):
            constrained = "device"
        if pace is not None and not pace > 0:
            raise ValueError(f"A pace is above 0 tokens/s, not {pace!r}.")
        if migration is not None and pace is None:
            raise ValueError("A migration needs a pace: without one no buffer builds up to mask the hand-off.")
        if constrained is None and (migration is not None or bucket is not None):
            raise ValueError("A migration or a token bucket needs to know which endpoint is constrained.")
        sources = {"device": device, "server": server}
        clients = {s: EndpointClient(e) if isinstance(e, Endpoint) else e for s, e in sources.items()}
        self.ledger = Ledger()
        self.policy = policy
        self._plan = _plan(policy, random.Random(seed))
        self._pace = pace
        self._setup = Setup(
            sources={side: clients[side] for side in SIDES},
            constrained=constrained,
            count_tokens=count_tokens,
            timeouts=timeouts or Timeouts(),
            migration=migration,
            bucket=bucket,
            ledger=self.ledger,
            tasks=set(),
        )

    @property
    def constrained(self) -> Side | None:
        return self._setup.constrained

    def stream(self, prompt: str | Sequence[Message], max_tokens: int | None = None, **options: Any) -> Stream:
        """The answer to a prompt (completions) or a list of messages (chat); options such as temperature are passed on.

        ValueError if the prompt is empty.
        """
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        if isinstance(prompt, str):
            return self.answer(parse("completions", {"prompt": prompt, **limit, **options}))
        return self.answer(parse("chat", {"messages": list(prompt), **limit, **options}))

    def answer(self, request: Request) -> Stream:
        return Stream(self._setup, request, self._plan, self._pace)

    async def aclose(self) -> None:
        """Close all connections; streams that still run end with an error."""
        tasks = list(self._setup.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in self._setup.sources.values():
            await source.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.aclose()


class Stream:
    """One answer: `async for token in stream`, then `stream.summary`. Leaving the loop closes both endpoints."""

    def __init__(self, setup: Setup, request: Request, plan: Plan, pace: float | None) -> None:
        self.request = request
        self._setup = setup
        self._plan = plan
        self._pace = None if request.whole else pace
        self._session: Session | None = None

    @property
    def summary(self) -> Summary:
        """How the answer has come about so far; complete when the stream has ended."""
        if self._session is None:
            raise RuntimeError("The stream has not been started.")
        return self._session.summary()

    async def __aiter__(self) -> AsyncIterator[Token]:
        if self._session is not None:
            raise RuntimeError("A stream can be read once.")
        length = self._setup.count_tokens(self.request.text)
        (device, server), tell = self._plan(length)
        waits: Mapping[Side, float] = {"device": device, "server": server}
        self._session = Session(self._setup, self.request, length, waits, Delivery(self._pace))
        self._session.start()
        try:
            async for token in self._session.out.read():
                if token.index == 0:
                    tell(token, self._session.started)
                yield token
        finally:
            self._session.abandon()


def _plan(policy: DispatchPolicy | OnlineDispatcher | Waits, coins: random.Random) -> Plan:
    if isinstance(policy, OnlineDispatcher):
        return partial(_learning, policy)
    if isinstance(policy, DispatchPolicy):
        decide = policy.decider()
        return lambda length: (decide(length, coins.random()), _ignore)
    return lambda length: (policy(length), _ignore)


def _learning(
    dispatcher: OnlineDispatcher, length: int
) -> tuple[tuple[float, float], Callable[[Token, Collection[Side]], None]]:
    decision = dispatcher.decide(length)

    def tell(first: Token, started: Collection[Side]) -> None:
        dispatcher.observe(
            decision, first.time, server_answered=first.source == "server", device_started="device" in started
        )

    return (decision.wait, 0.0), tell


def _ignore(first: Token, started: Collection[Side]) -> None:
    pass
