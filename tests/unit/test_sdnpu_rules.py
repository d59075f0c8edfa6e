"""sd.npu's rules: one a claim, each rejects its wrong value, and bounds are those that the paper's numbers give."""

import pytest

from ondevice.evidence import Estimate, Rule
from ondevice.sdnpu.rules import RULES

JUDGED = {claim: rule for claim, rule in RULES.items() if isinstance(rule, Rule)}


def at(value, half=0.0, n=100):
    return Estimate(value, value - half, value + half, n, "recorded")


@pytest.mark.parametrize("claim", JUDGED)
def test_each_rule_rejects_its_wrong_value(claim):
    assert JUDGED[claim].verdict(JUDGED[claim].wrong) == "contradicted"


@pytest.mark.parametrize(
    ("claim", "value", "verdict"),
    [
        ("sdnpu-c01", at(3.8), "reproduced"),
        ("sdnpu-c01", at(1.6, 0.05), "trend"),
        ("sdnpu-c03", (at(1.06), at(3.81)), "reproduced"),
        ("sdnpu-c08", (at(0.9), at(1.5)), "contradicted"),  # every cell has to be faster
        ("sdnpu-c08", (at(1.01, 0.05), at(1.5)), "undecided"),
        ("sdnpu-c39", at(0.203), "reproduced"),
        ("sdnpu-c39", at(0.08), "trend"),  # 8 % are not the paper's 20 %
        ("sdnpu-c40", at(1.68), "reproduced"),
        ("sdnpu-c41", (at(1.05), at(1.16)), "reproduced"),
        ("sdnpu-c41", (at(1.01), at(1.05)), "trend"),
        ("sdnpu-c43", (at(1.0), at(9000)), "reproduced"),
        ("sdnpu-c43", (at(0.999), at(9000)), "trend"),
        ("sdnpu-c49", at(94.9), "reproduced"),
        ("sdnpu-c50", (at(0.72), at(0.6), at(0.3)), "reproduced"),
        ("sdnpu-c60", at(50.0), "reproduced"),
        ("sdnpu-c65", at(1.0), "reproduced"),
    ],
)
def test_verdicts_of_the_papers_own_values_and_of_weaker_ones(claim, value, verdict):
    assert RULES[claim].verdict(value) == verdict
