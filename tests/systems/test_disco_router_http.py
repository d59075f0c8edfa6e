"""DiSCo's router as a gateway: chat through the openai client, conventions, keys, money, models, the commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from replaying import Fault, Timing, create_replay
from routing import (
    DEVICE_FIRST,
    DONE,
    MESSAGES,
    NOW,
    Told,
    Upstream,
    chunk,
    client_of,
    configured,
    deployment,
    routed,
    serving,
    usage,
)
from starlette.responses import JSONResponse

from ondevice_papers.disco.policy import NEVER, Side
from ondevice_programs.router import state
from ondevice_programs.router.app import create_app
from ondevice_programs.router.replay import answer, plain_chat
from ondevice_programs.router.router import Router

TOKENS = 20
JSON = {"content-type": "application/json"}
QUICK, SLOW = Timing([0.0], 0.0), Timing([5.0])
WHOLE = "".join(answer(plain_chat(MESSAGES), TOKENS))
SERVER_FIRST: dict[Side, float] = {"device": NEVER, "server": 0.0}


@pytest.mark.gate
def test_chat_streamed_and_whole_with_headers_a_seam_and_one_usage(tmp_path: Path) -> None:
    async def work() -> None:
        drop = create_replay(QUICK, fault=lambda _: Fault("disconnect", 7))
        async with routed(tmp_path, drop, create_replay(QUICK), Told(DEVICE_FIRST)) as url, client_of(url) as client:
            asked: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_tokens": TOKENS}
            raw = await client.chat.completions.with_raw_response.create(
                **asked, stream=True, stream_options={"include_usage": True}, extra_headers={"x-request-id": "call-7"}
            )
            assert raw.headers["x-disco-side"] == "device" and raw.headers["x-disco-call-id"] == "call-7"
            assert raw.headers["x-request-id"] == "call-7" and "x-ratelimit-remaining-tokens" in raw.headers
            lines = [line async for line in raw.http_response.aiter_lines()]
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == WHOLE
            assert lines.count(": fallback to the server") == 1 and lines[-2] == "data: [DONE]"
            assert chunks[-2]["choices"][0]["finish_reason"] == "length"
            assert [switch["at"] for switch in chunks[-1]["disco"]["switches"]] == [0, 7]
            assert chunks[-1]["usage"]["completion_tokens"] == TOKENS and chunks[-1]["disco"]["estimated"] is True
            reply = await client.chat.completions.create(**asked)
            assert reply.choices[0].message.content == WHOLE

    asyncio.run(work())


def before_nobody(folder: Path) -> contextlib.AbstractAsyncContextManager[str]:
    """A router whose endpoints are not there, served; gives its address."""
    config = configured(folder, deployment("device"), deployment("server"))
    return serving(create_app(Router(config, dispatcher=Told())))


def test_health_readiness_and_metrics(tmp_path: Path) -> None:
    async def work() -> None:
        async with aiohttp.ClientSession() as http:
            async with before_nobody(tmp_path) as url:
                assert [(await http.get(f"{url}/{path}")).status for path in ("health", "ready")] == [200, 503]
            apps = create_replay(QUICK), create_replay(SLOW)
            async with routed(tmp_path, *apps, Told()) as url, client_of(url) as client:
                root = url.removesuffix("/v1")
                assert (await http.get(f"{root}/ready")).status == 200
                await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3)
                metrics = await (await http.get(f"{root}/metrics")).text()
        for name in (
            'disco_requests_total{status="200"} 1.0',
            "disco_migrations_total",
            "disco_budget_tokens_left",
            "disco_budget_share_used",
            "disco_budget 1.0",
        ):
            assert name in metrics, name

    asyncio.run(work())


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[tuple[str, list[str]]]:
    """(base URL, the log, which is complete once the command has ended)."""
    line = [sys.executable, "-m", "ondevice_programs.router", *arguments, "--port", "0"]
    running = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    try:
        assert running.stdout is not None
        yield running.stdout.readline().split()[-1], log
    finally:
        running.terminate()
        log += running.communicate(timeout=20)[1].splitlines()


@pytest.mark.parametrize(
    ("body", "kind", "status", "named"),
    [
        (b'{"messages": [{"role": "user", "content": "a"}], "n": true}', "application/json", 400, "'n'"),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}', "application/json", 400, "'max_tokens'"),
        (b'{"messages": [{"content": "a"}]}', "application/json", 400, "'messages.0.role'"),
        (b'{"messages": []}', "application/json", 400, "'messages'"),
        (b'{"messages": [{"role": "user", "content": ""}]}', "application/json", 400, "prompt"),
        (b"[1]", "application/json", 400, "JSON object"),
        (b"{", "application/json", 400, "JSON"),
        (b"[" * 100_000, "application/json", 400, "JSON"),
        (b'{"prompt": "' + b"a" * (17 << 20) + b'"}', "application/json", 413, ""),
        (b'{"messages": [{"role": "user", "content": "a"}], "seed": NaN}', "application/json", 400, "'seed'"),
        (b'{"messages": []}', "text/plain", 415, ""),  # as a web page could send it
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_by_its_field(tmp_path: Path, body: bytes, kind: str, status: int, named: str) -> None:
    async def work() -> tuple[int, str]:
        async with (
            before_nobody(tmp_path) as url,
            aiohttp.ClientSession() as http,
        ):
            reply = await http.post(f"{url}/v1/chat/completions", data=body, headers={"content-type": kind})
            return reply.status, await reply.text()

    got, text = asyncio.run(work())
    assert got == status and named in text and json.loads(text)["error"]["type"] == "invalid_request_error"


def test_both_sides_answer_to_one_name_and_nobody_to_another_or_on_another_path(tmp_path: Path) -> None:
    async def work() -> None:
        device, server = create_replay(QUICK), create_replay(QUICK)
        async with routed(tmp_path, device, server, Told(NOW)) as url, client_of(url) as client:
            assert [model.id async for model in await client.models.list()] == ["m"]
            assert (await client.models.retrieve("m")).id == "m"
            reply = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=2)
            assert reply.model == "m"
            assert (device.state.seen.requests, server.state.seen.requests) == (1, 1)
            with pytest.raises(openai.NotFoundError, match="other"):
                await client.models.retrieve("other")
            with pytest.raises(openai.NotFoundError, match="none") as caught:
                await client.chat.completions.create(model="none", messages=MESSAGES)
            assert caught.value.code == "model_not_found"
            with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
                await client.completions.create(model="m", prompt="Go")

    asyncio.run(work())


def configuration(folder: Path, device: str, server: str) -> str:
    config = {
        "model_list": [deployment("device", device), deployment("server", server)],
        "router_settings": {"constrained": "server", "budget": 0.0, "state": str(folder / "state")},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)


def test_the_commands_learn_and_remember(tmp_path: Path) -> None:
    with command("replay", "--ttft", "0.01") as (device, _), command("replay", "--ttft", "0.01") as (server, _):
        path = configuration(tmp_path, device, server)
        for times in (1, 2):
            with command("serve", "--config", path, "--budget", "0.5") as (url, log):
                with openai.OpenAI(base_url=url, api_key="none") as client:
                    reply = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=TOKENS)
                assert reply.choices[0].message.content == WHOLE
            assert sum("status=200" in line and '"completion_tokens": 20' in line for line in log) == 1
            assert not any("buffers" in line for line in log), "what was asked is in no log"
            (kept,) = (tmp_path / "state").glob("*.json")
            learned = state.read(kept)
            assert learned["dispatcher"]["account"]["arrived"] == times * 12  # as `replay` counts a prompt
            assert "buffers" not in kept.read_text()


def test_a_stream_that_the_end_of_the_program_cuts_ends_with_an_error(tmp_path: Path) -> None:
    with command("replay", "--ttft", "0.01", "--tbt", "0.2") as (device, _), command("replay") as (server, _):
        body = json.dumps({"messages": MESSAGES, "stream": True, "max_tokens": 100}).encode()
        with command("serve", "--config", configuration(tmp_path, device, server)) as (url, log):
            asked = urllib.request.Request(f"{url}/chat/completions", body, {"content-type": "application/json"})
            answer = urllib.request.urlopen(asked, timeout=30)
            lines = [answer.readline() for _ in range(5)]  # it runs
        lines += answer.readlines()
    assert b'"error"' in lines[-2] + lines[-1]
    assert not any("Traceback" in line for line in log)


PACKETS = [chunk(role="assistant"), *[chunk("four words in one ")] * 10, chunk(reason="stop")]


@pytest.mark.parametrize("counts", [{"prompt_tokens": 7, "completion_tokens": 40}, {}])
def test_the_endpoint_is_asked_as_the_caller_asked_and_its_usage_is_told(
    tmp_path: Path, counts: dict[str, int]
) -> None:
    server = Upstream(lambda _: [*PACKETS, *[usage(**counts)] * bool(counts), DONE])

    async def work() -> Any:
        async with routed(tmp_path, create_replay(), server.app, Told(SERVER_FIRST)) as url, client_of(url) as client:
            extra = {"x-request-id": "call-7"}
            return await client.chat.completions.create(
                model="m", messages=MESSAGES, max_completion_tokens=90, seed=3, extra_headers=extra
            )

    reply = asyncio.run(work())
    (body,), (headers,) = server.bodies, server.headers
    assert body["max_completion_tokens"] == 90 and "max_tokens" not in body and body["seed"] == 3
    assert body["stream_options"] == {"include_usage": True} and body["model"] == "server"
    assert headers["x-request-id"] == "call-7" and "authorization" not in headers
    assert reply.disco["estimated"] == (not counts)
    assert reply.usage.completion_tokens == 40, "ten packets of four words are not ten tokens"
    assert reply.usage.prompt_tokens == 7 or not counts


@pytest.mark.parametrize("streamed", ["true", "false"])
def test_what_the_router_does_not_know_is_passed_on_and_named_in_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, streamed: str
) -> None:
    """The client's bytes, sent in pieces; an upstream's answer to an unknown field comes back whole."""
    unknown = '"odd field": {"b" : [1.10, 1E5,12345678901234567890123],"a":"\\u00e4 ä"}, "token_ids": true'
    body = f'{{"stream": {streamed}, {unknown}, "messages": {json.dumps(MESSAGES)}}}'.encode()
    reply = {"choices": [{"index": 0, "message": {"content": "An"}, "token_ids": [7], "finish_reason": "stop"}]}
    server = Upstream(lambda asked: [*PACKETS, DONE] if asked["stream"] else JSONResponse(reply))

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 7):
            yield body[at : at + 7]

    async def work() -> str:
        app = create_replay()
        async with routed(tmp_path, app, server.app, Told(SERVER_FIRST)) as url, aiohttp.ClientSession() as http:
            kind = {"content-type": "Application/JSON; charset=utf-8"}
            async with http.post(f"{url}/chat/completions", data=pieces(), headers=kind) as response:
                return await response.text()

    with caplog.at_level("INFO", "ondevice_programs.router"):
        text = asyncio.run(work())
    assert unknown.encode() in server.sent[0]
    assert ('"token_ids": [7]' in text.replace(":[", ": [")) == (streamed == "false")
    lines = [line for line in caplog.messages if "status=200" in line]
    assert len(lines) == 1 and '"uncounted": ["odd field", "token_ids"]' in lines[0]


def test_tools_are_passed_on_verbatim_and_asked_of_one_endpoint(tmp_path: Path) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    counts = {"prompt_tokens": 7, "completion_tokens": 40, "total_tokens": 47}

    def calls(body: dict[str, Any]) -> Any:
        if body["stream"]:
            return [chunk(tool_calls=[call]), chunk(reason="stop"), usage(**counts), DONE]
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return JSONResponse({"id": "x", "created": 0, "model": "m", "choices": [choice], "usage": counts})

    async def work() -> None:
        app = Upstream(calls).app
        async with routed(tmp_path, app, app, Told(NOW)) as url, client_of(url) as client:
            tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
            asked: dict[str, Any] = {"model": "m", "messages": MESSAGES, "tools": tools}
            reply = await client.chat.completions.create(**asked)
            assert reply.choices[0].message.tool_calls and reply.usage and reply.usage.total_tokens == 47
            stream = await client.chat.completions.create(**asked, stream=True)
            streamed = [chunk.choices[0].delta.tool_calls async for chunk in stream]
            assert [calls[0].id for calls in streamed if calls] == ["c1"]

    asyncio.run(work())


def test_who_does_not_know_the_routers_key_is_refused_and_no_endpoint_gets_it(tmp_path: Path) -> None:
    async def work() -> None:
        server = Upstream(lambda _: [*PACKETS, DONE])
        general = {"master_key": "sesame"}
        async with (
            routed(tmp_path, create_replay(), server.app, Told(SERVER_FIRST), general=general) as url,
            aiohttp.ClientSession() as http,
        ):

            async def ask(**headers: str) -> int:
                body = {"messages": MESSAGES}
                async with http.post(f"{url}/chat/completions", json=body, headers=headers) as reply:
                    assert reply.status == 200 or (await reply.json())["error"]["type"] == "authentication_error"
                    return reply.status

            assert await ask() == await ask(authorization="Bearer wrong") == 401
            assert await ask(authorization="Bearer sesame") == 200
            assert "authorization" not in server.headers[0]
            root = url.removesuffix("/v1")
            assert (await http.get(f"{root}/health")).status == 200
            assert (await http.get(f"{root}/metrics")).status == 401

    asyncio.run(work())
