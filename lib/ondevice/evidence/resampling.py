"""Means over prompts and their intervals, of many methods at once, paired by prompt and by task."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from ondevice.evidence.estimates import DRAWS, Estimate, born, derived, kind_of


def rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spearman's rank correlation of each row of two arrays [n, m]; 0 where all values of one side are equal."""
    x, y = (rankdata(side, axis=1) - (side.shape[1] + 1) / 2 for side in (first, second))
    return (x * y).sum(axis=1) / np.sqrt(np.maximum((x**2).sum(axis=1) * (y**2).sum(axis=1), 1e-9))


def interval(draws: NDArray[np.float64], n: int, kind: str, drawn: str) -> Estimate:
    """The first of draws [1 + DRAWS], with the interval that holds 95 % of the others that are numbers.

    n, drawn: how many independent units were drawn, and what they are.
    """
    low, high = np.nanquantile(draws[1:], [0.025, 0.975])
    return Estimate(float(draws[0]), float(min(low, draws[0])), float(max(high, draws[0])), n, kind, drawn)


def median_interval(samples: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(median, low, high) over the first axis of [n, ...], with 95 % by ranks: n / 2 less and plus 0.98 sqrt(n)."""
    ordered = np.sort(np.asarray(samples, dtype=float), axis=0)
    n = len(ordered)
    reach = 0.98 * n**0.5
    return np.median(ordered, axis=0), ordered[max(0, int(n / 2 - reach))], ordered[min(n - 1, int(n / 2 + reach))]


@dataclass(frozen=True)
class Resampled:
    """Means over prompts: values [1 + DRAWS, tasks, names], first of the recorded prompts, then of draws of them.

    A draw takes each task's prompts with replacement, the same ones for every name, so names are compared in pairs.
    """

    tasks: Sequence[str]
    names: Sequence[str]
    values: NDArray[np.float64]
    n: int
    kind: str
    fewest: int = 2  # prompts of a task; of one nothing can be drawn, so intervals have no ends
    drawn: str = "prompts"

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """The means of one name: [1 + DRAWS, tasks]."""
        return self.values[:, :, list(self.names).index(name)]

    def over(self, other: Resampled) -> Resampled:
        """Means over means: sums over sums, as both have the same prompts."""
        return replace(self, values=self.values / other.values)

    def ratios(self, pairs: Mapping[str, tuple[str, str]]) -> Resampled:
        """Each pair's first name over its second one, under a new name. pairs: by that name."""
        values = np.stack([self[over] / self[under] for over, under in pairs.values()], axis=2)
        return replace(self, names=list(pairs), values=values)

    def against(self, name: str) -> Resampled:
        """The name's means over each other name's: of latencies, the speed-up over it."""
        return self.ratios({other: (name, other) for other in self.names})

    def estimate(self, draws: NDArray[np.float64]) -> Estimate:
        """The first of draws [1 + DRAWS], with the interval that holds 95 % of the others."""
        low, high = np.quantile(draws[1:], [0.025, 0.975]) if self.fewest > 1 else (-np.inf, np.inf)
        ends = float(min(low, draws[0])), float(max(high, draws[0]))
        return Estimate(float(draws[0]), *ends, self.n, self.kind, self.drawn)

    def table(self, column: str) -> pd.DataFrame:
        """The means as a table: name, task, `column`, low, high; the task `average` is the mean over the tasks."""
        rows = []
        for name in self.names:
            for task, draws in [*zip(self.tasks, self[name].T, strict=True), ("average", self[name].mean(axis=1))]:
                part = self.estimate(draws)
                rows.append((name, task, part.value, part.low, part.high))
        return born(pd.DataFrame(rows, columns=["name", "task", column, "low", "high"]), self.kind)

    def averages(self, column: str, labels: Mapping[str, Sequence[object]] | None = None, *names: str) -> pd.DataFrame:
        """`table` of the average alone; labels: by name what stands in columns `names` in its place, in this order."""
        parts = {name: self.estimate(self[name].mean(axis=1)) for name in self.names}
        rows = [(name, part.value, part.low, part.high) for name, part in parts.items()]
        averages = pd.DataFrame(rows, columns=["name", column, "low", "high"]).set_index("name")
        if labels is None:
            return derived(averages.reset_index(), self.kind)
        labelled = pd.DataFrame(list(labels.values()), index=list(labels), columns=list(names))
        return derived(labelled.join(averages, how="inner").reset_index(drop=True), self.kind)


def resample(
    table: pd.DataFrame, column: str, seed: int = 0, names: Collection[str] = (), drawn: str = "prompts"
) -> Resampled:
    """`column` of a table with task, request and method; prompts that lack one of the names (all) are left out.

    drawn: what a request is, in the plural. A request's rows of one method count as their mean.
    """
    table = table[table["method"].isin(names)] if names else table
    wide = table.pivot_table(index=["task", "request"], columns="method", values=column, sort=False).dropna()
    random = np.random.default_rng(seed)
    groups = {str(task): prompts.to_numpy() for task, prompts in wide.groupby("task", sort=False)}
    means = []
    for values in groups.values():
        weights = random.multinomial(len(values), np.full(len(values), 1 / len(values)), DRAWS) / len(values)
        means.append(np.concatenate([values.mean(axis=0, keepdims=True), weights @ values]))
    fewest = min(map(len, groups.values()))
    return Resampled(
        list(groups), list(wide.columns), np.stack(means, axis=1), len(wide), kind_of(table), fewest, drawn
    )
