"""Linear probes, beyond the paper: what a layer's hidden state says of the final score, where the head says little.

Most rerankers' head was trained for the last layer. A probe is d numbers and an intercept a layer, fitted to predict
the final score from the state that the head reads. The model stays as it is; at run time a probe costs one product of
d numbers a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ondevice_papers.grating.clustering import Floats
from ondevice_papers.grating.margins import gaps

PENALTIES: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of each column's sum of squares


@dataclass(frozen=True)
class Probes:
    """Scores of candidates after every layer but the last.

    weights: [L - 1, d], of states divided by their root mean square. intercepts: [L - 1]. A score is the predicted
    final logit, up to a constant of the pool. queries: checksums of the list whose first part
    (`margins.parts`) they were fitted on, in its order, where it is known.
    Raises ValueError on other shapes, and on numbers that are not finite.
    """

    weights: NDArray[np.float32]
    intercepts: NDArray[np.float32]
    queries: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("weights", "intercepts"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.float32))
        object.__setattr__(self, "queries", tuple(self.queries))
        if self.weights.ndim != 2 or self.intercepts.shape != self.weights.shape[:1]:
            shapes = f"{self.weights.shape} and {self.intercepts.shape}"
            raise ValueError(f"Weights of probes are [L - 1, d] and intercepts [L - 1], not {shapes}.")
        if not (np.isfinite(self.weights).all() and np.isfinite(self.intercepts).all()):
            raise ValueError("A probe has a number that is not finite.")

    def require(self, layers: int, width: int) -> None:
        """Raise ValueError unless they are for a model of so many layers and such a width."""
        if self.weights.shape != (layers - 1, width):
            own = f"{len(self.weights) + 1} layers of width {self.weights.shape[1]}"
            raise ValueError(f"The probes are for {own}, not for {layers} layers of width {width}.")

    def scores(self, layer: int, states: Tensor) -> Tensor:
        """[n] scores, in float32. states: [n, d] what the head would read after this layer, 1 to L - 1."""
        return scaled(states) @ torch.from_numpy(self.weights[layer - 1]) + float(self.intercepts[layer - 1])


def rounded(probes: Probes) -> Probes:
    """With weights as they are recorded, of float16's precision."""
    return Probes(probes.weights.astype(np.float16), probes.intercepts)


def scaled(states: Tensor) -> Tensor:
    """States [..., d] divided by their root mean square, in float32: a final norm without its gains."""
    wide = states.float()
    return wide / wide.square().mean(-1, keepdim=True).clamp_min(1e-12).sqrt()


# Fitting


def fit(
    states: Sequence[Floats],
    final: Sequence[Floats],
    k: int,
    folds: int = 4,
    seed: int = 0,
    ridge: Callable[..., Floats] | None = None,
) -> Probes:
    """Fit probes by weighted ridge regression, each layer's penalty chosen on pools that are held out.

    states: of each pool [L - 1, N, d], what the head would read after each layer. final: of each pool [N], scores after
    the last. Pools may have different numbers N of candidates, more than K each. A pool's constant is left out on both
    sides. Candidates near the boundary of the top K weigh most, as in `margins.fit`. ridge: the regression.
    Raises ValueError on fewer pools than folds, and pools of K or fewer candidates.
    """
    wanted = [np.asarray(scores, np.float64) for scores in final]
    if len(wanted) < folds or not 1 <= k < min(map(len, wanted)):
        raise ValueError(f"Probes for K = {k} need {folds} pools of more candidates, not {len(wanted)}.")
    nearness = _nearness(wanted, k)
    centred = [scores - scores.mean() for scores in wanted]
    parts = np.array_split(np.random.default_rng(seed).permutation(len(wanted)), folds)
    weights = []
    intercepts = []
    for layer in range(len(states[0])):
        x = [scaled(torch.from_numpy(np.asarray(pool[layer], np.float32))).double().numpy() for pool in states]
        row = (ridge or best_ridge)([rows - rows.mean(0) for rows in x], centred, nearness, parts)
        weights.append(row)
        intercepts.append(np.concatenate(wanted).mean() - np.concatenate(x).mean(0) @ row)
    return Probes(np.array(weights), np.array(intercepts))


def predicted(probes: Probes, states: ArrayLike) -> Floats:
    """[L - 1, N] scores of a pool. states: [L - 1, N, d]."""
    scores = [probes.scores(layer, torch.from_numpy(rows)) for layer, rows in enumerate(np.asarray(states), 1)]
    return torch.stack(scores).double().numpy()


def cross_fitted(
    states: Sequence[Floats], final: Sequence[Floats], k: int, folds: int = 4, seed: int = 1
) -> list[Floats]:
    """Of each pool [L - 1, N] scores by probes that were fitted on other pools; arguments as of `fit`."""
    scores = dict[int, Floats]()
    parts = np.array_split(np.random.default_rng(seed).permutation(len(states)), folds)
    for part in parts:
        rest = np.setdiff1d(np.arange(len(states)), part)
        fitted = rounded(fit([states[number] for number in rest], [final[number] for number in rest], k))
        scores |= {int(number): predicted(fitted, states[number]) for number in part}
    return [scores[number] for number in range(len(states))]


def _nearness(final: Sequence[Floats], k: int) -> list[Floats]:
    """Of each pool [N] weights: 1 at the boundary, a half one standard deviation from it."""
    spread = max(np.concatenate([scores - scores.mean() for scores in final]).std(), 1e-12)
    return [1 / (1 + (gaps(scores, k) / spread) ** 2) for scores in final]


def best_ridge(
    x: Sequence[Floats], y: Sequence[Floats], weights: Sequence[Floats], parts: Sequence[NDArray[np.int64]]
) -> Floats:
    """[d] coefficients of y on x, weighted; the penalty with the least error on pools that are held out.

    x: of each pool [N, d]. y, weights: of each pool [N]. parts: the pools that are held out together.
    """
    squares = []
    products = []
    for part in parts:
        rows, wanted, nearness = (np.concatenate([values[pool] for pool in part]) for values in (x, y, weights))
        weighted = nearness[:, None] * rows
        squares.append(weighted.T @ rows)
        products.append(weighted.T @ wanted)
    square = np.sum(squares, 0)
    product = np.sum(products, 0)

    def error(penalty: float) -> float:  # on held-out parts, up to a constant
        total = 0.0
        for own_square, own_product in zip(squares, products, strict=True):
            row = ridge_solution(square - own_square, product - own_product, penalty)
            total += float(row @ own_square @ row - 2 * row @ own_product)
        return total

    return ridge_solution(square, product, min(PENALTIES, key=error))


def ridge_solution(square: Floats, product: Floats, penalty: float) -> Floats:
    return np.asarray(np.linalg.solve(square + np.diag(penalty * square.diagonal() + 1e-9), product), np.float64)
