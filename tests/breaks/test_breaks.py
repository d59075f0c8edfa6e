"""Faults put into a copy of library and notebooks, each of which a check must notice."""

import pytest
from copies import ROOT, Break, NotFound, broken, failing, file_of
from faults import AUDIT, FAULTS


class Unnoticed(AssertionError):
    """All checks pass in spite of a fault."""


def marked(fault: Break):
    # The process that ran a check unbroken gets all of its breaks.
    marks = [pytest.mark.xdist_group(file_of(fault))]
    if fault.passes:
        reason = "passes through until its paper is rebuilt"
        marks.append(pytest.mark.xfail(raises=Unnoticed, strict=True, reason=reason))
    return pytest.param(fault, id=f"{fault.paper}: {fault.name}", marks=marks)


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


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_checks_of_a_break_exist(fault):
    for check in fault.checks:
        file, _, name = check.partition("::")
        text = (ROOT / "tests" / file.removeprefix("tests/")).read_text(encoding="utf-8")
        assert not name or f"def {name.partition('[')[0]}(" in text, check


# An auditor's twenty faults, each with the breaks that stand for it.
TWENTY = {
    "near-tie threshold of 0.1": ["a near-tie is whatever is closer than 0.1"],
    "mean for median in a recorder": [
        "sd.npu's recorder takes the mean for the median",
        "DIAA's recorder takes the mean for the median",
        "GRATING's recorder takes the mean for the median",
        "DiSCo's probe takes means for medians",
    ],
    "invented machine, commit, minutes": ["an invented machine, commit and minutes are believed"],
    "a stale PNG": ["a picture's hash is not looked at", "a stale picture with a mended hash passes"],
    "a halved published CSV": ["a halved table passes"],
    "a bound loosened and published": ["a bound loosened and published"],
    "another plotted column": ["another column is plotted"],
    "a number in README's prose": [
        "a number in README's prose", "a number in README's findings", "a number in a row that is written",
    ],
    "a headline swapped for a reproduced claim": ["a headline swapped for a reproduced claim"],
    "DIAA's tables forgotten between requests": ["DIAA's tables forget between requests"],
    "a tenth of a record's rows dropped": ["a record without a tenth of its rows is believed"],
    "validation used for test pools": ["rules are judged on validation pools"],
    "simulated called measured": ["times of a fitted phone are called measured"],
    "small-sample widening dropped": ["the widening for few samples is dropped"],
    "an interval's level": ["an interval of 90 percent"],
    "intervals over pairs instead of prompts": ["a prompt that is asked five times is five prompts"],
    "DRAGON's first wait dropped": ["time per token leaves the first wait out"],
    "growth measured without its baseline": ["growth of memory is measured without its baseline"],
    "published kinds relabelled": ["relabelled kinds pass where all files agree"],
    "a null computed by another function": ["a null is computed by another function"],
}


def test_each_fault_of_the_audit_has_a_break():
    assert len(TWENTY) == 20
    assert {name for names in TWENTY.values() for name in names} <= {fault.name for fault in AUDIT}


def test_a_text_that_is_gone_is_said(root):
    fault = Break("gone", "shared", "pyproject.toml", "no such text", "", ())
    with pytest.raises(NotFound, match="stands 0 times in pyproject"), broken(root, fault):
        pass
