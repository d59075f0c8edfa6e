"""Beyond the paper: dispatch that is optimal in the mean, in the P99 or between them, and the clairvoyant bound.

Device-constrained: minimise E[min(S, w(l) + D(l))] subject to E[l 1{S > w(l)}] <= b E[l]. The problem separates over
lengths but for the budget, and an optimal wait is 0, a sample of S, or never: a multiple-choice knapsack whose linear
relaxation is attained with one randomised length. Its dual has one variable, the price of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ondevice.disco.distributions import Device, Latency, Lengths
from ondevice.disco.policy import MOMENT, NEVER, DispatchPolicy, check_budget, check_constrained, mixture

CANDIDATES = 512  # waits considered at most; a trace of up to that many samples is solved exactly


@dataclass(frozen=True)
class _Choices:
    """Per length u and candidate g: wait [U, G] s, share of uses [U, G], expected TTFT [U, G] s (inf: not allowed)."""

    wait: np.ndarray
    share: np.ndarray
    ttft: np.ndarray


def mean_optimal(
    lengths: Lengths, server: Latency, device: Device, budget: float, constrained: str = "device"
) -> DispatchPolicy:
    """The policy of least mean TTFT among all that spend at most the budget of the constrained endpoint.

    Exact for server traces of up to CANDIDATES samples; on longer ones waits come from that many quantiles.
    """
    check_budget(budget)
    check_constrained(constrained)
    if constrained == "server":
        return _server_knapsack(lengths, server, device, budget)
    return _solve("mean-optimal", lengths, budget, _choices(server, device.ttft(lengths.support)))


def deadline_optimal(
    lengths: Lengths, server: Latency, device: Device, budget: float, quantile: float = 0.99
) -> tuple[DispatchPolicy, float]:
    """The policy of least P99 TTFT within a device budget, and that deadline t in seconds.

    A prompt is covered when its device answers by t, w(l) = t - D(l); the dearest prompts are left uncovered while
    P(uncovered)(1 - F(t)) stays within 1 - quantile. The least affordable t is found by bisection.
    """
    check_budget(budget)
    values = np.unique(np.concatenate([server.samples, device.ttft(lengths.support)]))
    low, high = 0, len(values) - 1
    while low < high:  # the least affordable value, between whose neighbours t lies
        middle = (low + high) // 2
        if _cover(values[middle], lengths, server, device, quantile)[1] <= budget + 1e-12:
            high = middle
        else:
            low = middle + 1
    bottom, t = float(values[max(0, low - 1)]), float(values[low])
    for _ in range(50):
        middle_t = (bottom + t) / 2
        affordable = _cover(middle_t, lengths, server, device, quantile)[1] <= budget + 1e-12
        bottom, t = (bottom, middle_t) if affordable else (middle_t, t)
    covered, _ = _cover(t, lengths, server, device, quantile)
    waits = np.where(covered > 0, np.maximum(0.0, t - device.ttft(lengths.support)), NEVER)
    never, always = np.full(len(lengths.counts), NEVER), np.zeros(len(lengths.counts))
    return mixture(
        "P99-optimal", "device", budget, (never, always), (_spread(lengths, waits), always), _spread(lengths, covered)
    ), t


def frontier(
    lengths: Lengths, server: Latency, device: Device, budget: float, slack: np.ndarray, quantile: float = 0.99
) -> list[DispatchPolicy]:
    """Policies between P99-optimal and mean-optimal: a low mean TTFT subject to P99 <= slack times the least P99.

    slack: factors >= 1. The lengths to cover are those of the P99-optimal rule, cheapest first; among policies that
    cover them the mean is the least. (Choosing both at once lowers it by at most 4 % on the series tried.) A deadline
    that whole lengths cannot afford gives no policy, so the list may be shorter.
    """
    if not np.all(np.asarray(slack) >= 1):
        raise ValueError(f"Slack factors on the least P99 are at least 1, not {slack}.")
    _, least = deadline_optimal(lengths, server, device, budget, quantile)
    device_at = device.ttft(lengths.support)
    found = []
    for factor in slack:
        t = least * float(factor)
        covered, _ = _cover(t, lengths, server, device, quantile)
        cap = np.where(covered > 1e-12, t - device_at, NEVER)  # a partly covered length is covered whole
        choices = _choices(server, device_at, cap)
        cheapest = np.where(np.isfinite(choices.ttft), choices.share, np.inf).min(axis=1)
        if lengths.mass @ cheapest <= budget + 1e-12:
            found.append(_solve(f"P99 <= {t:.3g} s", lengths, budget, choices))
    return found


def clairvoyant_mean(
    lengths: Lengths, server: Latency, device: Device, budget: float, constrained: str = "device"
) -> float:
    """Mean TTFT of a policy that knows S: a bound that no real policy reaches. Seconds.

    Spends the budget where the constrained endpoint saves most seconds per token: a fractional knapsack over (l, S).
    """
    check_budget(budget)
    check_constrained(constrained)
    s, d = server.samples[None, :], device.ttft(lengths.support)[:, None]
    free, other = (s, d) if constrained == "device" else (d, s)
    gain = np.maximum(0.0, free - other)  # [U, n]
    rate = gain / lengths.support[:, None]
    weight = np.broadcast_to(lengths.probability[:, None] / s.size, rate.shape).ravel()
    mass = np.broadcast_to(lengths.mass[:, None] / s.size, rate.shape).ravel()
    order = np.argsort(-rate, axis=None)
    taken = np.clip((budget - (np.cumsum(mass[order]) - mass[order])) / mass[order], 0, 1)
    base = float(server.mean if constrained == "device" else lengths.probability @ d[:, 0])
    return base - float((taken * weight[order] * gain.ravel()[order]).sum())


def _choices(server: Latency, device_at: np.ndarray, cap: np.ndarray | None = None) -> _Choices:
    """Candidate waits 0, samples, never (and the cap itself where there is one), with their use and expected TTFT.

    device_at: D(l), [U]. cap: longest wait allowed, [U].
    """
    n = server.samples.size
    if n > CANDIDATES:
        samples = server.samples[np.linspace(0, n - 1, CANDIDATES).round().astype(int)]
    else:
        samples = server.samples
    # The longest sample stands for never: no server TTFT seen exceeds it.
    grid = np.concatenate([[0.0], np.maximum(np.unique(samples)[:-1], MOMENT), [NEVER]])
    wait = np.broadcast_to(grid, (len(device_at), len(grid)))
    if cap is not None:
        wait = np.concatenate([wait, cap[:, None]], axis=1)
    share = np.where(wait == 0, 1.0, np.where(np.isfinite(wait), 1 - server.cdf(wait), 0.0))
    ttft = server.expected_minimum(wait + device_at[:, None])
    if cap is not None:
        ttft = np.where(wait <= cap[:, None], ttft, np.inf)
    return _Choices(wait, share, ttft)


def _solve(name: str, lengths: Lengths, budget: float, choices: _Choices) -> DispatchPolicy:
    """Bisect the price of a token; between the two prices that bracket the budget, change lengths one by one."""
    price = lengths.support / lengths.mean
    mass = lengths.mass
    rows = np.arange(len(mass))

    def best(token_price: float) -> tuple[np.ndarray, float]:
        pick = (choices.ttft + token_price * price[:, None] * choices.share).argmin(axis=1)
        return pick, float(mass @ choices.share[rows, pick])

    finite = np.where(np.isfinite(choices.ttft), choices.ttft, 0.0)
    dear = (1.0 + 2.0 * finite.max()) * _dearness(choices) * lengths.mean  # one use costs more than any TTFT
    frugal, _ = best(dear)
    lavish, lavish_use = best(0.0)
    low = 0.0
    for _ in range(100):
        if lavish_use <= budget or dear - low < 1e-15 * dear:
            break
        middle = (low + dear) / 2
        pick, use = best(middle)
        if use <= budget:
            dear, frugal = middle, pick
        else:
            low, lavish, lavish_use = middle, pick, use
    if lavish_use <= budget:
        frugal = lavish
    return _mixed(name, lengths, budget, choices, frugal, lavish)


def _dearness(choices: _Choices) -> float:
    """1 / (smallest difference between two shares): how many times dearer the least use must be made."""
    gaps = np.diff(np.unique(choices.share.round(12)))
    return 1.0 / gaps.min() if gaps.size else 1.0


def _mixed(
    name: str, lengths: Lengths, budget: float, choices: _Choices, frugal: np.ndarray, lavish: np.ndarray
) -> DispatchPolicy:
    """Lengths from frugal to lavish until the budget is spent, the last with a coin; both picks are optimal."""
    rows = np.arange(len(frugal))
    low, high = choices.share[rows, frugal], choices.share[rows, lavish]
    extra = lengths.mass * np.maximum(0.0, high - low)  # equal costs can differ by rounding, and prefer either pick
    left = budget - float(lengths.mass @ low)
    before = np.cumsum(extra) - extra
    with np.errstate(invalid="ignore", divide="ignore"):
        chance = np.where(extra > 0, np.clip((left - before) / extra, 0, 1), 0.0)
    waits, sooner = (_spread(lengths, choices.wait[rows, pick]) for pick in (frugal, lavish))
    always = np.zeros(len(waits))
    return mixture(name, "device", budget, (waits, always), (sooner, always), _spread(lengths, chance))


def _spread(lengths: Lengths, values: np.ndarray) -> np.ndarray:
    """[U] values of the lengths that occur -> [N]: a length that never occurred takes the next longer one's."""
    at = np.searchsorted(lengths.support, np.arange(len(lengths.counts)))
    return values[np.minimum(at, len(values) - 1)]


def _cover(t: float, lengths: Lengths, server: Latency, device: Device, quantile: float) -> tuple[np.ndarray, float]:
    """Cheapest coverage [U] in [0, 1] with P(TTFT > t) <= 1 - quantile, and its budget share (inf: impossible)."""
    late = 1.0 - float(server.cdf(t))
    covered = np.zeros(len(lengths.support))
    if late <= 1 - quantile + 1e-12:
        return covered, 0.0
    slack = t - device.ttft(lengths.support)
    needed = 1.0 - (1 - quantile) / late
    share = np.where(slack > 0, 1 - server.cdf(slack), 1.0)
    cost = np.where(slack >= 0, lengths.support * share, np.inf)  # tokens per covered request
    order = np.argsort(cost, kind="stable")
    p = lengths.probability[order]
    covered[order] = np.clip((needed - (np.cumsum(p) - p)) / p, 0, 1)
    used = covered > 1e-12
    if np.isinf(cost[used]).any():
        return covered, np.inf
    return covered, float((covered * lengths.probability)[used] @ cost[used]) / lengths.mean


def _server_knapsack(lengths: Lengths, server: Latency, device: Device, budget: float) -> DispatchPolicy:
    """Server-constrained: race the lengths of greatest expected saving per token, E[D - min(S, D)] / l.

    With D proportional to l this order is longest first, which is DiSCo-S; a device overhead can change it.
    """
    device_at = device.ttft(lengths.support)
    rate = (device_at - server.expected_minimum(device_at)) / lengths.support
    order = np.lexsort((-lengths.support, -rate))
    mass = lengths.mass[order]
    share = np.zeros(len(order))
    share[order] = np.clip((budget - (np.cumsum(mass) - mass)) / mass, 0, 1)
    at_once, never = np.zeros(len(lengths.counts)), np.full(len(lengths.counts), NEVER)
    return mixture("mean-optimal", "server", budget, (at_once, never), (at_once, at_once), _spread(lengths, share))
