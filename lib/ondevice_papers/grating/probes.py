"""Linear probes, beyond the paper: what a layer's hidden state says of the final score, where the head says little.

Most rerankers' head was trained for the last layer. A probe is d numbers and an intercept a layer, fitted to predict
the final score from the state that the head reads. The model stays as it is; at run time a probe costs one product of
d numbers a candidate. data/models has those of the bundled rerankers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ondevice import models
from ondevice_papers.grating.clustering import Floats
from ondevice_papers.grating.margins import gaps

PENALTIES: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of each column's sum of squares


@dataclass(frozen=True)
class Probes:
    """Scores of candidates after every layer but the last.

    weights: [L - 1, d], of states divided by their root mean square. intercepts: [L - 1]. A score is the predicted
    final logit, up to a constant of the pool.
    Raises ValueError on other shapes, and on numbers that are not finite.
    """

    weights: NDArray[np.float32]
    intercepts: NDArray[np.float32]

    def __post_init__(self) -> None:
        for name in ("weights", "intercepts"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.float32))
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


def load(model: str) -> Probes:
    """The probes of a bundled reranker. Raises ValueError where there are none."""
    arrays = models.load_arrays("probes")
    if f"{model}.weights" not in arrays:
        others = sorted(name.removesuffix(".weights") for name in arrays if name.endswith(".weights"))
        raise ValueError(f"There are no probes of {model}; there are of {', '.join(others)}.")
    return Probes(arrays[f"{model}.weights"], arrays[f"{model}.intercepts"])


def rounded(probes: Probes) -> Probes:
    """With weights as they are recorded, of float16's precision."""
    return Probes(probes.weights.astype(np.float16), probes.intercepts)


def scaled(states: Tensor) -> Tensor:
    """States [..., d] divided by their root mean square, in float32: a final norm without its gains."""
    wide = states.float()
    return wide / wide.square().mean(-1, keepdim=True).clamp_min(1e-12).sqrt()


# Fitting


def fit(
    states: ArrayLike, final: ArrayLike, k: int, folds: int = 4, seed: int = 0,
    ridge: Callable[..., Floats] | None = None,
) -> Probes:  # fmt: skip
    """Fit probes by weighted ridge regression, each layer's penalty chosen on pools that are held out.

    states: [pools, L - 1, N, d] what the head would read after each layer. final: [pools, N] scores after the last.
    A pool's constant is left out on both sides. Candidates near the boundary of the top K weigh most, as in
    `margins.fit`. ridge: the regression. Raises ValueError on fewer pools than folds, and pools of K or fewer
    candidates.
    """
    given = np.asarray(states)
    wanted = np.asarray(final, np.float64)
    if len(given) < folds or not 1 <= k < given.shape[2]:
        raise ValueError(f"Probes for K = {k} need {folds} pools of more candidates, not {len(given)}.")
    nearness = _nearness(wanted, k)
    centred = wanted - wanted.mean(1, keepdims=True)
    parts = np.array_split(np.random.default_rng(seed).permutation(len(given)), folds)
    weights = []
    intercepts = []
    for layer in range(given.shape[1]):
        x = scaled(torch.from_numpy(given[:, layer].astype(np.float32))).double().numpy()
        row = (ridge or best_ridge)(x - x.mean(1, keepdims=True), centred, nearness, parts)
        weights.append(row)
        intercepts.append(wanted.mean() - (x @ row).mean())
    return Probes(np.array(weights), np.array(intercepts))


def predicted(probes: Probes, states: ArrayLike) -> Floats:
    """[pools, L - 1, N] scores. states: [pools, L - 1, N, d]."""
    given = np.asarray(states)
    layers = [probes.scores(layer + 1, torch.from_numpy(given[:, layer])).numpy() for layer in range(given.shape[1])]
    return np.stack(layers, 1).astype(np.float64)


def cross_fitted(states: ArrayLike, final: ArrayLike, k: int, folds: int = 4, seed: int = 1) -> Floats:
    """[pools, L - 1, N] scores of each pool by probes that were fitted on others; arguments as of `fit`."""
    given = np.asarray(states)
    wanted = np.asarray(final, np.float64)
    scores = np.full(given.shape[:3], np.nan)
    for part in np.array_split(np.random.default_rng(seed).permutation(len(given)), folds):
        rest = np.setdiff1d(np.arange(len(given)), part)
        scores[part] = predicted(rounded(fit(given[rest], wanted[rest], k)), given[part])
    return scores


def _nearness(final: Floats, k: int) -> Floats:
    """[pools, N] weights: 1 at the boundary, a half one standard deviation from it."""
    spread = max((final - final.mean(1, keepdims=True)).std(), 1e-12)
    return 1 / (1 + (np.stack([gaps(scores, k) for scores in final]) / spread) ** 2)


def best_ridge(x: Floats, y: Floats, weights: Floats, parts: Sequence[NDArray[np.int64]]) -> Floats:
    """[d] coefficients of y [pools, N] on x [pools, N, d], weighted; the penalty with the least held-out error."""
    squares = []
    products = []
    for part in parts:
        rows = x[part].reshape(-1, x.shape[2])
        weighted = (weights[part, :, None] * x[part]).reshape(-1, x.shape[2])
        squares.append(weighted.T @ rows)
        products.append(weighted.T @ y[part].ravel())
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
