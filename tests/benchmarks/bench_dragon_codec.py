"""DRAGON's codec: perplexity of the two sides' mixture against the cap, acceptance of drafts, and times.

1. Figure 6's windows of the test split, 16 documents, half of them on each side: both sides' distributions through the
   codec, filled in from the model without documents. Beside: the same when the sender does not know the prior and keeps
   the likeliest tokens. Accepted: by Algorithm 1, mean of both sides.
2. CPU time of one thread, milliseconds, for one distribution of V = 8,192, and spread over Qwen2.5's 151,936 ids.

Run: python tests/benchmarks/bench_dragon_codec.py [--windows N]
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
import torch

from ondevice import models
from ondevice.dragon import codec, record
from ondevice.dragon import language_modelling as lm
from ondevice.dragon.aggregation import document_weights, log_weight, target

MODEL, TEMPERATURE = record.BASE, 2.0
HALVES = slice(record.FOUND // 2), slice(record.FOUND // 2, record.FOUND)
QWEN = 151_936

Array = np.ndarray


def sides(read: lm.Read) -> tuple[list[Array], list[float], Array]:
    """(the sides' distributions [n, V], their log weights, the prior [n, V])."""
    weights = [np.exp(document_weights(read.scores[half], TEMPERATURE)) for half in HALVES]
    mixed = [np.tensordot(of, read.whole[1:][half].astype(float), 1) for of, half in zip(weights, HALVES, strict=True)]
    prior = read.whole[0].astype(float)
    whole = [p / p.sum(-1, keepdims=True) for p in (*mixed, prior)]
    return whole[:2], [log_weight(read.scores[half], TEMPERATURE) for half in HALVES], whole[2]


def show(found: list[lm.Read]) -> None:
    """The first part."""
    print("   cap   prior known   bytes   tokens   perplexity   accepted   encode ms   fill ms")
    for cap, known in [(0, False), *((cap, known) for cap in lm.CAPS for known in (True, False))]:
        nats, sizes, kept, accepted, encoding, filling = [], [], [], [], [], []
        for read in found:
            mixed, heights, prior = sides(read)
            for place, token in enumerate(read.tokens):
                told, drawn = [], []
                for side in mixed:
                    p, before = side[place], prior[place]
                    if not cap:
                        told.append(p), drawn.append(p)
                        continue
                    start = time.process_time()
                    payload = codec.encode(p, cap, before if known else None)
                    encoding.append(time.process_time() - start)
                    start = time.process_time()
                    told.append(codec.filled(payload, before))
                    filling.append(time.process_time() - start)
                    drawn.append(codec.decode(payload, len(p)))
                    sizes.append(len(payload))
                    kept.append(np.count_nonzero(drawn[-1]))
                q = target(told[0], told[1], *heights)
                nats.append(-np.log(q[token]))
                accepted += [0.5 * np.minimum(p, q).sum() + 0.5 * (p @ q) for p in drawn]
        mean = [float(np.mean(one)) if one else np.nan for one in (sizes, kept, accepted, encoding, filling)]
        print(f"{cap or 'uncut':>6}{known!s:>14}{mean[0]:>8.0f}{mean[1]:>9.0f}{np.exp(np.mean(nats)):>13.3f}"
              f"{mean[2]:>11.3f}{1e3 * mean[3]:>12.2f}{1e3 * mean[4]:>10.2f}", flush=True)  # fmt: skip


def timed(run: Callable[[], object], repeats: int = 50) -> float:
    """Median milliseconds of CPU time."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        found.append(1e3 * (time.process_time() - start))
    return float(np.median(found))


def show_wide(found: list[lm.Read]) -> None:
    """The second part."""
    mixed, _, prior = sides(found[0])
    ids = np.random.default_rng(1).permutation(QWEN)[: prior.shape[1]]
    for vocabulary in (prior.shape[1], QWEN):
        p, before = mixed[0][0], prior[0]
        if vocabulary == QWEN:
            p, before = np.zeros(QWEN), np.zeros(QWEN)
            p[ids], before[ids] = mixed[0][0], prior[0]
        for cap in (64, 512):
            payload = codec.encode(p, cap, before)
            print(f"V = {vocabulary}, {cap} bytes: encode {timed(lambda: codec.encode(p, cap, before)):.3f} ms, "  # noqa: B023
                  f"fill in {timed(lambda: codec.filled(payload, before)):.3f} ms", flush=True)  # noqa: B023  # fmt: skip


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=48)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{MODEL}, {options.windows} windows, numpy {np.__version__}, one thread; measured here")
    loaded = models.load(MODEL)
    fronts = lm.Fronts(loaded.model, loaded.tokenizer)
    found = [lm.read_window(loaded.model, fronts, one) for one in record.retrieved("test", options.windows)]
    show(found)
    show_wide(found)


if __name__ == "__main__":
    main()
