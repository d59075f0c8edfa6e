"""Graph scheduling rules against the exact optimum on random instances, and the time that our rule takes to plan.

Latencies are simulated by the scheduler's own executor and do not depend on the machine; planning times are measured.
Ratios are latency / optimum, mean and worst. Times p are those of a block on G1, d on G2, s of a load.

Run: python tests/benchmarks/bench_sdnpu_scheduling.py [--instances N] [--repeats N]
"""
# ruff: noqa: E402

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before numpy is imported

import argparse
import time

import numpy as np

from ondevice.sdnpu.instances import FAMILIES, heterogeneous, ratios
from ondevice.sdnpu.scheduling import RULES, execute, ours

OURS, PAPER = "ours", "greedy (paper)"
TARGET_RATIO, TARGET_MS = 1.01, 50.0
BAR = "heterogeneous, N 3-8, C 2-6"


def optimality(instances: int) -> None:
    """Print a table of families and rules."""
    print(f"latency / optimum, mean / worst of {instances} instances")
    for family, draw in FAMILIES.items():
        table = ratios({family: draw}, instances)
        print(family)
        for name, found in table.groupby("rule", sort=False)["ratio"]:
            mean, verdict = found.mean(), ""
            if family == BAR and name == OURS:
                verdict = f"target {TARGET_RATIO}: {'met' if mean <= TARGET_RATIO else 'MISSED'}"
            print(f"  {name:<26}{mean:>8.4f} /{found.max():>7.4f}  {verdict}", flush=True)


def planning(repeats: int) -> None:
    """Print the time to plan N = 28, C = 16 under short, middling and long loads."""
    print("\nmilliseconds of CPU time to plan N = 28, C = 16, and T / the greedy's")
    for load in (0.5, 2.0, 8.0, 16.0, 28.0, 40.0):
        prefill = heterogeneous(np.random.default_rng(1), 28, 16, load, 1.5)
        times = []
        for _ in range(repeats + 1):
            start = time.process_time()
            plan = ours(prefill)
            times.append(1e3 * (time.process_time() - start))
        median, low = np.median(times[1:]), np.quantile(times[1:], 0.05)
        ratio = execute(prefill, plan).latency / execute(prefill, RULES[PAPER](prefill)).latency
        verdict = "met" if median <= TARGET_MS else "MISSED"
        print(f"  s ~ {load:>4g} p{median:>8.2f}  (5 %: {low:.2f})  {ratio:.3f}  target {TARGET_MS:g}: {verdict}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=101)
    arguments = parser.parse_args()
    optimality(arguments.instances)
    planning(arguments.repeats)


if __name__ == "__main__":
    main()
