"""How many devices a cloud serves at once: 20 against one, and what a greedy one does to another's first token.

Answers are the command's own, of two documents of each side by Algorithm 1, all of 24 tokens: questions whose answers
end before are left out. The cloud is a process with a core of its own, behind the paper's network without added delay;
so is this one, in which all devices share a model, as 20 phones would not. Ratios are of one run, A B A B.

    python tests/benchmarks/bench_dragon_sessions.py
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path

import numpy as np

from ondevice.dragon import pair
from ondevice.dragon.live.answer import Asked
from ondevice.dragon.live.device import Device
from ondevice.dragon.live.node import Node
from ondevice.dragon.world import world
from ondevice.evidence import machine_name

MODEL, DEVICES, ROUNDS, QUESTIONS = "pydocs-lm-base", 20, 5, 9  # the last: of every holder
ASKED = Asked(limit=24, seed=1)
ALONE = Asked(limit=8, seed=1, mode="cloud-only")  # so that no neighbour is held up by the devices' model here
GREEDY = Asked(k=16, limit=200, seed=1, mode="cloud-only")


async def answered(devices: list[Device], queries: list[str], asked: Asked = ASKED) -> tuple[float, list[float], float]:
    """(seconds until all are done, each one's, the median first token)."""
    begin, ends = time.perf_counter(), list[float]()

    async def one(device: Device, query: str) -> float:
        answer = await device.ask(query, asked)
        assert answer.alone_from is None, answer.reason
        ends.append(time.perf_counter() - begin)
        return answer.ttft

    firsts = await asyncio.gather(*(one(*pair) for pair in zip(devices, queries, strict=True)))
    return time.perf_counter() - begin, ends, float(np.median(firsts))


async def measure(port: int, node: Node, queries: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Device(node, port=port, patience=120.0)) for _ in range(DEVICES + 1)]
        devices, other = made[:-1], made[-1]
        for device in made:
            await asyncio.to_thread(device.connect)
        whole = [query for query in queries if len((await made[0].ask(query, ASKED)).tokens) == ASKED.limit]
        queries = (whole * DEVICES)[:DEVICES]
        print(f"{len(whole)} questions of so long answers")
        await answered(devices, queries)
        rows = []
        for turn in range(ROUNDS):
            each = [await answered([device], [query]) for device, query in zip(devices, queries, strict=True)]
            one = np.mean([found[0] for found in each])
            _, _, first = await answered(devices[turn : turn + 1], queries[turn : turn + 1], ALONE)
            all_, ends, _ = await answered(devices, queries)
            greedy = asyncio.create_task(other.ask(queries[0], GREEDY))
            await asyncio.sleep(0.3)
            _, _, beside = await answered(devices[turn : turn + 1], queries[turn : turn + 1], ALONE)
            assert (await greedy).alone_from is None
            rows.append((one, all_, all_ / one, max(ends) / np.median(ends), first, beside, beside / first))
            print("one {:.2f} s, all {:.2f} s: {:.1f} times; slowest over median {:.2f}; first token {:.3f} s, beside "
                  "a greedy one {:.3f} s: {:.2f} times".format(*rows[-1]), flush=True)  # fmt: skip
        middle = np.median(np.array(rows), axis=0)
        print(f"{machine_name()}: {DEVICES} devices take {middle[2]:.1f} times one's time, slowest over median "
              f"{middle[3]:.2f}; a greedy neighbour delays the first token {middle[6]:.2f} times")  # fmt: skip


def main() -> None:
    queries = [question.query for question in world().first(QUESTIONS, least=24)]
    with tempfile.TemporaryDirectory() as name, pair.both(MODEL, pair.write(Path(name), world())) as (device, relay):
        asyncio.run(measure(relay.port, device.node, queries))


if __name__ == "__main__":
    main()
