"""The guard knows every run of its length, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice_programs.pair.guard import Guard


@pytest.mark.parametrize("length", [2, 5, 8])
def test_it_finds_exactly_the_runs_that_are_there(length: int):
    random = np.random.default_rng(length)
    documents = [random.integers(0, 30, size).tolist() for size in (0, 1, length - 1, length, 40, 200)]
    runs = {tuple(one[i : i + length]) for one in documents for i in range(len(one) - length + 1)}
    guard, found = Guard(documents, length), 0
    for one in [*runs, *(tuple(random.integers(0, 30, length).tolist()) for _ in range(3000))]:
        assert guard.quotes([7, 7, *one]) == (one in runs)
        found += one in runs
    assert found >= len(runs) > 100


def test_less_than_a_run_is_no_quotation():
    guard = Guard([[1, 2, 3, 4]], 3)
    assert not guard.quotes([2, 3]) and guard.quotes([2, 3, 4]) and not guard.quotes([2, 3, 4, 5])
    assert not Guard([], 3).quotes([1, 2, 3])


def test_orders_and_neighbours_are_told_apart():
    guard = Guard([[10, 20, 30]], 3)
    assert not any(guard.quotes(one) for one in ([30, 20, 10], [20, 10, 30], [11, 19, 30], [10, 21, 29], [9, 21, 30]))


def test_a_single_token_is_no_quotation():
    with pytest.raises(ValueError, match="not 1"):
        Guard([[1]], 1)
