"""A stop string that spans a seam ends the answer there, however the text is split; any other text arrives whole."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing import DEVICE_FIRST, MESSAGES, Source, Told, configured, deployment, read, virtually

from ondevice_programs.router.delivery import Delivery
from ondevice_programs.router.endpoints import AnswerChunk, EndpointError, Finish, OnEvent, Usage
from ondevice_programs.router.request import BadRequest, ChatRequest, parse
from ondevice_programs.router.router import Router

LETTERS = "ab\n"  # few, so that stop strings often begin and often come to nothing
PACKETS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=6)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=3)


def ends_at(stretches: list[list[str]], stops: list[str]) -> int | None:
    """Where the answer ends, letter by letter: before the first stop string that is complete and spans a seam."""
    text = "".join(packet for packets in stretches for packet in packets)
    seams = {len("".join(packet for packets in stretches[:cut] for packet in packets)) for cut in range(len(stretches))}
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        starts = [start for start in starts if any(start < seam < end for seam in seams)]
        if starts:
            return min(starts)
    return None


@given(st.lists(PACKETS, min_size=1, max_size=4), STOPS, st.booleans())
def test_every_split_of_every_text(stretches: list[list[str]], stops: list[str], fails: bool) -> None:
    async def work() -> tuple[str, bool]:
        out = Delivery(None, stops)
        shown: list[str] = []

        async def reader() -> None:
            async for part in out.read():
                shown.append(part.text)

        reading = asyncio.create_task(reader())
        for number, packets in enumerate(stretches):
            for at, packet in enumerate(packets):
                if not out.stopped:
                    out.push(packet, "device", seam="fallback" if number and not at and len(out) else None)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert whole.startswith("".join(shown)), "what was shown is never taken back"
        out.close(EndpointError("cut") if fails else None)
        try:
            await reading
        except EndpointError:
            assert fails
        return "".join(shown), out.stopped

    text = "".join(packet for packets in stretches for packet in packets)
    end = ends_at(stretches, stops)
    whole = text if end is None else text[:end]
    assert asyncio.run(work()) == (whole, end is not None)


@given(PACKETS, STOPS)
def test_one_endpoints_packets_pass_as_they_came(packets: list[str], stops: list[str]) -> None:
    async def work() -> list[str]:
        out = Delivery(None, stops)
        for packet in packets:
            out.push(packet, "device")
        out.close()
        return [part.text async for part in out.read()]

    assert asyncio.run(work()) == packets


class Spoken(Source):
    """Says these packets, then fails or has finished; what it is asked to continue is noted."""

    def __init__(self, *packets: str, fails: bool = False) -> None:
        self.packets, self.fails, self.asked, self.left = packets, fails, [], 0

    async def ask(self, request: ChatRequest, prefix: str, limits: Mapping[str, int], on_event: OnEvent) -> Finish:
        self.asked.append(prefix)
        try:
            for packet in self.packets:
                await asyncio.sleep(0.01)
                on_event(AnswerChunk(packet))
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.left += 1
            raise
        if self.fails:
            raise EndpointError("as scripted", 500)
        return Finish("stop", Usage(request.tokens, len(self.packets)))


class AtTwo:
    """A migration that is due after two packets."""

    def due(self, prompt: int, generated: int, shown: int) -> bool:
        return generated >= 2


class Moves(Told):
    def migration(self, source: Any, target: Any, pace: float) -> Any:
        return AtTwo()


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize(
    ("server", "stop", "text", "reason"),
    [
        (("ser: more", " still"), "\n\nUser:", "One.", "stop"),
        (("s", "er", ":", " more"), ["</end>", "\n\nUser:"], "One.", "stop"),
        (("ual", " end"), "\n\nUser:", "One.\n\nUual end", "stop"),
        (("ual User: more",), "User:", "One.\n\nUual User: more", "stop"),  # not over the seam: the endpoint's matter
    ],
)
def test_an_answer_ends_at_its_seam(
    tmp_path: Path, moves: bool, server: tuple[str, ...], stop: Any, text: str, reason: str
) -> None:
    device = Spoken("One.", "\n\nU", *[" never"] * moves, fails=not moves)
    other = Spoken(*server)
    config = configured(tmp_path, deployment("device"), deployment("server"), pace=20.0 if moves else None)
    dispatcher = Moves(DEVICE_FIRST) if moves else Told(DEVICE_FIRST)
    router = Router(config, lambda entry: device if entry.side == "device" else other, dispatcher)  # type: ignore[arg-type]

    async def work() -> Any:
        seen = await read(router, ChatRequest(messages=tuple(MESSAGES), options={"stop": stop}))
        await asyncio.sleep(1.0)
        return seen

    seen = virtually(work())
    assert "".join(seen.texts) == text and seen.session.finish.reason == reason and seen.error is None
    assert other.asked == ["One.\n\nU"] and len(seen.switches) == 2
    assert other.left == (text == "One." and len(server) > 1), "an endpoint that is not needed is left"
    assert seen.session.entries[-1].outcome == "served" and seen.session.usage()[1]


def test_a_stop_that_is_none_is_one_sentence() -> None:
    with pytest.raises(BadRequest, match=r"stop\.1"):
        parse({"messages": MESSAGES, "stop": ["a", 1]})
    assert parse({"messages": MESSAGES, "stop": ["a", ""]}).stops == ("a",)
    assert parse({"messages": MESSAGES, "stop": None}).stops == parse({"messages": MESSAGES}).stops == ()
