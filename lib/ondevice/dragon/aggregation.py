"""Output aggregation: the next-token distributions of documents, and of two sides, are mixed (sections 2 and 4.1).

Weights are exponentials of relevance scores and are kept as logarithms, so that no score is too large. A side mixes
the distributions of its own documents by `document_weights`. What it tells the other one about its weight is
`log_weight`, log h^s: with it, `target` is the same as one softmax over the documents of both sides.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

Floats = NDArray[np.float64]

TOLERANCE = 1e-6  # by how much the sum of a distribution may differ from 1
_ROUNDING = 1e-3  # the same of a model's log-probabilities, which may be float32; it is normalised away


def log_weight(scores: ArrayLike, temperature: float = 1.0) -> float:
    """log h^s: a side's weight before normalisation (section 4.1).

    scores: [D] the relevance of each of the side's documents.
    Raises ValueError on no document, a score that is not finite and a temperature that is not positive.
    """
    return float(_log_sum(_scaled(scores, temperature)))


def document_weights(scores: ArrayLike, temperature: float = 1.0) -> Floats:
    """[D] log ω_t(d): log-softmax of the scores over the temperature (section 2.2). Errors as of `log_weight`."""
    scaled = _scaled(scores, temperature)
    return scaled - _log_sum(scaled)


def mixture(log_probs: ArrayLike, log_weights: ArrayLike) -> Floats:
    """[V] log p_t: the documents' next-token distributions, mixed (Eqs. 1 and 2).

    log_probs: [D, V] of the next token after each document; -inf is a probability of 0.
    log_weights: [D] that sum to 1 as probabilities, from `document_weights`.
    Raises ValueError on shapes that do not fit, on weights that do not sum to 1, and if the result does not, as with
    logits in the place of log-probabilities.
    """
    rows, weights = np.asarray(log_probs, float), np.asarray(log_weights, float)
    if rows.ndim != 2 or not rows.size or weights.shape != rows.shape[:1]:
        raise ValueError(f"A mixture has log_probs [D, V] and log_weights [D], not {rows.shape} and {weights.shape}.")
    total = float(np.exp(_log_sum(weights)))
    if not abs(total - 1) <= TOLERANCE:
        raise ValueError(f"The weights of documents sum to 1, not {total:g}.")
    mixed = _log_sum(rows + weights[:, None])
    total = float(_log_sum(mixed))
    if not abs(total) <= _ROUNDING:
        raise ValueError(f"Mixed log-probabilities have a sum of log 1, not {total:g}; are they logits?")
    return mixed - total


def share(log_weight_local: float, log_weight_remote: float) -> float:
    """η^l: the local side's part of the target (section 4.1). η^r is the same with the two exchanged.

    A log weight of -inf is a side that does not count. Raises ValueError on +inf, NaN, and on -inf for both.
    """
    both = (log_weight_local, log_weight_remote)
    if np.isnan(both).any() or np.inf in both or max(both) == -np.inf:
        raise ValueError(f"Log weights are below infinity, and one of them is finite; these are {both}.")
    return float(expit(log_weight_local - log_weight_remote))


def target(p_local: ArrayLike, p_remote: ArrayLike, log_weight_local: float, log_weight_remote: float) -> Floats:
    """[V] p_t = η^l p^l + η^r p^r (Eq. 4), bit for bit the same when the sides are exchanged.

    p_local, p_remote: [V] next-token probabilities of the two sides.
    Raises ValueError as `distribution` and `share` do, and on lengths that differ.
    """
    local, remote = distributions(p_local, p_remote)
    eta_local = share(log_weight_local, log_weight_remote)
    return eta_local * local + share(log_weight_remote, log_weight_local) * remote


def distribution(probabilities: ArrayLike, name: str = "A distribution") -> Floats:
    """[V] float64, checked: ValueError unless there is a token, none is negative or NaN, and they sum to 1."""
    values = np.asarray(probabilities, float)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"{name} has one probability for each token, not the shape {values.shape}.")
    least, total = float(values.min()), float(values.sum())
    if not least >= 0:
        raise ValueError(f"{name} has no probability below 0, but one is {least:g}.")
    if not abs(total - 1) <= TOLERANCE:
        raise ValueError(f"{name} sums to 1, not {total:.9g}.")
    return values


def distributions(*probabilities: ArrayLike) -> list[Floats]:
    """Each [V] and checked, over the same tokens."""
    found = [distribution(values) for values in probabilities]
    if len({len(values) for values in found}) > 1:
        raise ValueError(f"Distributions over one vocabulary have one length, not {[len(v) for v in found]}.")
    return found


def _scaled(scores: ArrayLike, temperature: float) -> Floats:
    values = np.asarray(scores, float)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"A side has at least one document, each with one score, not the shape {values.shape}.")
    if not 0 < temperature < np.inf:
        raise ValueError(f"A temperature is positive and finite, not {temperature}.")
    with np.errstate(over="ignore"):
        scaled = values / temperature
    if not np.isfinite(scaled).all():
        raise ValueError(f"Scores over the temperature {temperature:g} are finite, not {values.tolist()}.")
    return scaled


def _log_sum(values: Floats) -> Floats:
    """log Σ exp over the first axis; -inf where all are."""
    top = values.max(0)
    top = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(np.log(np.exp(values - top).sum(0)) + top)
