"""Measure a causal language model on this machine as DiSCo's device: TTFT by prompt length, and every gap after it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch

from ondevice import models
from ondevice.causal_lm import CausalLM
from ondevice.evidence import Estimate, born, derived, resampled
from ondevice.precision import bfloat16_pays


def load(spec: str) -> models.Loaded:
    """A model by its spec (`models.load`): on the GPU where there is one, in bf16 where that pays, else in float32."""
    if torch.cuda.is_available():
        with contextlib.suppress(ValueError):  # a GGUF file is read on the CPU
            return models.load(spec, torch.bfloat16 if bfloat16_pays("cuda") else torch.float32, "cuda")
    return models.load(spec)


def label(spec: str) -> str:
    """A model's name in tables and figures: the last part of a path or a hub id."""
    return spec.rstrip("/").rpartition("/")[2]


def measure(lm: CausalLM, lengths: Sequence[int] | np.ndarray, new_tokens: int, seed: int) -> pd.DataFrame:
    """Time greedy answers to prompts of random ids, which take as long as any others.

    lengths: [N] tokens. new_tokens: of each answer, at least 1. Columns: request, length, token, seconds: token 0 has
    the time to the first token, the others the gap before them. A first request warms up and is left out.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for request, length in enumerate([int(lengths[0]), *(int(x) for x in lengths)]):
        prompt = rng.integers(0, lm.vocabulary, length)
        session = lm.start()
        last = perf_counter()
        token = 0
        for number in range(new_tokens):
            logits = session.extend([token])[-1] if number else session.prefill(prompt)
            token = int(logits.argmax())  # waits for a GPU
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

    @functools.cache  # each statistic is of the same draws
    def fitted(drawn: bytes) -> dict[str, float]:
        rows = np.frombuffer(drawn, dtype=np.intp)
        medians = pd.Series(y[rows]).groupby(x[rows]).median()
        slope, constant = np.polyfit(medians.index, medians, 1)
        left = medians - (slope * medians.index + constant)
        return {
            "tokens_per_s": 1 / slope,
            "overhead_s": constant,
            "r2": 1 - left.var() / medians.var(),
            "pearson_r": np.corrcoef(x[rows], y[rows])[0, 1],
        }

    def estimate(name: str) -> Estimate:
        of_rows = lambda rows: float(fitted(rows.tobytes())[name])  # noqa: E731
        return resampled(of_rows, len(x), kind, drawn="prompts", clusters=prompts)

    return {name: estimate(name) for name in fitted(np.arange(len(x), dtype=np.intp).tobytes())}


def spread(seconds: Any, kind: Any, turns: Sequence[Any] | None = None) -> Estimate:
    """How much a time varies, (P90 - P10) / P50, which one hiccup does not move.

    turns: a label for each request; those of one turn are drawn together.
    """
    values = np.asarray(seconds, dtype=float)

    def statistic(rows: np.ndarray) -> float:
        p10, p50, p90 = np.quantile(values[rows], [0.1, 0.5, 0.9])
        return float((p90 - p10) / p50)

    drawn = "requests" if turns is None else "turns"
    return resampled(statistic, len(values), kind, drawn=drawn, clusters=turns)
