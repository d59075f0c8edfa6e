"""Beyond the paper: how many nodes of a tree are worth their verification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.speculation.verify_cost import SIZES, VerifyCost, measure

__all__ = ["SIZES", "Sizing", "VerifyCost", "measure"]


class Sizing:
    """How many of a tree's first nodes to draft, from the gain that each is expected to bring.

    rule `ratio`: the most tokens a second in this step, (1 + expected accepted) / (T(n) + overhead). Where T is smooth,
        growth stops when a node's gain falls under its share of the time.
    rule `rate`: the most tokens a second over all steps. A step's time could be spent on other steps, so it is priced
        with the rate reached so far: maximise 1 + expected accepted - rate * (T(n) + overhead). The two agree where all
        steps are alike; else `ratio` drafts too little where much can be won, and too much where little can. But the
        rate is an average over requests, whose lengths are given: time saved in one cannot be spent in another.
    """

    def __init__(self, cost: VerifyCost, rule: Literal["ratio", "rate"] = "ratio", memory: float = 0.99) -> None:
        if rule not in ("ratio", "rate"):
            raise ValueError(f"There is no rule {rule!r}; there are ratio and rate.")
        if not 0 < memory <= 1:
            raise ValueError(f"A memory is in (0, 1], not {memory}.")
        self.cost, self.rule, self.memory = cost, rule, memory
        self._steps = cost.steps(0)
        self._emitted = self._seconds = 0.0

    def __call__(self, gains: Sequence[float]) -> int:
        """Nodes to draft, 0 to len(gains). gains: probability of each node, in the order in which they would come."""
        seconds = self._times(len(gains))
        expected = 1 + np.concatenate([[0.0], np.cumsum(gains)])
        if self.rule == "ratio" or not self._seconds:
            return int(np.argmax(expected / seconds))
        return int(np.argmax(expected - self._emitted / self._seconds * seconds))

    def observe(self, drafted: int, emitted: int) -> None:
        """A step drafted and emitted so many tokens; its time is taken from the curve, which has no noise."""
        self._emitted = self.memory * self._emitted + emitted
        self._seconds = self.memory * self._seconds + float(self._times(drafted)[-1])

    def _times(self, budget: int) -> NDArray[np.float64]:
        if len(self._steps) <= budget:
            self._steps = self.cost.steps(budget)
        return self._steps[: budget + 1]
