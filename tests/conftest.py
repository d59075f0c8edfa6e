"""Fixtures of all tests."""

import os
import signal
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:  # before a numeric library is loaded: as many threads as workers, not more
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job: programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["budget", "resumed"]

# The gate draws the same few examples everywhere, and how long one takes decides nothing; make test-long draws others.
settings.register_profile(
    "random", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("gate", settings.get_profile("random"), max_examples=30, derandomize=True, database=None)
settings.load_profile("gate")

LONG = {"breaks", "systems"}  # folders of make test-long, but for tests with the mark `gate`


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests in folders of the long command get its mark. With --dist loadgroup a file's tests run in one process, as
    their fixtures are shared, but for smaller groups.
    """
    for item in items:
        if item.path.parent.name in LONG and item.get_closest_marker("gate") is None:
            item.add_marker("long")
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A unit or property test of the gate does not read the corpus of installed packages, which takes minutes."""
    from ondevice.corpus import store

    folder = CORPUS.setdefault("folder", store.folder)
    of_gate = item.path.parent.name in {"unit", "properties"} and item.get_closest_marker("long") is None
    store.folder = no_corpus if of_gate else folder


CORPUS: dict[str, Any] = {}  # the function itself, which other tests have


def no_corpus() -> NoReturn:
    raise AssertionError("This test reads the whole corpus: give it documents of its own, or the mark `long`.")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models run fastest on one thread; a module asks for it with `pytestmark`."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
