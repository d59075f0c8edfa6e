"""Graph switching on this machine: how much of the load time that synchronous switching exposes the others hide.

A round runs the same prompt with both graphs kept in memory (the pure compute time), then switched synchronously,
naively and progressively; exposed = T - T(keep both) of the same round, hidden = 1 - exposed / exposed(synchronous).
So what G2's slower chunks cost, and what the two threads cost each other, count against a rule. The progressive plan
is the best by simulation among those that load the last m blocks early and the others as naive switching does.
Computing and loading take a core each: a round during which anything else was busy is left out.

Run: python tests/benchmarks/bench_sdnpu_switching.py [--model SPEC] [--blocks N] [--tokens N] [--rounds N] [--cold]
"""
# ruff: noqa: E402

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before numpy is imported

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import torch

from ondevice import models
from ondevice.sdnpu import graphs, switching
from ondevice.sdnpu.switching import Load, Prefilled, Profile

HIDDEN, DIFFERENCE = 0.85, 1e-4  # the targets
BUSY = 0.1  # cores that others may take during a round
CLEAN = 5  # rounds without others, for a verdict


def simulated(plan: Sequence[Load], found: Profile, chunks: int) -> float:
    """T in seconds of a plan, by the executor's rules, if nothing slowed anything else down."""
    blocks = len(found.p)
    computes: list[tuple[int, float, float]] = []  # block, start, end
    switched: dict[int, float] = {}  # block -> end of its load
    waiting, free = list(plan), 0.0

    def begin_loads(until: float) -> None:
        nonlocal free
        while waiting:
            block, after = waiting[0]
            index = -1 if after is None else after[0] * blocks + after[1]
            if index >= len(computes):
                return
            start = max(free, computes[index][2] if index >= 0 else 0.0)
            start = max([start, *(end for busy, begun, end in computes if busy == block and begun < start < end)])
            if start > until:
                return
            free = switched[block] = start + found.s[block]
            del waiting[0]

    now = 0.0
    for index in range(blocks * chunks):
        block = index % blocks
        begin_loads(now)
        now = max(now, switched.get(block, 0.0))
        computes.append((block, now, now + (found.d if block in switched else found.p)[block]))
        now = computes[-1][2]
    begin_loads(float("inf"))
    return max(now, free)


def progressive(found: Profile, chunks: int) -> list[Load]:
    """The plan with the least simulated T among those that load the last m blocks from some compute on."""
    blocks = len(found.p)
    naive, plans = switching.naive(blocks, chunks), []
    for early in range(blocks + 1):
        for index in range(-1, blocks * chunks):
            after = divmod(index, blocks) if index >= 0 else None
            first = [Load(block, after) for block in range(blocks - 1, blocks - 1 - early, -1)]
            plans.append(first + naive[: blocks - early])
    return min(plans, key=lambda plan: simulated(plan, found, chunks))


def held_up(path: Path) -> tuple[float, float]:
    """Seconds of a load, and the longest that another thread of Python stood still meanwhile."""
    thread = threading.Thread(target=lambda: graphs.load(path))
    begun = now = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        before, now = now, time.perf_counter()
        longest = max(longest, now - before)
    return now - begun, longest


def rounds(built: graphs.Graphs, ids: np.ndarray, plans: dict[str, Sequence[Load] | None], count: int, cold: bool):
    """One dictionary of Prefilled a round, and the cores that were busy with something else."""
    for _ in range(count):
        psutil.cpu_percent()
        start, mine = time.perf_counter(), sum(psutil.Process().cpu_times()[:2])
        done: dict[str, Prefilled] = {}
        for name, plan in plans.items():
            for path in built.small_files if cold else ():
                graphs.drop_from_page_cache(path)
            done[name] = switching.prefill(built, ids, plan)
        own = (sum(psutil.Process().cpu_times()[:2]) - mine) / (time.perf_counter() - start)
        yield done, psutil.cpu_percent() / 100 * (os.cpu_count() or 1) - own


def report(clean: list[dict[str, Prefilled]]) -> None:
    """Medians over the rounds, and the verdicts."""
    plain = clean[0]["keep both"].logits
    print(
        f"{'':<14}{'T ms':>8}{'computes':>10}{'loads':>8}{'exposed':>9}{'hidden':>9}  (least to most)   logits within"
    )
    for name in clean[0]:
        total, computing, loading = (
            1e3 * np.median([getattr(done[name], key) for done in clean])
            for key in ("total_s", "computing_s", "loading_s")
        )
        exposed = np.array([done[name].total_s - done["keep both"].total_s for done in clean])
        hidden = 1 - exposed / [done["synchronous"].total_s - done["keep both"].total_s for done in clean]
        difference = max(float((done[name].logits - plain).abs().max()) for done in clean)
        print(
            f"{name:<14}{total:>8.0f}{computing:>10.0f}{loading:>8.0f}{1e3 * np.median(exposed):>9.1f}"
            f"{np.median(hidden):>9.1%}  ({hidden.min():.1%} to {hidden.max():.1%})   {difference:.1e}"
        )
        if name == "progressive":
            verdicts = [np.median(hidden) >= HIDDEN, difference < DIFFERENCE]
    words = ["met" if verdict else "MISSED" for verdict in verdicts]
    print(f"progressive hides at least {HIDDEN:.0%}: {words[0]}; logits within {DIFFERENCE:g}: {words[1]}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pydocs-lm-base")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = models.load(asked.model).model
    for label in ("built", "built again, from the cache"):
        start = time.perf_counter()
        built = graphs.build(model, asked.blocks)
        print(f"{label}: {time.perf_counter() - start:.1f} s")
    size = sum(path.stat().st_size for path in built.small_files) / 1e6
    print(
        f"{asked.model}, {asked.blocks} blocks, {size:.0f} MB each of G1 and G2; {asked.tokens} tokens; one thread each"
    )
    load, longest = held_up(built.small_files[0])
    print(f"a load of {1e3 * load:.1f} ms held up another thread for {1e3 * longest:.1f} ms at the longest")
    found = switching.profile(built, 7, asked.cold)
    for name in "pds":
        print(f"  {name} ms {np.round(1e3 * getattr(found, name), 1)}")
    print(f"  d/p {found.d.sum() / found.p.sum():.2f}, s/p {found.s.sum() / found.p.sum():.2f}")
    chunks = -(-asked.tokens // built.large)
    plans = {
        "keep both": None, "synchronous": switching.synchronous(built.blocks, chunks),
        "naive": switching.naive(built.blocks, chunks), "progressive": progressive(found, chunks),
    }  # fmt: skip
    print("progressive:", *(f"{load.block} after {load.after}," for load in plans["progressive"]))
    for name, plan in plans.items():
        print(f"  simulated {name}: {1e3 * simulated(plan or [], found, chunks):.0f} ms")
    ids, clean = np.random.default_rng(0).integers(3, 256, asked.tokens), []
    for done, busy in rounds(built, ids, plans, asked.rounds, asked.cold):
        clean += [done] if busy < BUSY else []
        print(
            f"  {busy:.2f} cores busy with others", *(f"{name} {1e3 * one.total_s:.0f}" for name, one in done.items())
        )
        sys.stdout.flush()
    if len(clean) < CLEAN:
        sys.exit(f"No verdict: only {len(clean)} rounds had both cores to themselves.")
    report(clean)


if __name__ == "__main__":
    main()
