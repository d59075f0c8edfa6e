"""A dispatch policy: when each endpoint starts, as a function of the prompt's length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Side = Literal["device", "server"]
SIDES: tuple[Side, Side] = ("device", "server")
NEVER = float("inf")
MOMENT = float(np.finfo(float).tiny)  # the shortest wait that is not 0: a first token at 0 s ends it


@dataclass(frozen=True)
class DispatchPolicy:
    """Waits before each endpoint starts, per prompt length; an endpoint whose wait is infinite never starts.

    An endpoint starts only if no first token has come when its wait is over. A length may carry two alternatives,
    drawn by a coin, which is what spends a budget to the token: alternative 1 is taken with `chance`.

    wait_device, wait_server: [2, N] seconds. chance: [N] in [0, 1]. Column min(l, N - 1) serves a prompt of l tokens.
    constrained: the endpoint whose input tokens the budget limits. budget: b, a share of all input tokens.
    """

    name: str
    constrained: Side
    budget: float
    wait_device: np.ndarray
    wait_server: np.ndarray
    chance: np.ndarray

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_constrained(self.constrained)
        for waits in (self.wait_device, self.wait_server):
            if waits.shape != (2, len(self.chance)):
                raise ValueError(f"Policy {self.name}: waits of shape {waits.shape} for {len(self.chance)} lengths.")
            if not waits.min() >= 0:  # a NaN is its array's minimum, and compares false
                raise ValueError(f"Policy {self.name}: a wait is negative or not a number.")
        if not (self.chance.min() >= 0 and self.chance.max() <= 1):
            raise ValueError(f"Policy {self.name}: a chance is not in [0, 1].")
        if np.minimum(self.wait_device, self.wait_server).max() == NEVER:
            raise ValueError(f"Policy {self.name}: at some length neither endpoint ever starts.")

    def waits(self, length: int, coin: float) -> tuple[float, float]:
        """(device wait, server wait) of a prompt of so many tokens and a coin in [0, 1), in seconds."""
        at = min(length, len(self.chance) - 1)
        taken = int(coin < self.chance[at])
        return float(self.wait_device[taken, at]), float(self.wait_server[taken, at])


def check_budget(budget: float) -> None:
    """Raise ValueError unless 0 <= budget <= 1."""
    if not 0.0 <= budget <= 1.0:
        raise ValueError(f"A budget is a share of input tokens in [0, 1], not {budget!r}.")


def check_constrained(endpoint: str) -> None:
    """Raise ValueError unless `endpoint` is device or server."""
    if endpoint not in ("device", "server"):
        raise ValueError(f"The constrained endpoint is device or server, not {endpoint!r}.")


def single(
    name: str, constrained: Side, budget: float, wait_device: np.ndarray, wait_server: np.ndarray
) -> DispatchPolicy:
    """A policy without coins. wait_device, wait_server: [N] seconds."""
    return mixture(name, constrained, budget, (wait_device, wait_server), (wait_device, wait_server), 0.0)


def mixture(
    name: str,
    constrained: Side,
    budget: float,
    first: tuple[np.ndarray, np.ndarray],
    second: tuple[np.ndarray, np.ndarray],
    chance: float | np.ndarray,
) -> DispatchPolicy:
    """Take `second` = (wait_device, wait_server), each [N], with `chance` ([N] or one number), else `first`."""
    device = np.array([first[0], second[0]])
    server = np.array([first[1], second[1]])
    return DispatchPolicy(name, constrained, budget, device, server, np.full(device.shape[1], chance))
