"""Fixtures of all tests."""

import os
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before a numeric library is loaded: as many threads as workers, not more
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models run fastest on one thread; a module asks for it with `pytestmark`."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
