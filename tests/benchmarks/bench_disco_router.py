"""Time to first token that DiSCo's router adds on loopback, against asking the endpoint directly.

Added TTFT at percentile p = percentile_p(through the router) - percentile_p(direct), over the same number of requests,
alternating one block of direct requests with one of routed ones. Device, server, router and client are four processes.

Run: python tests/benchmarks/bench_disco_router.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

TTFT_S, TBT_S, TOKENS = 0.1, 0.02, 24  # a stream lasts 0.56 s: 50 tokens/s, as a fast server's
LOSER_TTFT_S = 0.3
CONCURRENT = 20


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[str]:
    """Run `python -m ondevice.disco ...` on a free port; yields its base URL."""
    command = [sys.executable, "-m", "ondevice.disco", *arguments, "--port", "0", "--log-level", "critical"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        yield running.stdout.readline().split()[-1]
    finally:
        running.terminate()
        running.wait()


class Caller:
    """One keep-alive connection with as little client as possible, so that the servers' time is what is seen."""

    def __init__(self, base: str) -> None:
        self._host, port = base.split("/")[2].split(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ttft(self, prompt: str) -> float:
        """Seconds until the first data line; the whole answer is read and checked to be complete."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": TOKENS, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
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


async def block(base: str, streams: int, rounds: int, spread_s: float, seed: int) -> list[float]:
    """`streams` callers at once, each asking `rounds` times; starts are spread over `spread_s` seconds."""
    coins = random.Random(seed)

    async def worker(number: int) -> list[float]:
        caller = Caller(base)
        await asyncio.sleep(coins.random() * spread_s)
        found = [await caller.ttft(f"prompt {seed} {number} {again}") for again in range(rounds)]
        caller.close()
        return found

    return [ttft for found in await asyncio.gather(*map(worker, range(streams))) for ttft in found]


async def compare(direct: str, routed: str, blocks: int, spread_s: float, rounds: int) -> dict[str, float]:
    """Added TTFT in milliseconds, from `blocks` blocks each, A B A B."""
    seen: dict[str, list[float]] = {direct: [], routed: []}
    for number in range(-1, blocks):  # the first pair warms up
        for base in (direct, routed):
            found = await block(base, CONCURRENT, rounds, spread_s, number)
            seen[base] += found if number >= 0 else []
    levels = [50, 90, 99]
    a, b = (1000 * np.percentile(seen[base], levels) for base in (direct, routed))
    numbers = {f"added_p{level}_ms": float(y - x) for level, x, y in zip(levels, a, b, strict=True)}
    return {"requests_each": len(seen[direct]), "direct_p50_ms": float(a[0]), "direct_p99_ms": float(a[2]), **numbers}


async def measure(direct: str, routed: dict[str, str], blocks: int) -> dict[str, dict[str, float]]:
    found = {}
    for policy, base in routed.items():
        spread = TTFT_S + TOKENS * TBT_S
        found[f"{policy}, {CONCURRENT} streams"] = await compare(direct, base, blocks, spread, 3)
        found[f"{policy}, {CONCURRENT} in one instant"] = await compare(direct, base, blocks, 0.0, 1)
    start = time.perf_counter()
    answers = await block(base, 200, 1, 0.0, 0)
    found["200 streams in one instant"] = {
        "served": len(answers),
        "ttft_p50_ms": 1000 * float(np.median(answers)),
        "ttft_p99_ms": 1000 * float(np.percentile(answers, 99)),
        "all_done_s": time.perf_counter() - start,
    }
    return found


def main(blocks: int = 10) -> dict[str, dict[str, float]]:
    """Print and return the numbers, in milliseconds."""
    timing = ("--tbt", str(TBT_S))
    with (
        process("replay", "--ttft", str(TTFT_S), *timing) as server,
        process("replay", "--ttft", str(LOSER_TTFT_S), *timing) as device,
    ):
        sides = ("serve", "--server", server, "--device", device, "--constrained", "device")
        with (
            process(*sides, "--policy", "server-only") as alone,
            process(*sides, "--policy", "race") as race,
        ):
            found = asyncio.run(measure(server, {"server-only": alone, "race": race}, blocks))
    for name, numbers in found.items():
        print(name, {key: round(value, 2) for key, value in numbers.items()})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10)
    main(parser.parse_args().blocks)
