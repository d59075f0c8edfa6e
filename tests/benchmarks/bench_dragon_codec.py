"""DRAGON's codec: bytes and total variation lost against the cap, and the time to encode and decode.

1. Next-token distributions of a bundled model in test documents, as they are (V = 8,192) and with their ids spread over
   the 151,936 of Qwen2.5. Lost: total variation between p and what is decoded. It changes p itself; sampling from the
   decoded distribution is exact. Next: how often the text's own next token is not kept. Beside it what byte-wise
   varints would lose under the same cap (the likeliest tokens that fit, the best B), and the authors' rule: the nucleus
   of 0.8 without the token that crosses it, two bytes an id and two a probability, before LZ4, without a bound.
2. CPU time of one thread, milliseconds, for one distribution; and of a Draft with it, to a frame and back.

Run: python tests/benchmarks/bench_dragon_codec.py [--documents N] [--places N]
"""
# ruff: noqa: E402

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before numpy is imported

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ondevice import corpus, models
from ondevice.causal_lm import CausalLM
from ondevice.dragon import codec, messages
from ondevice.dragon.codec import decode, encode
from ondevice.dragon.live import frames

MODEL = "pydocs-lm-base"
QWEN = 151_936
CAPS = (64, 128, 256, 432, 512, 1024, 2048)
NOTED = {432: "a Draft's frame within 512 bytes", 512: "the default"}
NUCLEUS = 0.8  # of the authors' program
PREFIX, LONGEST = 32, 256  # tokens of a document: before the first place, and in all

Array = np.ndarray


def real(documents: int, places: int) -> tuple[Array, Array]:
    """(distributions [n, V], the tokens [n] that follow in the text)."""
    loaded = models.load(MODEL)
    lm = CausalLM(loaded.model)
    random, every = np.random.default_rng(0), corpus.documents("test")
    found, following = [], []
    for index in random.permutation(len(every)):
        ids = loaded.tokenizer(every[index].text)["input_ids"][:LONGEST]
        if len(ids) < PREFIX + places + 1:
            continue
        chosen = PREFIX + random.choice(len(ids) - PREFIX - 1, places, replace=False)
        rows: list[Array] = []
        with torch.inference_mode():
            lm.start(len(ids)).prefill(ids, on_logits=functools.partial(keep, rows))
        found.append(np.concatenate(rows)[chosen])
        following += [ids[place + 1] for place in chosen]
        if len(found) == documents:
            break
    return np.concatenate(found), np.array(following)


def keep(rows: list[Array], start: int, logits: torch.Tensor) -> None:
    """Append the distributions of a chunk."""
    rows.append(logits.double().softmax(-1).numpy())


def spread(p: Array, following: Array) -> tuple[Array, Array]:
    """The same distributions over the larger vocabulary, at drawn ids."""
    ids = np.random.default_rng(1).permutation(QWEN)[: p.shape[1]]
    found = np.zeros((len(p), QWEN), np.float32)  # half the memory; encode takes it
    found[:, ids] = p
    return found, ids[following]


def varint_loss(p: Array, cap: int) -> float:
    """Least total variation of byte-wise varints for gaps and weights, over B and the number of tokens."""
    tokens, best = codec._likeliest(np.asarray(p, float), cap), 1.0
    for precision in range(7, 19):
        low, high = 0, len(tokens.ids)
        while low < high:
            middle = (low + high + 1) // 2
            kept = tokens.quantised(middle, precision)
            numbers = np.concatenate([np.diff(kept.ids), kept.weights])
            size = 3 + int(sum((numbers >= 2 ** (7 * more)).sum() for more in range(4)))
            low, high = (middle, high) if size <= cap else (low, middle - 1)
        kept = tokens.quantised(max(low, 1), precision)
        found = np.zeros(len(p))
        found[kept.ids] = kept.weights / 2.0**kept.precision
        best = min(best, variation(p, found))
    return best


def variation(p: Array, found: Array) -> float:
    """Total variation."""
    return float(np.abs(p - found).sum() / 2)


def nucleus(p: Array) -> tuple[float, int]:
    """(total variation, bytes) of the authors' rule."""
    ordered = np.sort(p)[::-1]
    kept = max(1, int((np.cumsum(ordered) <= NUCLEUS).sum()))
    return 1 - float(ordered[:kept].sum()), 4 * kept


def show_losses(name: str, p: Array, following: Array) -> None:
    """The table of the first part."""
    print(f"{name}: {len(p)} distributions")
    print("   cap   bytes (most)   tokens   lost: mean  median   95 %   next dropped   varints lose")
    for cap in CAPS:
        payloads = [encode(one, cap) for one in p]
        found = [decode(payload, p.shape[1]) for payload in payloads]
        sizes = [len(payload) for payload in payloads]
        losses = [variation(one, other) for one, other in zip(p, found, strict=True)]
        missing = np.mean([one[token] == 0 for one, token in zip(found, following, strict=True)])
        varints = np.mean([varint_loss(one, cap) for one in p[:: max(1, len(p) // 40)]]) if cap <= 512 else np.nan
        low, high = np.quantile(losses, [0.5, 0.95])
        tokens = np.mean([(one > 0).sum() for one in found])
        verdict = "" if max(sizes) <= cap else "  OVER THE CAP"
        print(
            f"{cap:>6}{np.mean(sizes):>8.0f} ({max(sizes)}){tokens:>9.0f}{np.mean(losses):>14.4f}"
            f"{low:>8.4f}{high:>8.4f}{missing:>12.1%}{varints:>16.4f}   {NOTED.get(cap, '')}{verdict}", flush=True,
        )  # fmt: skip
    losses, sizes = zip(*map(nucleus, p), strict=True)
    print(f"  nucleus of {NUCLEUS}: {np.mean(sizes):.0f} bytes, at most {max(sizes)}; lost {np.mean(losses):.4f}\n")


def timed(run: Callable[..., Any], arguments: list[tuple]) -> list[float]:
    """Milliseconds of CPU time of each call, the first three left out."""
    found = []
    for one in arguments:
        start = time.process_time()
        run(*one)
        found.append(1e3 * (time.process_time() - start))
    return found[3:]


def show_times(p: Array) -> None:
    """The lines of the second part for one vocabulary."""
    vocabulary = p.shape[1]
    payloads = [encode(one) for one in p]
    drafts = [messages.Draft("s" * 16, 3, 100, 1, payload, -2.5, 0.02) for payload in payloads]
    packed = [frames.pack(messages.encode(draft)) for draft in drafts]
    parts = {
        "encode": timed(encode, [(one,) for one in p.astype(float)]),
        "decode": timed(decode, [(payload, vocabulary) for payload in payloads]),
        "Draft to a frame": timed(lambda draft: frames.pack(messages.encode(draft)), [(one,) for one in drafts]),
        "and back": timed(
            lambda data: [messages.decode(body) for body in frames.Reader().feed(data)], [(one,) for one in packed]
        ),
    }
    print(f"V = {vocabulary}, cap {codec.CAP}; a Draft's frame has at most {max(map(len, packed))} bytes")
    for name, values in parts.items():
        low, median, high = np.quantile(values, [0.05, 0.5, 0.95])
        print(f"  {name:<20}{median:>8.3f}  (5 %: {low:.3f}, 95 %: {high:.3f})", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--places", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"numpy {np.__version__}, one thread; measured here\n")
    p, following = real(options.documents, options.places)
    wide, wide_following = spread(p, following)
    show_losses(f"{MODEL}, V = {p.shape[1]}", p, following)
    show_losses(f"{MODEL}, ids spread over V = {QWEN}", wide, wide_following)
    show_times(p)
    show_times(wide)


if __name__ == "__main__":
    main()
