"""Beyond the paper: dispatch that is optimal in the mean or in the P99, and a bound that knows the future.

Minimise E[TTFT] subject to E[l 1{constrained side starts}] <= b E[l]. The problem separates over lengths but for the
budget: one price a token settles it (a multiple-choice knapsack, whose linear relaxation needs one random length).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice_papers.disco.distributions import DeviceSpeed, Latency, Lengths
from ondevice_papers.disco.policy import MOMENT, NEVER, DispatchPolicy, Side, mixture

CANDIDATES = 1024  # waits considered at least, where there are as many samples
Choices = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


def choices(server: Latency, device_at: NDArray[np.float64], constrained: Side) -> Choices:
    """(waits [G] of the constrained side, P(it starts) [G], E[TTFT] [U, G]) for prompts whose device takes D(l), [U].

    An optimal wait of the device is 0, a sample of S, or never; the server gains nothing by waiting, as D is known.
    """
    if constrained == "server":
        return np.array([0, NEVER]), np.array([1.0, 0.0]), np.stack([server.expected_minimum(device_at), device_at], 1)
    samples = np.unique(server.samples[:: max(1, server.samples.size // CANDIDATES)])[:-1]  # the largest is never
    waits = np.concatenate([[0.0], np.maximum(samples, MOMENT), [NEVER]])
    share = np.concatenate([[1.0], 1 - server.cdf(samples), [0.0]])
    return waits, share, server.expected_minimum(waits + device_at[:, None])


def best(options: Choices, tokens: NDArray[Any], price: float) -> NDArray[np.intp]:
    """[U] the choice of least E[TTFT] + price l P(start) for each length. tokens: l, [U]. price: seconds a token."""
    _, share, ttft = options
    return (ttft + price * tokens[:, None] * share).argmin(axis=1)


def prices(
    options: Choices, tokens: NDArray[Any], mass: NDArray[np.float64], b: float, tolerance: float = 1e-13
) -> tuple[float, float]:
    """(low, high): prices a token within `tolerance`, between which the use of the constrained side crosses the budget.

    mass: [U] each length's share of all tokens.
    """
    _, share, ttft = options

    def use(price: float) -> float:
        return float((mass * share[best(options, tokens, price)]).sum())  # BLAS rounds by the processor

    low = 0.0
    high = 1.0 + ttft.max() / tokens.min() / np.diff(np.unique(share)).min()
    if use(low) <= b:
        return low, low
    for _ in range(100):
        if high - low <= tolerance * high:
            break
        middle = (low + high) / 2
        low, high = (low, middle) if use(middle) <= b else (middle, high)
    return low, high


def mean_optimal(
    lengths: Lengths, server: Latency, device: DeviceSpeed, b: float, constrained: Side = "device"
) -> DispatchPolicy:
    """The policy of least mean TTFT among all that spend at most the budget b of the constrained side."""
    tokens = lengths.support
    mass = lengths.mass
    options = waits, share, _ = choices(server, device.ttft(tokens), constrained)
    low, high = prices(options, tokens, mass, b)
    lavish = best(options, tokens, low)
    frugal = best(options, tokens, high)  # equally good but for the budget
    extra = mass * np.maximum(0, share[lavish] - share[frugal])
    left = b - (mass * share[frugal]).sum() - (np.cumsum(extra) - extra)  # before each length, the shorter ones first
    chance = np.divide(np.clip(left, 0, extra), extra, out=np.zeros(len(mass)), where=extra > 0)
    first, second, chance = (spread_over_lengths(lengths, x) for x in (waits[frugal], waits[lavish], chance))
    at_once = np.zeros(len(first))
    if constrained == "device":
        return mixture("mean-optimal", constrained, b, (first, at_once), (second, at_once), chance)
    return mixture("mean-optimal", constrained, b, (at_once, first), (at_once, second), chance)


def deadline_optimal(
    lengths: Lengths, server: Latency, device: DeviceSpeed, b: float, quantile: float = 0.99
) -> tuple[DispatchPolicy, float]:
    """The policy of least P99 TTFT within a device budget, and that deadline t in seconds.

    A prompt is covered when its device answers by t, w(l) = t - D(l); the dearest prompts stay uncovered while
    P(uncovered)(1 - F(t)) is within 1 - quantile. The least affordable t is found by bisection.
    """
    low = 0.0
    high = float(max(server.samples[-1], device.ttft(lengths.support[-1])))
    while high - low > 1e-14 * high:
        middle = (low + high) / 2
        affordable = _cover(middle, lengths, server, device, quantile)[1] <= b + 1e-12
        low, high = (low, middle) if affordable else (middle, high)
    covered, _ = _cover(high, lengths, server, device, quantile)
    waits = np.where(covered > 0, np.maximum(0.0, high - device.ttft(lengths.support)), NEVER)
    never = np.full(len(lengths.counts), NEVER)
    always = np.zeros(len(lengths.counts))
    soon = (spread_over_lengths(lengths, waits), always)
    return mixture("P99-optimal", "device", b, (never, always), soon, spread_over_lengths(lengths, covered)), high


def clairvoyant_mean(lengths: Lengths, server: Latency, device: DeviceSpeed, b: float) -> float:
    """Mean TTFT, seconds, of a device budget spent by one who knows every S: a bound that no policy reaches.

    The budget goes where the device saves most seconds a token: a fractional knapsack over (l, S).
    """
    s = server.samples[None, :]
    d = device.ttft(lengths.support)[:, None]
    gain = np.maximum(0.0, s - d)  # [U, n]
    rate = gain / lengths.support[:, None]
    weight = np.broadcast_to(lengths.probability[:, None] / s.size, rate.shape).ravel()
    mass = np.broadcast_to(lengths.mass[:, None] / s.size, rate.shape).ravel()
    order = np.argsort(-rate, axis=None, kind="stable")
    taken = np.clip((b - (np.cumsum(mass[order]) - mass[order])) / mass[order], 0, 1)
    return float(server.mean - (taken * weight[order] * gain.ravel()[order]).sum())


def spread_over_lengths(lengths: Lengths, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[U] values of the lengths that occur -> [N]: a length that never occurred takes the next longer one's."""
    at = np.searchsorted(lengths.support, np.arange(len(lengths.counts)))
    return values[np.minimum(at, len(values) - 1)]


def _cover(
    t: float, lengths: Lengths, server: Latency, device: DeviceSpeed, quantile: float
) -> tuple[NDArray[np.float64], float]:
    """Cheapest coverage [U] in [0, 1] with P(TTFT > t) <= 1 - quantile, and its budget share (inf: impossible)."""
    late = 1.0 - float(server.cdf(t))
    covered = np.zeros(len(lengths.support))
    if late <= 1 - quantile + 1e-12:
        return covered, 0.0
    slack = t - device.ttft(lengths.support)
    needed = 1.0 - (1 - quantile) / late
    share = np.where(slack > 0, 1 - server.cdf(slack), 1.0)
    cost = np.where(slack >= 0, lengths.support * share, np.inf)  # tokens a covered request
    order = np.argsort(cost, kind="stable")
    p = lengths.probability[order]
    covered[order] = np.clip((needed - (np.cumsum(p) - p)) / p, 0, 1)
    used = covered > 1e-12
    if np.isinf(cost[used]).any():
        return covered, np.inf
    return covered, float((covered * lengths.probability)[used] @ cost[used]) / lengths.mean
