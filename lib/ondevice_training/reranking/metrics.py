"""Metrics of a ranking: nDCG, precision, correlation of two orders. Ties count against the ranker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class MeanAndError:
    """A mean over queries and its standard error."""

    mean: float
    error: float

    @classmethod
    def from_values(cls, values: Sequence[float] | np.ndarray) -> MeanAndError:
        """From one value a query; the error is the sample's standard deviation over sqrt(n)."""
        sample = np.asarray(values, dtype=float)
        if not len(sample):
            raise ValueError("There are no queries to average over.")
        error = sample.std(ddof=1) / len(sample) ** 0.5 if len(sample) > 1 else float("nan")
        return cls(float(sample.mean()), float(error))


def ranked(scores: np.ndarray, relevant: np.ndarray) -> np.ndarray:
    """[n] bool: relevance in falling order of scores [n]; of equal scores the irrelevant come first.

    Raises ValueError on a score that is not a number.
    """
    if not np.isfinite(scores).all():
        raise ValueError("A score is not a finite number.")
    return relevant[np.lexsort((relevant, -scores))]


def ndcg(order: np.ndarray, k: int = 10) -> float:
    """nDCG@k, in [0, 1], of relevance [n] in the ranker's order; the ideal order has all relevant first."""
    gains = 1 / np.log2(np.arange(2, len(order) + 2))
    ideal = gains[: min(k, int(order.sum()))].sum()
    if ideal == 0:
        raise ValueError("A ranking without a relevant candidate has no nDCG.")
    return float((gains * order)[:k].sum() / ideal)


def precision(order: np.ndarray, k: int) -> float:
    """Share of the first k that are relevant."""
    return float(order[:k].sum() / k)


def correlations(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Spearman's rho and Kendall's tau-b of two scorings [n] of the same candidates; 0 where one is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0, 0.0
    return float(stats.spearmanr(first, second).statistic), float(stats.kendalltau(first, second).statistic)
