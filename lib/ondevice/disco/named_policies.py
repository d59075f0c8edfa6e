"""Dispatch policies by name, for the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ondevice.disco import dispatch, optimal
from ondevice.disco.distributions import Device, Latency, Lengths
from ondevice.disco.online import OnlineDispatcher
from ondevice.disco.policy import NEVER, Constrained, DispatchPolicy, check_budget, mixture


@dataclass(frozen=True)
class Known:
    """What a policy is computed from: past prompt lengths, past server TTFTs and the device's speed."""

    lengths: Lengths
    server: Latency
    device: Device


Maker = Callable[[Known, Constrained, float, str], DispatchPolicy | OnlineDispatcher]

# Name -> (endpoint it is for, or None for either; what follows a colon, or ""; how it is made).
POLICIES: dict[str, tuple[Constrained | None, str, Maker]] = {
    "server-only": (None, "", lambda known, constrained, b, _: dispatch.server_only(known.lengths)),
    "device-only": (None, "", lambda known, constrained, b, _: dispatch.device_only(known.lengths)),
    "stochastic": (None, "", lambda known, constrained, b, _: dispatch.stochastic(known.lengths, constrained, b)),
    "race": (None, "", lambda known, constrained, b, _: dispatch.race(known.lengths, constrained, b)),
    "hedge": (None, "SECONDS", lambda known, constrained, b, text: _hedge(known.lengths, constrained, b, text)),
    "disco-s": ("server", "", lambda known, constrained, b, _: dispatch.disco_s(known.lengths, b)),
    "disco-d": (
        "device",
        "ALPHA",
        lambda known, constrained, b, text: dispatch.disco_d(
            known.lengths, known.server, b, _number(text, "disco-d's ALPHA is a number")
        ),
    ),
    "mean-optimal": (
        None,
        "",
        lambda known, constrained, b, _: optimal.mean_optimal(
            known.lengths, known.server, known.device, b, constrained
        ),
    ),
    "p99-optimal": (
        "device",
        "",
        lambda known, constrained, b, _: optimal.deadline_optimal(known.lengths, known.server, known.device, b)[0],
    ),
    "online": ("device", "", lambda known, constrained, b, _: OnlineDispatcher(known.device, b)),
}


def known_names() -> str:
    """All names, with what follows a colon."""
    return ", ".join(f"{name}:{extra}" if extra else name for name, (_, extra, _) in POLICIES.items())


def named_policy(
    name: str, constrained: Constrained | None, budget: float, known: Known
) -> tuple[DispatchPolicy | OnlineDispatcher, Constrained]:
    """(policy, constrained endpoint) of a name such as `race`, `hedge:0.5` or `disco-d:0.05`.

    constrained None: the endpoint the policy is for, the server where it suits both. Raises ValueError on an unknown
    name, a missing or superfluous number, and a policy that is for the other endpoint.
    """
    check_budget(budget)
    head, colon, text = name.partition(":")
    if head not in POLICIES:
        raise ValueError(f"There is no policy {name!r}; there are {known_names()}.")
    endpoint, extra, make = POLICIES[head]
    if bool(extra) != bool(colon):
        raise ValueError(
            f"Policy {head!r} takes {f'a number, {head}:{extra}' if extra else 'no number'}; it is {name!r}."
        )
    if endpoint and constrained not in (None, endpoint):
        raise ValueError(f"Policy {head!r} is for a constrained {endpoint}, not for a constrained {constrained}.")
    chosen = endpoint or constrained or "server"
    return make(known, chosen, budget, text), chosen


def _hedge(lengths: Lengths, constrained: Constrained, budget: float, text: str) -> DispatchPolicy:
    """Start the constrained endpoint some seconds after the other, for a share `budget` of the requests."""
    seconds = _number(text, "A hedge waits a number of seconds of at least 0")
    size = len(lengths.counts)
    at_once, never, later = np.zeros(size), np.full(size, NEVER), np.full(size, seconds)
    alone = (never, at_once) if constrained == "device" else (at_once, never)
    both = (later, at_once) if constrained == "device" else (at_once, later)
    return mixture(f"hedge:{text}", constrained, budget, alone, both, budget)


def _number(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < NEVER:
        raise ValueError(f"{what}, not {text!r}.")
    return number
