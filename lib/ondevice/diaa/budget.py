"""Beyond the paper: how many nodes of a tree are worth their verification."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.causal_lm import TokenTree

if TYPE_CHECKING:
    from ondevice.causal_lm import CausalLM

SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class VerifyCost:
    """T(n): seconds of a forward over n rows, the root and n - 1 nodes; linear between what was measured.

    seconds: [m] at sizes [m], made to rise. overhead: seconds a step outside the forward.
    """

    sizes: Sequence[int]
    seconds: Sequence[float]
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("A cost curve has one time for each of its sizes, which increase.")
        if self.sizes[0] < 1 or min(self.seconds) <= 0 or self.overhead < 0:
            raise ValueError("A cost curve has positive sizes and times.")

    def steps(self, budget: int) -> NDArray[np.float64]:
        """[1 + budget] seconds of a step with 0, 1 .. budget nodes; beyond the last size along the last slope."""
        rows = np.arange(1, budget + 2)
        rising = np.maximum.accumulate(np.asarray(self.seconds, float))  # noise must not make a larger tree cheaper
        found = np.interp(rows, self.sizes, rising)
        if len(self.sizes) > 1:
            slope = (rising[-1] - rising[-2]) / (self.sizes[-1] - self.sizes[-2])
            found += slope * np.maximum(0, rows - self.sizes[-1])
        return found + self.overhead


def measure(lm: CausalLM, length: int, sizes: Iterable[int] = SIZES, repeats: int = 11) -> VerifyCost:
    """Time the verification of trees of `sizes` rows (medians) behind `length` tokens. Their ids do not matter.

    Sizes take turns, so that whatever slows the machine for a while does so to all.
    """
    session = lm.start(min(lm.context, length + max(SIZES)))
    session.prefill(np.arange(length) % lm.vocabulary)
    found = sorted(set(sizes))
    trees = [TokenTree(np.arange(size) % lm.vocabulary, np.r_[-1, np.arange(size - 1) // 2]) for size in found]
    times: list[list[float]] = [[] for _ in found]
    for _ in range(repeats + 1):
        for tree, spent in zip(trees, times, strict=True):
            started = perf_counter()
            session.verify(tree)[-1, 0].item()  # waits for an accelerator
            spent.append(perf_counter() - started)
            session.rollback(length)
    return VerifyCost(found, [median(spent[1:]) for spent in times])  # the first turn builds the masks


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
