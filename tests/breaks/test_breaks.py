"""Faults put into the process or into what it reads, each of which its check must notice."""

import faults
import pytest
from faults import FAULTS
from injection import Fault

from ondevice_studies.claims import CLAIMS


def marked(fault: Fault):
    # The process that ran a check without a fault gets all that have it.
    return pytest.param(fault, id=f"{fault.paper}: {fault.name}", marks=pytest.mark.xdist_group(fault.file))


@pytest.mark.parametrize("fault", map(marked, FAULTS))
def test_a_fault_is_caught_by_its_check(fault, outcome, note):
    unbroken, broken = outcome(fault)
    assert not broken.error, broken.error
    assert not unbroken.error and not unbroken.failed, f"Without a fault: {unbroken.error} {unbroken.texts}"
    assert broken.used, f"{fault.check} does not come upon the fault."
    note(fault, fault.check if broken.judged else "")
    assert broken.judged, f"{fault.check} passes, or fails by an error of another kind: {broken.texts}"


def test_there_are_forty_over_all_papers():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
    assert {*CLAIMS, "shared"} == {fault.paper for fault in FAULTS}


# An auditor's twenty faults, each with those that stand for it.
TWENTY = {
    "near-tie threshold of 0.1": [faults.near_ties_within_a_tenth],
    "mean for median in a recorder": [
        faults.diaa_means, faults.disco_means, faults.grating_means, faults.sdnpu_means,
    ],
    "invented machine, commit, minutes": [faults.edits_believed, faults.invented_machine],
    "a stale PNG": [faults.stale_picture, faults.stale_picture_with_its_hash],
    "a halved published CSV": [faults.halved_table, faults.tables_never_compared],
    "a bound loosened and published": [faults.loosened_bound],
    "another plotted column": [faults.another_column],
    "a number in README's prose": [faults.number_in_prose, faults.number_in_findings, faults.number_in_a_row],
    "a headline swapped for a reproduced claim": [faults.swapped_headline],
    "DIAA's tables forgotten between requests": [faults.forgetful_tables],
    "a tenth of a record's rows dropped": [faults.rows_dropped],
    "validation used for test pools": [faults.judged_on_validation],
    "simulated called measured": [faults.simulated_called_measured],
    "small-sample widening dropped": [faults.not_widened],
    "an interval's level": [faults.another_level],
    "intervals over pairs instead of prompts": [faults.pairs_for_prompts],
    "DRAGON's first wait dropped": [faults.first_wait_dropped],
    "growth measured without its baseline": [faults.no_baseline],
    "published kinds relabelled": [faults.relabelled_kind],
    "a null computed by another function": [faults.null_of_another_function],
}  # fmt: skip


def test_each_fault_of_the_audit_stands_for_something():
    assert len(TWENTY) == 20
    assert all(fault in FAULTS for stand_ins in TWENTY.values() for fault in stand_ins)
