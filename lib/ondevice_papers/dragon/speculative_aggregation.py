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

from ondevice_papers.dragon.aggregation import Floats

Ints = NDArray[np.int64]
Tokens = Ints | int
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


def sample(weights: Floats, uniform: ArrayLike) -> Ints:
    """Tokens drawn in proportion to weights [V], one for each number in [0, 1): none of weight 0."""
    sums = np.cumsum(weights)
    return np.asarray(np.searchsorted(sums, np.asarray(uniform) * sums[-1], side="right"))


def residual(p: Floats, target: Floats) -> Floats:
    """[V] max(0, target - p): what rejected drafts are resampled from, not normalised."""
    return np.maximum(0.0, target - p)


def verify(draft: Tokens, p: Floats, target: Floats, uniforms: Floats) -> Ints:
    """x̃ ~ target: drafts kept with probability min(1, target / p), or else resampled from the residual.

    draft: tokens of any shape, drawn from p [V]. target: [V]. uniforms: [2, *shape] in [0, 1).
    """
    verifying, resampling = np.asarray(uniforms)
    rest = residual(p, target)
    rejected = verifying * p[draft] < p[draft] - target[draft]
    if not (np.any(rejected) and rest.any()):  # without a rest both are equal, but for rounding
        return np.asarray(draft)
    return np.where(rejected, sample(rest, resampling), draft)


def aggregate(
    draft_local: Tokens,
    draft_remote: Tokens,
    p_local: Floats,
    p_remote: Floats,
    target: Floats,
    uniforms: Floats,
    gamma_remote: float = 0.5,
) -> Aggregation:
    """Target tokens x_t ~ target from independent drafts of the two sides (Algorithm 1, Theorem 1).

    draft_local, draft_remote: tokens of one shape, drawn from exactly p_local [V] and p_remote [V].
    target: [V], from `aggregation.target`. uniforms: [5, *shape] in [0, 1), from `uniforms`.
    gamma_remote: γ^r, chance that the remote side's resample is taken; 0.5 is the paper's.
    """
    from_local = verify(draft_local, p_local, target, uniforms[0:2])
    from_remote = verify(draft_remote, p_remote, target, uniforms[2:4])
    token = np.where(uniforms[4] < 1 - gamma_remote, from_local, from_remote)
    return Aggregation(token, token == draft_local, token == draft_remote)


# Acceptance


def divergence(p_local: Floats, p_remote: Floats) -> float:
    """δ = 1 - Σ min(p^l, p^r), the total variation distance (section 4.2), in [0, 1]."""
    return float(np.clip(1 - np.minimum(p_local, p_remote).sum(), 0, 1))


def acceptance(p_side: Floats, target: Floats, gamma_side: float = 0.5) -> float:
    """Probability that a side's draft is accepted, for any target: γ^s Σ min(p^s, q) + (1 - γ^s) Σ p^s q.

    p_side: [V] that the side draws from. gamma_side: chance that this side's resample is taken.
    With gamma_side 1 it is 1 - TV(p^s, q), which no way to draw the two tokens exceeds.
    """
    return float(gamma_side * np.minimum(p_side, target).sum() + (1 - gamma_side) * (p_side @ target))


def expected_acceptance(p_local: Floats, p_remote: Floats, eta_local: float, gamma_local: float = 0.5) -> float:
    """α^l = γ^l (1 - η^r δ) + γ^r Σ p^l p_t: the local side's acceptance for the mixture (Eq. 5).

    α^r: the same with the sides' arguments exchanged. eta_local: η^l. gamma_local: γ^l; γ^r is 1 - γ^l.
    Theorem 2: the more p^l and p^r overlap, the larger it is. If p^r moves straight to p^l, that is so for γ^l >= 1/2,
    as then the first term gains at least what the second can lose; below, acceptance may fall.
    """
    eta_remote = 1 - eta_local
    agreement = p_local @ (eta_local * p_local + eta_remote * p_remote)
    return float(gamma_local * (1 - eta_remote * divergence(p_local, p_remote)) + (1 - gamma_local) * agreement)


def shared_acceptance(p_side: Floats, target: Floats) -> float:
    """Probability that a side's draft is accepted with shared randomness: Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x).

    Both tokens are winners of a race of exponential times E_y / p_y; x wins both if for all y
    E_y >= E_x max(p_y / p_x, q_y / q_x), and that has the probability of the sum's term.
    """
    p, q, both = p_side, target, (p_side > 0) & (target > 0)
    order = np.argsort(np.log(p[both]) - np.log(q[both]), kind="stable")
    p_sorted = p[both][order]
    q_sorted = q[both][order]
    # The ratio p_y / q_y tells which of the two is larger: p's from x on, and where q is 0; q's before, and where p is.
    from_here = np.cumsum(p_sorted[::-1])[::-1] + p[q == 0].sum()
    before = np.cumsum(q_sorted) - q_sorted + q[p == 0].sum()
    with np.errstate(over="ignore"):  # an infinite sum is right for a token next to impossible
        return float((1 / (from_here / p_sorted + before / q_sorted)).sum())


# Shared randomness


def choose(probabilities: Floats, gumbel: Floats) -> Ints:
    """Tokens drawn from [V] probabilities with Gumbel noise [..., V]: argmax of log p + noise.

    The same noise gives similar distributions mostly the same token. Of equal sums the lowest id.
    """
    with np.errstate(divide="ignore"):
        return np.asarray((np.log(probabilities) + gumbel).argmax(-1))


def aggregate_shared(draft_local: Tokens, draft_remote: Tokens, target: Floats, gumbel: Floats) -> Aggregation:
    """Target tokens with shared randomness: those of token-wise aggregation, whatever the drafts.

    draft_local, draft_remote: tokens of one shape, `choose`n with the same noise to be accepted often.
    target: [V]. gumbel: [*shape, V].
    """
    token = choose(target, gumbel)
    return Aggregation(token, token == draft_local, token == draft_remote)


# Random numbers


def uniforms(seed: int, stream: Stream, position: int, count: int = UNIFORMS) -> Floats:
    """[count] numbers in [0, 1) that seed, stream and position determine; the same on every machine.

    seed, position: in [0, 2^64).
    """
    key = np.array([seed, int(stream)], np.uint64)
    counter = np.array([0, position, 0, 0], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)


def gumbels(seed: int, position: int, vocabulary: int) -> Floats:
    """[V] Gumbel noise for one position, the same on both sides.

    Logarithms may differ in the last bit between machines. The target is right with either; a draft may be rejected.
    """
    return gumbel_noise(uniforms(seed, Stream.SHARED, position, vocabulary))


def gumbel_noise(uniform: Floats) -> Floats:
    """Numbers in [0, 1) as Gumbel noise, -log(-log u), all finite."""
    return -np.log(-np.log(np.maximum(uniform, 2.0**-53)))
