"""The copy that all breaks share, and the table of what caught them, at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from copies import Break, copy, failing

CAUGHT = pytest.StashKey[list[tuple[Break, str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CAUGHT] = []


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(tmp_path_factory.mktemp("breaks"))


@pytest.fixture(scope="session")
def passing(root: Path) -> Callable[[Break], None]:
    """Raises AssertionError unless the break's checks pass on the unbroken copy; each is run once."""
    known: set[str] = set()

    def check(fault: Break) -> None:
        new = [one for one in fault.checks if one not in known]
        failed = failing(root, new, root / "log") if new else []
        assert not failed, f"{', '.join(failed)} fails without a break:\n{(root / 'log').read_text()[-3000:]}"
        known.update(new)

    return check


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[Break, str], None]:
    return lambda fault, check: request.config.stash[CAUGHT].append((fault, check))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    rows = config.stash[CAUGHT]
    if rows:
        terminalreporter.section("breaks on purpose, and what caught them")
        for fault, check in rows:
            terminalreporter.line(f"{fault.paper:8} {fault.name:58} {check or '- (passes through)'}")
        terminalreporter.line(f"{sum(bool(check) for _, check in rows)} of {len(rows)} caught")
