"""DRAGON's simulator: how fast it runs, what the schedulers reach, and speculative against token-wise aggregation.

All latencies are simulated by the live state machine on a virtual clock and do not depend on the machine; only the
first table is measured. Paces: the cloud 20 ms a token, the device 130 or 230 ms. Delays are one way, on both links.

Run: python tests/benchmarks/bench_dragon_simulator.py [--tokens N] [--seeds N]
"""
# ruff: noqa: E402

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before numpy is imported

import argparse
import time

import numpy as np

from ondevice.dragon.scheduler import Greedy, Lagging
from ondevice.dragon.simulator import CLOUD, DEVICE, Link, World, independent, oracle, regimes, simulate

PACES = {"130/20 ms": (0.13, 0.02), "230/20 ms": (0.23, 0.02), "100/100 ms": (0.1, 0.1)}
DELAYS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
STATIONARY = {".49/.99": (0.49, 0.99), ".8/.8": (0.8, 0.8), ".95/.6": (0.95, 0.6), ".5/.5": (0.5, 0.5)}
CHANGING = {".97/.4 swap": [(0.97, 0.4), (0.4, 0.97)], ".95/.6 swap": [(0.95, 0.6), (0.6, 0.95)]}
TARGET_SPEED, TARGET_STATIC, TARGET_BETTER, TARGET_ORACLE = 1000.0, 1.01, 0.95, 1.05


def met(good: bool) -> str:
    """For the tables."""
    return "met" if good else "MISSED"


def speed(tokens: int) -> None:
    """Print simulated seconds for each second of CPU and of wall time, at 300 ms; medians of nine."""
    print(f"simulated / real time at 300 ms, {tokens} tokens, .8/.8 (CPU, wall); target {TARGET_SPEED:g}")
    link = Link(0.3, 0.06)
    for name, paces in PACES.items():
        world = World(independent(tokens, 0.8, 0.8), *paces, link, link)
        for rule in ("device", "ours"):
            rates = []
            for _ in range(10):  # the first one plans and is left out
                pair = (Lagging(0.6), Lagging(0.6)) if rule == "ours" else None
                clocks = time.process_time(), time.perf_counter()
                total = simulate(world, DEVICE, pair).total
                rates.append([total / (time.process_time() - clocks[0]), total / (time.perf_counter() - clocks[1])])
            cpu, wall = np.median(rates[1:], 0)
            print(f"  {name:<11}{rule:<8}{cpu:>8.0f}{wall:>8.0f}  {met(cpu >= TARGET_SPEED)}", flush=True)


def scheduling(tokens: int, seeds: int) -> None:
    """Print totals over the best static side's and the oracle's, of means over seeds."""
    print(f"\n{tokens} tokens, {seeds} seeds: total / best static side (paper, ours), / oracle (best static, ours)")
    for changing, cases in ((False, STATIONARY), (True, CHANGING)):
        for name, rates in cases.items():
            for paces_name, paces in PACES.items():
                for delay in (0.05, 0.15, 0.3):
                    found = []
                    for seed in range(seeds):
                        flags = regimes(tokens, rates, 40, seed) if changing else independent(tokens, *rates, seed)
                        found.append(totals(World(flags, *paces, Link(delay), Link(delay)), 2 * delay))
                    device, cloud, paper, ours, best = np.mean(found, 0)
                    static = min(device, cloud)
                    bar = TARGET_BETTER if changing else TARGET_STATIC
                    near = met(ours <= TARGET_ORACLE * best)
                    reached = met(ours <= bar * static) if best <= bar * static else "no schedule can"
                    print(
                        f"  {name:<12}{paces_name:<11}{1e3 * delay:>4.0f} ms{paper / static:>8.3f}{ours / static:>8.3f}"
                        f"{static / best:>9.3f}{ours / best:>7.3f}  {TARGET_ORACLE:g}: {near}"
                        f"  {bar:g}: {reached}",
                        flush=True,
                    )


def totals(world: World, rtt: float) -> tuple[float, ...]:
    """Seconds: device, cloud, paper's rule, ours, oracle."""
    return (
        simulate(world, DEVICE).total,
        simulate(world, CLOUD).total,
        simulate(world, DEVICE, (Greedy(rtt), Greedy(rtt))).total,
        simulate(world, DEVICE, (Lagging(rtt), Lagging(rtt))).total,
        oracle(world).total,
    )


def latency(tokens: int, seeds: int) -> None:
    """Print milliseconds a token, token-wise and speculative, for two places of the delay."""
    for place in ("on both links", "on the link to the device only, as in the paper's testbed"):
        print(f"\nms a token, delay {place}, jitter a fifth of it, acceptance .63/.98 and .8/.8")
        print("  paces      delay      TW   .63/.98: device, ours      .8/.8: device, ours")
        for name, paces in list(PACES.items())[:2]:
            for delay in DELAYS:
                down = Link(delay, delay / 5)
                up = down if place == "on both links" else Link(0.001)
                rtt = delay + (delay if up is down else 0.001)
                row = []
                for rates in ((0.63, 0.98), (0.8, 0.8)):
                    for ahead, ours in ((1, False), (16, False), (16, True)):
                        found = []
                        for seed in range(seeds):
                            world = World(independent(tokens, *rates, seed), *paces, up, down, ahead)
                            pair = (Lagging(rtt), Lagging(rtt)) if ours else None
                            found.append(simulate(world, DEVICE, pair, seed).per_token)
                        row.append(1e3 * float(np.mean(found)))
                gains = [f"{x:>9.1f} ({x / row[0] - 1:+.0%})" for x in (row[1], row[2], row[4], row[5])]
                print(f"  {name:<10}{1e3 * delay:>4.0f} ms{row[0]:>8.1f}" + "".join(gains), flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    speed(arguments.tokens)
    scheduling(arguments.tokens, arguments.seeds)
    latency(arguments.tokens, arguments.seeds)


if __name__ == "__main__":
    main()
