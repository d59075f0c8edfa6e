"""Means over prompts that several models answer: a draw takes the same prompts for all models, so n counts one once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ondevice.evidence import Estimate, kind_of
from ondevice.evidence.estimates import widened
from ondevice.evidence.resampling import DRAWS, Resampled


@dataclass(frozen=True)
class OfPrompts(Resampled):
    """A sample that knows its prompts. prompts: the labels of each task's, in the order of `tasks`."""

    prompts: tuple[frozenset[str], ...] = ()

    def only(self, columns: Sequence[int]) -> OfPrompts:
        """The sample of these tasks alone; n counts their prompts. columns: positions in `tasks`."""
        prompts = tuple(self.prompts[column] for column in columns)
        return replace(
            self,
            tasks=[self.tasks[column] for column in columns],
            values=self.values[:, columns],
            n=distinct(prompts),
            fewest=min(map(len, prompts)),
            prompts=prompts,
        )

    def estimate(self, draws: NDArray[np.float64]) -> Estimate:
        """The first of draws [1 + DRAWS], with an interval that is widened for few prompts, as in `resampled`."""
        plain = super().estimate(draws)
        if self.fewest < 2:
            return plain
        ends = widened(self.fewest, max(1, self.n - len(set(self.prompts))))
        low, high = np.quantile(draws[1:], ends).tolist()
        return replace(plain, low=min(low, plain.value), high=max(high, plain.value))


def distinct(prompts: Collection[frozenset[str]]) -> int:
    """How many different prompts there are."""
    return len(frozenset[str]().union(*prompts))


def resample_models(
    table: pd.DataFrame, column: str, seed: int = 0, names: Collection[str] = ()
) -> dict[str, OfPrompts]:
    """By model, `resample` of its rows: `column` of a table with model, task, request and method.

    A request has one label, whoever answers. Each draw is of the requests that at least one model answered by all
    names; a model's mean is over those of them that it answered.
    """
    table = table[table["method"].isin(names)] if names else table
    models: dict[str, pd.DataFrame] = {
        str(model): rows.pivot_table(index=["task", "request"], columns="method", values=column, sort=False).dropna()
        for model, rows in table.groupby("model", sort=False)
    }
    random = np.random.default_rng(seed)
    tasks = list(dict.fromkeys(task for wide in models.values() for task in wide.index.get_level_values(0)))
    means: dict[str, list[np.ndarray]] = {model: [] for model in models}
    prompts: dict[str, list[frozenset[str]]] = {model: [] for model in models}
    for task in tasks:
        rows = {model: wide.loc[task] for model, wide in models.items() if task in wide.index}
        labels = pd.Index(list(dict.fromkeys(label for wide in rows.values() for label in wide.index)))
        drawn = random.multinomial(len(labels), np.full(len(labels), 1 / len(labels)), DRAWS)
        weights = np.vstack([np.ones(len(labels)), drawn])
        for model, wide in rows.items():
            own = weights[:, labels.get_indexer(wide.index)]
            own[own.sum(axis=1) == 0] = 1  # a draw without any of a model's few prompts takes all of them
            means[model].append(own @ wide.to_numpy() / own.sum(axis=1, keepdims=True))
            prompts[model].append(frozenset(f"{task} {label}" for label in wide.index))
    return {
        model: OfPrompts(
            tasks=[task for task in tasks if task in wide.index],
            names=list(wide.columns),
            values=np.stack(means[model], axis=1),
            n=len(wide),
            kind=kind_of(table),
            fewest=min(map(len, prompts[model])),
            prompts=tuple(prompts[model]),
        )
        for model, wide in models.items()
    }
