"""Faults put into a copy of library and notebooks, each of which a check must notice."""

import pytest
from copies import Break, NotFound, broken, failing
from faults import FAULTS


class Unnoticed(AssertionError):
    """All checks pass in spite of a fault."""


def marked(fault: Break):
    through = pytest.mark.xfail(raises=Unnoticed, strict=True, reason="passes through until its paper is rebuilt")
    return pytest.param(fault, id=f"{fault.paper}: {fault.name}", marks=[through] if fault.passes else [])


@pytest.mark.parametrize("fault", map(marked, FAULTS))
def test_a_break_is_noticed(fault, root, passing, note):
    passing(fault)
    with broken(root, fault):
        failed = failing(root, fault.checks, root / "log")
    note(fault, failed[0].removeprefix("tests/") if failed else "")
    if not failed:
        raise Unnoticed(f"{fault.name}: {', '.join(fault.checks)} pass.")


def test_there_are_thirty_over_all_papers():
    assert len(FAULTS) >= 30
    assert {"diaa", "disco", "dragon", "grating", "sdnpu"} <= {fault.paper for fault in FAULTS}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_text_that_is_gone_is_said(root):
    fault = Break("gone", "shared", "pyproject.toml", "no such text", "", ())
    with pytest.raises(NotFound, match="stands 0 times in pyproject"), broken(root, fault):
        pass
