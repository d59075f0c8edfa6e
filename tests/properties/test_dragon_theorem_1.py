"""DRAGON's Theorem 1 by exact sums, and the program against the algorithm as printed.

`values.chi_square` of the claims draws tokens and tests their counts, with errors that it must find.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binomtest, chisquare

from ondevice_papers.dragon.aggregation import target
from ondevice_papers.dragon.speculative_aggregation import (
    UNIFORMS,
    aggregate,
    aggregate_shared,
    choose,
    gumbel_noise,
    residual,
    sample,
    shared_acceptance,
)

Floats = NDArray[np.float64]
Pair = tuple[Floats, Floats, float]  # p^l, p^r, log h^l - log h^r


@st.composite
def distributions(draw, vocabulary: int) -> Floats:
    """With zeros, equal values, one-hot vectors and a large range."""
    weight = st.one_of(st.integers(0, 3), st.floats(0, 1, width=32), st.sampled_from([1e-300, 1e-12, 1e6]))
    weights = draw(st.lists(weight, min_size=vocabulary, max_size=vocabulary).filter(lambda w: sum(w) > 0))
    p = np.array(weights, float)
    return p / p.sum()


@st.composite
def cases(draw) -> Pair:
    vocabulary = draw(st.integers(1, 8))
    local = draw(distributions(vocabulary))
    remote = draw(st.one_of(distributions(vocabulary), st.just(local)))
    return local, remote, draw(st.floats(-800, 800))


def verified(p: Floats, q: Floats) -> Floats:
    """[V] the exact law of `verify`'s tokens: kept with min(p, q), the rest from the residual."""
    kept = np.minimum(p, q)
    rest = residual(p, q)
    return kept + (1 - kept.sum()) * rest / rest.sum() if rest.any() else p


@given(cases())
@example((np.array([1.0]), np.array([1.0]), 0.0))
@example((np.array([1.0, 0]), np.array([0, 1.0]), 0.0))
def test_theorem_1_by_exact_sums(pair):
    local, remote, weight = pair
    q = target(local, remote, weight, 0.0)
    for p in (local, remote):
        assert verified(p, q) == pytest.approx(q, abs=1e-9)


def as_printed(x, p_a, p_b, eta, uniform, resampling):
    """Sample of Algorithm 1 as the paper has it, for one token."""
    if p_a[x] > p_b[x] and uniform < eta * (1 - p_b[x] / p_a[x]):
        rest = np.maximum(0, p_b - p_a)
        return int(np.flatnonzero(np.cumsum(rest) > resampling * rest.sum())[0])
    return x


@given(cases(), st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_the_same_tokens_as_the_printed_algorithm(pair, seed, gamma_remote):
    """In arrays and one by one. A number may fall within rounding of a bound: with these draws none does."""
    local, remote, weight = pair
    weight = float(np.clip(weight, -9, 9))  # beyond, η is rounded to 1 or 0 in the mixture
    q, eta_local = target(local, remote, weight, 0.0), 1 / (1 + np.exp(-weight))
    random = np.random.default_rng(seed)
    drafts, numbers = [sample(p, random.random(30)) for p in (local, remote)], random.random((UNIFORMS, 30))
    drawn = aggregate(*drafts, local, remote, q, numbers, gamma_remote)
    for i in range(30):
        x_local, x_remote, u = int(drafts[0][i]), int(drafts[1][i]), numbers[:, i]
        new_local = as_printed(x_local, local, remote, 1 - eta_local, u[0], u[1])
        new_remote = as_printed(x_remote, remote, local, eta_local, u[2], u[3])
        token = new_local if u[4] <= 1 - gamma_remote else new_remote
        assert drawn.token[i] == token
        assert (drawn.accepted_local[i], drawn.accepted_remote[i]) == (token == x_local, token == x_remote)
        alone = aggregate(x_local, x_remote, local, remote, q, u, gamma_remote)
        assert (int(alone.token), bool(alone.accepted_local), bool(alone.accepted_remote)) == tuple(
            column[i] for column in drawn
        )


@given(cases())
def test_a_grid_of_numbers_draws_each_token_as_often_as_it_is_likely(pair):
    p, size = pair[0], 1000
    counts = np.bincount(sample(p, (np.arange(size) + 0.5) / size), minlength=len(p))
    assert counts == pytest.approx(size * p, abs=1 + 1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_with_shared_randomness_tokens_and_acceptance_have_their_probabilities(seed):
    """By counts, as the noise has no sum: the seeds are fixed, so that what passes once passes always."""
    random, draws = np.random.default_rng([10, seed]), 20_000
    local, remote = random.dirichlet(np.full(12, 0.8), 2) * 0.99 + 0.01 / 12
    q = target(local, remote, float(random.normal()), 0.0)
    noise = gumbel_noise(random.random((draws, 12)))
    drawn = aggregate_shared(choose(local, noise), choose(remote, noise), q, noise)
    assert chisquare(np.bincount(drawn.token, minlength=12), draws * q).pvalue > 1e-3
    for p, accepted in ((local, drawn.accepted_local), (remote, drawn.accepted_remote)):
        assert binomtest(int(accepted.sum()), draws, shared_acceptance(p, q)).pvalue > 1e-3
