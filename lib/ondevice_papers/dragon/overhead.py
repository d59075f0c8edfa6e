"""Section 7.5: what speculative aggregation adds to a token, in operations, time and bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ondevice_papers.dragon.aggregation import target
from ondevice_papers.dragon.speculative_aggregation import Stream, aggregate, sample, uniforms

QWEN_VOCABULARY = 151_936
WIFI = 100e6 / 8  # bytes a second: the paper's 100 Mbps
# Qwen2.5-1.5B: layers, hidden, intermediate, key and value width, vocabulary
QWEN_SHAPE = (28, 1536, 8960, 256, QWEN_VOCABULARY)


def operations(vocabulary: int = QWEN_VOCABULARY, resamples: int = 2) -> int:
    """Multiplications, additions and comparisons of one aggregation in which so many drafts are resampled.

    For each: the target less the draft's distribution, the maximum with 0, the sum, and the search in the running sum;
    and the mixture itself once, two products and a sum.
    """
    return (4 * resamples + 3) * vocabulary


def decode_macs(shape: tuple[int, int, int, int, int] = QWEN_SHAPE) -> int:
    """Multiply-accumulates of a token: layers x (query, output, keys, values, MLP), and the output layer."""
    layers, hidden, intermediate, width, vocabulary = shape
    return layers * hidden * (2 * hidden + 2 * width + 3 * intermediate) + hidden * vocabulary


def peaked(vocabulary: int, seed: int, sharpness: float = 3.0) -> np.ndarray:
    """[V] a distribution as peaked as a language model's: a softmax of Gumbel noise times `sharpness`."""
    logits = sharpness * np.random.default_rng(seed).gumbel(size=vocabulary)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def times(vocabulary: int = QWEN_VOCABULARY, repeats: int = 30) -> dict[str, list[float]]:
    """Seconds on this machine by part, once warm: aggregate, which is Algorithm 1, and mixture."""
    p = peaked(vocabulary, 0)
    q = peaked(vocabulary, 1)
    mixed = target(p, q, 0.0, 0.0)
    numbers = [uniforms(seed, Stream.AGGREGATION, 0) for seed in range(repeats + 1)]
    local = sample(p, [n[0] for n in numbers])
    remote = sample(q, [n[1] for n in numbers])
    parts: dict[str, Callable[[int], object]] = {
        "aggregate": lambda i: aggregate(local[i], remote[i], p, q, mixed, numbers[i]),
        "mixture": lambda i: target(p, q, 0.0, 0.0),
    }
    return {name: [_seconds(act, i) for i in range(repeats + 1)][1:] for name, act in parts.items()}


def _seconds(part: Callable[[int], object], i: int) -> float:
    start = time.perf_counter()
    part(i)
    return time.perf_counter() - start
