"""`transformers serve` with SmolLM2 as an endpoint of DiSCo's router, of both sides or beside a cloud."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from routing import DEVICE_FIRST, DONE, NOBODY, Told, Upstream, chunk, client_of, configured, deployment, serving, usage
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from transformers import AutoTokenizer
from waiting import PATIENCE, until, wait_for

from ondevice import assets, models
from ondevice.network.listening import listener
from ondevice_programs.router.app import create_app
from ondevice_programs.router.router import Router

pytest.importorskip("fastapi", reason="the extra 'serving' is not installed")

MESSAGES: Any = [{"role": "user", "content": "Explain the class sklearn.cluster.KMeans with all its attributes."}]
TOKENS = 40
ASKED: dict[str, Any] = {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SmolLM2 as a folder of transformers."""
    path = str(tmp_path_factory.mktemp("models") / "smollm2")
    loaded = models.load(models.SMOLLM2)
    loaded.model.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def port(saved: str) -> Iterator[int]:
    with listener() as free:
        number = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", saved, "--device", "cpu"]
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        [*command, "--port", str(number)], env=os.environ | quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def there() -> bool:
        assert running.poll() is None, "transformers serve ended"
        try:
            with urllib.request.urlopen(f"http://localhost:{number}/health") as reply:
                return reply.status == 200
        except urllib.error.URLError:
            return False

    try:
        wait_for(there, 4 * PATIENCE)  # its imports alone take most of a minute beside other work
        yield number
    finally:
        running.terminate()
        running.wait(20)


@pytest.fixture(scope="module")
def whole(port: int, saved: str) -> str:
    """The answer without a router."""
    with openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none") as client:
        text = client.chat.completions.create(model=saved, **ASKED).choices[0].message.content
    assert text
    return text


@pytest.fixture(scope="module")
def pace(port: int, saved: str, whole: str) -> float:
    """Tokens per second, a third of the server's: they wait to be read, and a migration comes due."""
    began = time.perf_counter()
    with openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none") as client:
        client.chat.completions.create(model=saved, **ASKED)
    return TOKENS / (time.perf_counter() - began) / 3


def continuing(port: int, saved: str) -> Starlette:
    """Chat that goes on from a prefix, as `transformers serve` does by /v1/completions only: it writes the prompt."""
    tokenizer: Any = AutoTokenizer.from_pretrained(saved, local_files_only=True)

    async def chat(http: Request) -> StreamingResponse:
        body = await http.json()
        messages = body.pop("messages")
        prefix = messages.pop()["content"] if body.pop("continue_final_message", False) else ""
        body.pop("add_generation_prompt", None)
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + prefix

        async def events() -> AsyncIterator[str]:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"http://localhost:{port}/v1/completions", json=body | {"prompt": prompt}) as reply,
            ):
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        chunk = json.loads(line[6:])
                        for choice in chunk["choices"]:
                            choice["delta"] = {"content": choice.pop("text")}
                        yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


def through(folder: Path, chat: Any, can_continue: Any, model: str, pace: float) -> tuple[str, Any]:
    """(text, the last chunk) of one stream that begins at the device, by two names of one server."""
    more = {"can_continue": can_continue, "model": model}

    async def work() -> tuple[str, Any]:
        async with chat as url:
            sides = (
                deployment("device", url, **more),
                deployment("server", url.replace("127.0.0.1", "localhost"), **more),
            )
            router = Router(configured(folder, *sides, pace=pace), dispatcher=Told(DEVICE_FIRST, buffer=4))
            async with serving(create_app(router)) as address, client_of(f"{address}/v1") as client:
                assert await until(lambda: all(end.can_continue is not None for end in router.endpoints.values()))
                chunks = await client.chat.completions.create(model="m", stream=True, **ASKED)
                seen = [chunk async for chunk in chunks]
        return "".join(chunk.choices[0].delta.content or "" for chunk in seen), seen[-1]

    return asyncio.run(work())


def test_an_answer_moves_from_one_side_to_the_other_and_stays_the_same(
    tmp_path: Path, port: int, whole: str, saved: str, pace: float
) -> None:
    text, last = through(tmp_path, serving(continuing(port, saved)), True, saved, pace)
    assert text == whole
    switches = [(switch["side"], switch["role"]) for switch in last.disco["switches"]]
    assert switches == [("device", "race"), ("server", "migration")]


def test_its_chat_cannot_continue_which_the_probe_finds_so_it_is_not_spliced(
    tmp_path: Path, port: int, whole: str, saved: str, pace: float
) -> None:
    text, last = through(tmp_path, contextlib.nullcontext(f"http://127.0.0.1:{port}"), "probe", saved, pace)
    assert text == whole and len(last.disco["switches"]) == 1 and last.disco["estimated"] is False


def readmes_command() -> list[str]:
    """The router's command as README prints it."""
    text = (assets.ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ondevice-router serve .*$", text, re.M)
    return shlex.split(line, comments=True)


def test_readmes_command_answers_before_a_cloud_and_this_device(port: int, whole: str) -> None:
    """The device's answer comes where the cloud is silent, and the cloud's where the device is off."""
    program, *words = readmes_command()
    silent = Upstream(lambda body: [3600.0], models=["cloud-1"])
    quick = Upstream(lambda body: [chunk("from the"), chunk(" cloud"), chunk(reason="stop"),
                                   usage(prompt_tokens=9, completion_tokens=3), DONE], models=["cloud-1"])  # fmt: skip

    async def answer(cloud: Upstream, device: str) -> str:
        async with serving(cloud.app) as server:
            given = {"--device": device, "--server": server}
            asked = [given.get(before, word) for before, word in zip([program, *words], words, strict=False)]
            command = [str(Path(sys.executable).with_name(program)), *asked, "--port", "0"]
            running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            try:
                assert running.stdout is not None
                url = (await running.stdout.readline()).split()[-1].decode()
                async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                    done = await client.chat.completions.create(model="any name", **ASKED)
                    return done.choices[0].message.content or ""
            finally:
                running.terminate()
                await running.wait()

    assert asyncio.run(answer(silent, f"http://127.0.0.1:{port}")) == whole
    assert asyncio.run(answer(quick, NOBODY)) == "from the cloud"
