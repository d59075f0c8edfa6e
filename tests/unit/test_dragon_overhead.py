"""What aggregation adds: its operations counted, a model's products counted, and times with a clock that is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ondevice import shapes
from ondevice_papers.dragon import overhead
from ondevice_papers.dragon.speculative_aggregation import residual


class Counted(np.ndarray):
    """An array that counts the elements of all that is computed of it."""

    done = 0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [np.asarray(value) for value in inputs]
        Counted.done += max(value.size for value in plain)
        found = getattr(ufunc, method)(*plain, **options)
        return found.view(Counted) if isinstance(found, np.ndarray) else found


def test_operations_are_those_of_a_mixture_and_two_resamples(monkeypatch: pytest.MonkeyPatch):
    """The sum is that of the running sum, and the search in it counts as one comparison a token."""
    size = 50
    monkeypatch.setattr(Counted, "done", 0)
    p, q = (overhead.peaked(size, seed).view(Counted) for seed in (0, 1))
    mixed = 0.4 * p + 0.6 * q
    for side in (p, q):
        rest = residual(side, mixed)
        np.add.accumulate(rest)
        np.less(rest, 0.5)
    assert overhead.operations(size) == Counted.done
    assert overhead.operations() == overhead.operations(overhead.QWEN_VOCABULARY) > 1e6


def test_products_of_a_token_are_the_weights_of_all_linear_layers():
    """Each weight of a linear layer is one multiplication a token; a tied output layer is one, too."""
    config = shapes.SHAPES["qwen2.5-1.5b"].config()
    model = shapes.SHAPES["qwen2.5-1.5b"].empty()
    weights = [part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear)]
    assert overhead.decode_macs() == sum(weights)
    assert config.vocab_size == overhead.QWEN_VOCABULARY
    assert overhead.decode_macs((2, 3, 5, 1, 7)) == 2 * (3 * 3 * 2 + 3 * 1 * 2 + 3 * 5 * 3) + 3 * 7
