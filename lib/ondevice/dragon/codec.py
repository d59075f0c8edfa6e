"""A next-token distribution in a few hundred bytes, read alike on every machine.

The most probable tokens that fit are kept, each with an integer weight n; the weights sum to 2^B, and the token's
probability is n / 2^B. Both numbers and every partial sum of them are exact in float64, so both sides have the same
distribution bit for bit, and it sums to exactly 1 in any order. The tail is dropped and the rest scaled up.

A side draws its drafts from decode(encode(p)) and both sides take this for p, so that Theorem 1 stays exact: it holds
for any pair of distributions. What the cap changes is p itself, by the total variation that `bench_dragon_codec.py`
reports. (Printed: "less than 0.5 KB per token", section 7.3, without saying how.)

The bytes: B, k, and the number of tokens K less 1 (1, 1 and 2 bytes, big-endian); then bits: the gaps between ids in
ascending order, less 1, as Rice codes, and the weights as Elias gamma codes, both with all unary parts first; then
zeros up to a whole byte. Byte-wise varints of the same would keep half as many tokens.
"""

from __future__ import annotations

import bisect
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

CAP = 512  # bytes a distribution: "0.5 KB"
SMALLEST = 16  # bytes: one token of any vocabulary fits
LARGEST = 2**14  # bytes: K fits into two of them, as a token takes two bits at least
PRECISION = 24  # the finest B; what is less probable than 2^-25 is dropped
_TOLERANCE = 1e-3  # of the sum of what is encoded; a softmax in float32 is within 1e-5
_HEADER = struct.Struct(">BBH")

Integers = NDArray[np.int64]
Bits = NDArray[np.uint8]


@dataclass(frozen=True)
class _Kept:
    """Tokens that stand for a distribution: ids [K] ascending, weights [K] that sum to 2^precision."""

    ids: Integers
    weights: Integers
    precision: int

    def size(self) -> int:
        """Bytes of the code."""
        gaps = _gaps(self.ids)
        bits = int(2 * _widths(self.weights).sum()) + len(gaps) + _rice(gaps)[1]
        return _HEADER.size + -(-bits // 8)


def encode(probabilities: ArrayLike, cap: int = CAP) -> bytes:
    """At most `cap` bytes that `decode` reads; of the ways to use them one that changes the distribution little.

    probabilities: [V], summing to 1 within 1e-3. Of equally probable tokens those with the lowest ids are kept. What
    `decode` gave is encoded without loss, where it fits into the cap.
    Raises ValueError on what is no distribution and on a cap outside [16, 16384].
    """
    if not SMALLEST <= cap <= LARGEST:
        raise ValueError(f"A distribution's cap is from {SMALLEST} to {LARGEST} bytes, not {cap}.")
    tokens = _likeliest(_checked(probabilities), 4 * cap)
    whole = tokens.quantised(len(tokens.ids), PRECISION)
    return _written(whole if whole.size() <= cap else _fitted(tokens, cap))


def decode(payload: bytes, vocabulary: int) -> NDArray[np.float64]:
    """The probabilities [V] that sum to exactly 1.

    vocabulary: V, as at the encoder. Raises ValueError on bytes that no encoder wrote for it.
    """
    if vocabulary < 1:
        raise ValueError(f"A vocabulary has at least one token id, not {vocabulary}.")
    kept = _read(payload)
    if kept.ids[-1] >= vocabulary:
        raise ValueError(f"An encoded distribution has the token id {kept.ids[-1]}, of a vocabulary of {vocabulary}.")
    found = np.zeros(vocabulary)
    found[kept.ids] = kept.weights / 2.0**kept.precision
    return found


def _checked(probabilities: ArrayLike) -> NDArray[np.float64]:
    p = np.asarray(probabilities, float)
    if p.ndim != 1 or not 0 < p.size < 2**31:
        raise ValueError(f"A distribution has the shape [V], not {list(p.shape)}.")
    total, least = float(p.sum()), float(p.min())
    if not (least >= 0 and abs(total - 1) <= _TOLERANCE):
        raise ValueError(f"Probabilities are not negative and sum to 1; here the least is {least}, the sum {total}.")
    return p


@dataclass(frozen=True)
class _Likeliest:
    """The tokens that may be kept: ids and probabilities, likeliest first, and their order by id."""

    ids: Integers
    values: NDArray[np.float64]
    by_id: Integers

    def quantised(self, count: int, precision: int) -> _Kept:
        """The weights nearest to the first `count` probabilities, scaled to sum to 1; without those that are 0.

        The largest remainders are rounded up: no other integers of this sum are nearer in total variation.
        """
        values = self.values[:count]
        exact = values / values.sum() * 2.0**precision
        weights = np.floor(exact)
        left = 2**precision - int(weights.sum())
        if left:
            weights[_largest(exact - weights, left)] += 1
        chosen = self.by_id[self.by_id < count]
        chosen = chosen[weights[chosen] > 0]
        integers = weights[chosen].astype(np.int64)
        odd = int(np.bitwise_or.reduce(integers))
        spare = (odd & -odd).bit_length() - 1  # halved as often as all can be: one form of each distribution
        return _Kept(self.ids[chosen], integers >> spare, precision - spare)


def _likeliest(p: NDArray[np.float64], most: int) -> _Likeliest:
    """At most `most` tokens, none of probability 0; of equals those with the lowest ids."""
    some = p[p > 0]  # without the zeros of a cut distribution, which make a partition slow
    least = np.partition(some, -most)[-most] if most < len(some) else some.min()
    ids = np.flatnonzero(p >= least)
    ids = ids[np.argsort(-p[ids], kind="stable")[:most]]
    return _Likeliest(ids, p[ids], np.argsort(ids))


def _largest(values: NDArray[np.float64], count: int) -> Integers:
    """Places of the `count` largest values, of equals the first ones."""
    least = np.partition(values, -count)[-count]
    above = np.flatnonzero(values > least)
    return np.concatenate([above, np.flatnonzero(values == least)[: count - len(above)]])


def _fitted(tokens: _Likeliest, cap: int) -> _Kept:
    """The nearer, in total variation, of the two that can be the nearest that fits.

    A coarse B keeps more tokens, a fine one has nearer weights. The best is the finest B at which all tokens that do
    not round to 0 fit, or the next, with fewer tokens; one further was never best on a model's distributions.
    """
    every = len(tokens.ids)
    over = bisect.bisect(range(PRECISION), cap, key=lambda precision: tokens.quantised(every, precision).size())
    tried = tokens.quantised(every, over - 1), _longest(tokens, over, cap)
    return min(tried, key=lambda kept: _loss(tokens, kept))


def _loss(tokens: _Likeliest, kept: _Kept) -> float:
    """Twice the total variation, but for a constant: a token that is not kept adds its probability."""
    places = tokens.by_id[np.searchsorted(tokens.ids[tokens.by_id], kept.ids)]
    values = tokens.values[places]
    return float(np.abs(values - kept.weights / 2.0**kept.precision).sum() - values.sum())


def _longest(tokens: _Likeliest, precision: int, cap: int) -> _Kept:
    """With this precision, as many of the likeliest tokens as fit; one always does."""
    best, low, high = tokens.quantised(1, precision), 1, len(tokens.ids)
    while low < high and best.size() < cap - 1:  # `low` tokens fit, and leave room for another
        middle = (low + high + 1) // 2
        kept = tokens.quantised(middle, precision)
        if kept.size() <= cap:
            best, low = kept, middle
        else:
            high = middle - 1
    return best


def _gaps(ids: Integers) -> Integers:
    """How many ids lie between each and the one before."""
    found = ids.copy()
    found[1:] -= ids[:-1] + 1
    return found


def _rice(gaps: Integers) -> tuple[int, int]:
    """(k, bits) of the shortest Rice code: k low bits as they are, the rest in unary."""
    about = (int(gaps.sum()) // len(gaps)).bit_length()  # the best is next to log2 of the mean gap
    sizes = {k: len(gaps) * (k + 1) + int((gaps >> k).sum()) for k in range(max(0, about - 2), about + 1)}
    best = min(sizes, key=sizes.__getitem__)
    return best, sizes[best]


def _widths(weights: Integers) -> Integers:
    """Bits behind the leading one."""
    return np.frexp(weights)[1].astype(np.int64) - 1


def _written(kept: _Kept) -> bytes:
    gaps, widths = _gaps(kept.ids), _widths(kept.weights)
    k = _rice(gaps)[0]
    low = np.full(len(gaps), k)
    bits = np.concatenate(
        [_unary(gaps >> k), _unary(widths), _binary(gaps, low), _binary(kept.weights, widths)]
    )  # fmt: skip
    return _HEADER.pack(kept.precision, k, len(gaps) - 1) + np.packbits(bits).tobytes()


def _unary(values: Integers) -> Bits:
    """Each value as so many zeros and a one."""
    ends = np.cumsum(values + 1)
    bits = np.zeros(ends[-1], np.uint8)
    bits[ends - 1] = 1
    return bits


def _places(widths: Integers) -> tuple[Integers, Integers]:
    """(which value, which power of two) each bit belongs to, of values written with so many bits each."""
    owner = np.repeat(np.arange(len(widths)), widths)
    return owner, np.cumsum(widths)[owner] - 1 - np.arange(len(owner))


def _binary(values: Integers, widths: Integers) -> Bits:
    """The low bits of each value, as many as `widths` has, highest first."""
    owner, power = _places(widths)
    return (values[owner] >> power & 1).astype(np.uint8)


def _from_binary(bits: Bits, widths: Integers) -> Integers:
    owner, power = _places(widths)
    found = np.bincount(owner, np.ldexp(bits.astype(float), power), len(widths))  # sums below 2^32: exact
    return found.astype(np.int64)


def _read(payload: bytes) -> _Kept:
    """What `_written` wrote. Raises ValueError on other bytes, none of which may cost more than its length."""
    if not _HEADER.size < len(payload) <= LARGEST:
        raise ValueError(f"An encoded distribution has from {_HEADER.size + 1} to {LARGEST} bytes, not {len(payload)}.")
    precision, k, last = _HEADER.unpack_from(payload)
    count = last + 1
    bits = np.unpackbits(np.frombuffer(payload, np.uint8, offset=_HEADER.size))
    ones = np.flatnonzero(bits)[: 2 * count]
    if precision > PRECISION or k > 31 or len(ones) < 2 * count:
        raise ValueError(f"No encoded distribution: B = {precision}, k = {k}, K = {count} in {len(payload)} bytes.")
    unary = np.diff(ones, prepend=-1) - 1
    widths = np.concatenate([np.full(count, k), unary[count:]])
    begin = int(ones[-1]) + 1
    end = begin + int(widths.sum())
    if end > len(bits) or len(bits) - end >= 8 or bits[end:].any() or widths[count:].max() > precision:
        raise ValueError(f"An encoded distribution of {len(payload)} bytes is damaged: its bits are {end}.")
    binary = _from_binary(bits[begin:end], widths)
    ids = np.cumsum((unary[:count] << k) + binary[:count] + 1) - 1
    weights = binary[count:] + (1 << widths[count:])
    if weights.sum() != 2**precision or (precision and not (weights & 1).any()):
        raise ValueError(f"An encoded distribution is damaged: its weights sum to {weights.sum()}, B = {precision}.")
    return _Kept(ids, weights, precision)
