"""Exact k-means on a line by dynamic programming, in place of the paper's K-means (section 4.1).

Optimal clusters of numbers are intervals, so the best partition of the first j values ends with one interval after the
best partition of what is before it. No seed, no restarts, no iterations, and the same clusters on every run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BLOCK = 2**17  # costs held at once, so that 10,000 candidates need no [n, n] table


def kmeans(values: ArrayLike, k: int) -> NDArray[np.int64]:
    """Labels [n] of the partition of values [n] with the least sum of squares; 0 is the cluster of the highest.

    There are min(k, distinct values) clusters, and equal values share one. O(k d^2) time for d distinct values.
    Raises ValueError on k below 1, and on values that are empty, not finite or not one-dimensional.
    """
    given = np.asarray(values, np.float64)
    if given.ndim != 1 or not len(given) or not np.isfinite(given).all():
        raise ValueError(f"Clustering needs a list of finite numbers, not {given} of shape {given.shape}.")
    if k < 1:
        raise ValueError(f"There is at least one cluster, not {k}.")
    distinct, inverse, counts = np.unique(-given, return_inverse=True, return_counts=True)
    starts = _starts(distinct - distinct.mean(), counts, min(k, len(distinct)))
    return np.searchsorted(starts, inverse, side="right").astype(np.int64) - 1


def sum_of_squares(values: ArrayLike, labels: ArrayLike) -> float:
    """Sum over clusters of the squared distances to the cluster's mean: what k-means minimises."""
    given, found = np.asarray(values, np.float64), np.asarray(labels)
    return float(sum(((part - part.mean()) ** 2).sum() for part in (given[found == one] for one in np.unique(found))))


def _starts(values: NDArray[np.float64], counts: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Where each of the k clusters begins. values: [d] sorted and distinct; counts: how often each is there."""
    weights, sums, squares = (
        np.concatenate([[0.0], np.cumsum(counts * values**power)]) for power in (0, 1, 2)
    )  # fmt: skip

    def costs(first: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.float64]:
        weight, total = weights[end] - weights[first], sums[end] - sums[first]
        return squares[end] - squares[first] - total**2 / weight

    d = len(values)
    ends = np.arange(1, d + 1)
    best = np.concatenate([[np.inf], costs(np.zeros_like(ends), ends)])  # of the first j values in one cluster
    origins = []
    for clusters in range(2, k + 1):
        ends = np.array([d]) if clusters == k else np.arange(clusters, d + 1)  # the last cluster ends at the end
        following, origin = np.full(d + 1, np.inf), np.zeros(d + 1, np.int64)
        step = max(1, _BLOCK // d)
        for block in (ends[start : start + step] for start in range(0, len(ends), step)):
            firsts = np.arange(clusters - 1, block[-1])
            inside = firsts[None, :] < block[:, None]
            totals = best[firsts] + costs(np.minimum(firsts, block[:, None] - 1), block[:, None])
            totals[~inside] = np.inf
            chosen = totals.argmin(1)
            origin[block], following[block] = firsts[chosen], totals[np.arange(len(block)), chosen]
        best = following
        origins.append(origin)
    starts = [d]
    for origin in reversed(origins):
        starts.append(int(origin[starts[-1]]))
    return np.array([0, *starts[:0:-1]])
