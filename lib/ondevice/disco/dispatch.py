"""DiSCo's dispatch policies (Algorithms 1 to 3 of the paper) and the baselines it is compared with.

Default is the corrected form; the printed one stays behind `variant`, with what is wrong in its docstring.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ondevice.disco.distributions import Latency, Lengths
from ondevice.disco.policy import MOMENT, NEVER, Constrained, DispatchPolicy, check_budget, mixture, single

# The paper gives no value. With this one DiSCo-D is worse than Stoch-D below b = 0.2 on the LLaMA stand-in, as in 5.2.
DEFAULT_ALPHA = 0.15


def disco_d(
    lengths: Lengths,
    server: Latency,
    budget: float,
    alpha: float = DEFAULT_ALPHA,
    variant: Literal["corrected", "printed", "eq1"] = "corrected",
) -> DispatchPolicy:
    """DiSCo-D: the server starts at once, the device after w(l) (section 4.2, Algorithm 2).

    A share alpha of the budget bounds the tail, w_tail = F^-1(1 - min(alpha, b)); the rest starts the device at once on
    the shortest prompts. corrected: the boundary length waits w* with F(w*) = (1 - alpha)(1 - left / need), in token
    mass, and a coin between neighbouring samples spends the budget exactly. printed: line 18, F(w*) = left / need, in
    which more budget means a longer wait. eq1: the ramp min(beta l, w_tail) of Eq. 1, beta from the true budget.
    """
    check_budget(budget)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is a share in (0, 1), not {alpha!r}.")
    if variant == "eq1":
        return _ramp(lengths, server, budget, alpha)
    if variant not in ("corrected", "printed"):
        raise ValueError(f"Unknown variant {variant!r} of DiSCo-D; there are corrected, printed and eq1.")
    size = len(lengths.counts)
    always = np.zeros(size)
    late, early, coin = _wait_for_share(server, min(alpha, budget))
    if variant == "printed":
        late = early = server.quantile(1 - min(alpha, budget)) if budget > 0 else NEVER
        coin = 0.0
    waits, sooner, chance = np.full(size, late), np.full(size, early), np.full(size, coin)
    if budget > alpha:
        mass = lengths.counts * np.arange(size)
        mass = mass / mass.sum()
        spent = np.cumsum(mass) * (1 - alpha)
        edge = int(np.searchsorted(spent, budget - alpha, side="right"))
        waits[:edge] = sooner[:edge] = 0.0
        if edge < size:
            need = (1 - alpha) * mass[edge]
            left = budget - alpha - (spent[edge - 1] if edge else 0.0)
            if variant == "corrected":
                waits[edge], sooner[edge], chance[edge] = _wait_for_share(server, alpha + (1 - alpha) * left / need)
            else:
                waits[edge] = sooner[edge] = min(late, server.quantile(left / need))
    return mixture("DiSCo-D", "device", budget, (waits, always), (sooner, always), chance)


def disco_s(lengths: Lengths, budget: float, variant: Literal["corrected", "printed"] = "corrected") -> DispatchPolicy:
    """DiSCo-S: the device starts at once, the server only on prompts longer than l_th (section 4.2, Algorithm 3).

    Prompts under l_th hold a share 1 - b of all tokens (Eq. 3). corrected: prompts of exactly l_th tokens race with the
    chance that spends b exactly. printed: they always race, which overspends by up to one length's tokens.
    """
    check_budget(budget)
    if variant not in ("corrected", "printed"):
        raise ValueError(f"Unknown variant {variant!r} of DiSCo-S; there are corrected and printed.")
    size = len(lengths.counts)
    tokens = np.cumsum(lengths.counts * np.arange(size))
    alone = (1 - budget) * tokens[-1]
    threshold = int(np.searchsorted(tokens, alone, side="right"))
    never_then_race = np.zeros(size)
    never_then_race[:threshold] = NEVER
    sooner, chance = never_then_race.copy(), 0.0
    if threshold < size and variant == "corrected":
        before = tokens[threshold - 1] if threshold else 0
        never_then_race[threshold] = NEVER
        sooner[threshold] = 0.0
        chance = float(1 - (alone - before) / (tokens[threshold] - before))
    at_once = np.zeros(size)
    return mixture("DiSCo-S", "server", budget, (at_once, never_then_race), (at_once, sooner), chance)


def server_only(lengths: Lengths) -> DispatchPolicy:
    """Every request to the server (the paper's vLLM)."""
    size = len(lengths.counts)
    return single("server only", "device", 0.0, np.full(size, NEVER), np.zeros(size))


def device_only(lengths: Lengths) -> DispatchPolicy:
    """Every request to the device (the paper's llama.cpp)."""
    size = len(lengths.counts)
    return single("device only", "server", 0.0, np.zeros(size), np.full(size, NEVER))


def stochastic(lengths: Lengths, constrained: Constrained, budget: float) -> DispatchPolicy:
    """Stoch-D or Stoch-S: with chance b the constrained endpoint alone, else the other one alone (section 5.1)."""
    never, at_once = np.full(len(lengths.counts), NEVER), np.zeros(len(lengths.counts))
    device_alone, server_alone = (at_once, never), (never, at_once)
    if constrained == "device":
        return mixture("Stoch-D", constrained, budget, server_alone, device_alone, budget)
    return mixture("Stoch-S", constrained, budget, device_alone, server_alone, budget)


def race(lengths: Lengths, constrained: Constrained, budget: float) -> DispatchPolicy:
    """Start both with chance b, else the unconstrained endpoint alone.

    Not in the paper: it separates the value of choosing which requests race from the value of racing at all.
    """
    never, at_once = np.full(len(lengths.counts), NEVER), np.zeros(len(lengths.counts))
    alone = (never, at_once) if constrained == "device" else (at_once, never)
    return mixture(f"race-{constrained[0].upper()}", constrained, budget, alone, (at_once, at_once), budget)


def scenario(device: tuple[float, float], server: tuple[float, float]) -> Literal["device", "server", "mixed"]:
    """Which endpoint is constrained (Algorithm 1), from (prefill, decode) costs per token of each.

    device: both its costs exceed both of the server's. server: the mirror image. mixed: neither; the paper calls all of
    the rest server-constrained, so `mixed` is run as such.
    """
    if min(device) > max(server):
        return "device"
    return "server" if min(server) > max(device) else "mixed"


def _wait_for_share(server: Latency, share: float) -> tuple[float, float, float]:
    """(late, early, chance of early): neighbouring waits between which a coin makes P(S > wait) exactly `share`.

    The waits are 0 (the device always starts), the distinct samples, and never.
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


def _ramp(lengths: Lengths, server: Latency, budget: float, alpha: float) -> DispatchPolicy:
    """Eq. 1 with l_th = 0: w(l) = min(beta l, w_tail), beta by bisection on the budget that is really used."""
    size = len(lengths.counts)
    tokens = np.arange(size)
    mass = lengths.counts * tokens / (lengths.counts @ tokens)
    tail = server.quantile(1 - min(alpha, budget)) if budget > 0 else NEVER

    def waits(beta: float) -> np.ndarray:
        return np.minimum(beta * tokens, tail)

    def use(beta: float) -> float:
        w = waits(beta)
        return float(mass @ np.where(w > 0, 1 - server.cdf(w), 1.0))

    low, high = 0.0, server.samples[-1]  # seconds per token; at `high` every wait is the tail's
    if budget > alpha:
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if use(middle) <= budget else (middle, high)
    wait = np.full(size, tail) if budget <= alpha else waits(high)
    return single("DiSCo-D (Eq. 1)", "device", budget, wait, np.zeros(size))
