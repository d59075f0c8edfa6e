"""Matrices whose weights are integers in blocks, as GGUF files hold them: read exactly, or quantised here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SIZE = 32  # weights of a block that is quantised here
LARGEST = 127  # the code of a channel's largest weight
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix [rows, columns] in blocks of `size` weights along a row.

    A weight is scale * code + minimum, with the scale and the minimum of its block. Without minima the codes are
    centred: a weight is scale * (code - 2^(bits - 1)).

    codes: [rows, columns] uint8, below 2^bits. scales: [rows, columns / size] float32. minima: like scales, or None.
    bits: 4 or 8.
    """

    codes: Bytes
    scales: Floats
    minima: Floats | None
    bits: Literal[4, 8]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def size(self) -> int:
        """Weights of a block."""
        return self.codes.shape[1] // self.scales.shape[1]

    def rows(self, index: NDArray[np.int64]) -> Blocks:
        """The blocks of these rows, in this order."""
        minima = None if self.minima is None else self.minima[index]
        return Blocks(self.codes[index], self.scales[index], minima, self.bits)

    def values(self) -> Floats:
        """[rows, columns] the weights in float32."""
        codes = self.codes.reshape(*self.scales.shape, self.size).astype(np.float32)
        if self.minima is None:
            weights = (codes - 2 ** (self.bits - 1)) * self.scales[..., None]
        else:
            weights = codes * self.scales[..., None] + self.minima[..., None]
        return weights.reshape(self.shape)

    def widened(self) -> Blocks:
        """The same weights in codes of 8 bits."""
        if self.bits == 8:
            return self
        if self.minima is not None:
            return Blocks(self.codes, self.scales, self.minima, 8)
        return Blocks(self.codes + np.uint8(120), self.scales, None, 8)  # 128 - 8, so that the centre stays


def quantised(weights: Floats, bits: Literal[4, 8]) -> Blocks:
    """A matrix [rows, columns] in blocks of 32, by the rules of GGUF's Q4_1 and Q8_0, with scales in float32.

    Raises ValueError where a row cannot be cut into blocks.
    """
    rows, columns = weights.shape
    if columns % SIZE:
        raise ValueError(f"A row of {columns} weights cannot be cut into blocks of {SIZE}.")
    cut = weights.reshape(rows, columns // SIZE, SIZE)
    if bits == 8:
        scales = np.abs(cut).max(axis=-1) / 127
        codes = np.rint(_divided(cut, scales)) + 128
        return Blocks(codes.astype(np.uint8).reshape(rows, columns), scales, None, 8)
    minima = cut.min(axis=-1)
    scales = (cut.max(axis=-1) - minima) / 15
    codes = np.rint(_divided(cut - minima[..., None], scales)).clip(0, 15)
    return Blocks(codes.astype(np.uint8).reshape(rows, columns), scales, minima, 4)


@dataclass(frozen=True, eq=False)
class Channels:
    """A matrix [rows, columns] whose weights are scale * code, with a scale for each row.

    codes: [rows, columns] int8, from -127 to 127. scales: [rows] float32.
    """

    codes: NDArray[np.int8]
    scales: Floats

    def rows(self, index: NDArray[np.int64]) -> Channels:
        """These rows, in this order."""
        return Channels(self.codes[index], self.scales[index])

    def values(self) -> Floats:
        """[rows, columns] the weights in float32."""
        return self.codes * self.scales[:, None]


def per_channel(weights: Floats) -> Channels:
    """A matrix [rows, columns] in 8 bits, with one scale for each row, an output channel of a linear layer."""
    scales = np.abs(weights).max(axis=-1) / np.float32(LARGEST)
    return Channels(np.rint(_divided(weights, scales)).astype(np.int8), scales)


def _divided(cut: Floats, scales: Floats) -> Floats:
    """cut / scales, 0 where a block's scale is 0."""
    return np.divide(cut, scales[..., None], out=np.zeros_like(cut), where=scales[..., None] > 0)


# The formats of GGUF (ggml's block layouts). Each reader takes bytes [rows, blocks, bytes of a block].


def _halves(data: Bytes) -> Floats:
    """[..., n] numbers from [..., 2n] bytes of float16."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """[..., 2n] codes from [..., n] bytes: all low halves, then all high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _fifth_bits(data: Bytes) -> Bytes:
    """[..., 32] the bits, as 0 or 16, of [..., 4] bytes, the least significant first."""
    return np.unpackbits(data, axis=-1, bitorder="little") << np.uint8(4)


def _flat(codes: Bytes) -> Bytes:
    return codes.reshape(len(codes), -1)


def _q4_0(data: Bytes) -> Blocks:
    return Blocks(_flat(_nibbles(data[..., 2:])), _halves(data[..., :2])[..., 0], None, 4)


def _q4_1(data: Bytes) -> Blocks:
    halves = _halves(data[..., :4])
    return Blocks(_flat(_nibbles(data[..., 4:])), halves[..., 0], halves[..., 1], 4)


def _q5_0(data: Bytes) -> Blocks:
    codes = (_nibbles(data[..., 6:]) | _fifth_bits(data[..., 2:6])) + np.uint8(112)  # 128 - 16: centred
    return Blocks(_flat(codes), _halves(data[..., :2])[..., 0], None, 8)


def _q5_1(data: Bytes) -> Blocks:
    halves = _halves(data[..., :4])
    codes = _nibbles(data[..., 8:]) | _fifth_bits(data[..., 4:8])
    return Blocks(_flat(codes), halves[..., 0], halves[..., 1], 8)


def _q8_0(data: Bytes) -> Blocks:
    codes = data[..., 2:] + np.uint8(128)  # int8 read as uint8: adding 128 wraps to the centred code
    return Blocks(_flat(codes), _halves(data[..., :2])[..., 0], None, 8)


def _k_scales(data: Bytes) -> tuple[Floats, Floats]:
    """(scales, minima) [rows, 8 * blocks] of Q4_K's and Q5_K's first 16 bytes: two float16, 8 pairs of 6 bits."""
    halves = _halves(data[..., :4])
    first, second, third = data[..., 4:8], data[..., 8:12], data[..., 12:16]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minimum = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    scales = halves[..., :1] * scale.astype(np.float32)
    minima = -halves[..., 1:] * minimum.astype(np.float32)
    return scales.reshape(len(data), -1), minima.reshape(len(data), -1)


def _k_nibbles(data: Bytes) -> Bytes:
    """[..., 256] codes from [..., 128] bytes: of each 32 bytes all low halves, then all high ones."""
    parts = data.reshape(*data.shape[:-1], 4, 32)
    return _nibbles(parts).reshape(*data.shape[:-1], 256)


def _q4_k(data: Bytes) -> Blocks:
    return Blocks(_flat(_k_nibbles(data[..., 16:])), *_k_scales(data), 4)


def _q5_k(data: Bytes) -> Blocks:
    high = np.unpackbits(data[..., 16:48, None], axis=-1, bitorder="little")  # [..., 32, 8]: bit j of weight 32 j + i
    fifth = np.swapaxes(high, -1, -2).reshape(*data.shape[:-1], 256) << np.uint8(4)
    return Blocks(_flat(_k_nibbles(data[..., 48:]) | fifth), *_k_scales(data), 8)


def _q6_k(data: Bytes) -> Blocks:
    low = data[..., :128].reshape(*data.shape[:-1], 2, 2, 32)  # [..., half, part, 32]
    high = data[..., 128:192].reshape(*data.shape[:-1], 2, 1, 32)
    fourths = np.concatenate([low & 15, low >> 4], axis=-2)  # [..., half, 4, 32]
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = (fourths | (((high >> shifts) & 3) << 4)) + np.uint8(96)  # 128 - 32: centred
    scale = data[..., 192:208].view(np.int8).astype(np.float32)
    scales = _halves(data[..., 208:210]) * scale
    return Blocks(_flat(codes), scales.reshape(len(data), -1), None, 8)


@dataclass(frozen=True)
class Format:
    """A format of GGUF: so many weights in a block of so many bytes, and what reads them."""

    weights: int
    bytes: int
    read: Callable[[Bytes], Blocks]


FORMATS = {
    "Q4_0": Format(32, 18, _q4_0),
    "Q4_1": Format(32, 20, _q4_1),
    "Q5_0": Format(32, 22, _q5_0),
    "Q5_1": Format(32, 24, _q5_1),
    "Q8_0": Format(32, 34, _q8_0),
    "Q4_K": Format(256, 144, _q4_k),
    "Q5_K": Format(256, 176, _q5_k),
    "Q6_K": Format(256, 210, _q6_k),
}


def read(name: str, data: Bytes, columns: int) -> Blocks:
    """The matrix of bytes in one of `FORMATS`. columns: weights of a row."""
    layout = FORMATS[name]
    return layout.read(data.reshape(-1, columns // layout.weights, layout.bytes))
