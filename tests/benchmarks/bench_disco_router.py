"""Time to first token that DiSCo's router adds on loopback, beside LiteLLM's proxy before the same endpoints.

Added TTFT at percentile p = percentile_p(through a gateway) - percentile_p(direct), over the same number of requests,
one block of each in turn. Endpoints, gateways and client are processes of their own; the router learns all the while.
Requests a second: answers of one token, 20 callers without a pause.

Run: python tests/benchmarks/bench_disco_router.py [--litellm PATH of LiteLLM's command, in an environment of its own]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.network.listening import listener

TTFT_S, TBT_S, TOKENS = 0.1, 0.02, 24  # a stream lasts 0.56 s: 50 tokens/s, as a fast server's
LOSER_TTFT_S = 0.3
CONCURRENT = 20
QUIET = {
    "OMP_NUM_THREADS": "1",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # neither gateway checks a key
}


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[str]:
    """Run `ondevice-router ...` on a free port; yields its address."""
    command = [sys.executable, "-m", "ondevice_programs.router", *arguments, "--port", "0", "--log-level", "critical"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | QUIET)
    try:
        assert running.stdout is not None
        yield running.stdout.readline().split()[-1].removesuffix("/v1")
    finally:
        running.terminate()
        running.wait()


@contextlib.contextmanager
def litellm(command: str, config: Path) -> Iterator[str]:
    """LiteLLM's proxy with that configuration; yields its address."""
    with listener() as free:
        port = free.getsockname()[1]
    line = [command, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    running = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | QUIET)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert running.poll() is None, "LiteLLM's proxy ended"
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{url}/health/liveliness").close()
                break
            time.sleep(0.2)
        yield url
    finally:
        running.terminate()
        running.wait()


class Caller:
    """One keep-alive connection with as little client as possible, so that the servers' time is what is seen."""

    def __init__(self, base: str) -> None:
        self._host, port = base.split("/")[2].split(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ttft(self, prompt: str, tokens: int) -> float:
        """Seconds until the first token; the whole answer is read and checked to be complete."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        asked = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True}
        body = json.dumps(asked)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        start = time.perf_counter()
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        await reader.readuntil(b"data: ")
        first = time.perf_counter() - start
        rest = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert b"[DONE]" in rest and b'"error"' not in rest, rest[-300:]
        return first

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def block(base: str, streams: int, rounds: int, spread_s: float, seed: int, tokens: int = TOKENS) -> list[float]:
    """`streams` callers at once, each asking `rounds` times; starts are spread over `spread_s` seconds."""
    coins = random.Random(seed)

    async def worker(number: int) -> list[float]:
        caller = Caller(base)
        await asyncio.sleep(coins.random() * spread_s)
        words = " word" * coins.randrange(200)
        found = [await caller.ttft(f"prompt {seed} {number} {again}{words}", tokens) for again in range(rounds)]
        caller.close()
        return found

    return [ttft for found in await asyncio.gather(*map(worker, range(streams))) for ttft in found]


async def compare(bases: dict[str, str], blocks: int, spread_s: float, rounds: int) -> dict[str, dict[str, float]]:
    """Added TTFT in milliseconds over the first of `bases`, from `blocks` blocks of each in turn."""
    seen: dict[str, list[float]] = {name: [] for name in bases}
    for number in range(-1, blocks):  # the first round warms up
        for name, base in bases.items():
            found = await block(base, CONCURRENT, rounds, spread_s, number)
            seen[name] += found if number >= 0 else []
    levels = [50, 90, 99]
    found = {name: 1000 * np.percentile(values, levels) for name, values in seen.items()}
    direct = found.pop(next(iter(bases)))
    return {
        name: {f"added_p{level}_ms": float(it) for level, it in zip(levels, values - direct, strict=True)}
        for name, values in found.items()
    }


async def rate(base: str, rounds: int) -> float:
    """Requests a second."""
    await block(base, CONCURRENT, 2, 0.0, 0, tokens=1)
    start = time.perf_counter()
    answers = await block(base, CONCURRENT, rounds, 0.0, 1, tokens=1)
    return len(answers) / (time.perf_counter() - start)


async def measure(bases: dict[str, str], quick: dict[str, str], blocks: int) -> dict[str, Any]:
    spread = TTFT_S + TOKENS * TBT_S
    found: dict[str, Any] = {
        f"{CONCURRENT} streams": await compare(bases, blocks, spread, 3),
        f"{CONCURRENT} in one instant": await compare(bases, blocks, 0.0, 1),
        "requests a second": {name: await rate(base, 10 * blocks) for name, base in quick.items()},
    }
    start = time.perf_counter()
    answers = await block(bases["router"], 200, 1, 0.0, 0)
    found["200 streams in one instant"] = {
        "served": len(answers),
        "ttft_p50_ms": 1000 * float(np.median(answers)),
        "ttft_p99_ms": 1000 * float(np.percentile(answers, 99)),
        "all_done_s": time.perf_counter() - start,
    }
    return found


def configuration(path: Path, device: str, server: str, only: bool = False) -> Path:
    """One file for both gateways; LiteLLM's has the server alone, as it does not race."""
    entries = [
        {
            "model_name": "m",
            "litellm_params": {"model": f"openai/{side}", "api_base": f"{url}/v1", "api_key": "none"},
        }
        | ({} if only else {"model_info": {"side": side, "can_continue": True}})
        for side, url in (("device", device), ("server", server))[1 if only else 0 :]
    ]
    settings = {} if only else {"router_settings": {"constrained": "device", "budget": 0.5, "state": f"{path}.state"}}
    path.write_text(json.dumps({"model_list": entries} | settings))
    return path


def main(command: str | None, blocks: int = 10) -> dict[str, Any]:
    """Print and return the numbers."""
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start = stack.enter_context
        server = start(process("replay", "--ttft", str(TTFT_S), "--tbt", str(TBT_S)))
        device = start(process("replay", "--ttft", str(LOSER_TTFT_S), "--tbt", str(TBT_S)))
        instant = start(process("replay", "--ttft", "0", "--tbt", "0"))
        bases, quick = {"direct": server}, {"direct": instant}
        for name, behind, which in (("router", server, bases), ("router", instant, quick)):
            path = configuration(folder / f"{name}{len(which)}{behind[-5:]}.yaml", device, behind)
            which[name] = start(process("serve", "--config", str(path)))
        if command is not None:
            for behind, which in ((server, bases), (instant, quick)):
                path = configuration(folder / f"litellm{behind[-5:]}.yaml", device, behind, only=True)
                which["LiteLLM"] = start(litellm(command, path))
        found = asyncio.run(measure(bases, quick, blocks))
    print(f"load before: {load:.2f} over a minute")
    for name, numbers in found.items():
        print(name, json.dumps(numbers, default=float))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--litellm", metavar="PATH", help="LiteLLM's command; without it ours is measured alone")
    parser.add_argument("--blocks", type=int, default=10)
    options = parser.parse_args()
    main(options.litellm, options.blocks)
