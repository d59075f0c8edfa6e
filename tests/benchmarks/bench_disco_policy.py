"""Time to compute DiSCo's policies and to decide a request, on one thread (the paper's Figure 9).

Lengths and TTFTs are drawn as in the paper's setting. Steps are timed apart, since a running system keeps the histogram
and the sorted window: `S total` is histogram + policy, `D total` is histogram + sort + policy, from raw lists.

Run: python tests/benchmarks/bench_disco_policy.py [--repeats N]
"""
# ruff: noqa: E402

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before numpy is imported

import argparse
import platform
import sys
import time
from collections.abc import Callable

import numpy as np

from ondevice.disco import dispatch, optimal
from ondevice.disco.distributions import DEVICES, Latency, Lengths
from ondevice.disco.policy import DispatchPolicy

SIZES = (1_000, 10_000, 100_000)
BUDGET, ALPHA = 0.5, 0.15
DEVICE = DEVICES["Pixel 7 Pro, Bloom-560M"]
PAPER_MS = {"S total": (0.128, 0.969, 9.082), "D total": (0.486, 1.741, 14.856)}
TARGET_MS = {"S total": (0.05, 0.1, 0.5), "D total": (0.1, 0.4, 3.0), "mean-optimal": (np.inf, np.inf, 60.0)}
DECISION_TARGET_NS = 2000


def seconds(run: Callable[[], object], repeats: int, at_least: float = 0.2) -> tuple[float, float]:
    """(median, 5 % quantile) of the time of one call, over `repeats` calls and at least that many seconds."""
    run()
    found: list[float] = []
    end = time.perf_counter() + at_least
    while len(found) < repeats or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return float(np.median(found)), float(np.quantile(found, 0.05))


def steps(n: int) -> dict[str, Callable[[], object]]:
    """What is timed for n requests. Kept distributions are made fresh, so that nothing cached on them is reused."""
    rng = np.random.default_rng(0)
    tokens = np.maximum(1, np.round(rng.lognormal(2.74, 0.55, n))).astype(np.int64)
    ttft = rng.lognormal(-0.86, 0.28, n)
    counts, samples = Lengths.of(tokens).counts, Latency.of(ttft).samples
    return {
        "histogram": lambda: Lengths.of(tokens),
        "sort": lambda: Latency.of(ttft),
        "S policy": lambda: dispatch.server_constrained(Lengths(counts), BUDGET),
        "D policy": lambda: dispatch.device_constrained(Lengths(counts), Latency(samples), BUDGET, ALPHA),
        "S total": lambda: dispatch.server_constrained(Lengths.of(tokens), BUDGET),
        "D total": lambda: dispatch.device_constrained(Lengths.of(tokens), Latency.of(ttft), BUDGET, ALPHA),
        "mean-optimal": lambda: optimal.mean_optimal(Lengths(counts), Latency(samples), DEVICE, BUDGET),
        "P99-optimal": lambda: optimal.deadline_optimal(Lengths(counts), Latency(samples), DEVICE, BUDGET),
    }


def decision_ns(policy: DispatchPolicy, repeats: int) -> tuple[float, float]:
    """(median, 5 % quantile) nanoseconds of one decision, in a plain Python loop whose own cost is included."""
    decide, calls = policy.decider(), 10_000
    rng = np.random.default_rng(0)
    requests = list(zip(rng.integers(1, 200, calls).tolist(), rng.random(calls).tolist(), strict=True))

    def loop() -> None:
        for length, coin in requests:
            decide(length, coin)

    median, low = seconds(loop, repeats)
    return 1e9 * median / calls, 1e9 * low / calls


def verdict(value: float, low: float, target: float) -> str:
    """Whether the median meets the target, or only the 5 % quantile does (a busy machine)."""
    if not np.isfinite(target):
        return ""
    return "met" if value <= target else "met at 5 %" if low <= target else "MISSED"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=31)
    repeats = parser.parse_args().repeats
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, {os.cpu_count()} cores"
          f"{load}; milliseconds, one thread, measured here; the paper's column is quoted (another machine).")
    row = "{:<14}{:>9}{:>11}{:>11}{:>9}{:>9}  {}"
    print(row.format("step", "n", "median", "5 %", "target", "paper", ""))
    for i, n in enumerate(SIZES):
        for name, run in steps(n).items():
            median, low = (1e3 * value for value in seconds(run, repeats))
            target = TARGET_MS[name][i] if name in TARGET_MS else np.inf
            print(row.format(name, n, f"{median:.4f}", f"{low:.4f}", f"{target:g}" if np.isfinite(target) else "-",
                             f"{PAPER_MS[name][i]:g}" if name in PAPER_MS else "-", verdict(median, low, target)))
            sys.stdout.flush()
    policy = dispatch.device_constrained(Lengths.of([5, 20, 60, 199]), Latency.of([0.3, 0.5, 2.0]), BUDGET, ALPHA)
    median, low = decision_ns(policy, repeats)
    print(f"decision: {median:.0f} ns (5 %: {low:.0f}), target {DECISION_TARGET_NS} ns: "
          f"{verdict(median, low, DECISION_TARGET_NS)}")


if __name__ == "__main__":
    main()
