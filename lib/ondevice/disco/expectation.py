"""What a policy gives, exactly: mean and P99 TTFT and both endpoints' use, lengths and server TTFTs independent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ondevice.disco.distributions import Device, Latency, Lengths
from ondevice.disco.policy import NEVER, DispatchPolicy


@dataclass(frozen=True)
class Outcome:
    """mean, p99: TTFT in seconds. use_device, use_server: share of all input tokens each endpoint processes."""

    mean: float
    p99: float
    use_device: float
    use_server: float

    def use(self, endpoint: str) -> float:
        """Use of `device` or `server`."""
        return self.use_device if endpoint == "device" else self.use_server


def evaluate(policy: DispatchPolicy, lengths: Lengths, server: Latency, device: Device) -> Outcome:
    """Expected mean and P99 TTFT and use of a policy; no sampling error.

    TTFT = min(w_s + S, w_d + D(l)); an endpoint starts unless the other one's first token came before its wait ended.
    """
    at = np.minimum(lengths.support, len(policy.chance) - 1)
    wait_d, wait_s = policy.wait_device[:, at], policy.wait_server[:, at]  # [2, U]
    coin = np.stack([1 - policy.chance[at], policy.chance[at]])
    weight, mass = coin * lengths.probability, coin * lengths.mass
    device_at = wait_d + device.ttft(lengths.support)
    server_runs = (wait_s == 0) | (wait_s < device_at)
    wait_s = np.where(server_runs, wait_s, NEVER)
    with np.errstate(invalid="ignore"):  # inf - inf, where the value is not used
        patience = np.where(np.isfinite(wait_s), wait_d - wait_s, 0.0)
        mean = np.where(
            np.isfinite(wait_s), wait_s + server.expected_minimum(np.maximum(0, device_at - wait_s)), device_at
        )
    late = np.where(patience > 0, 1 - server.cdf(patience), 1.0)
    device_runs = np.where(np.isfinite(wait_d), np.where(wait_d == 0, 1.0, late), 0.0)
    return Outcome(
        mean=float((weight * mean).sum()),
        p99=_quantile(0.99, weight, wait_s, device_at, server),
        use_device=float((mass * device_runs).sum()),
        use_server=float((mass * np.isfinite(wait_s)).sum()),
    )


def _quantile(q: float, weight: np.ndarray, wait_s: np.ndarray, device_at: np.ndarray, server: Latency) -> float:
    """Smallest possible TTFT t with P(TTFT <= t) >= q, by bisection over the values that a TTFT can take."""
    starts = np.unique(wait_s[np.isfinite(wait_s)])
    if len(starts) > 8:  # many different starts: bisect the real line instead of listing every sum
        return _quantile_real(q, weight, wait_s, device_at, server)
    values = np.unique(np.concatenate([device_at[np.isfinite(device_at)], *(s + server.samples for s in starts)]))
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if 1 - _exceeds(values[middle], weight, wait_s, device_at, server) >= q - 1e-12:
            high = middle
        else:
            low = middle + 1
    return float(values[low])


def _quantile_real(q: float, weight: np.ndarray, wait_s: np.ndarray, device_at: np.ndarray, server: Latency) -> float:
    reach = np.minimum(device_at, wait_s + server.samples[-1])
    low, high = 0.0, float(reach[weight > 0].max())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if 1 - _exceeds(middle, weight, wait_s, device_at, server) >= q - 1e-12 else (middle, high)
        )
    return high


def _exceeds(t: float, weight: np.ndarray, wait_s: np.ndarray, device_at: np.ndarray, server: Latency) -> float:
    """P(TTFT > t), with room for the rounding of a wait plus a sample."""
    t *= 1 + 1e-12
    server_late = np.where(np.isfinite(wait_s), 1 - server.cdf(t - wait_s), 1.0)
    return float((weight * server_late * (device_at > t)).sum())
