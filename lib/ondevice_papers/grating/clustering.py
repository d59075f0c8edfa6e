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

    There are min(k, distinct values) clusters, and equal values share one. O(k d^2) time for d distinct values.
    """
    x, inverse, counts = np.unique(-values, return_inverse=True, return_counts=True)
    weight, total, squares = (np.append(0, np.cumsum(counts * (x - x.mean()) ** power)) for power in (0, 1, 2))

    def cost(first: NDArray[np.int64], end: int) -> Floats:
        """Of clusters x[first:end]: the sum of squares about the mean."""
        return squares[end] - squares[first] - (total[end] - total[first]) ** 2 / (weight[end] - weight[first])

    d = len(x)
    origins = []
    best = np.append(np.inf, squares[1:] - total[1:] ** 2 / weight[1:])  # of the first j values in one cluster
    for clusters in range(2, min(k, d) + 1):
        following = np.full(d + 1, np.inf)
        origin = np.zeros(d + 1, np.int64)
        for end in range(d if clusters == min(k, d) else clusters, d + 1):
            first = np.arange(clusters - 1, end)  # where the last cluster can begin
            totals = best[first] + cost(first, end)
            following[end] = totals.min()
            origin[end] = first[totals.argmin()]
        best = following
        origins.append(origin)
    starts = [d]
    for origin in reversed(origins):
        starts.append(int(origin[starts[-1]]))
    return np.searchsorted(starts[:0:-1], inverse, side="right").astype(np.int64)
