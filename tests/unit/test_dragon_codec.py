"""Distributions under a byte cap: what is kept, how it is filled in, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice_papers.dragon import codec
from ondevice_papers.dragon.codec import LEAST, decode, encode, filled, read


def drawn(vocabulary: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    """The softmax of normal logits; a larger spread is more peaked."""
    logits = np.random.default_rng(seed).normal(0, spread, vocabulary)
    found = np.exp(logits - logits.max())
    return found / found.sum()


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """KL(p, q), nats."""
    return float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum())


# Rice order 0, Golomb order 0, no tail, K = 3; gaps 0 0 0 as 1 1 1; levels 6 3 3 are 3 0 0, of which v = 4 1 1 has the
# widths 2 0 0, in unary 001 1 1, and the low bits 00.
GOOD = bytes([0x00, 255, 0, 2, 0b11100111, 0b00000000])


def test_code_by_hand():
    assert encode([2 / 3, 1 / 6, 1 / 6]) == GOOD
    assert decode(GOOD, 3) == pytest.approx([2 / 3, 1 / 6, 1 / 6], abs=1e-15)
    assert decode(GOOD, 5)[3:].tolist() == [0, 0]
    assert read(GOOD, 3).weights.tolist() == [36, 9, 9] and read(GOOD, 3).tail == 0


def test_the_tail_is_shared_out_as_the_prior_has_it():
    """Tail 2^(-16/16) = 1/2; token 1 is kept, the others have 1/2 in proportion 1 : 3."""
    payload = bytes([0x00, 16, 0, 0, 0b01100000])  # a gap of 1, v = 1
    assert filled(payload, np.array([0.1, 0.6, 0.3])) == pytest.approx([0.125, 0.5, 0.375])
    assert filled(payload, np.array([0.0, 1.0, 0.0])).tolist() == [0, 1, 0]  # the prior has nothing to say
    assert decode(payload, 3).tolist() == [0, 1, 0]


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 8_192, 62_768, 151_936, 2**20])
def test_one_hot_is_exact_and_takes_eight_bytes_at_most(vocabulary):
    for token in {0, vocabulary // 2, vocabulary - 1}:
        p = np.zeros(vocabulary)
        p[token] = 1
        payload = encode(p, codec.SMALLEST)
        assert len(payload) <= codec.SMALLEST == 8
        assert (decode(payload, vocabulary) == p).all()
        assert (filled(payload, np.full(vocabulary, 1 / vocabulary)) == p).all()


@pytest.mark.parametrize("vocabulary", [8_192, 49_152])
@pytest.mark.parametrize(("top", "fall"), [(0.5, 0.01), (0.9, 0.1), (0.997, 0.5), (0.9999, 0.02)])
def test_a_larger_cap_is_not_worse_however_small_the_tail(vocabulary, top, fall):
    """One token has most of the chance, and the others fall to nothing: more of them differ than levels do."""
    rest = np.maximum(np.exp(-fall * np.arange(vocabulary - 1)), 1e-15)
    p = np.concatenate([[top], (1 - top) * rest / rest.sum()])
    away = [np.abs(decode(encode(p, cap), vocabulary) - p).sum() / 2 for cap in (64, 512, 2048, 4096, 16384)]
    assert (np.diff(away) < 1e-4).all(), away
    assert away[-1] < 0.01


@pytest.mark.parametrize("vocabulary", [1_000, 8_192, 151_936])
@pytest.mark.parametrize("known", [False, True])
def test_the_cap_is_kept_to_and_used(vocabulary, known):
    p, prior = drawn(vocabulary, spread=2.0), drawn(vocabulary, 1, 2.0)
    for cap in (16, 17, 64, 512):
        assert 0.9 * cap - 2 <= len(encode(p, cap, prior if known else None)) <= cap


def test_with_a_prior_what_it_foretells_is_left_to_it():
    """The likeliest token is kept all the same, as drafts come from what is kept."""
    prior = drawn(8_192, spread=2.0)
    p = prior.copy()
    p[100:140] *= 20
    p /= p.sum()
    known, unknown = (encode(p, 80, one) for one in (prior, None))
    both = [np.isin(np.flatnonzero(decode(one, len(p))), range(100, 140)).sum() for one in (known, unknown)]
    assert both[0] > 1.3 * both[1] and decode(known, len(p))[p.argmax()] > 0
    assert divergence(p, filled(known, prior)) < 0.8 * divergence(p, filled(unknown, prior))


def test_a_levels_error_is_half_a_step_of_the_square_root():
    p = np.zeros(8_192)
    p[np.random.default_rng(1).choice(8_192, 40, replace=False)] = drawn(40, spread=1.0)
    kept = read(encode(p), len(p))
    levels = np.sqrt(kept.weights)
    assert levels.min() == LEAST and len(kept.ids) == 40
    assert np.abs(levels - LEAST * np.sqrt(p[kept.ids] / p[p > 0].min())).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("bad", [[], [[0.5, 0.5]], [0.5, 0.4], [1.5, -0.5], [float("nan"), 1.0]])
def test_what_is_no_distribution_is_refused(bad):
    with pytest.raises(ValueError):
        encode(bad)


@pytest.mark.parametrize("cap", [-1, 7, 2**14 + 1])
def test_caps_out_of_bounds_are_refused(cap):
    with pytest.raises(ValueError, match=str(cap)):
        encode([1.0], cap)


def test_another_vocabulary_is_refused():
    payload = encode(np.eye(1, 100, 99)[0])
    with pytest.raises(ValueError, match="token 99"):
        decode(payload, 99)
