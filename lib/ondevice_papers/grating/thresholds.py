"""The dispersion threshold for a precision target (section 4.1), from validation pools.

The paper asks for the lowest threshold that meets the target. Precision need not fall with the threshold, so ours is
the lowest such that every higher one meets the target, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ondevice_papers.grating.clustering import Floats
from ondevice_papers.grating.pools import Pool, measured, sweep
from ondevice_papers.grating.pruning import Rule, cluster_rule

# Falling: infinity never prunes, 0 clusters after every layer.
THRESHOLDS: tuple[float, ...] = (np.inf, *np.geomspace(4, 0.004, 48).tolist(), 0.002, 0.001, 0.0)


def lowest(thresholds: Sequence[float], values: Sequence[float], target: float) -> float:
    """The lowest of falling thresholds such that it and all higher ones meet the target.

    values: of each threshold, such as the mean Precision@K. Raises ValueError where not even the highest one does.
    """
    missed = np.flatnonzero(np.asarray(values) < target - 1e-12)
    last = (missed[0] if len(missed) else len(values)) - 1
    if last < 0:
        raise ValueError(f"Without pruning it is {values[0]:.4f}: no threshold reaches {target:.4f}.")
    return thresholds[last]


def curve(
    pools: Sequence[Pool],
    k: int,
    rule: Callable[[float], Rule] = cluster_rule,
    exact_order: bool = False,
    thresholds: Sequence[float] = THRESHOLDS,
) -> dict[str, Floats]:
    """What the paper's rule does at each threshold: saved, precision, full, overlap, each [thresholds, pools]."""
    of_pools = [
        [measured(pool, k, outcome) for outcome in sweep(pool, k, rule, thresholds, exact_order)] for pool in pools
    ]
    names = ("saved", "precision", "full", "overlap")
    return {name: np.array([[getattr(cell, name) for cell in row] for row in of_pools]).T for name in names}
