"""Exact k-means on a line by dynamic programming, in place of the paper's K-means (section 4.1).

Optimal clusters of numbers are intervals, so the best partition of the first j values ends with one interval after the
best partition of what is before it. No seed, no restarts, no iterations, and the same clusters on every run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def kmeans(values: Floats, k: int) -> NDArray[np.int64]:
    """Clusters [n] of values [n] with the least sum of squares; 0 is the cluster of the highest values.

    There are min(k, distinct values) clusters, and equal values share one. O(k d^2) time and O(d^2) memory
    for d distinct values.
    """
    x, inverse, counts = np.unique(-values, return_inverse=True, return_counts=True)
    weight, total, squares = (np.append(0, np.cumsum(counts * (x - x.mean()) ** power)) for power in (0, 1, 2))
    first, end = np.ogrid[: len(x) + 1, : len(x) + 1]
    with np.errstate(divide="ignore", invalid="ignore"):  # no cluster is empty
        about_mean = squares[end] - squares[first] - (total[end] - total[first]) ** 2 / (weight[end] - weight[first])
    cost = np.where(first < end, about_mean, np.inf)  # of the cluster x[first:end]: the sum of squares about its mean

    best = cost[0]  # of the first values in one cluster, by how many they are
    origins = []
    for _ in range(1, min(k, len(x))):
        totals = best[:, None] + cost  # the last cluster begins at `first`
        best = totals.min(0)
        origins.append(totals.argmin(0))
    starts = [len(x)]
    for origin in reversed(origins):
        starts.append(int(origin[starts[-1]]))
    return np.searchsorted(starts[:0:-1], inverse, side="right").astype(np.int64)
