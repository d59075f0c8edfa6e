"""The CPU seconds that a test of the gate may take, its children's with them, imports and fixtures without.

A pytest plugin, which tests/conftest.py names. Counted is what passes while a test's function runs, unless the test has
the mark `long` or `whole`. Tests over REPORTED are listed at the end, and over MOST a test fails. A test with the mark
`gate`, whose programs import the library, is only listed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from typing import Any

import pytest

REPORTED, MOST = 5.0, 20.0
SECONDS = "CPU seconds"
imports = {"depth": 0, "seconds": 0.0}


def counted(load: Any) -> Any:
    """A loader's `exec_module` that adds its CPU seconds to those of imports; an import inside another counts once."""

    def exec_module(loader: Any, module: Any) -> None:
        imports["depth"] += 1
        began = time.process_time()
        try:
            load(loader, module)
        finally:
            imports["depth"] -= 1
            if imports["depth"] == 0:
                imports["seconds"] += time.process_time() - began

    return exec_module


def pytest_configure(config: pytest.Config) -> None:
    for loader in (SourceFileLoader, ExtensionFileLoader):
        loader.exec_module = counted(loader.exec_module)  # type: ignore[method-assign]


def spent() -> float:
    """CPU seconds of this process and of the children that it has waited for, less those of imports."""
    return sum(os.times()[:4]) - imports["seconds"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    began = spent()
    yield
    seconds = spent() - began
    if item.get_closest_marker("long") or item.get_closest_marker("whole"):
        return
    if seconds > REPORTED:
        item.user_properties.append((SECONDS, round(seconds, 1)))
    if seconds > MOST and not item.get_closest_marker("gate"):
        sentence = f"It took {seconds:.0f} CPU seconds of {MOST:g}: the mark `long` gives it to make test-long."
        pytest.fail(sentence, pytrace=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for key in ("passed", "failed") for report in terminalreporter.stats.get(key, [])]
    rows = [(dict(report.user_properties)[SECONDS], report.nodeid) for report in reports
            if report.when == "call" and SECONDS in dict(report.user_properties)]  # fmt: skip
    if rows:
        terminalreporter.section(f"tests of more than {REPORTED:.0f} CPU seconds; {MOST:.0f} are the most")
        for seconds, name in sorted(rows, reverse=True):
            terminalreporter.line(f"{seconds:6.1f}  {name}")
