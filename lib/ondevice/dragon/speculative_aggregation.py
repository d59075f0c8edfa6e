"""Speculative Aggregation: a target token from two draft tokens, distributed as the target (section 4, Algorithm 1).

The aggregator's side is local, l; the other one is remote, r. The algorithm stands here for any target, with the
same result as the paper's form where the target is the mixture p_t = η^l p^l + η^r p^r: with q = p_t,
1 - q / p^l = η^r (1 - p^r / p^l) and q - p^l = η^r (p^r - p^l). For greedy decoding the target is the one-hot vector of
the mixture's likeliest token, which no mixture of one-hot drafts gives.

All functions take one token or arrays of them, which is the same code.

Three ways to a target token, all with its exact distribution:
- gamma_remote 0.5, the paper's: either side's resample with equal chance.
- gamma_remote 1: always the remote side's. The remote side's drafts are then accepted as often as is possible at all,
  with 1 - TV(p^r, p_t), and no other acceptance counts in the latency (Eq. 7). The local side's are accepted less.
- Shared randomness: the three tokens are `choose`n with the same noise. No resample is needed, and the target tokens
  are those of token-wise aggregation with that noise, one by one.

Random numbers are keyed by session seed, stream and position, so that streams are independent and a token that is
decoded again gets the same number. A draft that was dropped has had no part in any earlier target token, so that this
does not change the distribution.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ondevice.dragon.aggregation import Floats, distribution, distributions

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

UNIFORMS = 5  # that one aggregation takes


class Stream(IntEnum):
    """What random numbers are for."""

    DEVICE = 0  # the device's drafts
    CLOUD = 1  # the cloud's drafts
    AGGREGATION = 2
    SHARED = 3  # drafts of both sides and the target, with shared randomness


class Aggregation(NamedTuple):
    """Target tokens, and whether they are the sides' draft tokens: arrays of the drafts' shape, which may be ()."""

    token: Ints
    accepted_local: Bools
    accepted_remote: Bools


# Algorithm 1


def sample(probabilities: ArrayLike, uniform: ArrayLike) -> Ints:
    """Tokens drawn from [V] probabilities, one for each number in [0, 1), by the inverse of their sum.

    No token of probability 0 is drawn. Raises ValueError on what is no distribution, and on numbers outside [0, 1).
    """
    return _inverse(distribution(probabilities), _uniform(uniform))


def residual(probabilities: Floats, target: Floats) -> Floats:
    """[V] max(0, target - p): what rejected drafts are resampled from, not normalised."""
    return np.maximum(0.0, target - probabilities)


def verify(draft: ArrayLike, probabilities: ArrayLike, target: ArrayLike, uniforms: ArrayLike) -> Ints:
    """Sample of Algorithm 1: drafts kept with probability min(1, target / p), or else resampled; x̃ ~ target.

    draft: tokens of any shape, drawn from probabilities [V]. target: [V]. uniforms: [2, *shape] in [0, 1).
    Raises ValueError on a draft that cannot have been drawn from these probabilities, as the result would be wrong.
    """
    p, q = distributions(probabilities, target)
    tokens, numbers = np.asarray(draft), _uniform(uniforms)
    _check_drafts(tokens, p)
    if numbers.shape != (2, *tokens.shape):
        raise ValueError(f"Drafts {tokens.shape} take numbers {(2, *tokens.shape)}, not {numbers.shape}.")
    verifying, resampling = numbers
    rejected = np.asarray(verifying * p[tokens] < p[tokens] - q[tokens])
    if not rejected.any():
        return tokens.astype(np.int64)
    rest = residual(p, q)
    if not rest.any():  # equal, but for rounding
        return tokens.astype(np.int64)
    return np.where(rejected, _inverse(rest, resampling), tokens)


def aggregate(
    draft_local: ArrayLike,
    draft_remote: ArrayLike,
    p_local: ArrayLike,
    p_remote: ArrayLike,
    target: ArrayLike,
    uniforms: ArrayLike,
    gamma_remote: float = 0.5,
) -> Aggregation:
    """Target tokens x_t ~ target from independent drafts of the two sides (Algorithm 1, Theorem 1).

    draft_local, draft_remote: tokens of one shape, drawn from exactly p_local [V] and p_remote [V].
    target: [V], from `aggregation.target`. uniforms: [5, *shape] in [0, 1), from `uniforms`.
    gamma_remote: γ^r, chance that the remote side's resample is taken; 0.5 is the paper's.
    Raises ValueError on a gamma outside [0, 1], on shapes that do not fit, and as `verify` does.
    """
    _check_gamma(gamma_remote)
    local, remote, numbers = np.asarray(draft_local), np.asarray(draft_remote), np.asarray(uniforms, float)
    if local.shape != remote.shape or numbers.shape != (UNIFORMS, *local.shape):
        raise ValueError(
            f"Drafts of one shape s take numbers [{UNIFORMS}, *s], not drafts {local.shape} and {remote.shape} "
            f"with numbers {numbers.shape}."
        )
    from_local = verify(local, p_local, target, numbers[0:2])
    from_remote = verify(remote, p_remote, target, numbers[2:4])
    token = np.where(_uniform(numbers[4]) < 1 - gamma_remote, from_local, from_remote)
    return Aggregation(token, local == token, remote == token)


# Acceptance


def divergence(p_local: ArrayLike, p_remote: ArrayLike) -> float:
    """δ = 1 - Σ min(p^l, p^r), the total variation distance (section 4.2), in [0, 1]."""
    local, remote = distributions(p_local, p_remote)
    return float(np.clip(1 - np.minimum(local, remote).sum(), 0, 1))


def acceptance(p_side: ArrayLike, target: ArrayLike, gamma_side: float = 0.5) -> float:
    """Probability that a side's draft is accepted, for any target: γ^s Σ min(p^s, q) + (1 - γ^s) Σ p^s q.

    p_side: [V] that the side draws from. gamma_side: chance that this side's resample is taken.
    With gamma_side 1 it is 1 - TV(p^s, q), which no way to draw the two tokens exceeds.
    Raises ValueError on a gamma outside [0, 1] and on what are no distributions.
    """
    _check_gamma(gamma_side)
    p, q = distributions(p_side, target)
    return float(gamma_side * np.minimum(p, q).sum() + (1 - gamma_side) * (p @ q))


def expected_acceptance(p_local: ArrayLike, p_remote: ArrayLike, eta_local: float, gamma_local: float = 0.5) -> float:
    """α^l = γ^l (1 - η^r δ) + γ^r Σ p^l p_t: the local side's acceptance for the mixture (Eq. 5).

    α^r: the same with the sides' arguments exchanged. eta_local: η^l. gamma_local: γ^l; γ^r is 1 - γ^l.
    Theorem 2: the more p^l and p^r overlap, the larger it is. If p^r moves straight to p^l, that is so for γ^l >= 1/2,
    as then the first term gains at least what the second can lose; below, acceptance may fall.
    Raises ValueError on weights outside [0, 1] and on what are no distributions.
    """
    _check_gamma(gamma_local)
    if not 0 <= eta_local <= 1:
        raise ValueError(f"A side's share of the target is in [0, 1], not {eta_local}.")
    local, remote = distributions(p_local, p_remote)
    eta_remote = 1 - eta_local
    agreement = local @ (eta_local * local + eta_remote * remote)
    return float(gamma_local * (1 - eta_remote * divergence(local, remote)) + (1 - gamma_local) * agreement)


def shared_acceptance(p_side: ArrayLike, target: ArrayLike) -> float:
    """Probability that a side's draft is accepted with shared randomness: Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x).

    Both tokens are winners of a race of exponential times E_y / p_y; x wins both if for all y
    E_y >= E_x max(p_y / p_x, q_y / q_x), and that has the probability of the sum's term.
    """
    p, q = distributions(p_side, target)
    both = (p > 0) & (q > 0)
    order = np.argsort(np.log(p[both]) - np.log(q[both]), kind="stable")
    p_sorted, q_sorted = p[both][order], q[both][order]
    # The ratio p_y / q_y tells which of the two is larger: p's from x on, and where q is 0; q's before, and where p is.
    from_here = np.cumsum(p_sorted[::-1])[::-1] + p[q == 0].sum()
    before = np.cumsum(q_sorted) - q_sorted + q[p == 0].sum()
    with np.errstate(over="ignore"):  # an infinite sum is right for a token next to impossible
        return float((1 / (from_here / p_sorted + before / q_sorted)).sum())


# Shared randomness


def choose(probabilities: ArrayLike, gumbel: ArrayLike) -> Ints:
    """Tokens drawn from [V] probabilities with Gumbel noise [..., V]: argmax of log p + noise.

    The same noise gives similar distributions mostly the same token. Of equal sums the lowest id.
    """
    p, noise = distribution(probabilities), np.asarray(gumbel, float)
    if noise.shape[-1:] != p.shape:
        raise ValueError(f"The noise has one number for each of {len(p)} tokens, not the shape {noise.shape}.")
    with np.errstate(divide="ignore"):
        return np.asarray((np.log(p) + noise).argmax(-1))


def aggregate_shared(
    draft_local: ArrayLike, draft_remote: ArrayLike, target: ArrayLike, gumbel: ArrayLike
) -> Aggregation:
    """Target tokens with shared randomness: those of token-wise aggregation, whatever the drafts.

    draft_local, draft_remote: tokens of one shape, `choose`n with the same noise to be accepted often.
    target: [V]. gumbel: [*shape, V]. Raises ValueError on shapes that do not fit.
    """
    local, remote, token = np.asarray(draft_local), np.asarray(draft_remote), choose(target, gumbel)
    if not local.shape == remote.shape == token.shape:
        raise ValueError(f"Noise for {token.shape} tokens has drafts {local.shape} and {remote.shape}.")
    return Aggregation(token, local == token, remote == token)


# Random numbers


def uniforms(seed: int, stream: Stream, position: int, count: int = UNIFORMS) -> Floats:
    """[count] numbers in [0, 1) that seed, stream and position determine; the same on every machine.

    seed, position: in [0, 2^64); ValueError otherwise.
    """
    for name, value in (("seed", seed), ("position", position)):
        if not 0 <= value < 2**64:
            raise ValueError(f"A {name} is a whole number from 0 to 2^64 - 1, not {value}.")
    key, counter = np.array([seed, int(stream)], np.uint64), np.array([0, position, 0, 0], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)


def gumbels(seed: int, position: int, vocabulary: int) -> Floats:
    """[V] Gumbel noise for one position, the same on both sides.

    Logarithms may differ in the last bit between machines. The target is right with either; a draft may be rejected.
    """
    return gumbel_noise(uniforms(seed, Stream.SHARED, position, vocabulary))


def gumbel_noise(uniform: ArrayLike) -> Floats:
    """Numbers in [0, 1) as Gumbel noise, -log(-log u), all finite."""
    return -np.log(-np.log(np.maximum(_uniform(uniform), 2.0**-53)))


def _uniform(numbers: ArrayLike) -> Floats:
    values = np.asarray(numbers, float)
    if values.size and not (values.min() >= 0 and values.max() < 1):
        raise ValueError(f"Random numbers are in [0, 1), but these go from {values.min():g} to {values.max():g}.")
    return values


def _inverse(weights: Floats, uniform: Floats) -> Ints:
    """The first token with a sum above the number's part of all: never one of weight 0."""
    sums = np.cumsum(weights)
    return np.asarray(np.searchsorted(sums, uniform * sums[-1], side="right"))


def _check_drafts(tokens: NDArray[np.int64], p: Floats) -> None:
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"A draft is a token id, not of the type {tokens.dtype}.")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < len(p):
        odd = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ValueError(f"A draft's token id is from 0 to {len(p) - 1}, not {odd}.")
    impossible = tokens[p[tokens] == 0]
    if impossible.size:
        raise ValueError(f"Token {impossible.flat[0]} has probability 0; it was not drawn from this distribution.")


def _check_gamma(gamma: float) -> None:
    if not 0 <= gamma <= 1:
        raise ValueError(f"A gamma is a chance in [0, 1], not {gamma}.")
