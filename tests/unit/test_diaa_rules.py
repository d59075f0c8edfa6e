"""DIAA's rules: one a claim, each rejects its wrong value, and bounds are those that the paper's numbers give."""

import pytest

from ondevice.diaa.rules import RULES
from ondevice.evidence import Estimate, Rule

JUDGED = {claim: rule for claim, rule in RULES.items() if isinstance(rule, Rule)}


def at(value, half=0.0, n=100):
    return Estimate(value, value - half, value + half, n, "recorded")


@pytest.mark.parametrize(
    ("claim", "value", "verdict"),
    [
        ("diaa-c02", at(1.06, 0.03), "reproduced"),  # the paper's own lead
        ("diaa-c02", at(1.06, 0.05), "trend"),  # the interval reaches below 1.02
        ("diaa-c02", at(1.0, 0.03), "undecided"),
        ("diaa-c05", at(1.076, 0.01), "reproduced"),
        ("diaa-c09", (at(0.7), at(3.0)), "trend"),
        ("diaa-c11", (at(0.93), at(1.28)), "reproduced"),
        ("diaa-c12", at(2.22), "reproduced"),
        ("diaa-c12", at(1.45, 0.1), "trend"),
        ("diaa-c16", (at(1.05), at(1.13)), "reproduced"),
        ("diaa-c16", (at(0.99), at(1.13)), "trend"),
        ("diaa-c23", (at(1.0), at(0.66), at(1.0)), "trend"),
        ("diaa-c26", at(0.04), "reproduced"),
        ("diaa-c29", at(6.2), "trend"),  # 2.3 times the paper's share
        ("diaa-c29", at(2.7), "reproduced"),
        ("diaa-c30", (at(0.0), at(240.0)), "contradicted"),  # too few answers
        ("diaa-c30", (at(0.2), at(500.0)), "trend"),  # one differs
        ("diaa-c32", at(0.97, 0.02), "reproduced"),
    ],
)
def test_what_becomes_of_a_value(claim, value, verdict):
    assert JUDGED[claim].verdict(value) == verdict
