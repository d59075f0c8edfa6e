"""With any budget, and with none, an answer survives what either side does; the real dispatcher learns meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from routing import MESSAGES, Scripted, configured, deployment, read, virtually

from ondevice_papers.disco.policy import SIDES
from ondevice_programs.router.endpoints import EndpointError, Finish, OnEvent
from ondevice_programs.router.replay import answer, plain_chat
from ondevice_programs.router.request import ChatRequest
from ondevice_programs.router.router import Router

STREAMS, TOKENS = 150, 20
WHOLE = answer(plain_chat(MESSAGES), TOKENS)
ERRORS = [EndpointError("cut"), EndpointError("oops", 500), EndpointError("refused", reached=False), None]


@pytest.mark.parametrize("constrained", SIDES)
@pytest.mark.parametrize("b", [None, 0.0, 0.3, 1.0])
def test_an_answer_survives_what_one_side_does(tmp_path: Path, b: float | None, constrained: str) -> None:
    coins = random.Random(str((b, constrained)))
    asked = ChatRequest(messages=tuple(MESSAGES), limits={"max_tokens": TOKENS})

    async def work() -> None:
        sources: dict[str, Any] = {}
        settings: dict[str, Any] = {"constrained": constrained, "budget": b, "over_budget": "fallback", "state": "none"}
        settings |= {"num_retries": 0, "allowed_fails": STREAMS, "stream_timeout": 0.5}
        config = configured(tmp_path, *map(deployment, SIDES), **settings)
        router = Router(config, lambda entry: Switched(sources, entry.side))
        account, overdrawn = router.dispatcher.account, False
        for _ in range(STREAMS):
            faulty = coins.choice(SIDES)
            for side in SIDES:
                fault = (0, coins.randrange(TOKENS)) if side == faulty else None
                error = coins.choice(ERRORS)
                if fault and error and not error.reached:
                    fault = (0, 0)
                sources[side] = Scripted([coins.choice([0.01, 0.1, 0.4])], 0.01, fault=fault, error=error)
            seen = await read(router, asked)
            assert seen.error is None and seen.texts == WHOLE, (seen.error, seen.outcomes)
            overdrawn |= seen.session.over_budget
            assert overdrawn or b is None or account.spent <= b * account.arrived + 1e-6
        assert overdrawn == (b is not None), "without a budget nothing is overdrawn"
        await asyncio.sleep(10.0)  # cancelled tasks end

    virtually(work())


class Switched:
    """One side's endpoint, which is another one for each request."""

    def __init__(self, sources: Mapping[str, Scripted], side: str) -> None:
        self._sources, self._side = sources, side

    async def ask(self, request: ChatRequest, prefix: str, limits: Mapping[str, int], on_event: OnEvent) -> Finish:
        return await self._sources[self._side].ask(request, prefix, limits, on_event)
