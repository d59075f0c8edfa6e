"""DRAGON's aggregation: mixtures in log space, Algorithm 1's edges, acceptance, shared randomness."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from ondevice_papers.dragon.aggregation import document_weights, log_weight, mixture, share, target
from ondevice_papers.dragon.speculative_aggregation import (
    UNIFORMS,
    Stream,
    acceptance,
    aggregate,
    choose,
    expected_acceptance,
    gumbel_noise,
    residual,
    sample,
    shared_acceptance,
    uniforms,
    verify,
)

LAST = np.nextafter(1.0, 0.0)  # the largest number in [0, 1)


def random_p(seed: int, vocabulary: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(vocabulary, 0.5))


# Mixtures (Eqs. 1-4)


def test_a_mixture_by_hand():
    weights = document_weights([np.log(3), 0.0])
    assert np.exp(weights) == pytest.approx([0.75, 0.25])
    with np.errstate(divide="ignore"):
        rows = np.log([[0.2, 0.8, 0.0], [0.6, 0.4, 0.0]])
    found = mixture(rows, weights)
    assert np.exp(found) == pytest.approx([0.3, 0.7, 0.0])
    assert np.isneginf(found[2])


def test_a_temperature_flattens_the_weights():
    assert np.exp(document_weights([2.0, 0.0], 2.0)) == pytest.approx(np.exp([1, 0]) / np.exp([1, 0]).sum())
    assert log_weight([3.0, 3.0], 1.5) == pytest.approx(2 + np.log(2))


def test_two_sides_are_one_softmax_over_all_documents():
    """Eq. 4 against Eq. 2, with scores that overflow outside of log space."""
    random = np.random.default_rng(0)
    scores, log_probs = random.normal(2000, 2, 7), np.log(random.dirichlet(np.ones(9), 7))
    central = np.exp(mixture(log_probs, document_weights(scores, 1.7)))
    sides = [slice(0, 3), slice(3, 7)]
    local, remote = (np.exp(mixture(log_probs[s], document_weights(scores[s], 1.7))) for s in sides)
    split = target(local, remote, *(log_weight(scores[s], 1.7) for s in sides))
    assert split == pytest.approx(central, rel=1e-12)


def test_float32_rounding_is_normalised_away():
    logits = np.random.default_rng(0).normal(0, 3, (3, 50_000)).astype(np.float32)
    rows = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert np.exp(mixture(rows, document_weights([1, 2, 3]))).sum() == pytest.approx(1, abs=1e-12)


def test_the_target_is_the_same_from_both_sides():
    for seed in range(20):
        p, q, weight = random_p(seed), random_p(seed + 100), float(np.random.default_rng(seed).normal(0, 9))
        assert (target(p, q, weight, 1.3) == target(q, p, 1.3, weight)).all()


def test_shares():
    assert share(np.log(3), 0.0) == pytest.approx(0.75)
    assert share(5000.0, 5000.0) == 0.5
    assert (share(-np.inf, -4000.0), share(-4000.0, -np.inf)) == (0, 1)


# Algorithm 1


def test_rounding_rejects_no_draft():
    """No token has more in the target, so that there is no residual to resample from."""
    p, drafts = random_p(1), np.arange(6)
    assert verify(drafts, p * (1 + 4e-7), p, np.zeros((2, 6))).tolist() == drafts.tolist()


@pytest.mark.parametrize("gamma_remote", [0.0, 0.5, 1.0])
def test_a_greedy_target_is_the_mixtures_likeliest_token(gamma_remote):
    """Which is neither side's own likeliest: whatever is drafted, the target token is always the same."""
    local, remote = np.array([0.5, 0.1, 0.4]), np.array([0.1, 0.5, 0.4])
    q = np.eye(3)[target(local, remote, 0.0, 0.0).argmax()]
    numbers = np.random.default_rng(0).random((UNIFORMS, 300))
    drafts = [sample(p, np.random.default_rng(i).random(300)) for i, p in enumerate((local, remote))]
    drawn = aggregate(*drafts, local, remote, q, numbers, gamma_remote)
    assert (drawn.token == 2).all() and (drawn.accepted_local == (drafts[0] == 2)).all()


def test_a_token_of_probability_0_is_never_drawn():
    p = np.array([0.0, 0.1, 0.0, 0.3 + 1e-9, 0.6, 0.0])
    numbers = np.array([0.0, LAST, *np.random.default_rng(0).random(1000)])
    drawn = sample(p, numbers)
    assert set(drawn.tolist()) == {1, 3, 4}
    assert (drawn[0], drawn[1]) == (1, 4)
    noise = gumbel_noise(np.array([[LAST, 0, LAST, 0, 0, LAST]]))
    assert choose(p, noise)[0] == 4


# Acceptance (Eq. 5, Theorem 2)


def test_equation_5_by_enumeration():
    """All drafts, all resamples of Algorithm 1 and both sides of the coin, with their exact probabilities."""
    for seed in range(25):
        p_local, p_remote = random_p(seed, 4), random_p(seed + 50, 4)
        eta_local, gamma_local = np.random.default_rng(seed).random(2)
        q = eta_local * p_local + (1 - eta_local) * p_remote
        kernels = []  # [V, V] law of a side's resample for each of its drafts
        for p, other, eta in ((p_local, p_remote, 1 - eta_local), (p_remote, p_local, eta_local)):
            reject = np.maximum(0, eta * (1 - other / p))
            rest = np.maximum(0, other - p)
            kernels.append(np.diag(1 - reject) + np.outer(reject, rest / rest.sum()))
        accepted_local = accepted_remote = 0.0
        for x_local in range(4):
            for x_remote in range(4):
                chance = p_local[x_local] * p_remote[x_remote]
                token = gamma_local * kernels[0][x_local] + (1 - gamma_local) * kernels[1][x_remote]
                accepted_local += chance * token[x_local]
                accepted_remote += chance * token[x_remote]
        assert expected_acceptance(p_local, p_remote, eta_local, gamma_local) == pytest.approx(accepted_local)
        assert expected_acceptance(p_remote, p_local, 1 - eta_local, 1 - gamma_local) == pytest.approx(accepted_remote)
        assert acceptance(p_local, q, gamma_local) == pytest.approx(accepted_local)


def test_gamma_1_gives_the_greatest_acceptance_possible():
    """1 - TV(p^r, p_t): what the best joint law of draft and target reaches, a linear program."""
    for seed in range(10):
        p, q = random_p(seed, 4), random_p(seed + 70, 4)
        same = -np.eye(4).ravel()
        sums = np.vstack([np.kron(np.eye(4), np.ones(4)), np.kron(np.ones(4), np.eye(4))])
        best = -linprog(same, A_eq=sums, b_eq=np.concatenate([p, q])).fun
        assert acceptance(p, q, 1.0) == pytest.approx(best)
        assert acceptance(p, q, 1.0) == pytest.approx(1 - np.abs(p - q).sum() / 2)
        assert max(acceptance(p, q, gamma) for gamma in (0, 0.5, 0.9)) <= best


# Random numbers


def test_numbers_are_keyed_and_the_same_everywhere():
    assert uniforms(5, Stream.CLOUD, 7).tolist() == uniforms(5, Stream.CLOUD, 7, 9)[:UNIFORMS].tolist()
    seen = {
        number
        for seed in (0, 1, 2**64 - 1)
        for stream in Stream
        for position in (0, 1, 2**40)
        for number in uniforms(seed, stream, position, 50).tolist()
    }
    assert len(seen) == 3 * 4 * 3 * 50  # no two streams share a part
    fixed = [0.9456775220595027, 0.6952594558751128]  # for good: both sides count on it
    assert uniforms(1, Stream.DEVICE, 2, 2).tolist() == fixed


def test_large_vocabularies_and_extreme_values_raise_no_warning():
    """Warnings are errors here. Probabilities down to the smallest number there is."""
    p = np.full(150_000, 5e-324)
    q = p.copy()
    p[0] = q[1] = 1.0
    numbers = [0.5, LAST, 0.5, LAST, 0.2]
    assert aggregate(0, 1, p, q, target(p, q, 0.0, 0.0), numbers).token in (0, 1)
    assert shared_acceptance(p, q) == pytest.approx(0, abs=1e-300)
    assert shared_acceptance(np.array([1 - 1e-9, 1e-9]), np.array([1.0, 5e-324])) == pytest.approx(1)
    assert residual(p, q).argmax() == 1
