"""Empirical distributions: server TTFT as a sorted sample, prompt lengths as a histogram."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Latency:
    """A latency distribution F, given by equally likely samples in seconds, ascending."""

    samples: np.ndarray

    @classmethod
    def from_seconds(cls, seconds: ArrayLike) -> Latency:
        """From measured seconds in any order; raises ValueError on an empty trace, a negative number or a NaN."""
        samples = np.sort(np.asarray(seconds, dtype=float).ravel())
        if not samples.size:
            raise ValueError("A latency trace needs at least one sample.")
        if not np.isfinite(samples[-1]):  # NaN and infinity sort to the end
            raise ValueError("A latency trace holds a NaN or an infinite number.")
        if samples[0] < 0:
            raise ValueError(f"A latency trace holds a negative number, {samples[0]:g} s.")
        return cls(samples)

    @cached_property
    def _sums(self) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(self.samples)])

    def cdf(self, t: ArrayLike) -> np.ndarray:
        """Distribution function F(t): the share of samples <= t."""
        return np.searchsorted(self.samples, t, side="right") / self.samples.size

    def quantile(self, q: float) -> float:
        """The smallest sample with F >= q, q in [0, 1]."""
        n = self.samples.size
        return float(self.samples[min(n - 1, max(0, int(np.ceil(q * n - 1e-9)) - 1))])

    def expected_minimum(self, t: ArrayLike) -> np.ndarray:
        """E[min(S, t)], the integral of 1 - F from 0 to t; t may be infinite."""
        t = np.asarray(t, dtype=float)
        below = np.searchsorted(self.samples, t, side="right")
        n = self.samples.size
        beyond = np.where(below < n, t, 0.0) * (n - below)  # keeps inf * 0 out
        return (self._sums[below] + beyond) / n

    @property
    def mean(self) -> float:
        """Mean latency E[S], seconds."""
        return float(self._sums[-1] / self.samples.size)


@dataclass(frozen=True)
class Lengths:
    """Prompt lengths as a histogram: counts[l] prompts have l tokens; counts[0] is 0."""

    counts: np.ndarray

    @classmethod
    def from_tokens(cls, tokens: ArrayLike) -> Lengths:
        """From one length in tokens per prompt; raises ValueError on none, a length under 1 or a fraction."""
        tokens = np.asarray(tokens).ravel()
        if not tokens.size:
            raise ValueError("A length distribution needs at least one prompt.")
        if not np.issubdtype(tokens.dtype, np.integer):
            if not np.all(np.isfinite(tokens) & (tokens == np.floor(tokens))):
                raise ValueError("Prompt lengths are whole numbers of tokens.")
            tokens = tokens.astype(np.int64)
        if tokens.min() < 1:
            raise ValueError(f"A prompt has at least one token; the smallest length given is {tokens.min()}.")
        return cls(np.bincount(tokens))

    @cached_property
    def support(self) -> np.ndarray:
        """The lengths that occur, ascending: [U] tokens."""
        return np.flatnonzero(self.counts)

    @cached_property
    def probability(self) -> np.ndarray:
        """Probability p(l) of each length that occurs: [U], summing to 1."""
        return self.counts[self.support] / self.counts.sum()

    @cached_property
    def mean(self) -> float:
        """Mean prompt length E[l], tokens."""
        return float(self.support @ self.probability)

    @cached_property
    def mass(self) -> np.ndarray:
        """Token mass m_l = l p(l) / E[l] on the support: [U], summing to 1."""
        return self.support * self.probability / self.mean

    def sample(self, size: int | tuple[int, int], rng: np.random.Generator) -> np.ndarray:
        """Draw [size] lengths."""
        return rng.choice(self.support, size=size, p=self.probability)


@dataclass(frozen=True)
class DeviceSpeed:
    """A device's speed: TTFT is linear in the prompt, D(l) = l / prefill_rate + overhead.

    prefill_rate, decode_rate: tokens/s. overhead: seconds, e.g. a cold start.
    """

    name: str
    prefill_rate: float
    decode_rate: float
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not (self.prefill_rate > 0 and self.decode_rate > 0 and 0 <= self.overhead < float("inf")):
            raise ValueError(f"Device {self.name}: rates must be positive numbers and the overhead not negative.")

    def ttft(self, length: ArrayLike) -> np.ndarray:
        """Time to the first token D(l), seconds, of prompts of l tokens."""
        return np.asarray(length) / self.prefill_rate + self.overhead


# Section 5.1 of the paper.
DEVICES = {
    "Pixel 7 Pro, Bloom-1.1B": DeviceSpeed("Pixel 7 Pro, Bloom-1.1B", 31.32, 13.93),
    "Pixel 7 Pro, Bloom-560M": DeviceSpeed("Pixel 7 Pro, Bloom-560M", 51.80, 20.14),
    "Xiaomi 14, Qwen1.5-0.5B": DeviceSpeed("Xiaomi 14, Qwen1.5-0.5B", 79.90, 21.47),
}
