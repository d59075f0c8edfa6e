"""The dispersion threshold for a precision target (section 4.1), from validation pools.

The paper asks for the lowest threshold that meets the target. Precision need not fall with the threshold, so ours is
the lowest such that every higher one meets the target, too. It is exact: a pool's outcome changes only at values that
the statistic takes, and those are the grid.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ondevice.grating.pruning import ClusterRule
from ondevice.grating.replay import Pools, measured, replay

Target = Literal["precision", "overlap"]


@dataclasses.dataclass(frozen=True)
class Curve:
    """Means over pools at every threshold that makes a difference; arrays are [m].

    thresholds: falling, from infinity (no pruning). A row holds from its threshold up to, without it, the one before.
    The other columns are as in `Measured`; full is one number.
    """

    thresholds: NDArray[np.float64]
    saved: NDArray[np.float64]
    precision: NDArray[np.float64]
    overlap: NDArray[np.float64]
    full: float


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over pools with its bootstrap interval."""

    mean: float
    low: float
    high: float


def curve(pools: Pools, k: int, rule: ClusterRule, exact_order: bool = False) -> Curve:
    """All that `rule` can do with these pools as its threshold falls from infinity to minus infinity."""
    steps = [_steps(pools, index, k, rule, exact_order) for index in range(len(pools))]
    thresholds = np.unique(np.concatenate([[np.inf], *(starts for starts, _ in steps)]))[::-1]
    total = np.zeros((len(thresholds), 4))
    for starts, rows in steps:  # starts fall: a threshold belongs to the first start that it reaches
        total += rows[np.searchsorted(-starts, -thresholds)]
    saved, precision, full, overlap = (total / len(pools)).T
    return Curve(thresholds, saved, precision, overlap, float(full[0]))


def calibrate(found: Curve, target: float, of: Target = "overlap") -> float:
    """The lowest threshold such that it and all higher ones meet the target; infinity where only no pruning does.

    of: "precision" is P@K against labels, in [0, 1]; "overlap" is the share of the full model's top K that is chosen,
    and needs no labels. Raises ValueError on a target that the full model itself misses.
    """
    values = found.precision if of == "precision" else found.overlap
    missed = np.flatnonzero(values < target - 1e-12)
    if len(missed) and missed[0] == 0:
        raise ValueError(f"Without pruning the {of} is {values[0]:.4f}: no threshold reaches {target}.")
    last = missed[0] - 1 if len(missed) else len(values) - 1
    return float(found.thresholds[last])


def interval(values: ArrayLike, level: float = 0.95, draws: int = 2000, seed: int = 0) -> Interval:
    """Mean of one value a pool [pools] and its percentile bootstrap interval. Raises ValueError without pools."""
    given = np.asarray(values, np.float64)
    if not len(given) or not 0 < level < 1:
        raise ValueError(f"An interval needs values and a level in (0, 1), not {len(given)} values and {level}.")
    counts = np.random.default_rng(seed).multinomial(len(given), np.full(len(given), 1 / len(given)), draws)
    low, high = np.quantile(counts @ given / len(given), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(given.mean()), float(low), float(high))


def _steps(
    pools: Pools, index: int, k: int, rule: ClusterRule, exact_order: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One pool's outcome as a step function: thresholds [s] falling to -inf, where each step begins, and rows [s, 4].

    A replay does not change until the threshold falls below the highest statistic at which it did not decide.
    """
    scores, threshold = pools.pool(index), np.inf
    starts, rows = [], []
    while True:
        tried = _Recording(dataclasses.replace(rule, threshold=threshold))
        outcome = replay(scores, k, tried, exact_order)
        starts.append(tried.highest)
        rows.append(measured(pools, index, k, outcome))
        if tried.highest == -np.inf:
            return np.array(starts), np.array(rows)
        threshold = float(np.nextafter(tried.highest, -np.inf))


class _Recording:
    """A rule that remembers the highest statistic that did not exceed its threshold."""

    def __init__(self, rule: ClusterRule) -> None:
        self.rule, self.highest = rule, -np.inf

    def verdicts(self, history: NDArray[np.float64], slots: int) -> NDArray[np.int8]:
        strength = self.rule.strength(history)
        if strength <= self.rule.threshold:
            self.highest = max(self.highest, strength)
        return self.rule.verdicts(history, slots)
