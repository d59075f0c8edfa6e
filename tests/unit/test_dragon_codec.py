"""Distributions under a byte cap: what is kept, how near it is, and what is refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from ondevice.dragon import codec
from ondevice.dragon.codec import decode, encode


def drawn(vocabulary: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    """The softmax of normal logits; a larger spread is more peaked."""
    logits = np.random.default_rng(seed).normal(0, spread, vocabulary)
    found = np.exp(logits - logits.max())
    return found / found.sum()


def lost(p: np.ndarray, cap: int) -> float:
    """Total variation."""
    return float(np.abs(p - decode(encode(p, cap), len(p))).sum() / 2)


def test_code_by_hand():
    """B = 2, k = 0, K = 3; gaps 0 0 0 as 1 1 1; weights 2 1 1 as 01 1 1, and the low bit 0 of the 2."""
    payload = bytes([2, 0, 0, 2, 0b11101110])
    assert encode([0.5, 0.25, 0.25]) == payload
    assert decode(payload, 3).tolist() == [0.5, 0.25, 0.25]
    assert decode(payload, 5).tolist() == [0.5, 0.25, 0.25, 0, 0]


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 8_192, 62_768, 151_936, 2**20])
def test_one_hot_is_exact_and_takes_eight_bytes_at_most(vocabulary):
    for token in {0, vocabulary // 2, vocabulary - 1}:
        p = np.zeros(vocabulary)
        p[token] = 1
        payload = encode(p, codec.SMALLEST)
        assert len(payload) <= 8
        assert (decode(payload, vocabulary) == p).all()


@pytest.mark.parametrize("vocabulary", [1, 2, 64, 1024])
def test_uniform_is_exact_where_it_fits(vocabulary):
    p = np.full(vocabulary, 1 / vocabulary)
    assert (decode(encode(p), vocabulary) == p).all()


@pytest.mark.parametrize("vocabulary", [8_192, 151_936])
def test_of_a_uniform_one_that_does_not_fit_the_lowest_ids_are_kept(vocabulary):
    found = decode(encode(np.full(vocabulary, 1 / vocabulary)), vocabulary)
    kept = np.flatnonzero(found)
    assert len(kept) >= 1000
    assert kept.tolist() == list(range(len(kept)))


@pytest.mark.parametrize("vocabulary", [500, 8_192, 151_936])
def test_the_cap_is_kept_to_and_used(vocabulary):
    p = drawn(vocabulary, spread=2.0)
    for cap in (16, 17, 64, 512):
        assert 0.8 * cap <= len(encode(p, cap)) <= cap  # flat ones leave some: the next finer B would take more


def test_most_probable_tokens_are_kept():
    p = drawn(8_192)
    kept = decode(encode(p), len(p)) > 0
    assert p[kept].min() >= p[~kept].max()


def test_ids_of_large_vocabularies_survive():
    """Two bytes cannot hold them: the authors' program takes one for another from id 62,768 on."""
    ids = [0, 32_767, 32_768, 62_767, 62_768, 65_535, 65_536, 151_643, 151_935]
    p = np.zeros(151_936)
    p[ids] = 1 / len(ids)
    found = decode(encode(p), len(p))
    assert np.flatnonzero(found).tolist() == ids
    assert np.allclose(found[ids], 1 / len(ids), atol=2.0**-codec.PRECISION)


def test_a_small_support_is_kept_whole_to_the_finest_precision():
    p = np.zeros(8_192)
    p[np.random.default_rng(1).choice(8_192, 50, replace=False)] = drawn(50, spread=1.0)
    assert np.abs(decode(encode(p), len(p)) - p).max() <= 2.0**-codec.PRECISION


def test_sums_are_exactly_one_in_any_order():
    found = decode(encode(drawn(8_192)), 8_192)
    random = np.random.default_rng(0)
    assert {float(np.cumsum(random.permutation(found))[-1]) for _ in range(20)} == {1.0}
    assert math.fsum(found) == 1.0


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0, 4.0])
def test_more_bytes_lose_less(spread):
    p = drawn(8_192, spread=spread)
    losses = [lost(p, cap) for cap in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.75 * losses[0]


def nearest(p: np.ndarray, cap: int) -> float:
    """The least total variation of all precisions and numbers of tokens, by trying each."""
    tokens = codec._likeliest(p, 4 * cap)
    best = 1.0
    for precision, count in itertools.product(range(13), range(1, len(tokens.ids) + 1)):
        kept = tokens.quantised(count, precision)
        if kept.size() <= cap:
            found = np.zeros(len(p))
            found[kept.ids] = kept.weights / 2.0**kept.precision
            best = min(best, float(np.abs(p - found).sum() / 2))
    return best


def test_near_the_best_that_fits():
    ratios = []
    for seed, spread in itertools.product(range(2), (0.5, 1.5, 3.0)):
        p = drawn(80, seed, spread)
        ratios.append(lost(p, 30) / nearest(p, 30))
    assert min(ratios) >= 1
    assert max(ratios) <= 1.25
    assert np.mean(ratios) <= 1.05


def test_largest_remainders_are_rounded_up():
    """2.2 and 1.8 of 4 are 2 and 2, in lowest terms 1 and 1 of 2."""
    kept = codec._likeliest(np.array([0.45, 0.55]), 2).quantised(2, 2)
    assert (kept.weights.tolist(), kept.precision) == ([1, 1], 1)


def test_the_rice_code_is_the_shortest():
    random = np.random.default_rng(0)
    for mean in (0.01, 0.5, 3, 40, 1000):
        gaps = random.geometric(1 / (1 + mean), 200) - 1
        assert codec._rice(gaps)[1] == min(len(gaps) * (k + 1) + (gaps >> k).sum() for k in range(20))


def test_torch_and_float32_are_taken():
    torch = pytest.importorskip("torch")
    p = torch.softmax(torch.randn(8_192, generator=torch.Generator().manual_seed(0)), 0)
    assert encode(p) == encode(p.numpy())


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([], r"shape \[V\], not \[0\]"),
        ([[0.5, 0.5]], r"not \[1, 2\]"),
        (0.5, r"not \[\]"),
        ([0.5, 0.4], "sum 0.9"),
        ([1.5, -0.5], "least is -0.5"),
        ([float("nan"), 1.0], "nan"),
        ([float("inf"), 0.0], "inf"),
    ],
)
def test_what_is_no_distribution_is_refused(bad, said):
    with pytest.raises(ValueError, match=said):
        encode(bad)


@pytest.mark.parametrize("cap", [-1, 0, 15, 2**14 + 1])
def test_caps_out_of_bounds_are_refused(cap):
    with pytest.raises(ValueError, match=str(cap)):
        encode([1.0], cap)


GOOD = bytes([2, 0, 0, 2, 0b11101110])


def coded(precision: int, bits: str, count: int = 1) -> bytes:
    """A code with k = 0 and these bits."""
    return bytes([precision, 0, 0, count - 1]) + int(bits + "0" * (-len(bits) % 8), 2).to_bytes(-(-len(bits) // 8))


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "not 0"),
        (GOOD[:4], "not 4"),
        (bytes(2**14 + 1), "not 16385"),
        (bytes([25, *GOOD[1:]]), "B = 25"),
        (bytes([2, 32, *GOOD[2:]]), "k = 32"),
        (bytes([2, 1, *GOOD[2:]]), "damaged"),  # three bits are missing
        (bytes([2, 0, 0, 3, 0xEE]), "K = 4"),
        (bytes([2, 0, 0, 1, 0xEE]), "damaged"),  # bits are left over
        (bytes([3, *GOOD[1:]]), "sum to 4, B = 3"),
        (GOOD + b"\0", "damaged"),
        (bytes([2, 0, 0, 1, 0b11010100]), "sum to 4, B = 2"),  # 2 and 2, not in lowest terms: 1 and 1 with B = 1
        (bytes([0, 0, 0, 0, 0b11000001]), "damaged"),  # what is over is not zero
        (coded(0, "1" + "0" * 70 + "1" + "1" * 70), "damaged"),  # a weight of 71 bits
        (coded(25, "11" + "1" + "0" * 24 + "1" + "1" * 24, 2), "No encoded distribution: B = 25"),  # right but for B
    ],
)  # fmt: skip
def test_damaged_codes_are_refused(payload, said):
    with pytest.raises(ValueError, match=said):
        decode(payload, 8)


def test_another_vocabulary_is_refused():
    payload = encode(np.eye(1, 100, 99)[0])
    with pytest.raises(ValueError, match="token id 99, of a vocabulary of 99"):
        decode(payload, 99)
    with pytest.raises(ValueError, match="not 0"):
        decode(payload, 0)
