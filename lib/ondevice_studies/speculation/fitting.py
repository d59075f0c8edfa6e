"""The weights of a mixture, by expectation and maximisation on answers that are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.speculation.mixture import SHAPE, Mixture

PRIOR = 10.0  # answers' tokens that a finer class must outweigh
ROUNDS = 60


def observed(
    mixture: Mixture, answers: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Classes [n, 2] and p [n, sources] of the token that came, at each token of answers but the first.

    answers: (prompt, answer) one after the other, as a session has them.
    """
    classes = []
    chances = []
    for prompt, answer in answers:
        tokens = [*prompt, *answer[:1]]
        mixture.begin(prompt)
        for token in answer[1:]:
            mixture.text.extend(tokens[len(mixture.text) :])
            _, kind, order, shares = mixture.sources(tokens[-mixture.text.longest :])
            classes.append((kind, order))
            chances.append([share.get(token, 0.0) for share in shares])
            tokens.append(token)
        mixture.end(tokens)
    return np.array(classes), np.array(chances)


def maximised(chances: NDArray[np.float64], prior: NDArray[np.float64], strength: float) -> NDArray[np.float64]:
    """Weights [sources] of the greatest likelihood of chances [n, sources], `strength` tokens of the prior with them.

    r_is = w_s p_is / sum_s w_s p_is, then w_s = (sum_i r_is + strength * prior_s) / (n + strength), and again. What no
    source had takes its part of n too, so the weights sum to what they explain.
    """
    weights = prior
    for _ in range(ROUNDS):
        parts = weights * chances
        whole = parts.sum(axis=1, keepdims=True)
        explained = np.divide(parts, whole, out=np.zeros_like(parts), where=whole > 0).sum(axis=0)
        weights = (explained + strength * prior) / (len(chances) + strength)
    return weights


def fit(classes: NDArray[np.int64], chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """[classes, 1 + ORDERS, sources] weights: of each pair of classes, drawn towards its first, and this to all."""
    count = chances.shape[1]
    whole = maximised(chances, np.full(count, 1 / count), 0.0)
    weights = np.empty((*SHAPE, count))
    for kind in range(SHAPE[0]):
        of_kind = classes[:, 0] == kind
        first = maximised(chances[of_kind], whole, PRIOR)
        for order in range(SHAPE[1]):
            weights[kind, order] = maximised(chances[of_kind & (classes[:, 1] == order)], first, PRIOR)
    return weights
