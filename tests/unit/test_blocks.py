"""Matrices in blocks: every format of GGUF is read as the `gguf` package reads it, and ours are within a half step."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from ondevice import blocks

COLUMNS = 512
HALVES = {"Q4_0": (0, 1), "Q5_0": (0, 1), "Q8_0": (0, 1), "Q6_K": (208, 1)}  # where a block's float16 lie; else (0, 2)


def stored(name: str) -> np.ndarray:
    """[3, bytes] rows of random bytes whose scales are sane."""
    layout = blocks.FORMATS[name]
    random = np.random.default_rng(sum(map(ord, name)))
    data = random.integers(0, 256, (3, COLUMNS // layout.weights, layout.bytes), dtype=np.uint8)
    start, count = HALVES.get(name, (0, 2))
    halves = random.uniform(-0.1, 0.1, (*data.shape[:2], count)).astype(np.float16)
    data[..., start : start + 2 * count] = halves.view(np.uint8).reshape(*data.shape[:2], 2 * count)
    return data.reshape(3, -1)


@pytest.mark.parametrize("name", blocks.FORMATS)
def test_a_format_is_read_exactly(name):
    data = stored(name)
    matrix = blocks.read(name, data, COLUMNS)
    right = quants.dequantize(data, GGMLQuantizationType[name])
    assert (matrix.values() == right).all() and matrix.shape == right.shape
    assert matrix.codes.max() < 2**matrix.bits and matrix.size * matrix.scales.shape[1] == COLUMNS
    assert (matrix.widened().values() == right).all() and matrix.widened().bits == 8
    assert (matrix.rows(np.array([2, 0])).values() == right[[2, 0]]).all()


@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (8, 254)])
def test_what_is_quantised_here_is_within_half_a_step(bits, steps):
    weights = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    weights[0, :32] = 0
    weights[1, :32] = 0.25
    cut = weights.reshape(5, 3, 32)
    widest = 2 * np.abs(cut).max(axis=-1) if bits == 8 else cut.max(axis=-1) - cut.min(axis=-1)
    apart = np.abs(blocks.quantised(weights, bits).values() - weights).reshape(5, 3, 32).max(axis=-1)
    assert (apart <= 0.5001 * widest / steps + 1e-7).all()


def test_a_row_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"40.*32"):
        blocks.quantised(np.zeros((2, 40), np.float32), 4)
