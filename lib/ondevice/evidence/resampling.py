"""Means over prompts and their intervals, of many methods at once, paired by prompt and by task."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from ondevice.evidence.estimates import DRAWS, Estimate, born, derived, kind_of


def rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spearman's, of each row of [n, m]; 0 where all values of one side are equal."""
    x, y = (rankdata(side, axis=1) - (side.shape[1] + 1) / 2 for side in (first, second))
    return (x * y).sum(axis=1) / np.sqrt(np.maximum((x**2).sum(axis=1) * (y**2).sum(axis=1), 1e-9))


def interval(draws: NDArray[np.float64], n: int, kind: str) -> Estimate:
    """The first of draws [1 + DRAWS], with 95 % of the others; those that are no number are left out."""
    low, high = np.nanquantile(draws[1:], [0.025, 0.975])
    return Estimate(float(draws[0]), float(min(low, draws[0])), float(max(high, draws[0])), n, kind)


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
    fewest: int = 2  # prompts of a task; of one nothing can be drawn, so that intervals have no ends

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """[1 + DRAWS, tasks]."""
        return self.values[:, :, list(self.names).index(name)]

    def over(self, other: Resampled) -> Resampled:
        """Means over means: sums over sums, as both have the same prompts."""
        return replace(self, values=self.values / other.values)

    def ratios(self, pairs: Mapping[str, tuple[str, str]]) -> Resampled:
        """By a new name the first of each pair over the second."""
        values = np.stack([self[over] / self[under] for over, under in pairs.values()], axis=2)
        return replace(self, names=list(pairs), values=values)

    def against(self, name: str) -> Resampled:
        """The name's means over each one's: of latencies, the speed-up over it."""
        return self.ratios({other: (name, other) for other in self.names})

    def estimate(self, of: NDArray[np.float64]) -> Estimate:
        """The first of `of` [1 + DRAWS], with 95 % of the others."""
        low, high = np.quantile(of[1:], [0.025, 0.975]) if self.fewest > 1 else (-np.inf, np.inf)
        return Estimate(float(of[0]), float(min(low, of[0])), float(max(high, of[0])), self.n, self.kind)

    def table(self, column: str) -> pd.DataFrame:
        """name, task, `column`, low, high; the task `average` is the mean over the tasks."""
        rows = []
        for name in self.names:
            for task, of in [*zip(self.tasks, self[name].T, strict=True), ("average", self[name].mean(axis=1))]:
                part = self.estimate(of)
                rows.append((name, task, part.value, part.low, part.high))
        return born(pd.DataFrame(rows, columns=["name", "task", column, "low", "high"]), self.kind)

    def averages(self, column: str, labels: Mapping[str, Sequence[object]] | None = None, *names: str) -> pd.DataFrame:
        """`table` of the average alone; labels: by name what stands in columns `names` in its place, in this order."""
        found = self.table(column).query("task == 'average'").drop(columns="task").set_index("name")
        if labels is None:
            return derived(found.reset_index(), self.kind)
        told = pd.DataFrame(list(labels.values()), index=list(labels), columns=list(names))
        return derived(told.join(found, how="inner").reset_index(drop=True), self.kind)


def resample(table: pd.DataFrame, column: str, seed: int = 0, names: Collection[str] = ()) -> Resampled:
    """`column` of a table with task, request and method; prompts that lack one of the names (all) are left out."""
    table = table[table["method"].isin(names)] if names else table
    wide = table.pivot_table(index=["task", "request"], columns="method", values=column, sort=False).dropna()
    random = np.random.default_rng(seed)
    groups = {str(task): mine.to_numpy() for task, mine in wide.groupby("task", sort=False)}
    means = []
    for values in groups.values():
        drawn = random.multinomial(len(values), np.full(len(values), 1 / len(values)), DRAWS) / len(values)
        means.append(np.concatenate([values.mean(axis=0, keepdims=True), drawn @ values]))
    fewest = min(map(len, groups.values()))
    return Resampled(list(groups), list(wide.columns), np.stack(means, axis=1), len(wide), kind_of(table), fewest)
