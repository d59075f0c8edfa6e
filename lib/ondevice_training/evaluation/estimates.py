"""Numbers with a standard error: ratios of sums, resampled over units (windows, texts, tasks)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

SEED = 0
DRAWS = 2000


@dataclass(frozen=True)
class Estimate:
    """A value over `count` units, its bootstrap standard error and its 95 % percentile interval [low, high]."""

    value: float
    standard_error: float
    low: float
    high: float
    count: int

    def as_json(self) -> dict[str, Any]:
        """What evaluation.json holds: five significant digits."""
        return {key: float(f"{value:.5g}") if key != "count" else value for key, value in asdict(self).items()}


def bootstrap(units: ArrayLike, statistic: Callable[[np.ndarray], np.ndarray], seed: int = SEED) -> Estimate:
    """The statistic of the units' column means, resampled over the units.

    units: [n] or [n, c]. statistic: from means [..., c] to [...]. Raises ValueError under two units.
    """
    table = np.asarray(units, dtype=np.float64)
    table = table.reshape(len(table), -1)
    means = _resampled(table, np.random.default_rng(seed))
    return _estimate(statistic(table.mean(axis=0, keepdims=True))[0], statistic(means), len(table))


def rate(values: ArrayLike) -> Estimate:
    """The mean of [n] numbers or truths."""
    return bootstrap(values, lambda means: means[..., 0])


def mean_of_groups(groups: Sequence[ArrayLike], seed: int = SEED) -> Estimate:
    """The mean of the groups' means, each group resampled by itself: groups weigh the same, whatever their sizes."""
    random = np.random.default_rng(seed)
    tables = [np.asarray(group, dtype=np.float64)[:, None] for group in groups]
    draws = np.mean([_resampled(table, random)[:, 0] for table in tables], axis=0)
    value = float(np.mean([table.mean() for table in tables]))
    return _estimate(value, draws, sum(map(len, tables)))


def ratio(numerators: ArrayLike, denominators: ArrayLike) -> Estimate:
    """Sum over sum."""
    return bootstrap(np.column_stack([numerators, denominators]), lambda means: means[..., 0] / means[..., 1])


def perplexity(losses: ArrayLike, tokens: ArrayLike) -> Estimate:
    """exp of summed losses (nats) over summed tokens, [n] each."""
    return bootstrap(np.column_stack([losses, tokens]), lambda means: np.exp(means[..., 0] / means[..., 1]))


def _resampled(table: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """[draws, c] column means of a table [n, c] whose rows are drawn with replacement."""
    count = len(table)
    if count < 2:
        raise ValueError(f"A standard error needs two units or more; there are {count}.")
    return random.multinomial(count, np.full(count, 1 / count), DRAWS) @ table / count


def _estimate(value: float, draws: np.ndarray, count: int) -> Estimate:
    low, high = np.quantile(draws, [0.025, 0.975])
    return Estimate(float(value), float(draws.std(ddof=1)), float(low), float(high), count)
