"""Pruning with a promise, beyond the paper: "recall of the top K at least 0.98, with 95 % confidence".

1. A model of errors, fitted on some validation pools. After layer l the final score is predicted from the l provisional
   ones, and the chance that a candidate is on the wrong side of the boundary from how far its prediction is from it.
2. A family of rules: accept or drop where that chance is below c, that is, where the prediction is further than a
   margin m_l(c) from the boundary. c orders the family from safe to aggressive.
3. A certificate from the other pools: learn-then-test, with a test that is exact in finite samples. A wrong model of
   errors costs savings, never the promise.

Recall is of the full model's top K, its mean over pools. Pools, not candidates, are drawn independently: a promise for
pools of another kind than the validation's does not follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice_papers.grating.clustering import Floats
from ondevice_papers.grating.pools import Pool, measure, validation
from ondevice_papers.grating.pruning import ACCEPT, DEFER, DROP, Verdicts, expit, ranking

CHANCES: tuple[float, ...] = tuple(np.geomspace(1e-4, 0.45, 40).tolist())  # fixed: not from the pools that certify
FITTED = 0.25  # share of the pools that the model of errors is fitted on
_RIDGE = 1e-3  # of each column's sum of squares
_STEPS = 50  # of Newton's method, at most


def gaps(scores: Floats, slots: int) -> Floats:
    """[n] signed distances to the boundary: above the best outside the K, or (negative) below the K-th."""
    order = ranking(scores)
    distances = scores - scores[order[slots - 1]]
    distances[order[:slots]] = scores[order[:slots]] - scores[order[slots]]
    return distances


@dataclass(frozen=True)
class MarginRule:
    """Accept or drop those whose predicted final score is further than a margin from the boundary. A `Rule`.

    weights: [L - 1, L - 1]; row l - 1 predicts the final score from those after layers 1 to l, up to a constant of the
    pool. margins: [L - 1] in predicted logits; infinite where nothing is decided.
    """

    weights: Floats
    margins: Floats
    gaps: Callable[[Floats, int], Floats] = gaps

    def __call__(self, history: Floats, slots: int) -> Verdicts:
        layer = len(history)
        distances = self.gaps(self.weights[layer - 1, :layer] @ history, slots)
        margin = self.margins[layer - 1]
        return np.where(distances > margin, ACCEPT, np.where(distances < -margin, DROP, DEFER)).astype(np.int8)


@dataclass(frozen=True)
class ErrorModel:
    """The chance of a wrong side after each layer: sigmoid(-(intercepts + slopes gap)).

    weights: as in `MarginRule`. intercepts, slopes: [L - 1].
    """

    weights: Floats
    intercepts: Floats
    slopes: Floats

    def rule(self, chance: float, gaps: Callable[[Floats, int], Floats] = gaps) -> MarginRule:
        """Decides where the chance of an error is below `chance`."""
        telling = self.slopes > 0  # else a larger distance says nothing
        margins = np.full(len(self.slopes), np.inf)
        margins[telling] = (logit(1 - chance) - self.intercepts[telling]) / self.slopes[telling]
        return MarginRule(self.weights, np.maximum(margins, 0), gaps)


@dataclass(frozen=True)
class Certified:
    """The most aggressive rule of a family whose recall is certified; None, chance 0 and p 1 where none is.

    tested: pools of the certificate. recall: their mean recall with the rule.
    """

    rule: MarginRule | None
    chance: float
    p_value: float
    tested: int
    recall: float


def fit(pools: Sequence[Pool], k: int) -> ErrorModel:
    """Fit the model of errors for the top K. Raises ValueError where no pool has more than K candidates."""
    used = [pool.scores for pool in validation(pools) if pool.scores.shape[1] > k]
    if not used:
        raise ValueError(f"A model of errors for K = {k} needs pools of more candidates than that.")
    centred = np.concatenate([scores - scores.mean(1, keepdims=True) for scores in used], axis=1)
    final = np.concatenate([gaps(scores[-1], k) for scores in used])
    # The order matters near the boundary only; a candidate one standard deviation from it counts half.
    nearness = 1 / (1 + (final / max(centred[-1].std(), 1e-12)) ** 2)
    before = len(centred) - 1
    weights, intercepts, slopes = np.zeros((before, before)), np.zeros(before), np.zeros(before)
    for layer in range(1, before + 1):
        row = ridge(centred[:layer], centred[-1], nearness)
        predicted = np.concatenate([gaps(row @ scores[:layer], k) for scores in used])
        weights[layer - 1, :layer] = row
        intercepts[layer - 1], slopes[layer - 1] = logistic(np.abs(predicted), (predicted > 0) == (final > 0))
    return ErrorModel(weights, intercepts, slopes)


def certify(
    pools: Sequence[Pool],
    k: int,
    recall: float = 0.98,
    confidence: float = 0.95,
    exact_order: bool = False,
    seed: int = 0,
) -> Certified:
    """Fit on a quarter of the validation pools, and certify on the others.

    The promise: over draws of validation pools, the rule's recall on further pools is below `recall` in at most a share
    1 - confidence of the draws. Raises ValueError on so few pools that nothing could be certified without an error.
    """
    first, rest = parted(validation(pools), seed)
    require(len(rest), recall, confidence)
    model = fit(first, k)
    losses = (1 - measure(rest, k, model.rule(chance), exact_order)["overlap"] for chance in CHANCES)
    last, p, loss = last_certified(losses, 1 - recall, confidence, binary=k == 1)
    if last < 0:
        return Certified(None, 0.0, 1.0, len(rest), 1.0)
    return Certified(model.rule(CHANCES[last]), CHANCES[last], p, len(rest), 1 - loss)


def parts(count: int, seed: int = 0) -> list[NDArray[np.int64]]:
    """Numbers of the pools that a model of errors is fitted on, and of those that certify."""
    return np.split(np.random.default_rng(seed).permutation(count), [round(FITTED * count)])


def parted(pools: Sequence[Pool], seed: int = 0) -> tuple[list[Pool], list[Pool]]:
    """Those to fit a model of errors on, and those to certify with."""
    first, rest = parts(len(pools), seed)
    return [pools[number] for number in first], [pools[number] for number in rest]


def last_certified(
    losses: Iterable[Floats], risk: float, confidence: float, binary: bool = False
) -> tuple[int, float, float]:
    """(index, p-value, mean loss) of the last setting whose mean loss is below `risk`; (-1, 1, 0) where none is.

    losses: [pools] of each setting, in an order, from safe to aggressive, that does not depend on them. Settings are
    tested up to the first failure, so that no correction for their number is needed, however their losses depend.
    """
    last = (-1, 1.0, 0.0)
    for index, loss in enumerate(losses):
        p = p_value(loss, risk, binary)
        if p > 1 - confidence:
            break
        last = index, p, float(loss.mean())
    return last


def require(pools: int, recall: float, confidence: float) -> None:
    """Raise ValueError on values outside (0, 1), and on so few pools that none of them failing would not be enough."""
    for name, value in (("recall", recall), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(f"The promised {name} is in (0, 1), not {value}.")
    needed = int(np.ceil(np.log(1 - confidence) / np.log(recall) - 1e-9))
    if pools < needed:
        queries = int(np.ceil(needed / (1 - FITTED)))
        promise = f"Recall {recall:g} with confidence {confidence:g} takes at least {queries} queries"
        raise ValueError(f"{promise}, of which {needed} certify: here only {pools} can.")


def p_value(losses: Floats, risk: float, binary: bool = False) -> float:
    """p-value of "the mean loss is at least `risk`", exact in finite samples. losses: [pools] in [0, 1].

    binary: losses can be only 0 or 1; then it is the binomial tail (Clopper-Pearson). Else a test by betting: the
    product of (1 - loss) / (1 - risk) has a mean of at most 1 if the claim is true, so that its inverse is a p-value
    (Markov). The bet is the largest allowed, which pays best where losses are small and few.
    """
    if binary:
        return binomial_tail(int(losses.sum()), len(losses), risk)
    with np.errstate(divide="ignore"):
        log = len(losses) * np.log1p(-risk) - np.log1p(-losses).sum()
    return float(np.exp(min(0.0, log)))


def binomial_tail(lost: int, pools: int, risk: float) -> float:
    """Chance of at most `lost` losses among so many pools, each with the chance `risk`."""
    count = np.arange(lost + 1)
    orders = [math.lgamma(pools + 1) - math.lgamma(k + 1) - math.lgamma(pools - k + 1) for k in range(lost + 1)]
    return float(min(1.0, np.exp(orders + count * math.log(risk) + (pools - count) * math.log1p(-risk)).sum()))


def logit(p: float) -> float:
    """log(p / (1 - p)), to full precision near a half, too."""
    twice = 2 * (p - 0.5)
    return math.log1p(twice) - math.log1p(-twice) if 0.3 <= p <= 0.65 else math.log(p / (1 - p))


def ridge(x: Floats, y: Floats, weights: Floats) -> Floats:
    """[l] coefficients of y [m] on x [l, m], weighted."""
    weighted = x * weights
    squares = weighted @ x.T
    return np.asarray(np.linalg.solve(squares + np.diag(_RIDGE * squares.diagonal() + 1e-9), weighted @ y), np.float64)


def logistic(x: Floats, right: NDArray[np.bool_]) -> tuple[float, float]:
    """(intercept, slope) of log-odds of `right` [m] on x [m], by Newton's method with a weak prior at 0."""
    scale = float(x.std())
    if scale == 0:
        return 0.0, 0.0
    design = np.stack([np.ones_like(x), x / scale])
    coefficients = np.zeros(2)
    for _ in range(_STEPS):
        p = expit(coefficients @ design)
        slope = design @ (right - p) - _RIDGE * coefficients
        step = np.linalg.solve(design * (p * (1 - p)) @ design.T + _RIDGE * np.eye(2), slope)
        coefficients = coefficients + step
        if np.abs(step).max() < 1e-8:
            break
    return float(coefficients[0]), float(coefficients[1]) / scale
