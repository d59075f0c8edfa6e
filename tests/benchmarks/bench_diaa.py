"""What DIAA does besides the model's forward: growing a tree of 32 nodes, and updating the tables by 33 verified rows.

The tables are full, their rows' probabilities drawn at random (a row sums to 0.9 on average), and every root is another
token. `likeliest` is softmax and top 8 of the logits, `write` puts them into the tables; with overlap the first runs
beside the next forward; `by topk` is what it replaces. Logits in bfloat16, two threads, wall time. The paper's
vocabularies are 32,000 (Vicuna) and 128,256 (Llama 3.2).

Run: python tests/benchmarks/bench_diaa.py [--repeats N]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from ondevice.diaa import merging, tree
from ondevice.diaa.calibration import Calibration
from ondevice.diaa.tables import K, Tables
from ondevice.diaa.updates import refreshed
from ondevice.speculation.largest import Likeliest

VOCABULARIES = (8_192, 32_000, 128_256)
NODES = 32
TARGET_MS = {"grow": 0.3, "grow, extended": 0.3, "update": 0.3}  # at the smallest vocabulary


def full_tables(vocabulary: int, seed: int = 0) -> Tables:
    """Tables without an empty place."""
    random, found = np.random.default_rng(seed), Tables.empty(vocabulary)
    first = random.integers(0, vocabulary, vocabulary)
    found.tokens[:] = (first[:, None] + np.arange(K) * (vocabulary // K)) % vocabulary  # distinct in a row
    shares = -np.sort(-random.dirichlet([0.3] * K, vocabulary), axis=1)
    found.probabilities[:] = shares * random.uniform(0.8, 1.0, (vocabulary, 1))
    return found


def milliseconds(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(median, 5 % quantile) of one call."""
    run()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(1e3 * (time.perf_counter() - start))
    return float(np.median(found)), float(np.quantile(found, 0.05))


def by_topk(logits: torch.Tensor) -> torch.Tensor:
    """The probabilities of the K likeliest, as PyTorch has it in two calls."""
    scores = logits.float()
    return (scores.topk(K).values - scores.logsumexp(-1, keepdim=True)).exp()


def parts(vocabulary: int) -> dict[str, Callable[[], object]]:
    """What is timed at a vocabulary."""
    tables, growth, random = full_tables(vocabulary), tree.Growth(), np.random.default_rng(1)
    roots = itertools.cycle(random.integers(0, vocabulary, 1000).tolist())
    drafts = [tree.grow(tables, next(roots), NODES, growth).draft() for _ in range(100)]
    nodes = np.mean([len(draft) for draft in drafts])
    depth = np.mean([draft.depths.max() for draft in drafts])
    print(f"V = {vocabulary}: {nodes:.1f} nodes a tree, depth {depth:.1f}; tables {sum(tables.mebibytes):.2f} MiB")
    calibration, continuing = Calibration(K), merging.Continuing()
    branch = merging.Branch(random.integers(0, vocabulary, 16).tolist(), 4)
    whole = max(drafts, key=len)
    logits = (3 * torch.randn(1 + NODES, vocabulary)).bfloat16()
    find = Likeliest(K)
    new, keys = refreshed(logits, find), random.integers(0, vocabulary, 1 + NODES)
    return {
        "grow": lambda: tree.grow(tables, next(roots), NODES, growth).draft(),
        "refill": lambda: tree.refill(tables, next(roots), whole),
        "grow, extended": lambda: merging.grow(
            tables, next(roots), NODES, calibration, branch, continuing, 5e-3).draft(NODES),
        "update": lambda: tables.write(keys, *refreshed(logits, find)),
        ".. likeliest": lambda: find(logits),
        ".. by topk": lambda: by_topk(logits),
        ".. write": lambda: tables.write(keys, *new),
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=301)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(2)
    print(f"torch {torch.__version__}, two threads, bfloat16; milliseconds, measured here")
    for vocabulary in VOCABULARIES:
        for name, run in parts(vocabulary).items():
            median, low = milliseconds(run, repeats)
            target = TARGET_MS.get(name) if vocabulary == VOCABULARIES[0] else None
            verdict = "" if target is None else f"target {target:g}: {'met' if median <= target else 'MISSED'}"
            print(f"  {name:<16}{median:>9.3f}  (5 %: {low:.3f})  {verdict}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
