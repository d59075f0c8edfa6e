"""Many streams of DiSCo's router with whatever may happen to them: no token lost, doubled or reordered."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from routing import MESSAGES, Scripted, Seen, Told, composed, configured, deployment, read, virtually

from ondevice_papers.disco.policy import NEVER, SIDES, Side
from ondevice_programs.router.endpoints import EndpointError
from ondevice_programs.router.replay import answer, plain_chat
from ondevice_programs.router.request import ChatRequest
from ondevice_programs.router.router import Router

STREAMS = 10 * settings().max_examples  # of the profile: 300 in the gate, 2,000 in make test-long
TOKENS = 30
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
        num_retries=coins.choice([0, 2]),
        over_budget=coins.choice(["fallback", "refuse"]),
        stream_timeout=0.5,
        timeout=20.0,
    )
    dispatcher = Told(
        waits, coins.choice([0, 50, NEVER]), config.router_settings.constrained, coins.choice([None, 1, 5])
    )
    router = Router(config, lambda it: made[it.model_info.side][0], dispatcher)
    seen = await read(router, ChatRequest(messages=tuple(MESSAGES), limits={"max_tokens": TOKENS}))
    await asyncio.sleep(30.0)  # whatever was cancelled ends
    check(seen, router, {side: scripted for side, (scripted, _) in made.items()})


def check(seen: Seen, router: Router, scripted: dict[str, Scripted]) -> None:
    assert seen.texts == composed(seen, VOICES, ASKED)
    assert all(later >= sooner for sooner, later in itertools.pairwise(seen.times))
    for side, endpoint in router.endpoints.items():  # who could not continue never did
        assert endpoint.can_continue or not any(scripted[side].asked)
        assert abs(endpoint.reserved) < 1e-9, "all have ended: a start reserves its price"
    assert len(seen.session.entries) == sum(len(it.asked) for it in scripted.values()), "every start is entered once"
    if seen.error is None:
        text = ASKED + "".join(seen.texts)
        assert len(seen.texts) == TOKENS or not answer(text, 1, VOICES[seen.switches[-1][1]])
    else:
        assert seen.error.status in (401, 429, 502, 504) and str(seen.error)
    told = router.dispatcher.told  # type: ignore[attr-defined]
    unasked = len(seen.session.entries) - sum(what[0] == "start" for what in told)
    assert unasked > 0 if seen.session.over_budget else unasked == 0, "nothing else starts unasked"
    assert told[-1][0] == "close" and (told[-1][1] is None) == (seen.error is not None)


def test_whatever_happens_no_token_is_lost_doubled_or_reordered(tmp_path: Path) -> None:
    for seed in range(STREAMS):
        virtually(one(seed, tmp_path))


@pytest.mark.parametrize("constrained", SIDES)
def test_the_budget_holds_at_every_moment_over_faults_races_and_migrations(tmp_path: Path, constrained: Side) -> None:
    coins = random.Random(7)
    made = {side: Scripted(coins.choices([0.05, 0.2, 0.7, 2.0], k=97), 0.01, VOICES[side]) for side in SIDES}
    entries = [deployment(side, output_cost_per_token=float(side == constrained)) for side in SIDES]
    config = configured(tmp_path, *entries, constrained=constrained, budget=0.3, pace=20.0, stream_timeout=1.0)
    router = Router(config, lambda it: made[it.model_info.side])
    asked = {"all": 0, "constrained": 0, "migrations": 0}

    async def ask(number: int) -> None:
        words = "word " * (coins.randrange(400) if number % 50 else 3000)
        request = ChatRequest(messages=({"role": "user", "content": f"{number} {words}"},), limits={"max_tokens": 100})
        for scripted in made.values():
            scripted.fault = (len(scripted.asked), coins.randrange(40)) if coins.random() < 0.3 else scripted.fault
        asked["all"] += request.tokens
        seen = await read(router, request)
        # Every start of the constrained side costs its prompt and prefix, whatever came of it.
        entered = [it for it in seen.session.entries if it.side == constrained]
        asked["constrained"] += len(entered) * request.tokens
        asked["migrations"] += any(it.role == "migration" for it in seen.session.entries)
        assert router.dispatcher.account.spent <= 0.3 * router.dispatcher.account.arrived + 1e-6
        assert asked["constrained"] <= 0.3 * asked["all"] + 1e-6

    async def work() -> None:
        for start in range(0, 600, 10):  # ten at once
            await asyncio.gather(*(ask(number) for number in range(start, start + 10)))

    virtually(work())
    assert asked["constrained"] > 0.15 * asked["all"], "what is allowed is used"
    assert asked["migrations"] > 0
