"""A thousand streams through the served router while its endpoints misbehave: every text exact, or a clear error."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import openai
import pytest

from ondevice.disco.endpoints import Endpoint
from ondevice.disco.handoff import StatedOverhead
from ondevice.disco.loopback import serving
from ondevice.disco.replay import Fault, FaultKind, Timing, answer, create_replay
from ondevice.disco.request import plain_chat
from ondevice.disco.router import Router
from ondevice.disco.serve import create_app
from ondevice.disco.session import Timeouts

STREAMS, AT_ONCE, TOKENS = 1200, 24, 16
PACE = 40.0  # tokens/s; the endpoints are faster even on a busy machine, so that a buffer builds up
VOICES = {"device": "a", "server": "b"}


def faults(seed: int, share: float = 0.3) -> Callable[[int], Fault | None]:
    coins = random.Random(seed)

    def fault(_: int) -> Fault | None:
        if coins.random() >= share:
            return None
        kind: FaultKind = coins.choice(get_args(FaultKind))
        return Fault(kind, coins.randrange(TOKENS), 0.03 if kind == "delay" else 0.0)

    return fault


def routers(device: str, server: str) -> list[Router]:
    """Race, hedge and both hand-off modes, over completions and chat endpoints."""
    limits = Timeouts(first_token=1.0, between_tokens=0.5, total=30.0)
    text = Endpoint(device, price_output=2.0), Endpoint(server)
    chat = Endpoint(device, api="chat", price_output=2.0), Endpoint(server, api="chat")
    mixed = Endpoint(device, price_output=2.0), Endpoint(server, api="chat")
    found = [
        Router(*text, lambda _: (0.0, 0.0), timeouts=limits),
        Router(*chat, lambda _: (0.02, 0.0), timeouts=limits),
    ]
    for sides in (text, mixed):
        for mode in ("stop", "overlap"):
            rule = StatedOverhead(PACE, 0.02, 128.0, source_output=2.0, target_output=0.0, handoff=mode)
            options: dict[str, Any] = {"timeouts": limits, "pace": PACE, "migration": rule, "constrained": "device"}
            found.append(Router(*sides, lambda _: (0.0, 0.01), **options))
    return found


@dataclass
class Outcome:
    asked: str
    text: str
    story: dict[str, Any] | None
    error: str | None


async def ask(client: openai.AsyncOpenAI, number: int, chat: bool, lag_s: float) -> Outcome:
    """One stream, read with a pause of `lag_s` after each chunk."""
    content = f"Question {number}: what is {number * 37 % 101}?"
    messages: Any = [{"role": "user", "content": content}]
    common: dict[str, Any] = {"model": "m", "max_tokens": TOKENS, "stream": True}
    text, story, error = "", None, None
    try:
        if chat:
            stream: Any = await client.chat.completions.create(messages=messages, **common)
        else:
            stream = await client.completions.create(prompt=content, **common)
        async for chunk in stream:
            choice = chunk.choices[0]
            text += (choice.delta.content if chat else choice.text) or ""
            story = getattr(chunk, "disco", story)
            if lag_s:
                await asyncio.sleep(lag_s)
    except openai.APIError as caught:
        error = str(caught)
    return Outcome(plain_chat(messages) if chat else content, text, story, error)


async def ask_all(voices: dict[str, str], seed: int, streams: int) -> tuple[list[Outcome], list[Router]]:
    coins = random.Random(seed)
    timings = [Timing([coins.uniform(0.0, 0.03) for _ in range(50)], 0.001) for _ in voices]
    apps = [
        create_replay(timing, voice, faults(seed + number))
        for number, (timing, voice) in enumerate(zip(timings, voices.values(), strict=True))
    ]
    async with contextlib.AsyncExitStack() as stack:
        device, server = [await stack.enter_async_context(serving(app)) for app in apps]
        made = [await stack.enter_async_context(router) for router in routers(device, server)]
        clients = []
        for router in made:
            url = await stack.enter_async_context(serving(create_app(router)))
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0)
            clients.append(await stack.enter_async_context(client))
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> Outcome:
            at = number % len(clients)
            chat = at != 0 and coins.random() < 0.5
            lag = 0.01 if coins.random() < 0.1 else 0.0
            if at == 1:
                chat = True  # both endpoints of that router speak chat: a bare prompt would be another question
            async with gate:
                return await ask(clients[at], number, chat or at >= 4, lag)

        return list(await asyncio.gather(*map(one, range(streams)))), made


def composed(asked: str, switches: list[dict[str, Any]]) -> str:
    """The text that the recorded switches promise: each stretch from its source, conditioned on all before it."""
    text = ""
    done = 0
    for switch, following in zip(switches, [*switches[1:], None], strict=True):
        until = TOKENS if following is None else following["at"]
        stretch = answer(asked + text, until - done, VOICES[switch["source"]])
        text, done = text + "".join(stretch), until
    return text


def check_errors(outcomes: list[Outcome], made: list[Router]) -> None:
    """Errors are few, clear, and follow only on failures of both endpoints."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert len(errors) < 0.35 * len(outcomes)
    assert all("device: " in error and "server: " in error for error in errors), Counter(errors).most_common(3)
    assert sum(router.ledger.errors for router in made) == len(errors)
    assert sum(router.ledger.requests for router in made) == len(outcomes)


@pytest.mark.slow  # 1200 streams with their stalls and pauses take about 30 s
def test_every_stream_is_byte_identical_or_ends_with_a_clear_error() -> None:
    outcomes, made = asyncio.run(ask_all({"device": "", "server": ""}, seed=1, streams=STREAMS))
    for outcome in outcomes:
        whole = "".join(answer(outcome.asked, TOKENS))
        assert outcome.text == whole if outcome.error is None else whole.startswith(outcome.text)
    check_errors(outcomes, made)
    assert sum(router.ledger.migrations for router in made) > 50
    roles = Counter(entry.role for router in made for entry in router.ledger.entries)
    assert min(roles["race"], roles["fallback"], roles["migration"]) > 50


def test_with_two_voices_each_switch_happens_exactly_where_it_is_recorded() -> None:
    outcomes, made = asyncio.run(ask_all(VOICES, seed=2, streams=STREAMS // 3))
    switched = 0
    for outcome in outcomes:
        if outcome.error is None:
            assert outcome.story is not None
            assert outcome.text == composed(outcome.asked, outcome.story["switches"])
            switched += len(outcome.story["switches"]) > 1
    check_errors(outcomes, made)
    assert switched > 30
