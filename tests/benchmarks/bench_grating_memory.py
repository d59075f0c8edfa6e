"""GRATING's memory and time against the baselines, on a published shape with random bfloat16 weights.

Every run is a process of its own that starts with none of the file in the page cache and is watched from outside, in
MB (10^6 bytes) over its imports: rss and anon (anonymous and shared) at their peak, what it leaves of the model's file
in the page cache, seconds by the clock and of the processor. malloc: "mmap" has each piece of 64 KiB or more given
back at once, so that what the process holds is what it uses, at the cost of page faults. head: "rows" computes two
logits, "whole" those of the whole vocabulary, as transformers' own forward does. The bars take the median run.

Run: python tests/benchmarks/bench_grating_memory.py [--tokens N ...] [--rounds N] [--shape NAME] [--short]
--short: GRATING and transformers only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pandas as pd

from ondevice.grating import measuring
from ondevice.grating.measuring import ABLATION, MB, OURS, Job, measure

FACTORS = {"transformers, whole head": 10.0, "accelerate, whole head, mmap": 4.0}  # the targets
EXCESS = 0.15  # of anonymous and shared memory over the sum of its parts
LIMIT = 120 << 20  # bytes that GRATING's data may grow by
MMAP = 1 << 16
CHUNK = 128  # tokens
REPEATS = 3  # queries: the first has nothing in the page cache
HALF = 14  # the layer from which Figure 16's pruning decides: random weights give no better reason
RUNS = {
    OURS: dict(method=OURS, chunk=CHUNK, offload=True),
    "ours, states in memory": dict(method=OURS, chunk=CHUNK),
    "ours, chunk 256": dict(method=OURS, chunk=256, offload=True),
    "ours, chunk 512": dict(method=OURS, chunk=512, offload=True),
    "ours, mmap": dict(method=OURS, chunk=CHUNK, offload=True, mmap_threshold=MMAP),
    "transformers, whole head": dict(method="transformers", whole_head=True),
    "transformers, rows": dict(method="transformers"),
    "transformers, copied": dict(method="transformers, copied"),
    "CrossEncoder": dict(method="CrossEncoder"),
    "accelerate, whole head": dict(method="accelerate", whole_head=True),
    "accelerate, whole head, mmap": dict(method="accelerate", whole_head=True, mmap_threshold=MMAP),
    "accelerate, rows, mmap": dict(method="accelerate", mmap_threshold=MMAP),
    "accelerate, rows, batch 20, mmap": dict(method="accelerate", batch=20, mmap_threshold=MMAP),
    "accelerate, all, mmap": dict(method="accelerate, all", mmap_threshold=MMAP),
    "int8": dict(method="int8"),
    "layer loading": dict(method="layer loading"),
    **{f"Figure 16: {step}": dict(method=step, chunk=CHUNK, threshold=0.0, first=HALF) for step in ABLATION},
}
SHORT = (OURS, "transformers, whole head", "transformers, rows")
COLUMNS = ("rss_mb", "anon_mb", "file_mb", "mean_rss_mb", "cached_mb", "parts_mb", "first_s", "next_s",
           "processor_s", "stalled_s", "work")  # fmt: skip


def rows(shape: str, tokens: int, rounds: int, names: tuple[str, ...]) -> Iterator[dict[str, object]]:
    """A row a run, round by round, printed as they come."""
    folder = measuring.prepared(shape)
    query, documents = measuring.random_pool(folder, 20, tokens)
    for _ in range(rounds):
        for name in names:
            found = measure(Job(folder=str(folder), query=query, documents=documents, repeats=REPEATS, **RUNS[name]))
            row = {"run": name, **{column: found.row()[column] for column in COLUMNS}}
            parts = ", ".join(f"{part} {size / MB:.1f}" for part, size in found.parts.items() if size >= MB / 20)
            print(f"{name:34}", *(f"{column} {row[column]:.1f}" for column in COLUMNS), f"({parts})", flush=True)
            yield row


def judged(table: pd.DataFrame) -> None:
    """The bars."""
    middle = table.groupby("run", sort=False).median()
    ours = middle.loc[OURS]
    for name, factor in FACTORS.items():
        if name in middle.index:
            ratio = middle.loc[name, "rss_mb"] / ours["rss_mb"]
            print(f"{verdict(ratio >= factor)}: {ratio:.2f}x less than {name}; bar {factor:g}x")
    for name in (name for name in middle.index if name.startswith(OURS)):
        excess = middle.loc[name, "anon_mb"] / middle.loc[name, "parts_mb"] - 1
        print(f"{verdict(excess <= EXCESS)}: {name} is {100 * excess:.0f} % over the sum of its parts; bar 15 %")
    print(f"{verdict(ours['cached_mb'] == 0)}: {ours['cached_mb']:.1f} MB left in the page cache; bar 0")


def limited(shape: str) -> None:
    """20 x 128 under the limit: GRATING passes, with its default room for embedding rows, and transformers fails."""
    folder = measuring.prepared(shape)
    query, documents = measuring.random_pool(folder, 20, 128)
    for method, passes in ((OURS, True), ("transformers", False)):
        job = Job(method, str(folder), query, documents, chunk=CHUNK, limit=LIMIT)
        try:
            measure(job)
            end = "passes"
        except RuntimeError as error:
            end = f"fails ({error})"
        print(f"{verdict((end == 'passes') == passes)}: under RLIMIT_DATA of 120 MiB {method} {end}")


def verdict(good: bool) -> str:
    return "met" if good else "NOT MET"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 500])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shape", default="qwen3-reranker-0.6b")
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    for tokens in given.tokens:
        print(f"20 documents x {tokens} tokens, {given.shape}")
        judged(pd.DataFrame(rows(given.shape, tokens, given.rounds, SHORT if given.short else tuple(RUNS))))
    limited(given.shape)
