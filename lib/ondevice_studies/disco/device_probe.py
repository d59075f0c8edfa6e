"""Measure a causal language model on this machine as DiSCo's device: TTFT by prompt length, and every gap after it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch

from ondevice import models
from ondevice.evidence import Estimate, born, derived, resampled
from ondevice.precision import bfloat16_pays


def load(spec: str) -> models.Loaded:
    """A model by its spec (`models.load`): on the GPU where there is one, in bf16 where that pays, else in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return models.load(spec, torch.bfloat16 if bfloat16_pays(device) else torch.float32, device)


def label(spec: str) -> str:
    """A model's name in tables and figures: the last part of a path or a hub id."""
    return spec.rstrip("/").rpartition("/")[2]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for PyTorch: the threads of one product wait for each other, tens of times longer on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(model: Any, lengths: Sequence[int] | np.ndarray, new_tokens: int, seed: int) -> pd.DataFrame:
    """Time greedy answers, in one thread, to prompts of random ids, which take as long as any others.

    lengths: [N] tokens. new_tokens: of each answer, at least 1. Columns: request, length, token, seconds: token 0 has
    the time to the first token, the others the gap before them. A first request warms up and is not told.
    """
    rng = np.random.default_rng(seed)
    rows = []
    with torch.inference_mode(), one_thread():
        for request, length in enumerate([int(lengths[0]), *(int(x) for x in lengths)]):
            token = torch.from_numpy(rng.integers(0, model.config.vocab_size, (1, length))).to(model.device)
            cache = None
            last = perf_counter()
            for number in range(new_tokens):
                output = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                token = output.logits.argmax(-1)
                token.item()  # waits for a GPU
                now = perf_counter()
                rows.append((request - 1, length, number, now - last))
                last = now
    return born(pd.DataFrame(rows[new_tokens:], columns=["request", "length", "token", "seconds"]), "measured")


def requests(timings: pd.DataFrame) -> pd.DataFrame:
    """One row a request of `measure`, or of the record's: length, ttft_s, tbt_s (mean gap; NaN for one token)."""
    keys = [key for key in ("machine", "model", "part", "turn", "request", "length") if key in timings]
    seconds = timings.groupby(keys, sort=False)["seconds"]
    return derived(seconds.agg(ttft_s="first", tbt_s=lambda gaps: gaps.iloc[1:].mean()).reset_index(), timings)


def line(lengths: Any, seconds: Any, kind: Any, prompts: Sequence[Any] | None = None) -> dict[str, Estimate]:
    """Straight line through the median TTFT of every length, and r over all requests, their intervals over prompts.

    tokens_per_s and overhead_s: r_p and c of D(l) = l / r_p + c. r2: of the medians. pearson_r: of the requests.
    kind: whatever `evidence.kind_of` takes. prompts: a label for each request; those of one prompt are drawn together.
    """
    x = np.asarray(lengths, dtype=float)
    y = np.asarray(seconds, dtype=float)

    def fitted(rows: np.ndarray) -> dict[str, float]:
        medians = pd.Series(y[rows]).groupby(x[rows]).median()
        slope, constant = np.polyfit(medians.index, medians, 1)
        left = medians - (slope * medians.index + constant)
        return {
            "tokens_per_s": 1 / slope,
            "overhead_s": constant,
            "r2": 1 - left.var() / medians.var(),
            "pearson_r": np.corrcoef(x[rows], y[rows])[0, 1],
        }

    return _each(fitted, len(x), kind, "prompts", prompts)


def steadiness(seconds: Any, kind: Any, turns: Sequence[Any] | None = None) -> dict[str, Estimate]:
    """How steady a time is: spread is (P90 - P10) / P50, which one hiccup does not move; cv and P99 / P50 feel it.

    turns: a label for each request; those of one turn are drawn together.
    """
    values = np.asarray(seconds, dtype=float)

    def found(rows: np.ndarray) -> dict[str, float]:
        p10, p50, p90, p99 = np.quantile(values[rows], [0.1, 0.5, 0.9, 0.99])
        return {
            "median_s": p50,
            "spread": (p90 - p10) / p50,
            "cv": values[rows].std() / values[rows].mean(),
            "p99_over_p50": p99 / p50,
        }

    return _each(found, len(values), kind, "requests" if turns is None else "turns", turns)


def _each(
    statistics: Callable[[np.ndarray], dict[str, float]], n: int, kind: Any, drawn: str, clusters: Sequence[Any] | None
) -> dict[str, Estimate]:
    """Every statistic of n samples with its interval, all from the same draws."""
    known = functools.cache(lambda rows: statistics(np.frombuffer(rows, dtype=np.intp)))

    def estimate(name: str) -> Estimate:
        of_rows = lambda rows: float(known(rows.tobytes())[name])  # noqa: E731
        return resampled(of_rows, n, kind, drawn=drawn, clusters=clusters)

    return {name: estimate(name) for name in statistics(np.arange(n))}
