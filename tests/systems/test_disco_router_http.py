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
from routing import DEVICE_FIRST, MESSAGES, NOW, Told, client_of, configured, deployment, routed, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ondevice_papers.disco.policy import NEVER
from ondevice_programs.router import state
from ondevice_programs.router.app import create_app
from ondevice_programs.router.replay import answer, plain_chat
from ondevice_programs.router.router import Router

TOKENS = 20
JSON = {"content-type": "application/json"}
QUICK, SLOW = Timing([0.0], 0.0), Timing([5.0])
WHOLE = "".join(answer(plain_chat(MESSAGES), TOKENS))


class Recorder:
    """A chat endpoint that notes what it is asked and answers `chunks` in packets of several words."""

    def __init__(self, usage: dict[str, int] | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.usage = usage
        self.app = Starlette(routes=[Route("/v1/chat/completions", self.handle, methods=["POST"])])

    async def handle(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
        tools = bool(self.bodies[-1].get("tools"))
        if not self.bodies[-1]["stream"]:
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            return JSONResponse({"id": "x", "created": 0, "model": "m", "choices": [choice], "usage": self.usage})

        async def events() -> AsyncIterator[str]:
            words: list[dict[str, Any]] = [{"content": "four words in one "}] * 10
            deltas = [{"role": "assistant"}, {"tool_calls": [call]}] if tools else words
            for delta in [*deltas, {}]:
                choice = {"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            if self.usage:
                yield f"data: {json.dumps({'choices': [], 'usage': self.usage})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


USAGE = {"prompt_tokens": 7, "completion_tokens": 40, "total_tokens": 47}


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


def test_a_bare_prompt_is_refused_with_the_path_that_is_served(tmp_path: Path) -> None:
    async def work() -> None:
        async with routed(tmp_path, create_replay(), create_replay(), Told()) as url, client_of(url) as client:
            with pytest.raises(openai.NotFoundError, match="ask /v1/chat/completions") as caught:
                await client.completions.create(model="m", prompt="Go")
            assert caught.value.type == "invalid_request_error"

    asyncio.run(work())


def test_the_endpoint_is_asked_as_the_caller_asked_and_its_usage_is_told(tmp_path: Path) -> None:
    async def work() -> None:
        for usage in (USAGE, None):
            server = Recorder(usage)
            async with (
                routed(tmp_path, create_replay(), server.app, Told({"device": NEVER, "server": 0.0})) as url,
                client_of(url) as client,
            ):
                extra = {"x-request-id": "call-7"}
                reply = await client.chat.completions.create(
                    model="m", messages=MESSAGES, max_completion_tokens=90, seed=3, extra_headers=extra
                )
            body = server.bodies[0]
            assert body["max_completion_tokens"] == 90 and "max_tokens" not in body and body["seed"] == 3
            assert body["stream_options"] == {"include_usage": True} and body["model"] == "server"
            assert server.headers[0]["x-request-id"] == "call-7" and "authorization" not in server.headers[0]
            assert reply.usage is not None and reply.disco["estimated"] == (usage is None)  # type: ignore[attr-defined]
            told = (reply.usage.prompt_tokens, reply.usage.completion_tokens)
            assert told == (7, 40) if usage else told[1] == 40  # ten packets of four words are not ten tokens

    asyncio.run(work())


def test_tools_are_passed_on_verbatim_and_asked_of_one_endpoint(tmp_path: Path) -> None:
    tools: Any = [{"type": "function", "function": {"name": "find", "parameters": {}}}]

    async def work() -> None:
        app = Recorder(USAGE).app
        async with routed(tmp_path, app, app, Told(NOW)) as url, client_of(url) as client:
            asked: dict[str, Any] = {"model": "m", "messages": MESSAGES, "tools": tools}
            reply = await client.chat.completions.create(**asked)
            assert reply.choices[0].message.tool_calls and reply.usage and reply.usage.total_tokens == 47
            stream = await client.chat.completions.create(**asked, stream=True)
            calls = [chunk.choices[0].delta.tool_calls async for chunk in stream]
            assert [found[0].id for found in calls if found] == ["c1"]

    asyncio.run(work())


@contextlib.asynccontextmanager
async def gateway(
    folder: Path, dispatcher: Told, *entries: dict[str, Any], **more: Any
) -> AsyncIterator[tuple[str, Router]]:
    """A router before these endpoints, served; yields its address."""
    router = Router(configured(folder, *entries, **more), dispatcher=dispatcher)
    async with serving(create_app(router)) as url:
        yield url, router


def test_both_sides_answer_to_one_name_and_nobody_to_another(tmp_path: Path) -> None:
    async def work() -> None:
        device, server = create_replay(QUICK), create_replay(QUICK)
        async with serving(device) as device_url, serving(server) as server_url:
            entries = deployment("device", device_url), deployment("server", server_url)
            async with gateway(tmp_path, Told(NOW), *entries) as (url, _), client_of(f"{url}/v1") as client:
                assert [model.id async for model in await client.models.list()] == ["m"]
                assert (await client.models.retrieve("m")).id == "m"
                with pytest.raises(openai.NotFoundError, match=r"There is no model 'other' here; there is m\."):
                    await client.models.retrieve("other")
                reply = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=2)
                assert reply.model == "m"
                assert (device.state.seen.requests, server.state.seen.requests) == (1, 1)
                with pytest.raises(openai.NotFoundError, match="here; there is m") as caught:
                    await client.chat.completions.create(model="none", messages=MESSAGES)
                assert caught.value.code == "model_not_found"

    asyncio.run(work())


def test_one_that_fails_rests(tmp_path: Path) -> None:
    async def work() -> None:
        quick, broken = create_replay(Timing([0.1])), create_replay(fault=lambda _: Fault("500"))
        async with serving(quick) as device_url, serving(broken) as server_url:
            entries = deployment("device", device_url), deployment("server", server_url)
            limits = {"allowed_fails": 1, "cooldown_time": 60.0}
            async with gateway(tmp_path, Told(NOW), *entries, **limits) as (url, _), client_of(f"{url}/v1") as client:
                for _ in range(12):
                    await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=2)
            assert (quick.state.seen.requests, broken.state.seen.requests) == (12, 2)

    asyncio.run(work())


def test_an_endpoint_costs_no_more_than_its_max_budget_over_restarts(tmp_path: Path) -> None:
    async def work() -> list[str | None]:
        async with serving(create_replay(QUICK)) as paid, serving(create_replay(QUICK)) as free:
            dear = deployment("device", paid, output_cost_per_token=1.0, max_budget=25.0)
            sides: list[str | None] = []
            for _ in range(2):  # 10 tokens each: two fit, the third one's worst case does not
                async with (
                    gateway(tmp_path, Told(DEVICE_FIRST), dear, deployment("server", free)) as (url, router),
                    client_of(f"{url}/v1") as client,
                ):
                    for _ in range(2):
                        raw = await client.chat.completions.with_raw_response.create(
                            model="m", messages=MESSAGES, max_tokens=10
                        )
                        sides.append(raw.headers["x-disco-side"])
                assert router.endpoints["device"].spent <= 25.0
            return sides

    assert asyncio.run(work()) == ["device", "device", "server", "server"]


def test_who_does_not_know_the_routers_key_is_refused_and_no_endpoint_gets_it(tmp_path: Path) -> None:
    async def work() -> None:
        server = Recorder(USAGE)
        general = {"master_key": "sesame"}
        async with serving(server.app) as behind:
            entries = deployment("device"), deployment("server", behind)
            told = Told({"device": NEVER, "server": 0.0})
            async with gateway(tmp_path, told, *entries, general=general) as (url, _), aiohttp.ClientSession() as http:

                async def ask(**headers: str) -> int:
                    body = {"messages": MESSAGES}
                    async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
                        assert reply.status == 200 or (await reply.json())["error"]["type"] == "authentication_error"
                        return reply.status

                assert await ask() == await ask(authorization="Bearer wrong") == 401
                assert await ask(authorization="Bearer sesame") == 200
                assert "authorization" not in server.headers[0]
                assert (await http.get(f"{url}/health")).status == 200
                assert (await http.get(f"{url}/metrics")).status == 401

    asyncio.run(work())


def test_health_readiness_and_metrics(tmp_path: Path) -> None:
    async def work() -> None:
        async with aiohttp.ClientSession() as http:
            async with gateway(tmp_path, Told(), deployment("device"), deployment("server")) as (url, _):
                assert [(await http.get(f"{url}/{path}")).status for path in ("health", "ready")] == [200, 503]
            apps = create_replay(QUICK), create_replay(SLOW)
            async with routed(tmp_path, *apps, Told()) as url, client_of(url) as client:
                root = url.removesuffix("/v1")
                assert (await http.get(f"{root}/ready")).status == 200
                await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3)
                metrics = await (await http.get(f"{root}/metrics")).text()
        for name in (
            'gen_ai_server_time_to_first_token_seconds_count{gen_ai_request_model="m"} 1.0',
            'gen_ai_server_time_per_output_token_seconds_count{gen_ai_request_model="m"} 1.0',
            "gen_ai_client_operation_duration_seconds_count{",
            "gen_ai_client_operation_time_to_first_chunk_seconds_count{",
            'gen_ai_token_type="output"',
            "disco_migrations_total",
            "disco_budget_tokens_left",
            "disco_budget_share_used",
            "disco_budget 1.0",
        ):
            assert name in metrics, name

    asyncio.run(work())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"messages": [{"role": "user", "content": "a"}], "n": "private"}', "'n': input should be a valid integer."),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": true}', "'n': input should be a valid integer."),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}', "'max_tokens': input should be greater"),
        (b'{"messages": [{"role": "user", "content": "a"}], "model": 7}', "'model': input should be a valid string."),
        (b'{"messages": [{"content": "a"}]}', "'messages.0.role': field required."),
        (b'{"prompt": "a"}', "'messages': field required."),
        (b"[1]", "The body is not a JSON object."),
        (b"{", "The body is not JSON"),
        (b"[" * 100_000, "The body is not JSON"),
        (b'{"messages": []}', "'messages': list should have at least 1 item"),
        (b'{"messages": [{"role": "user", "content": ""}]}', "The prompt is empty."),
    ],
)
def test_a_bad_request_gets_400_and_one_sentence(tmp_path: Path, body: bytes, message: str) -> None:
    async def work() -> tuple[int, Any]:
        async with (
            gateway(tmp_path, Told(), deployment("device"), deployment("server")) as (url, _),
            aiohttp.ClientSession() as http,
        ):
            reply = await http.post(f"{url}/v1/chat/completions", data=body, headers=JSON)
            return reply.status, await reply.json()

    status, reply = asyncio.run(work())
    assert status == 400
    assert message in reply["error"]["message"] and reply["error"]["type"] == "invalid_request_error"


def test_text_from_a_web_page_and_huge_bodies_are_refused(tmp_path: Path) -> None:
    async def work() -> list[int]:
        async with (
            gateway(tmp_path, Told(), deployment("device"), deployment("server")) as (url, _),
            aiohttp.ClientSession() as http,
        ):
            asked = f"{url}/v1/chat/completions"
            plain = await http.post(asked, data=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
            huge = b'{"prompt": "' + b"a" * (17 << 20) + b'"}'
            large = await http.post(asked, data=huge, headers=JSON)
            return [plain.status, large.status]

    assert asyncio.run(work()) == [415, 413]


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


def test_the_commands_learn_and_remember(tmp_path: Path) -> None:
    def ask(url: str) -> Any:
        with openai.OpenAI(base_url=url, api_key="none") as client:
            return client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=TOKENS)

    with command("replay", "--ttft", "0.01") as (device, _), command("replay", "--ttft", "0.01") as (server, _):
        config = {
            "model_list": [deployment("device", device), deployment("server", server)],
            "router_settings": {"constrained": "server", "budget": 0.0, "state": str(tmp_path / "state")},
        }
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        for times in (1, 2):
            with command("serve", "--config", str(path), "--budget", "0.5") as (url, log):
                assert ask(url).choices[0].message.content == WHOLE
            assert sum("status=200" in line and '"completion_tokens": 20' in line for line in log) == 1
            assert not any("buffers" in line for line in log), "what was asked is in no log"
            (kept,) = (tmp_path / "state").glob("*.json")
            learned = state.read(kept)
            assert learned["dispatcher"]["account"]["arrived"] == times * 12  # as `replay` counts a prompt
            assert "buffers" not in kept.read_text()


def test_a_stream_that_the_end_of_the_program_cuts_ends_with_an_error(tmp_path: Path) -> None:
    with command("replay", "--ttft", "0.01", "--tbt", "0.2") as (device, _), command("replay") as (server, _):
        config = {
            "model_list": [deployment("device", device), deployment("server", server)],
            "router_settings": {"constrained": "server", "budget": 0.0, "state": str(tmp_path / "state")},
        }
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(config))
        body = json.dumps({"messages": MESSAGES, "stream": True, "max_tokens": 100}).encode()
        with command("serve", "--config", str(path)) as (url, log):
            asked = urllib.request.Request(f"{url}/chat/completions", body, {"content-type": "application/json"})
            answer = urllib.request.urlopen(asked, timeout=30)
            lines = [answer.readline() for _ in range(5)]  # it runs
        lines += answer.readlines()
    assert b"The router was closed." in lines[-2] + lines[-1]
    assert not any("Traceback" in line for line in log)


def test_a_retry_after_is_obeyed_by_all_requests_and_told_to_all(tmp_path: Path) -> None:
    async def work() -> tuple[list[tuple[int, str | None]], int]:
        asked = 0

        async def busy(_: Request) -> Response:
            nonlocal asked
            asked += 1
            return JSONResponse({"error": {"message": "later"}}, 429, {"retry-after": "30"})

        app = Starlette(routes=[Route("/v1/chat/completions", busy, methods=["POST"])])
        async with serving(app) as at:
            told = Told(DEVICE_FIRST, tokens=0, constrained="server")
            devices = deployment("device", at), deployment("server", "http://127.0.0.1:1")
            async with gateway(tmp_path, told, *devices) as (url, _), aiohttp.ClientSession() as http:
                replies = []
                for _ in range(3):
                    reply = await http.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES})
                    replies.append((reply.status, reply.headers.get("retry-after")))
                return replies, asked

    replies, asked = asyncio.run(work())
    assert replies == [(429, "30")] * 3
    assert asked == 1
