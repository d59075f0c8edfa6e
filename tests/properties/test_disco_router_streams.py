"""Two thousand streams of DiSCo's router with whatever may happen to them: no token lost, doubled or reordered."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

from routing import MESSAGES, Scripted, Seen, Told, composed, configured, deployment, read, virtually

from ondevice.disco.policy import NEVER, SIDES
from ondevice.disco.router.endpoints import EndpointError
from ondevice.disco.router.replay import answer, plain_chat
from ondevice.disco.router.request import Request
from ondevice.disco.router.router import Router

STREAMS, TOKENS = 2000, 30
VOICES = {"device": "a", "server": "b"}
ASKED = plain_chat(MESSAGES)


def drawn(coins: random.Random, side: str) -> tuple[Scripted, dict[str, Any]]:
    fault = (coins.randrange(3), coins.randrange(TOKENS)) if coins.random() < 0.6 else None
    error = coins.choice([EndpointError("cut", None), EndpointError("broken", 500), EndpointError("no", 401), None])
    ttft = coins.choices([0.0, 0.01, 0.05, 0.2, 0.7, 2.0], k=3)
    scripted = Scripted(ttft, coins.choice([0.0, 0.004, 0.02, 0.1]), VOICES[side], fault, error, coins.random() < 0.5)
    return scripted, {"can_continue": coins.random() < 0.75, "input_cost_per_token": 1.0}


async def one(seed: int, folder: Path) -> None:
    coins = random.Random(seed)
    made = {side: drawn(coins, side) for side in SIDES}
    waits = {side: coins.choice([0.0, 0.03, 0.1, 1.0, NEVER]) for side in SIDES}
    waits[coins.choice(SIDES)] = 0.0
    config = configured(
        folder,
        *(deployment(side, **options) for side, (_, options) in made.items()),
        constrained=coins.choice(SIDES),
        pace=coins.choice([None, 15.0, 80.0]),
        migration=coins.choice(["stop", "overlap"]),
        num_retries=coins.choice([0, 2]),
        stream_timeout=0.5,
        timeout=20.0,
    )
    dispatcher = Told(
        waits, coins.choice([0, 50, NEVER]), config.router_settings.constrained, coins.choice([None, 1, 5])
    )
    router = Router(config, lambda it: made[it.model_info.side][0], dispatcher)
    seen = await read(router, Request(messages=tuple(MESSAGES), limits={"max_tokens": TOKENS}))
    await asyncio.sleep(30.0)  # whatever was cancelled ends
    check(seen, router, {side: scripted for side, (scripted, _) in made.items()})


def check(seen: Seen, router: Router, scripted: dict[str, Scripted]) -> None:
    assert seen.texts == composed(seen, VOICES, ASKED)
    assert all(later >= sooner for sooner, later in itertools.pairwise(seen.times))
    for member in router.members:  # who could not continue never did
        asked = scripted[member.deployment.model_info.side].asked
        assert member.can_continue or not any(asked)
        assert member.running == 0 and abs(member.reserved) < 1e-9
    assert len(seen.session.entries) == sum(len(it.asked) for it in scripted.values()), "every start is entered once"
    if seen.error is None:
        text = ASKED + "".join(seen.texts)
        assert len(seen.texts) == TOKENS or not answer(text, 1, VOICES[seen.switches[-1][1]])
    else:
        assert seen.error.status in (401, 429, 502, 504) and str(seen.error)
    told = router.dispatcher.told  # type: ignore[attr-defined]
    assert sum(what[0] == "start" for what in told) == len(seen.session.entries), "nothing starts unasked"
    assert told[-1][0] == "close" and (told[-1][1] is None) == (seen.error is not None)


def test_whatever_happens_no_token_is_lost_doubled_or_reordered(tmp_path: Path) -> None:
    for seed in range(STREAMS):
        virtually(one(seed, tmp_path))
