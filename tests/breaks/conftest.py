"""What became of each fault's check, and the table of what caught them, at the end of the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faults import FAULTS
from forked import Outcome, outcomes
from injection import Fault

CAUGHT = "caught"


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Fault], tuple[Outcome, Outcome]]:
    """Of a fault's check without it and with it; faults whose checks are in one file are tried at once."""
    log = tmp_path_factory.mktemp("breaks") / "log"
    known: dict[str, tuple[Outcome, Outcome]] = {}

    def both(fault: Fault) -> tuple[Outcome, Outcome]:
        if fault.name not in known:
            same = [other for other in FAULTS if other.file == fault.file]
            unbroken, broken = outcomes(same, log)
            known.update({other.name: (unbroken, each) for other, each in zip(same, broken, strict=True)})
        return known[fault.name]

    return both


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[Fault, str], None]:
    """Keeps what caught a fault with its test's report, which comes back from other processes, too."""
    return lambda fault, check: request.node.user_properties.append((CAUGHT, [fault.paper, fault.name, check]))


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    called = [report for report in reports if getattr(report, "when", "") == "call"]
    rows = [row for report in called for name, row in report.user_properties if name == CAUGHT]
    if rows:
        terminalreporter.section("faults on purpose, and what caught them")
        for paper, name, check in rows:
            terminalreporter.line(f"{paper:8} {name:80} {check or '- (passes through)'}")
        terminalreporter.line(f"{sum(bool(check) for _, _, check in rows)} of {len(rows)} caught")
