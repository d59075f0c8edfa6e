"""DiSCo's router before a wall of faults, with no budget named: the right answer or one clear error, never a hang.

S01 to S16 are the kinds of fault of failoverbench's catalogue (github.com/failoverbench/failoverbench); after them come
kinds that single public reports tell of. Each fault is played over a bare socket, so that it is what a client sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from routing import MESSAGES, NOBODY, configured, deployment, serving
from waiting import until

from ondevice_programs.router.app import create_app
from ondevice_programs.router.router import Router

WORDS = [f" w{number:02}" for number in range(20)]
WHOLE = "".join(WORDS)
CUT = 5  # words before a fault in mid-stream: three tries get no further than 15 of the 20
SILENCE_S = 0.3
HOLD_S = 30.0  # longer than any test may take
USAGE = {"prompt_tokens": 9, "completion_tokens": 20, "total_tokens": 29}
BILLED = {"input_cost_per_token": 1.0, "output_cost_per_token": 1.0}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]


@dataclass
class Call:
    """One request at an upstream. number: 0, 1, ... words: those that the answer still lacks. at: words before a fault.

    struck: of the whole test; set once a fault shows.
    """

    number: int
    words: list[str]
    body: dict[str, Any]
    at: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    struck: asyncio.Event

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def begin(self) -> None:
        await self.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def line(self, line: str) -> None:
        data = f"{line}\n\n".encode()
        await self.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def chunk(self, text: str | None = None, reason: str | None = None, **more: Any) -> None:
        choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": reason}
        await self.line(f"data: {json.dumps({'choices': [choice]} | more)}")

    async def some(self) -> None:
        """The head and the words before the fault, which then shows."""
        await self.begin()
        for word in self.words[: self.at]:
            await self.chunk(word)
        self.struck.set()

    async def rest(self, after: int, done: bool = True) -> None:
        """The words after so many, and a proper end."""
        for word in self.words[after:]:
            await self.chunk(word)
        await self.chunk(reason="stop")
        await self.line(f"data: {json.dumps({'choices': [], 'usage': USAGE})}")
        if done:
            await self.end()

    async def end(self) -> None:
        await self.line("data: [DONE]")
        await self.write(b"0\r\n\r\n")

    async def json(self, status: int, payload: dict[str, Any], **headers: str) -> None:
        body = json.dumps(payload).encode()
        lines = {"content-type": "application/json", "content-length": str(len(body))} | headers
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        await self.write(f"HTTP/1.1 {status} As asked\r\n{head}\r\n".encode() + body)

    def reset(self) -> None:
        """End the connection as a crash does: the peer gets RST."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Play = Callable[[Call], Awaitable[None]]


@dataclass
class Upstream:
    """A chat endpoint over a bare socket, which keeps connections open unless its play closes them."""

    play: Play
    at: int = 0
    struck: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                body = json.loads(await reader.readexactly(int(length[1]) if length else 0))
                self.bodies.append(body)
                prefix = body["messages"][-1]["content"] if body.get("continue_final_message") else ""
                assert WHOLE.startswith(prefix)
                words = WORDS[len(prefix) // len(WORDS[0]) :]
                await self.play(Call(len(self.bodies) - 1, words, body, self.at, reader, writer, self.struck))
        writer.close()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            server.close()


async def healthy(call: Call) -> None:
    """The right answer, once the fault has shown: it must not win the race before that."""
    await call.struck.wait()
    await asyncio.sleep(0.02)  # what the other side sent before its fault comes first
    if not call.body["stream"]:
        message = {"role": "assistant", "content": "".join(call.words)}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        await call.json(200, {"id": "x", "object": "chat.completion", "choices": choices, "usage": USAGE})
        return
    await call.begin()
    await call.rest(0)


def once(fault: Play) -> Play:
    """The first request only."""

    async def play(call: Call) -> None:
        await (healthy if call.number else fault)(call)

    return play


def refuses(status: int, message: str, code: str | None = None, **headers: str) -> Play:
    async def play(call: Call) -> None:
        call.struck.set()
        await call.json(status, {"error": {"message": message, "code": code}}, **headers)

    return play


async def resets(call: Call) -> None:
    if call.at:
        await call.some()
        await asyncio.sleep(0.02)  # RST would overtake what was sent
    call.struck.set()
    call.reset()


async def is_silent(call: Call) -> None:
    call.struck.set()
    await asyncio.sleep(HOLD_S)


async def is_slow(call: Call) -> None:
    await call.begin()
    call.struck.set()
    await asyncio.sleep(SILENCE_S / 3)
    await call.rest(0)


async def is_cut(call: Call) -> None:
    await call.some()
    call.writer.close()


async def drips(call: Call) -> None:
    """Half a comment is no sign of life."""
    await call.begin()
    call.struck.set()
    while True:
        await call.write(b"1\r\n:\r\n")
        await asyncio.sleep(SILENCE_S / 6)


async def never_ends_its_line(call: Call) -> None:
    await call.begin()
    call.struck.set()
    await call.line(f"data: {'x' * (3 << 20)}")


async def stalls(call: Call) -> None:
    await call.some()
    await asyncio.sleep(HOLD_S)


async def is_malformed(call: Call) -> None:
    await call.some()
    await call.line('data: {"choices": [{"delta": {"con')
    await call.rest(call.at)


async def is_malformed_at_its_end(call: Call) -> None:
    await call.begin()
    call.struck.set()
    await call.rest(0, done=False)
    await call.line('data: {"choices": [{"delta": {"con')
    await call.end()


async def never_says_done(call: Call) -> None:
    await call.begin()
    call.struck.set()
    await call.rest(0, done=False)
    await call.write(b"0\r\n\r\n")


async def never_says_done_nor_ends(call: Call) -> None:
    await call.begin()
    call.struck.set()
    await call.rest(0, done=False)
    await asyncio.sleep(HOLD_S)


def sends(body: bytes, kind: str = "application/json", length: int | None = None) -> Play:
    """A whole answer of status 200, and no more."""

    async def play(call: Call) -> None:
        call.struck.set()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length or len(body)}\r\n\r\n"
        await call.write(head.encode() + body)
        call.writer.close()

    return play


OLLAMA = b'{"message": {"role": "assistant", "content": "Hi"}, "done": false}\n{"done": true}\n'
ANTHROPIC = b'{"type": "message", "content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn"}'


def ended(reason: str, **more: Any) -> bytes:
    message = {"role": "assistant", "content": WORDS[0]}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": reason} | more]}).encode()


def says(line: str) -> Play:
    """In a stream of status 200, and then its proper end."""

    async def play(call: Call) -> None:
        await call.some()
        await call.line(line)
        await call.end()

    return play


def ends_for(reason: str) -> Play:
    async def play(call: Call) -> None:
        await call.some()
        await call.chunk(reason=reason)
        await call.end()

    return play


async def says_nothing(call: Call) -> None:
    await call.begin()
    call.struck.set()
    await call.end()


OVERLOADED = {"message": "overloaded", "code": 503}


async def fails_in_json(call: Call) -> None:
    call.struck.set()
    await call.json(200, {"error": OVERLOADED})


@dataclass(frozen=True)
class Fault:
    """alone: (status, what the error says) where no other side is there; None where the answer comes all the same.

    asked: how often the side may be asked for one answer. at: words before the fault, for each of its tests.
    """

    name: str
    play: Play
    alone: tuple[int, str] | None
    asked: int = 3
    at: tuple[int, ...] = (0,)


ANYWHERE = (0, CUT)
FAULTS = [
    Fault("S01 429 once, with Retry-After", once(refuses(429, "slow down", retry_after="2")), (429, "slow down"), 1),
    Fault("S02 429 for ever, without Retry-After", refuses(429, "slow down"), (429, "slow down")),
    Fault("S03 500 once", once(refuses(500, "oops")), None, 2),
    Fault("S04 503 for ever", refuses(503, "overloaded"), (502, "HTTP 503: overloaded")),
    Fault("S05 reset once", once(resets), None, 2, ANYWHERE),
    Fault("S05 reset for ever", resets, (502, "Connection|Disconnected|Payload"), 3, ANYWHERE),
    Fault("S06 no response", is_silent, (502, "no first token for")),
    Fault("S06 no response but dots", drips, (502, "no first token for")),
    Fault("S07 slow first token", is_slow, None, 1),
    Fault("S08 stream cut", is_cut, (502, "ended the stream|Payload"), 3, ANYWHERE),
    Fault("S09 stream stalls", stalls, (502, "no (first|further) token for"), 3, ANYWHERE),
    Fault("S10 malformed chunk", is_malformed, (502, "malformed chunk"), 3, ANYWHERE),
    Fault("S10 malformed chunk after the answer", is_malformed_at_its_end, None, 1),
    Fault("S10 a line without an end", never_ends_its_line, (502, "MiB")),
    Fault("another API's stream", sends(OLLAMA, "application/x-ndjson"), (502, "OpenAI-compatible")),
    Fault("S10 a web page", sends(b"<!doctype html>", "text/html"), (502, "text/html")),
    Fault("S11 no [DONE]", never_says_done, None, 1),
    Fault("S11 no [DONE], and the stream left open", never_says_done_nor_ends, None, 1),
    Fault("S12 too long", refuses(400, "too long", "context_length_exceeded"), (400, "too long"), 1),
    Fault("S13 filtered", refuses(400, "not that", "content_policy_violation"), (400, "not that"), 1),
    Fault("a wrong key", refuses(401, "not with this key"), (401, "not with this key"), 1),
    Fault("an error in a stream", says(f"data: {json.dumps({'error': OVERLOADED})}"), (502, "overloaded"), 3, ANYWHERE),
    # llama.cpp until September 2025 (ggml-org/llama.cpp#16104): a field that no event stream has
    Fault("an error as a field of its own", says(f"error: {json.dumps(OVERLOADED)}"), (502, "overloaded"), 3, ANYWHERE),
    # vllm-project/vllm#57082, and OpenRouter's "error": the engine gave up, then [DONE]
    Fault("the reason abort", ends_for("abort"), (502, "abort"), 3, ANYWHERE),
    # mnfst/llm-gateway#2709, decolua/9router#3051
    Fault("an empty stream", says_nothing, (502, "ended the stream")),
    # BerriAI/litellm#8448
    Fault("an error in a 200 of JSON", fails_in_json, (502, "overloaded")),
]
# Of an answer that is asked for whole, as with tools
WHOLE_FAULTS = [
    Fault("S02 429", refuses(429, "slow down"), (429, "slow down")),
    Fault("S05 reset", resets, (502, "Connection|Disconnected")),
    Fault("S06 no response", is_silent, (502, "timeout")),
    Fault("S08 body cut", sends(ended("stop"), length=5000), (502, "Payload")),
    Fault("S10 malformed body", sends(ended("stop")[:-9]), (502, "other than a completion")),
    Fault("an error in a 200", fails_in_json, (502, "overloaded")),
    Fault("another API's answer", sends(ANTHROPIC), (502, "other than a completion")),
    Fault("an error in a choice", sends(ended("error", error=OVERLOADED)), (502, "overloaded")),
    Fault("the reason abort", sends(ended("abort")), (502, "abort")),
    Fault("no choice", sends(b'{"choices": [], "usage": null}'), (502, "other than a completion")),
]
STREAMED, WHOLE_TEXT, TOOLED = {"stream": True}, {"stream": False}, {"tools": TOOLS}
HARMLESS = [fault for fault in FAULTS if fault.alone is None and fault.asked == 1]
EACH = pytest.mark.parametrize(
    ("fault", "at", "body"),
    [pytest.param(fault, at, body, id=f"{fault.name}, at {at}, {' '.join(body)} {body.get('stream', '')}")
     for faults, bodies in (
         (FAULTS, (STREAMED, WHOLE_TEXT)), (WHOLE_FAULTS, (TOOLED,)), (HARMLESS, (TOOLED | STREAMED,)),
     )
     for fault in faults for at in fault.at for body in bodies],
)  # fmt: skip
EITHER_WAY = pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])


@dataclass
class Reply:
    """What a caller got. errors: of the body, or the events of a stream."""

    status: int
    headers: Any
    text: str
    errors: list[dict[str, Any]]
    done: int
    body: dict[str, Any]

    @property
    def message(self) -> str:
        return str(self.errors[0]["message"]) if self.errors else ""


Ask = Callable[..., Awaitable[Reply]]


@contextlib.asynccontextmanager
async def asking(
    folder: Path, device: Upstream, server: Upstream | None, sides: Any = None, **settings: Any
) -> AsyncIterator[Ask]:
    """Asks a router before two upstreams that share their moment of the fault; without a server nobody is there."""
    usual: dict[str, Any] = {
        "constrained": "server", "over_budget": "fallback", "state": "none", "stream_timeout": SILENCE_S,
    }  # fmt: skip
    of_device, of_server = sides or ({}, {})
    async with contextlib.AsyncExitStack() as stack:
        at_device = await stack.enter_async_context(device.serving())
        at_server = NOBODY
        if server:
            server.struck = device.struck
            at_server = await stack.enter_async_context(server.serving())
        entries = deployment("device", at_device, **of_device), deployment("server", at_server, **of_server)
        router = Router(configured(folder, *entries, **usual | settings))
        url = await stack.enter_async_context(serving(create_app(router)))
        http = await stack.enter_async_context(aiohttp.ClientSession())

        async def ask(**body: Any) -> Reply:
            async with asyncio.timeout(HOLD_S / 2), http.post(
                f"{url}/v1/chat/completions", json={"messages": MESSAGES} | body
            ) as response:
                return read(response.status, response.headers, await response.text())

        yield ask


def read(status: int, headers: Any, content: str) -> Reply:
    if headers["content-type"].startswith("application/json"):
        body = json.loads(content)
        errors = [body["error"]] if "error" in body else []
        text = "" if errors else body["choices"][0]["message"]["content"]
        return Reply(status, headers, text, errors, 0, body)
    events = [line[6:] for line in content.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    return Reply(status, headers, text, errors, events.count("[DONE]"), chunks[-1])


def assert_whole(reply: Reply, streamed: bool) -> None:
    assert (reply.status, reply.text, reply.errors, reply.done) == (200, WHOLE, [], int(streamed)), reply


@pytest.mark.parametrize("alone", [False, True], ids=["with another side", "alone"])
@EACH
def test_the_other_side_answers_or_goes_on_and_alone_a_side_ends_in_the_answer_or_in_one_error(
    tmp_path: Path, fault: Fault, at: int, body: dict[str, Any], alone: bool
) -> None:
    device, server = Upstream(fault.play, at), Upstream(healthy)
    limits = {"timeout": SILENCE_S} if body == TOOLED else {}  # of a whole answer, silence is no sign

    async def work() -> Reply:
        async with asking(tmp_path, device, None if alone else server, (limits, {})) as ask:
            return await ask(**body)

    reply, streamed = asyncio.run(work()), body.get("stream", False)
    assert 1 <= len(device.bodies) <= fault.asked
    if alone and fault.alone:
        status, message = fault.alone
        in_band = streamed and at > 0
        assert reply.status == (200 if in_band else status), reply
        assert len(reply.errors) == 1 and re.search(message, reply.message) and reply.done == 0, reply
        assert (0 < len(reply.text) < len(WHOLE) and WHOLE.startswith(reply.text)) == in_band
    else:
        assert_whole(reply, streamed)
    if fault.alone is None and fault.asked == 1:
        assert not any("continue_final_message" in body for body in server.bodies), "the answer was whole"


@EITHER_WAY
@pytest.mark.parametrize("known", [True, False])
def test_s14_a_refused_prefix_hides_no_failure(tmp_path: Path, known: bool, streamed: bool) -> None:
    """known: whether the configuration says that the other side cannot continue."""

    async def refuses_prefixes(call: Call) -> None:
        if call.body.get("continue_final_message"):
            await call.json(400, {"error": {"message": "prefill is not supported"}})
        else:
            await healthy(call)

    async def work() -> Reply:
        sides: Any = ({"can_continue": False}, {"can_continue": not known})
        async with asking(tmp_path, Upstream(is_cut, CUT), Upstream(refuses_prefixes), sides) as ask:
            return await ask(stream=streamed)

    reply = asyncio.run(work())
    assert reply.status == (200 if streamed else 502) and len(reply.errors) == 1 and not reply.done
    assert reply.errors[0]["code"] == 502 and reply.errors[0]["type"] == "upstream_error"
    assert "device: " in reply.message and "server: " in reply.message, reply.message


def test_s15_a_side_that_is_down_rests_and_is_asked_again_once_it_is_well(tmp_path: Path) -> None:
    down = True

    async def flaps(call: Call) -> None:
        await (refuses(503, "down") if down else is_slow)(call)

    async def slower(call: Call) -> None:
        await asyncio.sleep(0 if down else HOLD_S)
        await healthy(call)

    async def work() -> None:
        nonlocal down
        device, server = Upstream(flaps), Upstream(slower)
        async with asking(tmp_path, device, server, allowed_fails=1, cooldown_time=1.0) as ask:
            for _ in range(4):
                reply = await ask(stream=True)
                assert_whole(reply, True)
                assert reply.headers["x-disco-side"] == "server"
            assert len(device.bodies) == 2, "it rests"
            down = False
            await asyncio.sleep(1.0)
            reply = await ask(stream=True)
            assert_whole(reply, True)
            assert reply.headers["x-disco-side"] == "device"

    asyncio.run(work())


@EITHER_WAY
def test_s16_a_failed_attempt_costs_nothing_and_the_side_that_answered_is_named(tmp_path: Path, streamed: bool) -> None:
    async def work() -> Reply:
        async with asking(tmp_path, Upstream(refuses(503, "no")), Upstream(healthy), (BILLED, {})) as ask:
            return await ask(stream=streamed, stream_options={"include_usage": True})

    reply = asyncio.run(work())
    assert_whole(reply, streamed)
    failed, served = sorted(reply.body["disco"]["entries"], key=lambda entry: entry["outcome"])
    assert (failed["side"], failed["outcome"], failed["cost"], failed["prompt_tokens"]) == ("device", "failed", 0.0, 0)
    assert (served["side"], served["outcome"]) == ("server", "served") == (reply.headers["x-disco-side"], "served")
    assert {name: reply.body["usage"][name] for name in USAGE} == USAGE


def test_a_connection_that_was_kept_and_is_closed_costs_no_answer(tmp_path: Path) -> None:
    """An endpoint's keep-alive runs out just as the next request comes (vllm-project/vllm#41567)."""

    async def closes_its_second(call: Call) -> None:
        call.struck.set()
        if call.number == 1:
            call.writer.close()
        else:
            await healthy(call)

    async def work() -> int:
        device = Upstream(closes_its_second)
        async with asking(tmp_path, device, None) as ask:
            for _ in range(2):
                assert_whole(await ask(stream=True), True)
        return len(device.bodies)

    assert asyncio.run(work()) == 3


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}], ids=["text", "tools"])
def test_when_the_caller_of_a_whole_answer_leaves_both_upstreams_see_it(tmp_path: Path, more: Any) -> None:
    """BerriAI/litellm#37140."""
    left = []

    async def watches(call: Call) -> None:
        if await call.reader.read(1) == b"":
            left.append(call)

    async def work() -> None:
        device, server = Upstream(watches), Upstream(watches)
        async with asking(tmp_path, device, server, stream_timeout=HOLD_S) as ask:
            asked = asyncio.create_task(ask(**more))
            assert await until(lambda: len(device.bodies) == len(server.bodies) == 1)
            asked.cancel()
            assert await until(lambda: len(left) == 2)

    asyncio.run(work())
