"""Graph switching on this machine: how much of the load time that synchronous switching exposes the others hide.

A round runs the same prompt with both graphs kept in memory (the pure compute time), then switched in every way;
exposed = T - T(keep both) of the same round, hidden = 1 - exposed / exposed(synchronous). So what G2's slower chunks
cost, and what the two threads cost each other, count against a rule. Computing and loading take a core each: beside
anything else that is busy the medians mean little, which the quartiles show.

Run: python tests/benchmarks/bench_sdnpu_switching.py [--model SPEC] [--blocks N] [--tokens N] [--rounds N]
"""
# ruff: noqa: E402

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before numpy is imported

import argparse
import threading
import time
from pathlib import Path

import numpy as np
import torch

from ondevice import models
from ondevice.sdnpu import graphs, switching
from ondevice.sdnpu.real_switching import exposed, instance, switched

HIDDEN, DIFFERENCE = 0.85, 1e-4  # the targets


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


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pydocs-lm-base")
    parser.add_argument("--blocks", type=int, nargs="+", default=[6, 12])
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = models.load(asked.model).model
    ids = np.random.default_rng(0).integers(3, 256, asked.tokens)
    for blocks in asked.blocks:
        start = time.perf_counter()
        built = graphs.build(model, blocks)
        load, longest = held_up(built.small_files[0])
        print(
            f"{asked.model}, N = {blocks}, {asked.tokens} tokens; built or found in {time.perf_counter() - start:.1f} s"
        )
        print(f"  a load of {1e3 * load:.1f} ms held up another thread for {1e3 * longest:.1f} ms at the longest")
        profile = switching.profile(built, 7)
        print(f"  d/p {profile.d.sum() / profile.p.sum():.2f}, s/p {profile.s.sum() / profile.p.sum():.2f}")
        case = instance(profile, -(-asked.tokens // built.large))
        table = exposed(switched(built, ids, case, asked.rounds))
        for name, rows in table.groupby("method", sort=False):
            low, median, high = rows["hidden"].quantile([0.25, 0.5, 0.75])
            times = 1e3 * rows[["total_s", "loading_s", "exposed_s"]].median()
            shares = f"hidden {median:.1%} ({low:.0%}, {high:.0%})"
            print(f"  {name:<15} T, loads, exposed (ms) {times.round(0).tolist()}; {shares}")
        hidden = table[table["method"] == "progressive"]["hidden"].median()
        verdicts = ["met" if met else "MISSED" for met in (hidden >= HIDDEN, table["logits"].max() < DIFFERENCE)]
        print(f"  progressive hides at least {HIDDEN:.0%}: {verdicts[0]}; logits within {DIFFERENCE:g}: {verdicts[1]}")


if __name__ == "__main__":
    main()
