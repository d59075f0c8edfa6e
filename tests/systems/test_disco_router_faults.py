"""DiSCo's router over real sockets while its endpoints misbehave: the undisturbed text, or a clear error."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from replaying import Timing, create_replay
from routing import DEVICE_FIRST, MESSAGES, NOW, Told, client_of, configured, deployment, routed, serving
from waiting import until

from ondevice_papers.disco.policy import NEVER, Side
from ondevice_programs.router.app import create_app
from ondevice_programs.router.replay import answer, plain_chat
from ondevice_programs.router.router import Router

TOKENS, CUTS = 24, 247
WHOLE = "".join(answer(plain_chat(MESSAGES), TOKENS))
QUICK = Timing([0.0], 0.0)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
Writes = Callable[[asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def raw(writes: Writes) -> AsyncIterator[str]:
    """A socket server that reads a request, writes what it is told and closes; yields its base URL."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await writes(writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


def recorded() -> bytes:
    """The whole answer as one event stream."""
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    chunks += [{"choices": [{"index": 0, "delta": {"content": it}}]} for it in answer(plain_chat(MESSAGES), TOKENS)]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    return b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def between(
    folder: Path, device: str, server: str, waits: Mapping[Side, float] = DEVICE_FIRST, **options: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Router]]:
    """A client of a router between two URLs."""
    continues = options.pop("can_continue", True)
    sides = deployment("device", device, can_continue=continues), deployment("server", server, can_continue=continues)
    router = Router(configured(folder, *sides, **{"num_retries": 0} | options), dispatcher=Told(waits))
    async with serving(create_app(router)) as url, client_of(f"{url}/v1") as client:
        yield client, router


async def stream(client: openai.AsyncOpenAI) -> tuple[str, str | None]:
    """(text, error)."""
    text = ""
    try:
        chunks = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=TOKENS, stream=True)
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
    except openai.APIError as error:
        return text, str(error)
    return text, None


@pytest.mark.parametrize("can_continue", [True, False])
def test_a_stream_cut_at_every_one_of_247_points(tmp_path: Path, can_continue: bool) -> None:
    whole = HEAD + recorded()
    cuts = [len(whole) * number // (CUTS - 1) for number in range(CUTS)]

    async def work() -> list[tuple[str, str | None]]:
        at = iter(cuts)

        async def writes(writer: asyncio.StreamWriter) -> None:
            writer.write(whole[: next(at)])
            await writer.drain()

        options = {"can_continue": can_continue, "allowed_fails": CUTS}
        async with (
            raw(writes) as device,
            serving(create_replay(QUICK)) as server,
            between(tmp_path, device, server, **options) as (client, _),
        ):
            return [await stream(client) for _ in cuts]

    found = asyncio.run(work())
    assert all(WHOLE.startswith(text) for text, _ in found)
    assert all((text == WHOLE) == (error is None) for text, error in found)
    errors = [error for _, error in found if error is not None]
    if can_continue:
        assert not errors
    else:  # before the first token the other side answers, after the last there is nothing to do
        assert len(errors) > CUTS // 2 and all("cannot continue an answer" in error for error in errors)


@pytest.mark.parametrize("when", ["before the first token", "in the middle"])
def test_when_the_client_leaves_every_upstream_sees_it_and_its_tokens_are_entered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    async def work() -> None:
        middle = when == "in the middle"
        device = create_replay(Timing([0.0 if middle else 30.0], 0.02))
        server = create_replay(Timing([30.0]))
        async with (
            serving(device) as one,
            serving(server) as other,
            between(tmp_path, one, other, NOW) as (client, _),
        ):
            asking = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            if middle:
                chunks = await asking
                iterator = aiter(chunks)
                for _ in range(3):
                    await anext(iterator)
                await until(lambda: server.state.seen.disconnected == 1)  # it lost the race
                assert device.state.seen.disconnected == 0
                await chunks.close()
            else:
                task = asyncio.create_task(asking)
                await until(lambda: device.state.seen.requests == server.state.seen.requests == 1)
                task.cancel()
            assert await until(lambda: device.state.seen.disconnected == server.state.seen.disconnected == 1)
            assert device.state.seen.finished == server.state.seen.finished == 0

            assert await until(lambda: any("status=499" in line for line in caplog.messages))
            (line,) = (line for line in caplog.messages if "status=499" in line)
            entries = json.loads(line[line.index("{") :])["entries"]
            entered = {entry["side"]: entry["output_tokens"] for entry in entries}
            assert entered["device"] >= (2 if middle else 0) and entered["server"] == 0

    with caplog.at_level("INFO", "ondevice_programs.router"):
        asyncio.run(work())


def test_two_hundred_streams_in_one_instant(tmp_path: Path) -> None:
    async def work() -> list[str]:
        async with (
            routed(tmp_path, create_replay(QUICK), create_replay(Timing([5.0])), Told()) as url,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        ):

            async def ask() -> str:
                body = {"messages": MESSAGES, "max_tokens": TOKENS, "stream": True}
                reply = await http.post(f"{url}/chat/completions", json=body)
                events = [line[6:] for line in (await reply.text()).split("\n") if line.startswith("data: {")]
                choices = [choice for event in events for choice in json.loads(event).get("choices", [])]
                return "".join(choice["delta"].get("content") or "" for choice in choices)

            return await asyncio.gather(*(ask() for _ in range(200)))

    assert asyncio.run(work()) == [WHOLE] * 200


def test_a_slow_reader_holds_up_neither_other_streams_nor_the_endpoint(tmp_path: Path) -> None:
    long = next(
        str(n) for n in range(9999) if len(answer(plain_chat([{"role": "user", "content": str(n)}]), 1200)) == 1200
    )

    async def work() -> None:
        device = create_replay(QUICK)
        async with routed(tmp_path, device, create_replay(), Told(DEVICE_FIRST)) as url, client_of(url) as client:
            host, port = url.split("/")[2].split(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            body = json.dumps({"messages": [{"role": "user", "content": long}], "max_tokens": 1200, "stream": True})
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
            await reader.readuntil(b"data: ")  # and reads no more for now
            for _ in range(20):
                assert await stream(client) == (WHOLE, None)
            assert await until(lambda: device.state.seen.finished == 21)  # free long before its reader is done
            rest = await reader.read(-1)
            writer.close()
            assert b"[DONE]" in rest

    asyncio.run(work())


def test_with_nobody_there_the_error_is_clear_and_costs_no_budget(tmp_path: Path) -> None:
    async def work() -> None:
        waits: dict[Side, float] = {"device": 0.0, "server": NEVER}
        async with between(tmp_path, "http://127.0.0.1:1", "http://127.0.0.1:2", waits) as (client, router):
            _, error = await stream(client)
            assert error is not None and error.count("Connect") >= 2
            told = router.dispatcher.told  # type: ignore[attr-defined]
            assert sum(it[0] == "start" for it in told) == sum(it[0] == "refund" for it in told) == 2

    asyncio.run(work())
