"""Output aggregation: the next-token distributions of documents, and of two sides, are mixed (sections 2 and 4.1).

Weights are exponentials of relevance scores and are kept as logarithms, so that no score is too large. A side mixes
the distributions of its own documents by `document_weights`. What it tells the other one about its weight is
`log_weight`, log h^s: with it, `target` is the same as one softmax over the documents of both sides.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, log_softmax, logsumexp

Floats = NDArray[np.float64]


def log_weight(scores: ArrayLike, temperature: float = 1.0) -> float:
    """log h^s: a side's weight before normalisation (section 4.1). scores: [D] the relevance of its documents."""
    return float(logsumexp(np.asarray(scores, float) / temperature))


def document_weights(scores: ArrayLike, temperature: float = 1.0) -> Floats:
    """[D] log ω_t(d): log-softmax of the scores over the temperature (section 2.2)."""
    return log_softmax(np.asarray(scores, float) / temperature)


def mixture(log_probs: Floats, log_weights: Floats) -> Floats:
    """[V] log p_t: the documents' next-token distributions [D, V], mixed by their weights [D] (Eqs. 1 and 2)."""
    mixed = np.exp(log_weights) @ np.exp(log_probs)
    with np.errstate(divide="ignore"):
        return np.log(mixed / mixed.sum())  # a model's float32 sums to 1 but for rounding


def share(log_weight_local: float, log_weight_remote: float) -> float:
    """η^l: the local side's part of the target (section 4.1). η^r is the same with the two exchanged."""
    return float(expit(log_weight_local - log_weight_remote))


def target(p_local: Floats, p_remote: Floats, log_weight_local: float, log_weight_remote: float) -> Floats:
    """[V] p_t = η^l p^l + η^r p^r (Eq. 4), bit for bit the same when the sides are exchanged."""
    eta_local = share(log_weight_local, log_weight_remote)
    return eta_local * p_local + share(log_weight_remote, log_weight_local) * p_remote
