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

from ondevice import corpus, models, retrieval
from ondevice.dragon import codec, experiments, windows
from ondevice.dragon import language_modelling as lm
from ondevice.dragon.aggregation import log_weight, target

MODEL, PASSAGES, DOCUMENTS, TEMPERATURE = "pydocs-lm-base", 40_000, 16, 2.0
CAPS = (16, 32, 64, 128, 256, 512, 1024, 4096)
QWEN = 151_936

Array = np.ndarray


def singles(count: int) -> list[lm._Single]:
    """Windows with all distributions."""
    loaded = models.load(MODEL)
    passages = experiments.train_passages(PASSAGES)
    index = retrieval.SparseIndex.build([one.text for one in passages])
    chosen = windows.windows(corpus.documents("test"), loaded.tokenizer, count)
    fronts = lm._Fronts(loaded.model, loaded.tokenizer)
    found = windows.retrieve(chosen, passages, index, DOCUMENTS)
    return [lm._Single(loaded.model, fronts, one, whole=True) for one in found]


def sides(single: lm._Single) -> tuple[list[Array], list[float], Array]:
    """(the sides' distributions [n, V], their log weights, the prior [n, V])."""
    assert single.whole is not None
    halves = slice(DOCUMENTS // 2), slice(DOCUMENTS // 2, DOCUMENTS)
    mixed = [lm._side(single.whole[1:][half], single.scores[half], TEMPERATURE) for half in halves]
    prior = single.whole[0] / single.whole[0].sum(-1, keepdims=True)
    return mixed, [log_weight(single.scores[half], TEMPERATURE) for half in halves], prior.astype(float)


def show(found: list[lm._Single]) -> None:
    """The first part."""
    print("   cap   prior known   bytes   tokens   perplexity   accepted   encode ms   fill ms")
    for cap, known in [(0, False), *((cap, known) for cap in CAPS for known in (True, False))]:
        nats, sizes, kept, accepted, encoding, filling = [], [], [], [], [], []
        for single in found:
            mixed, heights, prior = sides(single)
            for place, token in enumerate(single.targets):
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


def show_wide(found: list[lm._Single]) -> None:
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
    found = singles(options.windows)
    show(found)
    show_wide(found)


if __name__ == "__main__":
    main()
