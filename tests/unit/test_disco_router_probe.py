"""Who may be spliced: the probe believes only an endpoint that goes on in the middle of a word."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from routing import MESSAGES, Source, Told, configured, deployment, serving
from waiting import until

from ondevice_programs.router import probe
from ondevice_programs.router.endpoints import AnswerChunk, EndpointError, Finish, OnEvent, Usage
from ondevice_programs.router.replay import create_replay
from ondevice_programs.router.request import ChatRequest
from ondevice_programs.router.router import Router


class Says(Source):
    """Answers with one text after the prefix and another to the fresh request, counting prompt tokens as told."""

    def __init__(self, continued: str | EndpointError, fresh: str, counts: tuple[int, int] | None) -> None:
        self.continued, self.fresh, self.counts = continued, fresh, counts

    async def ask(self, request: ChatRequest, prefix: str, limits: Mapping[str, int], on_event: OnEvent) -> Finish:
        text = self.continued if prefix else self.fresh
        if isinstance(text, EndpointError):
            raise text
        on_event(AnswerChunk(text))
        return Finish("length", Usage(self.counts[0 if prefix else 1], 1) if self.counts else None)


REST = probe.WORD[probe.CUT :]


@pytest.mark.parametrize(
    ("continued", "fresh", "counts", "continues"),
    [
        (REST[:4], probe.WORD, (40, 20), True),
        (f"{REST}, {probe.WORD}", probe.WORD, None, True),
        (probe.WORD, probe.WORD, (40, 20), False),  # begins anew
        (f" {REST}", probe.WORD, (40, 20), False),  # a new turn
        (REST, REST, (40, 20), False),  # says so whatever it is asked
        (REST, probe.WORD, (20, 20), False),  # the prefix did not reach the model
        (REST[:2], probe.WORD, (40, 20), False),  # too little to tell
        (EndpointError("unknown field", 422), probe.WORD, None, False),
        (EndpointError("refused"), probe.WORD, None, None),
        (EndpointError("busy", 503), probe.WORD, None, None),
    ],
)
def test_only_who_finishes_the_word_continues(
    tmp_path: Path, continued: Any, fresh: str, counts: tuple[int, int] | None, continues: bool | None
) -> None:
    config = configured(tmp_path, deployment("device", can_continue="probe"), deployment("server"))
    router = Router(config, lambda _: Says(continued, fresh, counts), Told())
    assert router.endpoints["server"].can_continue is True and router.endpoints["device"].can_continue is None
    assert asyncio.run(probe.can_continue(router.endpoints["device"])) is continues


def test_a_count_that_no_prompt_can_have_is_not_paid_for(tmp_path: Path) -> None:
    priced = deployment("device", can_continue="probe", input_cost_per_token=1.0)
    says = Says(REST, probe.WORD, (10**9, 20))
    router = Router(configured(tmp_path, priced, deployment("server")), lambda _: says, Told())
    assert asyncio.run(probe.can_continue(router.endpoints["device"])) is True
    assert router.endpoints["device"].spent < 1e5


def test_an_endpoint_that_was_down_at_the_start_is_probed_on_first_use(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(create_replay()) as url:
            config = configured(tmp_path, deployment("device", url, can_continue="probe"), deployment("server"))
            router = Router(config, dispatcher=Told())
            assert router.endpoints["device"].can_continue is None  # nobody has started the router's own life
            session = router.open(ChatRequest(messages=tuple(MESSAGES), limits={"max_tokens": 3}))
            session.start()
            assert len([part async for part in session.out.read()]) == 3
            assert await until(lambda: router.endpoints["device"].can_continue is True)
            await router.endpoints["device"].source.aclose()

    asyncio.run(work())
