"""DRAGON's Theorem 1: target tokens have the target's distribution, by chi-square and by exact sums.

The test is one verdict over 50 random pairs of distributions: no p-value is too small, and together they are uniform.
It must also reject: each negative control is an error that a program could well have.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binomtest, chisquare, kstest

from ondevice_papers.dragon import speculative_aggregation as module
from ondevice_papers.dragon.aggregation import target
from ondevice_papers.dragon.speculative_aggregation import (
    UNIFORMS,
    Stream,
    acceptance,
    aggregate,
    aggregate_shared,
    choose,
    expected_acceptance,
    gumbel_noise,
    gumbels,
    residual,
    sample,
    shared_acceptance,
    uniforms,
    verify,
)

Floats = NDArray[np.float64]
Pair = tuple[Floats, Floats, float]  # p^l, p^r, log h^l - log h^r

DRAWS = 100_000
FEWER = 40_000  # of the negative controls, which are rejected with these already
MOST = 0.7  # the part of the pairs in which a control is rejected by that pair alone
LEAST = 1e-5  # a p-value of one pair; the seeds are fixed, so that what passes once passes always
UNIFORM = 1e-3  # of the test that all p-values are uniform
GAMMAS = (0.5, 1.0)


def one_distribution(random: np.random.Generator, vocabulary: int) -> Floats:
    """Flat or steep, and every third one cut to a part of its tokens."""
    p = random.dirichlet(np.full(vocabulary, random.choice([0.3, 1.0, 5.0])))
    if random.random() < 1 / 3:
        p[random.permutation(vocabulary)[: vocabulary // 3]] = 0
    return p / p.sum()


def pairs() -> list[Pair]:
    random, found = np.random.default_rng(20250), []
    for _ in range(50):
        vocabulary = int(random.integers(3, 80))
        local, remote = (one_distribution(random, vocabulary) for _ in range(2))
        found.append((local, remote, float(random.normal())))
    return found


def mixed(pair: Pair) -> Floats:
    return target(pair[0], pair[1], pair[2], 0.0)


def p_value(tokens: NDArray[np.int64], expected: Floats) -> float:
    """Chi-square; cells that expect fewer than 5 are one cell. 0 if an impossible token was drawn."""
    counts = np.bincount(tokens, minlength=len(expected)).astype(float)
    if counts[expected == 0].any():
        return 0.0
    means = expected * len(tokens)
    small = means < 5
    observed, means = np.append(counts[~small], counts[small].sum()), np.append(means[~small], means[small].sum())
    if means[-1] < 5:
        observed, means = np.append(observed[:-2], observed[-2:].sum()), np.append(means[:-2], means[-2:].sum())
    return float(chisquare(observed, means).pvalue)


def rejected(p_values: list[float]) -> bool:
    return min(p_values) < LEAST or kstest(p_values, "uniform").pvalue < UNIFORM


Drafts = NDArray[np.int64]
Rule = Callable[[Pair, Drafts, Drafts, Floats, np.random.Generator], NDArray[np.int64]]


def p_values_of(rule: Rule, draws: int = DRAWS, cut: float = 1.0) -> list[float]:
    """Over all pairs. cut: the mass to which drafts, but not what they are verified against, are cut."""
    found = []
    for seed, pair in enumerate(pairs()):
        random = np.random.default_rng([7, seed])
        drafts = [sample(nucleus(p, cut), random.random(draws)) for p in pair[:2]]
        tokens = rule(pair, drafts[0], drafts[1], mixed(pair), random)
        found.append(p_value(tokens, mixed(pair)))
    return found


def nucleus(p: Floats, mass: float) -> Floats:
    """The likeliest tokens until their sum reaches the mass."""
    order = np.argsort(-p)
    kept = np.zeros_like(p)
    first = order[np.cumsum(p[order]) - p[order] < mass]
    kept[first] = p[first]
    return kept / kept.sum()


def algorithm_1(gamma_remote: float) -> Rule:
    def rule(pair, draft_local, draft_remote, q, random):
        numbers = random.random((UNIFORMS, len(draft_local)))
        return aggregate(draft_local, draft_remote, *pair[:2], q, numbers, gamma_remote).token

    return rule


# By chi-square


@pytest.mark.parametrize("gamma_remote", GAMMAS)
def test_target_tokens_have_the_targets_distribution(gamma_remote):
    assert not rejected(p_values_of(algorithm_1(gamma_remote)))


def test_so_they_have_with_shared_randomness():
    def rule(pair, draft_local, draft_remote, q, random):
        noise = gumbel_noise(random.random((len(draft_local), len(q))))
        return aggregate_shared(choose(pair[0], noise), choose(pair[1], noise), q, noise).token

    assert not rejected(p_values_of(rule, draws=20_000))  # a number for each token of the vocabulary


def test_drafts_have_their_distribution():
    numbers = np.random.default_rng(3)
    assert not rejected([p_value(sample(q, numbers.random(DRAWS)), q) for q in map(mixed, pairs())])


# Negative controls: what the test above must reject


@pytest.mark.parametrize("gamma_remote", GAMMAS)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, q: q,  # resampled from the target itself
        lambda p, q: np.abs(q - p),
        lambda p, q: np.maximum(0.0, p - q),
    ],
)
def test_a_wrong_residual_is_rejected(monkeypatch, wrong, gamma_remote):
    monkeypatch.setattr(module, "residual", wrong)
    found = p_values_of(algorithm_1(gamma_remote), FEWER)
    assert rejected(found)
    assert np.mean(np.array(found) < LEAST) > MOST


def prefer_accepted(pair, draft_local, draft_remote, q, random):
    """The remote resample if it is the draft, else the local one: a choice that looks at what it chooses from."""
    numbers = random.random((4, len(draft_local)))
    remote = verify(draft_remote, pair[1], q, numbers[2:])
    return np.where(remote == draft_remote, remote, verify(draft_local, pair[0], q, numbers[:2]))


def one_number_twice(pair, draft_local, draft_remote, q, random):
    """The coin of the mix is the number that verifies the local draft."""
    numbers = random.random((UNIFORMS, len(draft_local)))
    numbers[4] = numbers[0]
    return aggregate(draft_local, draft_remote, *pair[:2], q, numbers).token


def either_draft(pair, draft_local, draft_remote, q, random):
    """gamma over the drafts in the place of the resamples."""
    return np.where(random.random(len(draft_local)) < 0.5, draft_local, draft_remote)


@pytest.mark.parametrize("rule", [prefer_accepted, one_number_twice, either_draft])
def test_a_wrong_mix_is_rejected(rule):
    found = p_values_of(rule, FEWER)
    assert rejected(found)
    assert np.mean(np.array(found) < LEAST) > MOST


@pytest.mark.parametrize("gamma_remote", GAMMAS)
def test_drafts_from_a_cut_distribution_are_rejected(gamma_remote):
    found = p_values_of(algorithm_1(gamma_remote), FEWER, cut=0.8)
    assert rejected(found)
    assert np.mean(np.array(found) < LEAST) > MOST


def test_drafts_that_depend_on_each_other_change_acceptance_only():
    """Each resample alone is right, so that the target is; Eq. 5, of independent drafts, no longer holds."""
    p_values, acceptances = [], []
    for seed, pair in enumerate(pairs()):
        random = np.random.default_rng([8, seed])
        same = random.random(DRAWS)
        drafts = [sample(p, same) for p in pair[:2]]
        found = aggregate(*drafts, *pair[:2], mixed(pair), random.random((UNIFORMS, DRAWS)))
        p_values.append(p_value(found.token, mixed(pair)))
        expected = acceptance(pair[1], mixed(pair))
        acceptances.append(float(binomtest(int(found.accepted_remote.sum()), DRAWS, expected).pvalue))
    assert not rejected(p_values)
    assert np.mean(np.array(acceptances) < LEAST) > MOST


# Acceptance


def acceptance_p_values(gamma_remote: float, assumed: float) -> list[float]:
    """Of both sides' accepted drafts in all pairs, against Eq. 5 with the assumed gamma."""
    found = []
    for seed, (local, remote, weight) in enumerate(pairs()):
        random, q = np.random.default_rng([9, seed]), mixed((local, remote, weight))
        eta_local = 1 / (1 + np.exp(-weight))
        drafts = [sample(p, random.random(DRAWS)) for p in (local, remote)]
        result = aggregate(*drafts, local, remote, q, random.random((UNIFORMS, DRAWS)), gamma_remote)
        for accepted, expected in (
            (result.accepted_local, expected_acceptance(local, remote, eta_local, 1 - assumed)),
            (result.accepted_remote, expected_acceptance(remote, local, 1 - eta_local, assumed)),
        ):
            found.append(float(binomtest(int(accepted.sum()), DRAWS, expected).pvalue))
    return found


@pytest.mark.parametrize("gamma_remote", [0.0, 0.3, 0.5, 1.0])
def test_acceptance_is_equation_5(gamma_remote):
    assert not rejected(acceptance_p_values(gamma_remote, gamma_remote))


@pytest.mark.parametrize("gamma_remote", [0.45, 0.97])
def test_a_wrong_gamma_is_rejected(gamma_remote):
    assumed = 0.5 if gamma_remote < 0.5 else 1.0
    assert np.mean(np.array(acceptance_p_values(gamma_remote, assumed)) < LEAST) > MOST


def test_acceptance_with_shared_randomness():
    for seed, pair in enumerate(pairs()):
        q = mixed(pair)
        noise = gumbel_noise(np.random.default_rng([10, seed]).random((10_000, len(q))))
        result = aggregate_shared(choose(pair[0], noise), choose(pair[1], noise), q, noise)
        expected = shared_acceptance(pair[1], q)
        assert binomtest(int(result.accepted_remote.sum()), 10_000, expected).pvalue > LEAST


# By exact sums


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
    for p in pair[:2]:
        assert verified(p, mixed(pair)) == pytest.approx(mixed(pair), abs=1e-9)


def as_printed(x, p_a, p_b, eta, uniform, resampling):
    """Sample of Algorithm 1 as the paper has it, for one token."""
    if p_a[x] > p_b[x] and uniform < eta * (1 - p_b[x] / p_a[x]):
        rest = np.maximum(0, p_b - p_a)
        return int(np.flatnonzero(np.cumsum(rest) > resampling * rest.sum())[0])
    return x


@given(cases(), st.integers(0, 2**32))
def test_the_same_tokens_as_the_printed_algorithm(pair, seed):
    """In arrays and one by one. A number may fall within rounding of a bound: with these draws none does."""
    local, remote, weight = pair
    weight = float(np.clip(weight, -9, 9))  # beyond, η is rounded to 1 or 0 in the mixture
    q, eta_local = target(local, remote, weight, 0.0), 1 / (1 + np.exp(-weight))
    random = np.random.default_rng(seed)
    drafts, numbers = [sample(p, random.random(30)) for p in (local, remote)], random.random((UNIFORMS, 30))
    found = aggregate(*drafts, local, remote, q, numbers)
    for i in range(30):
        x_local, x_remote, u = int(drafts[0][i]), int(drafts[1][i]), numbers[:, i]
        new_local = as_printed(x_local, local, remote, 1 - eta_local, u[0], u[1])
        new_remote = as_printed(x_remote, remote, local, eta_local, u[2], u[3])
        token = new_local if u[4] <= 0.5 else new_remote
        assert found.token[i] == token
        assert (found.accepted_local[i], found.accepted_remote[i]) == (token == x_local, token == x_remote)
        alone = aggregate(x_local, x_remote, local, remote, q, u)
        assert (int(alone.token), bool(alone.accepted_local), bool(alone.accepted_remote)) == tuple(
            column[i] for column in found
        )


# Sequences: streams of random numbers that are independent over positions, sides and sessions


def next_of(side: int, prefix: tuple[int, ...]) -> Floats:
    """[3] of a toy side; the prefix matters."""
    return np.random.default_rng([side, *prefix, 99]).dirichlet(np.full(3, 0.7))


PREFIXES = [prefix for n in range(6) for prefix in product(range(3), repeat=n)]
NEXT = {(side, prefix): next_of(side, prefix) for side in (0, 1) for prefix in PREFIXES}
TARGETS = {prefix: target(NEXT[0, prefix], NEXT[1, prefix], 0.3, 0.0) for prefix in PREFIXES}


def speculated(seed: int, length: int, gamma_remote: float, device: Stream, cloud: Stream) -> list[int]:
    """Step by step; both drafts at a position follow the target tokens, as if all before had been accepted."""
    tokens: list[int] = []
    for position in range(length):
        local, remote, q = NEXT[0, tuple(tokens)], NEXT[1, tuple(tokens)], TARGETS[tuple(tokens)]
        drafts = [sample(p, uniforms(seed, s, position, 1)[0]) for p, s in ((local, device), (remote, cloud))]
        numbers = uniforms(seed, Stream.AGGREGATION, position)
        tokens.append(int(aggregate(*drafts, local, remote, q, numbers, gamma_remote).token))
    return tokens


def p_value_of_sequences(sequences: list[list[int]]) -> float:
    expected = [TARGETS[()][a] * TARGETS[(a,)][b] for a, b in product(range(3), repeat=2)]
    return p_value(np.array([3 * a + b for a, b in sequences]), np.array(expected))


@pytest.mark.parametrize("gamma_remote", GAMMAS)
def test_two_tokens_in_a_row_have_their_joint_distribution(gamma_remote):
    found = [speculated(seed, 2, gamma_remote, Stream.DEVICE, Stream.CLOUD) for seed in range(4_000)]
    assert p_value_of_sequences(found) > LEAST


@pytest.mark.parametrize("gamma_remote", GAMMAS)
def test_drafts_from_the_aggregators_stream_are_rejected(gamma_remote):
    """The first number of the stream verifies the local draft; the remote draft uses it again, too."""
    wrong = Stream.AGGREGATION
    found = [speculated(seed, 2, gamma_remote, wrong, wrong) for seed in range(4_000)]
    rejects = p_value_of_sequences(found) < LEAST
    assert rejects == (gamma_remote == 0.5)  # at 1 neither the local draft nor that number plays a part


def test_with_shared_randomness_the_tokens_are_those_of_token_wise_aggregation():
    """Both sides draft three ahead from their own drafts and roll back; one in each session's positions."""
    accepted = 0
    for seed in range(300):
        wise: list[int] = []
        for position in range(6):
            wise.append(int(choose(TARGETS[tuple(wise)], gumbels(seed, position, 3))))
        tokens: list[int] = []
        queues: tuple[list[int], list[int]] = ([], [])
        for position in range(6):
            for side, queue in enumerate(queues):
                while len(queue) < min(3, 6 - position):
                    prefix = (*tokens, *queue)
                    queue.append(int(choose(NEXT[side, prefix], gumbels(seed, len(prefix), 3))))
            drafts = [queue.pop(0) for queue in queues]
            result = aggregate_shared(*drafts, TARGETS[tuple(tokens)], gumbels(seed, position, 3))
            for queue, kept in zip(queues, result[1:], strict=True):
                accepted += int(kept)
                if not kept:
                    queue.clear()
            tokens.append(int(result.token))
        assert tokens == wise
    assert 0.3 < accepted / 3600 < 0.95  # there was something to accept, and to roll back
