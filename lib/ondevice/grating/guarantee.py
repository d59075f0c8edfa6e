"""Pruning with a promise, beyond the paper: "recall of the top K at least 0.99, with 95 % confidence".

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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.special import expit, logit

from ondevice.grating.pruning import ACCEPT, DEFER, DROP, Rule, ranking
from ondevice.grating.replay import Pools, measure

CHANCES: tuple[float, ...] = tuple(np.geomspace(1e-8, 0.45, 72).tolist())  # fixed: not from the pools that certify
_RIDGE = 1e-3  # of each column's sum of squares
_STEPS = 50  # of Newton's method, at most


@dataclass(frozen=True)
class MarginRule:
    """Accept or drop those whose predicted final score is further than a margin from the boundary.

    weights: [L - 1, L - 1]; row l - 1 predicts the final score from those after layers 1 to l, up to a constant of the
    pool. margins: [L - 1] in predicted logits; infinite where nothing is decided.
    A candidate within the K is accepted if it is more than the margin above the first outside; one outside is dropped
    if it is more than the margin below the K-th.
    """

    weights: NDArray[np.float64]
    margins: NDArray[np.float64]

    def verdicts(self, history: NDArray[np.float64], slots: int) -> NDArray[np.int8]:
        """See `Rule`."""
        layers = len(history)
        if layers > len(self.margins):
            raise ValueError(f"The rule is for a model of {len(self.margins) + 1} layers, not more than {layers}.")
        found, margin = gaps(self.weights[layers - 1, :layers] @ history, slots), self.margins[layers - 1]
        return np.select([found > margin, found < -margin], [ACCEPT, DROP], DEFER).astype(np.int8)


@dataclass(frozen=True)
class ErrorModel:
    """The chance of a wrong side after each layer: sigmoid(-(intercepts + slopes gap)).

    weights: as in `MarginRule`. intercepts, slopes: [L - 1].
    """

    weights: NDArray[np.float64]
    intercepts: NDArray[np.float64]
    slopes: NDArray[np.float64]

    def rule(self, chance: float) -> MarginRule:
        """Decides where the chance of an error is below `chance`. Raises ValueError unless 0 < chance < 0.5."""
        if not 0 < chance < 0.5:
            raise ValueError(f"The chance of an error is between 0 and 0.5, not {chance}.")
        telling = self.slopes > 0  # else a larger distance says nothing
        margins = np.full(len(self.slopes), np.inf)
        margins[telling] = (logit(1 - chance) - self.intercepts[telling]) / self.slopes[telling]
        return MarginRule(self.weights, np.maximum(margins, 0))


@dataclass(frozen=True)
class Guarantee:
    """A certified rule. None prunes nothing: nothing more was certified.

    chance: of its family. p_value: of "recall is below the promised one". tested: pools of the certificate.
    """

    rule: Rule | None
    chance: float
    p_value: float
    tested: int


def gaps(scores: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """[n] signed distances to the boundary: above the best outside the K, or (negative) below the K-th."""
    order = ranking(scores)
    found = scores - scores[order[slots - 1]]
    found[order[:slots]] = scores[order[:slots]] - scores[order[slots]]
    return found


def fit(pools: Pools, k: int) -> ErrorModel:
    """Fit the model of errors for the top K on recorded pools. Raises ValueError where no pool has more than K."""
    used = [scores for scores in map(pools.pool, range(len(pools))) if scores.shape[1] > k]
    if k < 1 or not used:
        raise ValueError(f"A model of errors for K = {k} needs pools of more candidates than that.")
    centred = np.concatenate([scores - scores.mean(1, keepdims=True) for scores in used], axis=1)
    final = np.concatenate([gaps(scores[-1], k) for scores in used])
    # The order matters near the boundary only; a candidate one standard deviation from it counts half.
    nearness = 1 / (1 + (final / max(centred[-1].std(), 1e-12)) ** 2)
    before = pools.layers - 1
    weights, intercepts, slopes = np.zeros((before, before)), np.zeros(before), np.zeros(before)
    for layer in range(1, pools.layers):
        row = _ridge(centred[:layer], centred[-1], nearness)
        found = np.concatenate([gaps(row @ scores[:layer], k) for scores in used])
        weights[layer - 1, :layer] = row
        intercepts[layer - 1], slopes[layer - 1] = _logistic(np.abs(found), (found > 0) == (final > 0))
    return ErrorModel(weights, intercepts, slopes)


def choose(pools: Pools, k: int, overlap: float, exact_order: bool = False, folds: int = 4, seed: int = 0) -> float:
    """The largest of `CHANCES` such that it and all smaller ones reach a mean overlap; 0 if none does.

    No promise: overlaps are of pools that the model of errors was not fitted on, by cross-validation.
    """
    parts = np.array_split(np.random.default_rng(seed).permutation(len(pools)), folds)
    rests = [np.setdiff1d(np.arange(len(pools)), part) for part in parts]
    held = [(fit(pools.take(rest), k), pools.take(part)) for part, rest in zip(parts, rests, strict=True)]
    reached = 0.0
    for chance in CHANCES:
        overlaps = [measure(part, k, model.rule(chance), exact_order).overlap for model, part in held]
        if np.concatenate(overlaps).mean() < overlap - 1e-12:
            break
        reached = chance
    return reached


def guarantee(
    pools: Pools, k: int, recall: float = 0.99, confidence: float = 0.95, exact_order: bool = False,
    fitted: float = 0.25, seed: int = 0,
) -> Guarantee:  # fmt: skip
    """The most aggressive margin rule whose mean recall of the top K is certified.

    The promise: over draws of validation pools, the rule's recall on further pools is below `recall` in at most a share
    1 - confidence of the draws. fitted: share of pools for the model of errors; the rest certifies.
    Raises ValueError on values outside (0, 1), and where so few pools could certify nothing even without an error.
    """
    if not 0 < fitted < 1:
        raise ValueError(f"The share of pools for fitting is in (0, 1), not {fitted}.")
    order = np.random.default_rng(seed).permutation(len(pools))
    first, rest = np.split(order, [round(fitted * len(pools))])
    require(len(rest), recall, confidence)
    model = fit(pools.take(first), k)
    rules = [model.rule(chance) for chance in CHANCES]
    last, p = certify(rules, pools.take(rest), k, recall, confidence, exact_order)
    chance = CHANCES[last] if last >= 0 else 0.0
    return Guarantee(rules[last] if last >= 0 else None, chance, p, len(rest))


def certify(
    rules: Sequence[Rule], pools: Pools, k: int, recall: float = 0.99, confidence: float = 0.95,
    exact_order: bool = False,
) -> tuple[int, float]:  # fmt: skip
    """(index, p-value) of the last rule whose mean recall is certified; -1 and 0 where none is.

    rules: in an order, from safe to aggressive, that does not depend on `pools`.
    Raises ValueError on values outside (0, 1), and on too few pools to certify anything.
    """
    require(len(pools), recall, confidence)
    losses = (1 - measure(pools, k, rule, exact_order).overlap for rule in rules)
    return last_certified(losses, 1 - recall, confidence, binary=k == 1)


def last_certified(
    losses: Iterable[ArrayLike], risk: float, confidence: float, binary: bool = False
) -> tuple[int, float]:
    """(index, p-value) of the last setting whose mean loss is below `risk`; -1 and 0 where none is.

    losses: [pools] of each setting. Settings are tested in their order up to the first failure, so that no correction
    for their number is needed, however their losses depend on each other.
    """
    last, passed = -1, 0.0
    for index, found in enumerate(losses):
        p = p_value(found, risk, binary)
        if p > 1 - confidence:
            break
        last, passed = index, p
    return last, passed


def require(pools: int, recall: float, confidence: float) -> None:
    """Raise ValueError on values outside (0, 1), and on so few pools that none of them failing would not be enough."""
    for name, value in (("recall", recall), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(f"The promised {name} is in (0, 1), not {value}.")
    needed = int(np.ceil(np.log(1 - confidence) / np.log(recall) - 1e-9))
    if pools < needed:
        raise ValueError(
            f"Recall {recall:g} with confidence {confidence:g} takes at least {needed} pools to certify, not {pools}."
        )


def p_value(losses: ArrayLike, risk: float, binary: bool = False) -> float:
    """p-value of "the mean loss is at least `risk`", exact in finite samples. losses: [pools] in [0, 1].

    binary: losses can be only 0 or 1; then it is the binomial tail (Clopper-Pearson). Else a test by betting: the
    product of (1 - loss) / (1 - risk) has a mean of at most 1 if the claim is true, so that its inverse is a p-value
    (Markov). The bet is the largest allowed, which pays best where losses are small and few.
    Raises ValueError on a loss outside [0, 1], or another than 0 and 1 if `binary`.
    """
    given = np.asarray(losses, np.float64)
    if not len(given) or not ((given >= 0) & (given <= 1)).all() or (binary and not np.isin(given, (0, 1)).all()):
        raise ValueError(f"Losses are {'0 or 1' if binary else 'in [0, 1]'}, and there is at least one.")
    if binary:
        return float(stats.binom.cdf(int(given.sum()), len(given), risk))
    with np.errstate(divide="ignore"):
        log = len(given) * np.log1p(-risk) - np.log1p(-given).sum()
    return float(np.exp(min(0.0, log)))


def _ridge(x: NDArray[np.float64], y: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """[l] coefficients of y [m] on x [l, m], weighted."""
    weighted = x * weights
    squares = weighted @ x.T
    return np.asarray(np.linalg.solve(squares + np.diag(_RIDGE * squares.diagonal() + 1e-9), weighted @ y), np.float64)


def _logistic(x: NDArray[np.float64], right: NDArray[np.bool_]) -> tuple[float, float]:
    """(intercept, slope) of log-odds of `right` [m] on x [m], by Newton's method with a weak prior at 0."""
    scale = float(x.std())
    if scale == 0:
        return 0.0, 0.0
    design, found = np.stack([np.ones_like(x), x / scale]), np.zeros(2)
    for _ in range(_STEPS):
        p = expit(found @ design)
        slope = design @ (right - p) - _RIDGE * found
        step = np.linalg.solve(design * (p * (1 - p)) @ design.T + _RIDGE * np.eye(2), slope)
        found = found + step
        if np.abs(step).max() < 1e-8:
            break
    return float(found[0]), float(found[1]) / scale
