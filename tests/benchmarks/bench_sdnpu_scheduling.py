"""Graph scheduling rules against the exact optimum on random instances, and the time that our rule takes to plan.

Latencies are simulated by the scheduler's own executor and do not depend on the machine; planning times are measured.
Ratios are latency / optimum, mean and worst. Times p are those of a block on G1, d on G2, s of a load.

Run: python tests/benchmarks/bench_sdnpu_scheduling.py [--instances N] [--repeats N] [--seconds N]
"""
# ruff: noqa: E402

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before numpy is imported

import argparse
import time
from collections.abc import Callable

import numpy as np

from ondevice.sdnpu.optimum import bounds, exact
from ondevice.sdnpu.scheduling import RULES, Prefill, beam_search, execute

Random = np.random.Generator
OURS, PAPER = "beam search (ours)", "greedy (paper)"
TARGET_RATIO, TARGET_MS = 1.03, 5.0


def homogeneous(random: Random) -> Prefill:
    """Equal blocks."""
    p, blocks = 10.0, int(random.integers(3, 9))
    d, s = p * random.uniform(1, 2), random.uniform(1, 40)
    return Prefill([p] * blocks, [d] * blocks, [s] * blocks, int(random.integers(2, 7)))


def heterogeneous(random: Random, blocks: int = 0, chunks: int = 0, load: float = 2.0, slower: float = 2.0) -> Prefill:
    """p from 1 to 20, d/p from 1 to `slower`, s from next to nothing to 2 `load` mean computes."""
    blocks, chunks = blocks or int(random.integers(3, 9)), chunks or int(random.integers(2, 7))
    p = random.uniform(1, 20, blocks)
    return Prefill(p, p * random.uniform(1, slower, blocks), random.uniform(0.1, 2, blocks) * load * 10.5, chunks)


def paper_like(random: Random) -> Prefill:
    """Figure 8 with spread: N = 6, a load takes about two computes, G2 10 to 40 % slower."""
    p = random.uniform(8, 12, 6)
    return Prefill(p, p * random.uniform(1.1, 1.4, 6), random.uniform(18, 22, 6), int(random.integers(2, 7)))


def growing(random: Random) -> Prefill:
    """Later chunks take longer, as attention looks back further."""
    one = heterogeneous(random)
    factor = 1 + 0.2 * np.arange(one.chunks)[:, None]
    return Prefill(one.p * factor, one.d * factor, one.s)


FAMILIES: dict[str, Callable[[Random], Prefill]] = {
    "homogeneous, N 3-8, C 2-6": homogeneous,
    "heterogeneous, N 3-8, C 2-6": heterogeneous,
    "load ~ compute, C = 2": lambda random: heterogeneous(random, chunks=2, load=1.0),
    "long loads, s ~ a whole chunk": lambda random: heterogeneous(random, load=6.0),
    "G2 up to 4 times slower": lambda random: heterogeneous(random, slower=4.0),
    "paper-like, N = 6, C 2-6": paper_like,
    "chunks that grow": growing,
    "N = 8, C = 6": lambda random: heterogeneous(random, 8, 6),
    "N = 12, C = 6": lambda random: heterogeneous(random, 12, 6),
}
BAR = "heterogeneous, N 3-8, C 2-6"


def ratios(instances: int) -> None:
    """Print a table of families and rules."""
    names = [name for name in RULES if name != "keep both graphs"]
    print(f"latency / optimum, mean / worst of {instances} instances; exact: mean and longest seconds\n")
    for family, draw in FAMILIES.items():
        random, found, seconds = np.random.default_rng(0), [], []
        for _ in range(instances):
            prefill, start = draw(random), time.process_time()
            best = exact(prefill).latency
            seconds.append(time.process_time() - start)
            found.append([execute(prefill, RULES[name](prefill)).latency / best for name in names])
        means, worst = np.mean(found, 0), np.max(found, 0)
        print(f"{family}; exact {np.mean(seconds):.3f} s, {max(seconds):.2f} s")
        for name, mean, most in zip(names, means, worst, strict=True):
            verdict = ""
            if family == BAR and name == OURS:
                verdict = f"target {TARGET_RATIO}: {'met' if mean <= TARGET_RATIO else 'MISSED'}"
            print(f"  {name:<26}{mean:>8.4f} /{most:>7.4f}  {verdict}", flush=True)


def planning(repeats: int) -> None:
    """Print the time to plan N = 28, C = 16 under short, middling and long loads."""
    print("\nmilliseconds of CPU time to plan N = 28, C = 16, and T / the greedy's")
    for load in (0.5, 2.0, 8.0, 16.0, 28.0, 40.0):
        prefill = heterogeneous(np.random.default_rng(1), 28, 16, load, 1.5)
        times = []
        for _ in range(repeats + 1):
            start = time.process_time()
            plan = beam_search(prefill)
            times.append(1e3 * (time.process_time() - start))
        median, low = np.median(times[1:]), np.quantile(times[1:], 0.05)
        ratio = execute(prefill, plan).latency / execute(prefill, RULES[PAPER](prefill)).latency
        verdict = "met" if median <= TARGET_MS else "MISSED"
        print(f"  s ~ {load:>4g} p{median:>8.2f}  (5 %: {low:.2f})  {ratio:.3f}  target {TARGET_MS:g}: {verdict}")


def large(seconds: float) -> None:
    """Print how far our rule can be from the optimum where only bounds are known."""
    print(f"\nN = 28, C = 16: T / lower bound of the mixed-integer program stopped after {seconds:g} s")
    for load in (2.0, 8.0, 16.0):
        prefill = heterogeneous(np.random.default_rng(1), 28, 16, load, 1.5)
        lower = bounds(prefill, seconds).lower
        found = {name: execute(prefill, rule(prefill)).latency / lower for name, rule in RULES.items()}
        print(f"  s ~ {load:>4g} p  " + ", ".join(f"{name} {ratio:.4f}" for name, ratio in found.items()), flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=101)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    ratios(arguments.instances)
    planning(arguments.repeats)
    large(arguments.seconds)


if __name__ == "__main__":
    main()
