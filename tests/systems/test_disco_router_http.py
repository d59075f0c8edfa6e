"""The served router on loopback, through the openai client: both APIs, bad inputs, disconnects, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ondevice.disco.endpoints import Endpoint
from ondevice.disco.loopback import serving
from ondevice.disco.replay import Fault, Timing, answer, create_replay
from ondevice.disco.request import plain_chat
from ondevice.disco.router import Router
from ondevice.disco.serve import create_app
from ondevice.disco.session import StreamError, Timeouts

QUICK, SLOW = Timing([0.01], 0.001), Timing([0.5], 0.001)
TOKENS = 20
MESSAGES: Any = [{"role": "user", "content": "Which way?"}]


@contextlib.asynccontextmanager
async def served(device: Any, server: Any, policy: Any = lambda _: (0.0, 0.0), **options: Any) -> AsyncIterator[str]:
    """A router between two applications, served; yields its base URL."""
    sides = options.pop("api", "completions")
    async with (
        serving(device) as one,
        serving(server) as other,
        Router(Endpoint(one, api=sides), Endpoint(other, api=sides), policy, **options) as router,
        serving(create_app(router)) as url,
    ):
        yield f"{url}/v1"


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30.0)


def test_completions_streamed_and_whole() -> None:
    async def work() -> None:
        async with served(create_replay(QUICK), create_replay(SLOW)) as url, client_of(url) as client:
            stream = await client.completions.create(
                model="m", prompt="Go", max_tokens=TOKENS, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].text for c in chunks if c.choices) == "".join(answer("Go", TOKENS))
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == TOKENS
            assert chunks[-1].disco["winner"] == "device"  # type: ignore[attr-defined]
            assert len(chunks) == TOKENS + 2  # every token in a chunk of its own, the finish, the usage
            raw = await client.completions.with_raw_response.create(model="m", prompt="Go", max_tokens=TOKENS)
            assert raw.parse().choices[0].text == "".join(answer("Go", TOKENS))
            assert raw.headers["x-disco-winner"] == "device" and raw.headers["x-disco-started"] == "device,server"
            assert float(raw.headers["x-disco-cost"]) == 0.0

    asyncio.run(work())


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_chat_streamed_and_whole_over_either_kind_of_endpoint(api: str) -> None:
    whole = "".join(answer(plain_chat(MESSAGES), TOKENS))

    async def work() -> None:
        drop = create_replay(QUICK, fault=lambda _: Fault("disconnect", 7))
        async with served(drop, create_replay(SLOW), lambda _: (0.0, 9.0), api=api) as url, client_of(url) as client:
            raw = await client.chat.completions.with_raw_response.create(
                model="m", messages=MESSAGES, max_tokens=TOKENS, stream=True
            )
            assert raw.headers["x-disco-winner"] == "device"
            chunks = [chunk async for chunk in raw.parse()]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
            assert chunks[-1].choices[0].finish_reason == "length"
            assert [switch["at"] for switch in chunks[-1].disco["switches"]] == [0, 7]  # type: ignore[attr-defined]
            reply = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=TOKENS)
            assert reply.choices[0].message.content == whole

    asyncio.run(work())


def test_a_chat_endpoint_is_asked_to_continue_its_last_message() -> None:
    bodies: list[dict[str, Any]] = []

    async def handle(request: Request) -> Response:
        bodies.append(await request.json())
        text = "ab" if len(bodies) == 1 else "cd"

        async def events() -> AsyncIterator[str]:
            for letter in text:
                yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': letter}}]})}\n\n"
            if len(bodies) > 1:  # as transformers serve: a finish reason and the end, without [DONE] and usage
                yield 'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'

        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", handle, methods=["POST"])])

    async def work() -> None:
        async with served(app, app, lambda _: (0.0, 9.0), api="chat") as url, client_of(url) as client:
            reply = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=9, temperature=0.5)
            assert reply.choices[0].message.content == "abcd"

    asyncio.run(work())
    first, second = bodies
    assert first["messages"] == MESSAGES and "continue_final_message" not in first and first["max_tokens"] == 9
    assert second["messages"] == [*MESSAGES, {"role": "assistant", "content": "ab"}]
    assert second["continue_final_message"] is True and second["add_generation_prompt"] is False
    assert second["max_tokens"] == 7 and second["temperature"] == first["temperature"] == 0.5


def test_tool_calls_pass_through_as_they_came() -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}

    async def handle(request: Request) -> Response:
        body = await request.json()
        assert body["tools"]
        if not body["stream"]:
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
            return JSONResponse({"id": "x", "created": 0, "model": "m", "choices": [choice], "usage": usage})

        async def events() -> AsyncIterator[str]:
            for delta, reason in (({"role": "assistant"}, None), ({"tool_calls": [call]}, None), ({}, "tool_calls")):
                choice = {"index": 0, "delta": delta, "finish_reason": reason}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", handle, methods=["POST"])])
    tools: Any = [{"type": "function", "function": {"name": "find", "parameters": {}}}]

    async def work() -> None:
        async with served(app, app, api="chat") as url, client_of(url) as client:
            reply = await client.chat.completions.create(model="m", messages=MESSAGES, tools=tools)
            assert reply.choices[0].message.tool_calls is not None
            assert reply.choices[0].message.tool_calls[0].id == "c1"
            assert reply.usage is not None and reply.usage.total_tokens == 7
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, tools=tools, stream=True)
            calls = [chunk.choices[0].delta.tool_calls async for chunk in stream]
            assert [found[0].id for found in calls if found] == ["c1"]
        async with served(app, app, api="completions") as url, client_of(url) as client:
            with pytest.raises(openai.BadRequestError, match="cannot express this request"):
                await client.chat.completions.create(model="m", messages=MESSAGES, tools=tools)

    asyncio.run(work())


def test_models_health_and_metrics() -> None:
    async def work() -> None:
        async with served(create_replay(QUICK), create_replay(SLOW)) as url, client_of(url) as client:
            assert [model.id async for model in await client.models.list()] == ["disco"]
            await client.completions.create(model="m", prompt="Go", max_tokens=3)
            async with aiohttp.ClientSession() as http:
                root = url.removesuffix("/v1")
                assert await (await http.get(f"{root}/health")).json() == {"status": "ok"}
                metrics = await (await http.get(f"{root}/metrics")).text()
        assert "disco_requests_total 1\n" in metrics
        assert 'disco_endpoint_outcomes_total{endpoint="server",outcome="lost"} 1\n' in metrics

    asyncio.run(work())


# Bad input: one clear error each


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", b'{"prompt": ""}', "The prompt is empty."),
        ("completions", b"{}", "'prompt' is not a string"),
        ("completions", b'{"prompt": ["a", "b"]}', "'prompt' is not a string"),
        ("completions", b'{"prompt": "a", "max_tokens": 0}', "'max_tokens' is not a whole number of at least 1."),
        ("completions", b'{"prompt": "a", "model": 3}', "'model' is not a string."),
        ("completions", b"[1]", "The body is not a JSON object."),
        ("completions", b'{"prompt": ', "The body is not JSON"),
        ("chat/completions", b'{"messages": []}', "'messages' is not a list of at least one message."),
        ("chat/completions", b'{"messages": [{"role": "user", "content": ""}]}', "The prompt is empty."),
        ("chat/completions", b'{"messages": ["hi"]}', "A message is not an object with a 'role'."),
        ("chat/completions", b'{"messages": [{"role": "user", "content": 3}]}', "neither a string nor a list"),
        (
            "chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}], "response_format": 1}',
            "not an object",
        ),
    ],
)
def test_a_bad_request_gets_400_and_one_sentence(path: str, body: bytes, message: str) -> None:
    async def work() -> tuple[int, Any]:
        async with served(create_replay(), create_replay()) as url, aiohttp.ClientSession() as http:
            reply = await http.post(f"{url}/{path}", data=body, headers={"content-type": "application/json"})
            return reply.status, await reply.json()

    status, reply = asyncio.run(work())
    assert status == 400
    assert message in reply["error"]["message"] and reply["error"]["type"] == "invalid_request_error"


def test_text_from_a_web_page_and_huge_bodies_are_refused() -> None:
    async def work() -> list[int]:
        async with served(create_replay(), create_replay()) as url, aiohttp.ClientSession() as http:
            plain = await http.post(
                f"{url}/completions", data=b'{"prompt": "a"}', headers={"content-type": "text/plain"}
            )
            huge = b'{"prompt": "' + b"a" * (17 << 20) + b'"}'
            large = await http.post(f"{url}/completions", data=huge, headers={"content-type": "application/json"})
            return [plain.status, large.status]

    assert asyncio.run(work()) == [415, 413]


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        ("html", 502, "answered text/html instead of text/event-stream; is this an OpenAI-compatible base URL?"),
        ("429", 429, "HTTP 429: as asked"),
        ("500", 502, "HTTP 500: as asked"),
        ("malformed", 502, "sent a malformed chunk"),
        ("disconnect", 502, "ended the stream|Payload"),
        ("stall", 502, r"no first token for 0\.\d+ s"),
    ],
)
def test_when_both_endpoints_misbehave_the_error_says_how(kind: Any, status: int, message: str) -> None:
    async def work() -> openai.APIStatusError:
        bad = [create_replay(QUICK, fault=lambda _: Fault(kind)) for _ in range(2)]
        limits = Timeouts(first_token=0.2, between_tokens=0.2, total=20.0)
        async with served(*bad, timeouts=limits) as url, client_of(url) as client:
            with pytest.raises(openai.APIStatusError, match=message) as caught:
                await client.completions.create(model="m", prompt="Go", max_tokens=5, stream=True)
            return caught.value

    error = asyncio.run(work())
    assert error.status_code == status
    assert "device: http://127.0.0.1:" in str(error) and "server: http://127.0.0.1:" in str(error)


def test_refused_connections_are_an_error_and_one_of_them_a_fallback() -> None:
    nobody = Endpoint("http://127.0.0.1:1")

    async def work() -> None:
        async with Router(nobody, nobody, lambda _: (0.0, 9.0)) as router:
            with pytest.raises(StreamError, match=r"device: .*Connect.*server: .*Connect"):
                [token async for token in router.stream("Go", 5)]
        async with serving(create_replay(QUICK)) as url, Router(nobody, Endpoint(url), lambda _: (0.0, 9.0)) as router:
            assert [token.text async for token in router.stream("Go", 5)] == answer("Go", 5)

    asyncio.run(work())


def test_an_error_after_the_first_token_arrives_in_the_stream() -> None:
    async def work() -> None:
        bad = [create_replay(QUICK, fault=lambda _: Fault("disconnect", 4)) for _ in range(2)]
        async with served(*bad) as url, client_of(url) as client:
            stream = await client.completions.create(model="m", prompt="Go", max_tokens=TOKENS, stream=True)
            texts = []
            with pytest.raises(openai.APIError, match="No endpoint could finish the answer"):
                async for chunk in stream:
                    texts.append(chunk.choices[0].text)
            assert texts == answer("Go", 8)

    asyncio.run(work())


@pytest.mark.parametrize("url", ["", "ftp://host", "localhost:8000", "http://", "http://host/v1?key=1", "http://a b/"])
def test_an_endpoint_needs_an_http_url(url: str) -> None:
    with pytest.raises(ValueError, match=r"is not the http\(s\) URL of an API"):
        Endpoint(url)


# Readers


async def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("when", ["before the first token", "in the middle"])
def test_when_the_client_leaves_both_endpoints_see_it(when: str) -> None:
    async def work() -> None:
        middle = when == "in the middle"
        device = create_replay(Timing([0.05 if middle else 30.0], 0.05))
        server = create_replay(Timing([30.0]))
        async with served(device, server) as url, client_of(url) as client:
            if middle:
                stream = await client.completions.create(model="m", prompt="Go", max_tokens=400, stream=True)
                await anext(aiter(stream))
                await until(lambda: server.state.seen.disconnected == 1)  # it lost the race
                assert device.state.seen.disconnected == 0
                await stream.close()
            else:
                asking = asyncio.create_task(client.completions.create(model="m", prompt="Go", stream=True))
                await until(lambda: device.state.seen.requests == server.state.seen.requests == 1)
                asking.cancel()
            await until(lambda: device.state.seen.disconnected == server.state.seen.disconnected == 1)
            assert device.state.seen.finished == server.state.seen.finished == 0

    asyncio.run(work())


def test_a_slow_reader_holds_up_neither_other_streams_nor_the_endpoint() -> None:
    prompt = next(str(n) for n in range(9999) if len(answer(str(n), 1200)) == 1200)

    async def work() -> None:
        device = create_replay(Timing([0.0], 0.0))
        async with served(device, create_replay(SLOW), lambda _: (0.0, 99.0)) as url, client_of(url) as client:
            host, port = url.split("/")[2].split(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            body = json.dumps({"prompt": prompt, "max_tokens": 1200, "stream": True})
            head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            await reader.readuntil(b"data: ")  # and reads no more for now
            for number in range(20):
                reply = await client.completions.create(model="m", prompt=f"other {number}", max_tokens=TOKENS)
                assert reply.choices[0].text == "".join(answer(f"other {number}", TOKENS))
            await until(lambda: device.state.seen.finished == 21)  # the endpoint is free long before its reader is done
            rest = await reader.read(-1)
            writer.close()
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in _events(b"data: " + rest)]
        assert "".join(texts) == "".join(answer(prompt, 1200))

    asyncio.run(work())


def _events(chunked: bytes) -> list[bytes]:
    """The data lines of a chunked body, whose chunk sizes stand on lines of their own."""
    lines = [line.strip() for line in chunked.split(b"\n")]
    return [line for line in lines if line.startswith(b"data: {")]


# The command


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[str]:
    line = [sys.executable, "-m", "ondevice.disco", *arguments, "--port", "0"]
    running = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        yield running.stdout.readline().split()[-1]
    finally:
        running.terminate()
        running.wait(20)
        assert running.stdout is not None
        running.stdout.close()


def test_serve_and_replay_as_commands() -> None:
    async def ask(url: str) -> Any:
        async with client_of(url) as client:
            return await client.completions.with_raw_response.create(model="m", prompt="Go", max_tokens=TOKENS)

    with (
        command("replay", "--ttft", "0.3", "--tbt", "0.001") as device,
        command("replay", "--ttft", "0.01", "--tbt", "0.001", "--fault", "disconnect:5") as server,
        command("serve", "--device", device, "--server", server, "--policy", "hedge:0.2", "--constrained", "device",
                "--budget", "1", "--hard-budget") as url,
    ):  # fmt: skip
        raw = asyncio.run(ask(url))
    assert raw.parse().choices[0].text == "".join(answer("Go", TOKENS))
    assert raw.headers["x-disco-winner"] == "server" and raw.headers["x-disco-started"] == "device,server"
