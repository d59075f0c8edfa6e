"""Beyond the paper: device-constrained dispatch that learns F as it goes, and keeps a hard budget under drift.

The price of a token (the budget's Lagrange multiplier) rises when the device is used more than its share and falls
otherwise; a sliding window of TTFTs gives F. When the device wins, the server's request is cancelled and its TTFT is
only known to exceed that moment: the window is censored, and F is its Kaplan-Meier estimate. What is left beyond
the last time seen is put at the longest TTFT that was ever seen.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ondevice.disco.budget import TokenBucket
from ondevice.disco.distributions import Device
from ondevice.disco.policy import NEVER


@dataclass(frozen=True)
class Decision:
    """A prompt of `length` tokens: its device waits `wait` seconds, and would have waited `wish` without the bucket."""

    length: int
    wait: float
    wish: float


class OnlineDispatcher:
    """Decide each request's device wait from what earlier requests showed; the server always starts at once.

    window: requests remembered. step: relative change of the price per unit of over-use. Refits every `refit` requests.
    """

    def __init__(self, device: Device, budget: float, *, window: int = 200, step: float = 0.02, refit: int = 10):
        self.device, self.budget, self.step, self.refit = device, budget, step, refit
        self.bucket = TokenBucket(budget)
        self._seen: deque[tuple[float, bool]] = deque(maxlen=window)
        self._price = 1.0  # in units of mean TTFT per mean length: a number near 1 whatever the service
        self._mean_length, self._mean_ttft = 0.0, 0.0
        self._requests = 0
        self._longest = 0.0
        self._times = np.empty(0)
        self._share = np.empty(0)
        self._weights = np.empty(0)

    def decide(self, length: int) -> Decision:
        """When the device starts on a prompt of `length` tokens; infinite means never."""
        if length < 1:
            raise ValueError(f"A prompt has at least one token, not {length!r}.")
        self._requests += 1
        self._mean_length += (length - self._mean_length) / min(self._requests, 200)
        allowed = self.bucket.arrive(length)
        wish = self._best_wait(length)
        return Decision(length, wish if allowed else NEVER, wish)

    def _best_wait(self, length: int) -> float:
        if self.budget == 1:
            return 0.0  # nothing to save
        if len(self._seen) < 20:
            return NEVER  # nothing is known yet, and the allowance is kept
        if not self._times.size or self._requests % self.refit == 0:
            self._fit()
        waits = np.concatenate([[0.0], self._times, [NEVER]])
        ttft = np.minimum(self._times[None, :], (waits + self.device.ttft(length))[:, None]) @ self._weights
        price = self._price * self._mean_ttft / self._mean_length
        return float(waits[int(np.argmin(ttft + price * length * self._share))])

    def observe(self, decision: Decision, ttft: float, *, server_answered: bool, device_started: bool) -> None:
        """Report a first token: its TTFT in seconds, whether the server gave it, and whether the device was started."""
        length = decision.length
        self._seen.append((ttft, server_answered))
        self._longest = max(self._longest, ttft)
        self._mean_ttft += (ttft - self._mean_ttft) / min(self._requests, 200)
        if device_started:
            self.bucket.spend(length)
        # The price follows the wish: an empty bucket must not make the device look cheap.
        wished = decision.wish == 0 or decision.wish < ttft
        overuse = (float(wished) - self.budget) * length / self._mean_length
        self._price = min(1e3, max(1e-3, self._price * np.exp(self.step * overuse)))

    def _fit(self) -> None:
        """Kaplan-Meier estimate of F on the window."""
        seen = sorted(self._seen)
        times = np.array([t for t, _ in seen])
        answered = np.array([a for _, a in seen], dtype=float)
        at_risk = len(times) - np.arange(len(times))
        survival = np.cumprod(1 - answered / at_risk)
        weights = -np.diff(np.concatenate([[1.0], survival]))
        times, weights = np.append(times, max(self._longest, times[-1])), np.append(weights, survival[-1])
        keep = weights > 0
        self._times, self._weights = times[keep], weights[keep]
        beyond = 1 - np.cumsum(self._weights)
        self._share = np.concatenate([[1.0], np.maximum(0, beyond), [0.0]])
