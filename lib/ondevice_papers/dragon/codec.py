"""A next-token distribution in a few dozen bytes, which its receiver completes by what it knows itself.

The sender keeps K tokens, each with a level, the rounded square root of its probability on a scale of the message's
own, and the probability of all others together, the tail. From these bytes alone follow, on every machine,

- `decode`: what the sender draws its drafts from, the kept tokens in proportion to level^2. These are integers, so
  that both sides have the same numbers. Algorithm 1 is exact for any pair of distributions that drafts are drawn from,
  and for any target.
- `filled`: what the receiver takes for the sender's distribution when it makes the target. It shares the tail out in
  proportion to its own model's distribution without documents, the prior. No private text is in that, and nothing
  needs it to be bit-identical on the two sides.

Levels of the square root make the errors of likely and unlikely tokens cost alike. A sender that has the prior, too,
keeps the tokens that it foretells worst. (Printed: "less than 0.5 KB per token", section 7.5, without saying how.)

The bytes: the orders of the two codes below (5 and 3 bits), the tail in sixteenths of a power of 1/2 (1 byte; 255: no
tail), K less 1 (2 bytes, big-endian); then bits: the gaps between ids in ascending order, less 1, as Rice codes, and
the levels less LEAST as exponential Golomb codes, both with all unary parts first; then zeros up to a whole byte.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ondevice_papers.dragon.aggregation import Floats

CAP = 512  # bytes a distribution: "0.5 KB"
SMALLEST = 8  # bytes: one token of any vocabulary fits
LARGEST = 2**14  # bytes: K fits into two of them, as a token takes two bits at least
LEAST = 3  # level of the least token that is kept: finer levels keep fewer tokens, coarser ones are far off
GREATEST = 2**16  # level: sums of 2^16 squares are exact in float64
FOREGONE = 3.0  # nats of error of the prior that count for the choice of tokens, at most
_NONE = 255  # the tail's code where there is none
_TOLERANCE = 1e-3  # of the sum of what is encoded; a softmax in float32 is within 1e-5
_HEADER = struct.Struct(">BBH")

Integers = NDArray[np.int64]
Bits = NDArray[np.uint8]


class Kept(NamedTuple):
    """What a message holds. ids: [K] ascending. weights: [K] integers, level^2. tail: probability of other tokens."""

    ids: Integers
    weights: Integers
    tail: float


def encode(probabilities: ArrayLike, cap: int = CAP, prior: ArrayLike | None = None) -> bytes:
    """At most `cap` bytes of [V] probabilities, which sum to 1 within 1e-3.

    prior: [V], about the receiver's; without it the likeliest tokens are kept. Of equal ones those of the lowest ids.
    Raises ValueError on what is no distribution and on a cap outside [8, 16384].
    """
    if not SMALLEST <= cap <= LARGEST:
        raise ValueError(f"A distribution's cap is from {SMALLEST} to {LARGEST} bytes, not {cap}.")
    p = _checked(probabilities)
    order = ranked(p, cap, None if prior is None else _checked(prior))
    low = 1
    high = len(order) + 1
    best = _Coded.from_tokens(p, order[:1])
    tried = min(len(order), cap)
    while high - low > 1 + low // 64:  # the last 1 percent of tokens is not looked for
        coded = _Coded.from_tokens(p, order[:tried])
        if coded.size() <= cap:
            low = tried
            best = coded
        else:
            high = tried
        guess = tried * cap // coded.size()  # a token takes about as many bits as the others
        tried = min(max(guess, low + 1), high - 1)
    return best.written()


def decode(payload: bytes, vocabulary: int) -> Floats:
    """[V] what the sender's drafts are drawn from. Errors as of `read`."""
    kept = read(payload, vocabulary)
    p = np.zeros(vocabulary)
    p[kept.ids] = kept.weights / kept.weights.sum()
    return p


def filled(payload: bytes, prior: Floats) -> Floats:
    """[V] what the receiver takes for the sender's distribution. prior: [V] of its own. Errors as of `read`."""
    kept = read(payload, len(prior))
    p = prior.astype(float)
    p[kept.ids] = 0.0
    rest = p.sum()
    tail = kept.tail if rest > 0 else 0.0
    p *= tail / rest if tail else 0.0
    p[kept.ids] = (1 - tail) * (kept.weights / kept.weights.sum())
    return p


def read(payload: bytes, vocabulary: int) -> Kept:
    """The tokens that `encode` kept. Raises ValueError on other bytes, none of which may cost more than its length."""
    if not _HEADER.size < len(payload) <= LARGEST:
        raise ValueError(f"An encoded distribution has from {_HEADER.size + 1} to {LARGEST} bytes, not {len(payload)}.")
    orders, tail, last = _HEADER.unpack_from(payload)
    rice, golomb, count = orders >> 3, orders & 7, last + 1
    bits = np.unpackbits(np.frombuffer(payload, np.uint8, offset=_HEADER.size))
    ones = np.flatnonzero(bits)[: 2 * count]
    if len(ones) < 2 * count or not tail:
        raise ValueError(f"No encoded distribution: K = {count} and a tail of {tail} in {len(payload)} bytes.")
    unary = np.diff(ones, prepend=-1) - 1
    widths = np.concatenate([np.full(count, rice), unary[count:] + golomb])
    begin = int(ones[-1]) + 1
    end = begin + int(widths.sum())
    if end > len(bits) or len(bits) - end >= 8 or bits[end:].any() or widths[count:].max() > GREATEST.bit_length():
        raise ValueError(f"An encoded distribution of {len(payload)} bytes is damaged: its bits are {end}.")
    binary = _from_binary(bits[begin:end], widths)
    ids = np.cumsum((unary[:count] << rice) + binary[:count] + 1) - 1
    levels = binary[count:] + (1 << widths[count:]) - (1 << golomb) + LEAST
    if ids[-1] >= vocabulary or levels.max() > GREATEST:
        raise ValueError(f"An encoded distribution has token {ids[-1]}, level {levels.max()}; V is {vocabulary}.")
    return Kept(ids, levels**2, 0.0 if tail == _NONE else 2.0 ** (-tail / 16))


def _checked(probabilities: ArrayLike) -> Floats:
    p = np.asarray(probabilities, float)
    if p.ndim != 1 or not 0 < p.size <= 2**30:
        raise ValueError(f"A distribution has the shape [V], not {list(p.shape)}.")
    total = float(p.sum())
    least = float(p.min())
    if not (least >= 0 and abs(total - 1) <= _TOLERANCE):
        raise ValueError(f"Probabilities are not negative and sum to 1; here the least is {least}, the sum {total}.")
    return p


def ranked(p: Floats, cap: int, prior: Floats | None) -> Integers:
    """The ids that may be kept, those first whose loss would cost most: the likeliest, or the prior's worst errors."""
    least = 2.0**-10
    most = 4 * cap
    while np.count_nonzero(p >= least) < most and least > 1e-12:
        least /= 16
    ids = np.flatnonzero(p >= least)
    ids = ids[np.argsort(-p[ids], kind="stable")[:most]]
    if prior is None or len(ids) < 2:
        return ids
    top = ids[:cap]
    scale = max(1 - p[top].sum(), 1e-9) / max(1 - prior[top].sum(), 1e-9)  # of the prior in the tail, roughly
    error = np.abs(np.log(p[ids] / np.maximum(scale * prior[ids], 1e-30)))
    cost = p[ids] * np.minimum(error, FOREGONE)
    cost[0] = np.inf  # a draft may need it, and a message has a token
    return ids[np.argsort(-cost, kind="stable")]


def rooted(p: Floats) -> Integers:
    """[K] levels of the kept probabilities: their square roots on a scale of the message's own, from LEAST up.

    The scale leaves room for the likeliest: where probabilities differ by more than levels can, the least are rounded
    up.
    """
    unit = np.partition(p, len(p) // 50)[len(p) // 50]  # the few below it are rounded up
    unit = max(unit, p.max() * (LEAST / GREATEST) ** 2)
    return np.clip(np.rint(np.sqrt(p / unit) * LEAST), LEAST, GREATEST).astype(np.int64)


class _Coded(NamedTuple):
    """A choice of tokens: gaps and levels less LEAST, [K] each, with the orders of their codes and the tail's code."""

    gaps: Integers
    levels: Integers
    rice: int
    golomb: int
    bits: int
    tail: int

    @classmethod
    def from_tokens(cls, p: Floats, chosen: Integers) -> _Coded:
        """p: [V] probabilities. chosen: [K] ids of the tokens to keep."""
        ids = np.sort(chosen)
        values = p[ids]
        levels = rooted(values) - LEAST
        gaps = np.diff(ids, prepend=-1) - 1
        about = int(gaps.mean()).bit_length()  # the best Rice order is next to log2 of the mean gap
        rice, gap_bits = min(
            ((k, len(gaps) * (k + 1) + int((gaps >> k).sum())) for k in range(max(0, about - 2), about + 1)),
            key=lambda order: order[1],
        )
        widths = ((k, int((2 * _log2((levels >> k) + 1) + 1 + k).sum())) for k in range(5))
        golomb, level_bits = min(widths, key=lambda order: order[1])
        rest = 1 - min(1.0, float(values.sum()))
        tail = _NONE if rest < 2.0**-15.9 else max(1, round(-16 * np.log2(rest)))
        return cls(gaps, levels, rice, golomb, gap_bits + level_bits, tail)

    def size(self) -> int:
        """Bytes of the message."""
        return _HEADER.size - (-self.bits // 8)

    def written(self) -> bytes:
        shifted = self.levels + (1 << self.golomb)
        widths = _log2(shifted)  # the low bits of `shifted`; what is above golomb of them is told in unary
        bits = np.concatenate(
            [
                _unary(self.gaps >> self.rice),
                _unary(widths - self.golomb),
                _binary(self.gaps, np.full(len(self.gaps), self.rice)),
                _binary(shifted, widths),
            ]
        )
        return _HEADER.pack(self.rice << 3 | self.golomb, self.tail, len(self.gaps) - 1) + np.packbits(bits).tobytes()


def _log2(values: Integers) -> Integers:
    """Whole part of the logarithm of numbers from 1."""
    return np.frexp(values)[1].astype(np.int64) - 1


def _unary(values: Integers) -> Bits:
    """Each value as so many zeros and a one."""
    ends = np.cumsum(values + 1)
    bits = np.zeros(ends[-1], np.uint8)
    bits[ends - 1] = 1
    return bits


def _bit_positions(widths: Integers) -> tuple[Integers, Integers]:
    """(which value, which power of two) each bit belongs to, of values written with so many bits each."""
    owner = np.repeat(np.arange(len(widths)), widths)
    return owner, np.cumsum(widths)[owner] - 1 - np.arange(len(owner))


def _binary(values: Integers, widths: Integers) -> Bits:
    """The low bits of each value, as many as `widths` has, highest first."""
    owner, power = _bit_positions(widths)
    return (values[owner] >> power & 1).astype(np.uint8)


def _from_binary(bits: Bits, widths: Integers) -> Integers:
    owner, power = _bit_positions(widths)
    sums = np.bincount(owner, np.ldexp(bits.astype(float), power), len(widths))  # below 2^32: exact
    return sums.astype(np.int64)
