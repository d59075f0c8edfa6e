"""DiSCo's dispatch (Algorithms 1 to 3 of the paper, as corrected) and the baselines it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from ondevice_papers.disco.distributions import Latency, Lengths
from ondevice_papers.disco.policy import MOMENT, NEVER, DispatchPolicy, Side, check_budget, mixture, single

Boundary = Callable[[Latency, float, float], tuple[float, float, float]]


def scenario(device: tuple[float, float], server: tuple[float, float]) -> Literal["device", "server", "mixed"]:
    """Which endpoint is constrained (Algorithm 1), from (prefill, decode) costs per token of each.

    The paper calls all that is not "device" server-constrained; `mixed` is where neither side's costs dominate.
    """
    if min(device) > max(server):
        return "device"
    return "server" if min(server) > max(device) else "mixed"


def wait_for_share(server: Latency, share: float) -> tuple[float, float, float]:
    """(late, early, chance of early): the waits between which a coin makes P(S > wait) exactly `share`.

    The waits are 0 (the device always starts), the distinct samples of S, and never.
    """
    samples, n = server.samples, server.samples.size
    beyond = share * n
    whole = int(np.floor(beyond + 1e-9))
    if whole >= n:
        return 0.0, 0.0, 0.0
    pivot = samples[n - whole - 1]
    below, up_to = (int(np.searchsorted(samples, pivot, side)) for side in ("left", "right"))
    late = max(float(pivot), MOMENT) if up_to < n else NEVER
    early = max(float(samples[below - 1]), MOMENT) if below else 0.0
    chance = (beyond - (n - up_to)) / (up_to - below)  # equal samples are crossed together
    return (late, early, chance) if chance > 1e-12 else (late, late, 0.0)


def corrected(server: Latency, alpha: float, share: float) -> tuple[float, float, float]:
    """Algorithm 2's line 18 as it must be: 1 - F(w*) = alpha + (1 - alpha) share.

    share: of the boundary length that is paid for.
    """
    return wait_for_share(server, alpha + (1 - alpha) * share)


def printed(server: Latency, alpha: float, share: float) -> tuple[float, float, float]:
    """Algorithm 2's line 18 as it stands: F(w*) = share, in which more budget means a longer wait."""
    wait = min(server.quantile(1 - alpha), server.quantile(share))
    return wait, wait, 0.0


def device_constrained(
    lengths: Lengths, server: Latency, b: float, alpha: float, line_18: Boundary = corrected
) -> DispatchPolicy:
    """DiSCo-D (Algorithm 2): the server starts at once, the device after w(l).

    A share min(alpha, b) of the budget bounds every wait by w_tail; the rest starts the device at once on the shortest
    prompts, up to l_th, and one length waits w* in between.
    """
    w_tail = wait_for_share(server, min(alpha, b))  # F^-1(1 - min(alpha, b))
    w = np.tile(np.array(w_tail)[:, None], len(lengths.counts))  # [3, N] late, early, chance of early
    left = b - alpha
    for l_th, mass in zip(lengths.support.tolist(), lengths.mass.tolist(), strict=True):
        need = (1 - alpha) * mass  # what starting at once costs beyond w_tail, as a share of all tokens
        if left < need:
            if left > 0:
                w[:, l_th] = line_18(server, alpha, left / need)
            break
        w[:, : l_th + 1] = 0.0
        left -= need
    at_once = np.zeros(len(lengths.counts))
    return mixture("DiSCo-D", "device", b, (w[0], at_once), (w[1], at_once), w[2])


def server_constrained(lengths: Lengths, b: float) -> DispatchPolicy:
    """DiSCo-S (Algorithm 3, Eq. 3): the device starts at once, the server only on prompts longer than l_th.

    Prompts up to l_th hold a share 1 - b of all tokens. Those of exactly l_th race with the chance that spends b.
    """
    tokens = np.cumsum(lengths.counts * np.arange(len(lengths.counts)))
    alone = (1 - b) * tokens[-1]
    l_th = int(np.searchsorted(tokens, alone, side="right"))
    at_once = np.zeros(len(tokens))
    wait = np.zeros(len(tokens))
    wait[: l_th + 1] = NEVER
    sooner = wait.copy()
    chance = np.zeros(len(tokens))
    if l_th < len(tokens):
        before = tokens[l_th - 1] if l_th else 0
        sooner[l_th] = 0.0
        chance[l_th] = 1 - (alone - before) / (tokens[l_th] - before)
    return mixture("DiSCo-S", "server", b, (at_once, wait), (at_once, sooner), chance)


def ramp(lengths: Lengths, server: Latency, b: float, alpha: float) -> DispatchPolicy:
    """Eq. 1 with l_th = 0: w(l) = min(beta l, w_tail), beta by bisection on the budget that is really used (Eq. 2)."""
    tokens = np.arange(len(lengths.counts))
    w_tail = server.quantile(1 - min(alpha, b)) if b > 0 else NEVER

    def use(beta: float) -> float:
        w = np.minimum(beta * lengths.support, w_tail)
        return float(lengths.mass @ np.where(w > 0, 1 - server.cdf(w), 1.0))

    low, high = 0.0, server.samples[-1]  # seconds a token; at `high` every wait is w_tail
    for _ in range(60 if b > alpha else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if use(middle) <= b else (middle, high)
    return single("DiSCo-D (Eq. 1)", "device", b, np.minimum(high * tokens, w_tail), np.zeros(len(tokens)))


def server_only(lengths: Lengths) -> DispatchPolicy:
    """Every request to the server (the paper's vLLM)."""
    return stochastic(lengths, "device", 0.0)


def stochastic(lengths: Lengths, constrained: Side, b: float) -> DispatchPolicy:
    """Stoch-D or Stoch-S: with chance b the constrained endpoint alone, else the other one alone (section 5.1)."""
    return _by_chance("Stoch", lengths, constrained, b, np.full(len(lengths.counts), NEVER))


def random_race(lengths: Lengths, constrained: Side, b: float) -> DispatchPolicy:
    """Start both with chance b, else the unconstrained endpoint alone: racing, without choosing which requests race."""
    return _by_chance("race", lengths, constrained, b, np.zeros(len(lengths.counts)))


def _by_chance(name: str, lengths: Lengths, constrained: Side, b: float, other: np.ndarray) -> DispatchPolicy:
    """With chance b the constrained endpoint at once and the other after `other` seconds, else the other one alone."""
    check_budget(b)
    never = np.full(len(lengths.counts), NEVER)
    at_once = np.zeros(len(lengths.counts))
    pairs = ((never, at_once), (at_once, other))  # of the constrained endpoint and the other one
    first, second = pairs if constrained == "device" else (pair[::-1] for pair in pairs)
    return mixture(f"{name}-{constrained[0].upper()}", constrained, b, first, second, b)
