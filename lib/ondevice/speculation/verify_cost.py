"""T(n): what the verification of n rows takes, measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

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
