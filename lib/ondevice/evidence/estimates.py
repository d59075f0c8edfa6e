"""What a claim is judged by: a value with its 95 % interval, the number of samples behind it, and its kind.

A kind says where a number comes from; it is attached once, where the number is born, and travels with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

KINDS = ("measured", "recorded", "simulated", "replayed", "analytic", "quoted")
DRAWS = 2000
LEVEL = 0.95


def born(table: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Attach a kind to a table (attrs["kind"], which pandas carries through selections), and return the table."""
    return derived(table, kind)


def derived(table: pd.DataFrame, *parents: Any) -> pd.DataFrame:
    """Attach the union of the kinds of the tables, estimates or kinds that a table was made from, and return it."""
    table.attrs["kind"] = kind_of(parents)
    return table


def kind_of(source: Any) -> str:
    """The kind of a table, an estimate, a kind in words or several of these; raises ValueError where there is none."""
    if isinstance(source, tuple | list) and source:
        source = "+".join(map(kind_of, source))
    own = source.attrs.get("kind") if isinstance(source, pd.DataFrame | pd.Series) else getattr(source, "kind", None)
    kinds = (source if isinstance(source, str) else own or "").split("+")
    if kinds == [""]:
        name = type(source).__name__
        raise ValueError(f"This {name} does not say where it comes from: attach it by born or derived.")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ValueError(f"Unknown kind {unknown}; kinds are {', '.join(KINDS)}, joined by '+'.")
    return "+".join(kind for kind in KINDS if kind in kinds)


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval and its kind.

    low, high: the interval's ends; both equal the value where it is exact. n: samples, None where unknown.
    """

    value: float
    low: float
    high: float
    n: int | None
    kind: str

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the 95 % interval: (low, high)."""
        return self.low, self.high

    def __format__(self, spec: str) -> str:
        """`value [low, high]`, the value alone where it is exact. spec: of each number, by default three digits."""
        low, value, high = (format(number, spec or ".3g") for number in (self.low, self.value, self.high))
        return f"{value} [{low}, {high}]" if self.low < self.high else value

    def __str__(self) -> str:
        return format(self)

    def scaled(self, scale: float) -> Estimate:
        """The same value with an interval of `scale` times the width."""
        low, high = (self.value + scale * (end - self.value) for end in (self.low, self.high))
        return Estimate(self.value, low, high, self.n, self.kind)


Value = float | Estimate | Sequence[float | Estimate]


def exact(value: float, kind: Any) -> Estimate:
    """A value without uncertainty: a formula's, a count's. kind: whatever `kind_of` takes, here and below."""
    return Estimate(float(value), float(value), float(value), None, kind_of(kind))


def resampled(
    statistic: Callable[[np.ndarray], float], n: int, kind: Any, groups: Sequence[Any] | None = None, seed: int = 0
) -> Estimate:
    """A statistic of n samples with its bootstrap interval (percentiles of 2,000 seeded draws, widened for few samples:
    Hesterberg 2015, "What teachers should know about the bootstrap", section 5.3).

    statistic: of the positions drawn, [n] integers. groups: one label for each sample; draws keep each group's size.
    With a group of one sample the interval has no ends.
    """
    strata = _strata(groups, n)
    value = float(statistic(np.concatenate(strata)))
    least = min(map(len, strata))
    if least < 2:
        return Estimate(value, -math.inf, math.inf, n, kind_of(kind))
    generator = np.random.default_rng(seed)
    drawn = [statistic(np.concatenate([generator.choice(rows, len(rows)) for rows in strata])) for _ in range(DRAWS)]
    tail = stats.norm.sf(math.sqrt(least / (least - 1)) * stats.t.isf((1 - LEVEL) / 2, n - len(strata)))
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Estimate(value, float(low), float(high), n, kind_of(kind))


def mean(values: Sequence[float], kind: Any, groups: Sequence[Any] | None = None, seed: int = 0) -> Estimate:
    """The mean of the groups' means. values: one a prompt; groups: its task."""
    sample = np.asarray(values, dtype=float)
    weights = np.empty(len(values))
    strata = _strata(groups, len(sample))
    for rows in strata:
        weights[rows] = 1 / (len(strata) * len(rows))
    return resampled(lambda rows: float(sample[rows] @ weights[rows]), len(sample), kind, groups, seed)


def ratio(
    values: Sequence[float], over: Sequence[float], kind: Any, groups: Sequence[Any] | None = None, seed: int = 0
) -> Estimate:
    """Geometric mean of values over their partners, paired by prompt; groups weigh the same."""
    pairs = np.asarray(values, dtype=float), np.asarray(over, dtype=float)
    if min(part.min() for part in pairs) <= 0:
        raise ValueError("A ratio needs values above 0.")
    logs = mean(np.log(pairs[0] / pairs[1]), kind, groups, seed)
    return Estimate(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high), logs.n, logs.kind)


def share(k: int, n: int, kind: Any) -> Estimate:
    """The share k of n, with Wilson's interval."""
    ends = stats.binomtest(int(k), int(n)).proportion_ci(LEVEL, method="wilson")
    return Estimate(k / n, float(ends.low), float(ends.high), int(n), kind_of(kind))


def _strata(groups: Sequence[Any] | None, n: int) -> list[np.ndarray]:
    """Positions of each group's samples."""
    labels = np.zeros(n) if groups is None else np.asarray(groups)
    if n == 0 or len(labels) != n:
        raise ValueError(f"An estimate needs samples, each in a group: {n} samples, {len(labels)} labels.")
    return [np.flatnonzero(labels == label) for label in dict.fromkeys(labels.tolist())]
