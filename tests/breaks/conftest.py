"""The copy that all breaks share, and the table of what caught them, at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from copies import Break, copy, failing_each, file_of
from faults import FAULTS

CAUGHT = "caught"


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(tmp_path_factory.mktemp("breaks"))


@pytest.fixture(scope="session")
def passing(root: Path) -> Callable[[Break], None]:
    """Raises AssertionError unless the break's checks pass on the unbroken copy; those of a file are run at once."""
    known: dict[tuple[str, ...], list[str]] = {}

    def check(fault: Break) -> None:
        if fault.checks not in known:
            groups = list(dict.fromkeys(other.checks for other in FAULTS if file_of(other) == file_of(fault)))
            known.update(zip(groups, failing_each(root, groups, root / "log"), strict=True))
        failed = known[fault.checks]
        assert not failed, f"{', '.join(failed)} fails without a break:\n{(root / 'log').read_text()[-3000:]}"

    return check


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[Break, str], None]:
    """Keeps what caught a break with its test's report, which comes back from other processes, too."""
    return lambda fault, check: request.node.user_properties.append((CAUGHT, [fault.paper, fault.name, check]))


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    called = [report for report in reports if getattr(report, "when", "") == "call"]
    rows = [row for report in called for name, row in report.user_properties if name == CAUGHT]
    if rows:
        terminalreporter.section("breaks on purpose, and what caught them")
        for paper, name, check in rows:
            terminalreporter.line(f"{paper:8} {name:58} {check or '- (passes through)'}")
        terminalreporter.line(f"{sum(bool(check) for _, _, check in rows)} of {len(rows)} caught")
