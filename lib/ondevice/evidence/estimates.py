"""What a claim is judged by: a value with its 95 % interval, the number of samples behind it, and its kind.

A kind says where a number comes from; it is attached once, where the number is born, and travels with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

KINDS = ("measured", "recorded", "predicted", "simulated", "replayed", "analytic", "quoted")
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

    low, high: the interval's ends; both equal the value where it is exact. n: independent units that were drawn, None
    where unknown. drawn: what these units are, in the plural: "prompts", "pools", "runs". ends: "interval", or "range"
    where low and high are the least and the greatest of a few runs.
    """

    value: float
    low: float
    high: float
    n: int | None
    kind: str
    drawn: str = ""
    ends: str = "interval"

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the 95 % interval: (low, high)."""
        return self.low, self.high

    def __format__(self, spec: str) -> str:
        """`value [low, high]`, or `value (range low to high)`; the value alone where it is exact.

        spec: of each number, by default three digits.
        """
        low, value, high = (format(number, spec or ".3g") for number in (self.low, self.value, self.high))
        return value + self.between(low, high)

    def __str__(self) -> str:
        return format(self)

    def between(self, low: str, high: str) -> str:
        """The two ends as text behind the value: ` [low, high]` or ` (range low to high)`; empty where it is exact."""
        if self.low == self.high:
            return ""
        return f" (range {low} to {high})" if self.ends == "range" else f" [{low}, {high}]"

    def scaled(self, scale: float) -> Estimate:
        """The same value with an interval of `scale` times the width."""
        low, high = (self.value + scale * (end - self.value) for end in (self.low, self.high))
        return replace(self, low=low, high=high)


Value = float | Estimate | Sequence[float | Estimate]


def exact(value: float, kind: Any) -> Estimate:
    """A value without uncertainty: a formula's, a count's. kind: whatever `kind_of` takes, here and below."""
    return Estimate(float(value), float(value), float(value), None, kind_of(kind))


def resampled(
    statistic: Callable[[np.ndarray], float],
    n: int,
    kind: Any,
    groups: Sequence[Any] | None = None,
    seed: int = 0,
    *,
    drawn: str,
    clusters: Sequence[Any] | None = None,
) -> Estimate:
    """A statistic of n samples with its bootstrap interval (percentiles of 2,000 seeded draws, widened for few samples:
    Hesterberg 2015, "What teachers should know about the bootstrap", section 5.3).

    statistic: of the positions drawn, [n] integers. groups: one label for each sample; draws keep each group's size.
    drawn: what is drawn, in the plural. clusters: one label for each sample, such as its prompt; a draw takes whole
    clusters, and the estimate's n is their number. With a group of one cluster the interval has no ends.
    """
    strata = [_members(rows, clusters) for rows in _strata(groups, n)]
    units = sum(map(len, strata))
    value = float(statistic(np.concatenate([_picked(members, np.arange(len(members))) for members in strata])))
    least = min(map(len, strata))
    if least < 2:
        return Estimate(value, -math.inf, math.inf, units, kind_of(kind), drawn)
    generator = np.random.default_rng(seed)

    def draw() -> np.ndarray:
        indices = (generator.integers(len(members), size=len(members)) for members in strata)
        return np.concatenate(list(map(_picked, strata, indices)))

    values = [statistic(draw()) for _ in range(DRAWS)]
    low, high = np.quantile(values, widened(least, units - len(strata)))
    return Estimate(value, float(low), float(high), units, kind_of(kind), drawn)


def widened(fewest: int, degrees: int) -> tuple[float, float]:
    """The two quantiles of draws that are the ends of a 95 % interval of few samples (`resampled`).

    fewest: units of the smallest group, at least 2. degrees: of freedom, of Student's t.
    """
    tail = float(stats.norm.sf(math.sqrt(fewest / (fewest - 1)) * stats.t.isf((1 - LEVEL) / 2, degrees)))
    return tail, 1 - tail


def mean(
    values: Sequence[float],
    kind: Any,
    groups: Sequence[Any] | None = None,
    seed: int = 0,
    *,
    drawn: str,
    clusters: Sequence[Any] | None = None,
) -> Estimate:
    """The mean of the groups' means. values: one a sample; groups: its task; drawn, clusters: as in `resampled`."""
    sample = np.asarray(values, dtype=float)
    strata = _strata(groups, len(sample))
    group = np.empty(len(sample), dtype=int)
    for label, rows in enumerate(strata):
        group[rows] = label

    def mean_of_means(rows: np.ndarray) -> float:
        sums = np.bincount(group[rows], sample[rows], len(strata))
        return float(np.mean(sums / np.bincount(group[rows], minlength=len(strata))))

    return resampled(mean_of_means, len(sample), kind, groups, seed, drawn=drawn, clusters=clusters)


def ratio(
    values: Sequence[float],
    over: Sequence[float],
    kind: Any,
    groups: Sequence[Any] | None = None,
    seed: int = 0,
    *,
    drawn: str,
) -> Estimate:
    """Geometric mean of values over their partners, paired by sample; groups weigh the same."""
    pairs = np.asarray(values, dtype=float), np.asarray(over, dtype=float)
    if min(part.min() for part in pairs) <= 0:
        raise ValueError("A ratio needs values above 0.")
    logs = mean(np.log(pairs[0] / pairs[1]).tolist(), kind, groups, seed, drawn=drawn)
    return replace(logs, value=math.exp(logs.value), low=math.exp(logs.low), high=math.exp(logs.high))


def share(k: int, n: int, kind: Any, *, drawn: str) -> Estimate:
    """The share k of n independent units, with Wilson's interval."""
    ends = stats.binomtest(int(k), int(n)).proportion_ci(LEVEL, method="wilson")
    return Estimate(k / n, float(ends.low), float(ends.high), int(n), kind_of(kind), drawn)


def spread(values: Sequence[float], kind: Any, *, drawn: str) -> Estimate:
    """The median of a few runs with the least and the greatest of them, which are a range and no interval."""
    sample = np.asarray(values, dtype=float)
    least, middle, most = np.quantile(sample, [0, 0.5, 1])
    return Estimate(float(middle), float(least), float(most), len(sample), kind_of(kind), drawn, "range")


def _members(rows: np.ndarray, clusters: Sequence[Any] | None) -> np.ndarray | list[np.ndarray]:
    """The positions of each cluster among these; the positions themselves where there are no clusters."""
    if clusters is None:
        return rows
    members: dict[Any, list[int]] = {}
    for row in rows:
        members.setdefault(clusters[row], []).append(int(row))
    return [np.array(positions) for positions in members.values()]


def _picked(members: np.ndarray | list[np.ndarray], indices: np.ndarray) -> np.ndarray:
    """The positions of the members at these indices, some of them repeatedly."""
    if isinstance(members, np.ndarray):
        return members[indices]
    return np.concatenate([members[index] for index in indices])


def _strata(groups: Sequence[Any] | None, n: int) -> list[np.ndarray]:
    """Positions of each group's samples."""
    labels = np.zeros(n) if groups is None else np.asarray(groups)
    if n == 0 or len(labels) != n:
        raise ValueError(f"An estimate needs samples, each in a group: {n} samples, {len(labels)} labels.")
    return [np.flatnonzero(labels == label) for label in dict.fromkeys(labels.tolist())]
