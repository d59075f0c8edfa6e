"""Fixtures of all tests."""

import os
import signal
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before a numeric library is loaded: as many threads as workers, not more
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job: programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With --dist loadgroup a file's tests run in one process, as their fixtures are shared, but for smaller groups."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models run fastest on one thread; a module asks for it with `pytestmark`."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
