"""The likeliest token of each row of logits, which every pass of every drafter asks for: numpy's argmax and torch's.

Both take turns on the same logits in float32, as the engine leaves them.

Run: python tests/benchmarks/bench_likeliest.py [--turns 41]
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np
import torch

from ondevice.speculation.largest import likeliest

SHAPES = [(1, 8_192), (1, 49_152), (32, 49_152), (1, 151_936), (32, 151_936)]  # rows, vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=41)
    turns = parser.parse_args().turns
    print(f"{'rows':>5}{'vocabulary':>12}{'numpy, ms':>11}{'torch, ms':>11}{'torch / numpy':>15}")
    for rows, width in SHAPES:
        logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
        times: dict[str, list[float]] = {"numpy": [], "torch": []}
        for _ in range(turns):
            for name, find in (("numpy", likeliest), ("torch", lambda scores: scores.argmax(-1))):
                begin = perf_counter()
                find(logits)
                times[name].append(1e3 * (perf_counter() - begin))
        ours, theirs = (float(np.median(times[name])) for name in ("numpy", "torch"))
        print(f"{rows:>5}{width:>12,}{ours:>11.2f}{theirs:>11.2f}{theirs / ours:>15.1f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
