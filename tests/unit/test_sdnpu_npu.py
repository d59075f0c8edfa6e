"""The model of an NPU: its fit, what a recorded request takes in each arm, and what each arm is."""

import numpy as np
import pandas as pd
import pytest

from ondevice_papers.sdnpu import npu
from ondevice_papers.sdnpu.npu import Arm, Cpu, Curve, Eagle, Npu
from ondevice_studies.sdnpu import printed

CURVE = Curve(40.0, 2.0)  # F(32) = 104
NPU, CPU = Npu(CURVE), Cpu(Curve(30.0, 10.0))
EAGLE = Eagle(0.2)
KEYS = {"model": "m", "task": "summary", "request": 0}
DRAFTED = {"vanilla": [0] * 12, "SAM": [39, 31, 0], "SAM+both, printed": [20, 31], "SAM+both": [31]}
ANSWERS = pd.DataFrame([{**KEYS, "method": method, "prompt_tokens": 300, "tokens": 13} for method in DRAFTED])
PASSES = pd.DataFrame([{**KEYS, "method": method, "drafted": n} for method, many in DRAFTED.items() for n in many])


def one(arm: Arm) -> pd.Series:
    return npu.simulate(ANSWERS, PASSES, [arm]).iloc[0]


def test_two_points_are_met_and_more_are_fitted_in_relative_error():
    line = npu.fit([1, 32], [51.1, 182.4])
    assert line(1) == pytest.approx(51.1) and line(32) == pytest.approx(182.4)
    assert printed.npu_curve() == line
    many = npu.fit([1, 2, 4], [10.0, 12.0, 16.0])
    assert (many.intercept, many.slope) == pytest.approx((8.0, 2.0))


def test_a_line_of_every_second_size_foretells_the_others():
    table = npu.predicted([1, 2, 4, 8], [10.0, 12.0, 16.0, 48.0])
    assert table["rows"].tolist() == [2, 8] and table["predicted"].tolist() == pytest.approx([12.0, 24.0])
    assert table["error"].tolist() == pytest.approx([0.0, -0.5])


def test_a_graph_costs_the_same_whatever_its_fill_and_runs_again_beyond_it():
    assert NPU.forward_ms(np.array([1, 32, 33])).tolist() == [104, 104, 208]
    assert Npu(CURVE, 64).forward_ms(40) == 168
    assert CPU.forward_ms(np.array([1, 3])).tolist() == [40, 60]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Curve(-1.0, 2.0), "-1.0, 2.0"),
        (lambda: npu.fit([1, 1], [2, 3]), "two"),
        (lambda: npu.fit([1, 2], [2, 0]), "positive"),
        (lambda: npu.fit([1, 2], [9, 3]), "rows"),
    ],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_request_is_the_sum_of_its_parts():
    found = one(Arm("x", "SAM+both, printed", NPU, draft_ms=3.0, calibrate_ms=2.0, switch_ms=70.0))
    parts = ["prefill", "calibrate", "switch", "draft", "forward", "decode", "total"]
    assert found[parts].tolist() == [512, 600, 70, 6, 208, 214, 1396]  # two chunks of the prompt, two passes


def test_vanilla_runs_a_graph_for_every_token():
    assert one(Arm("x", "vanilla", NPU))["decode"] == 12 * 104


def test_a_draft_that_spills_costs_a_second_run():
    assert one(Arm("x", "SAM", NPU))["forward"] == (2 + 1 + 1) * 104  # 40, 32 and 1 rows


def test_an_answer_of_one_token_needs_no_pass():
    found = npu.simulate(ANSWERS.assign(tokens=1), PASSES.head(0), [Arm("x", "vanilla", NPU)]).iloc[0]
    assert found["decode"] == 0 and found["total"] == 512


def test_eagle_is_charged_for_its_draft_model():
    found = one(Arm("x", "vanilla", NPU, eagle=EAGLE))
    assert found["draft"] == pytest.approx(12 / 5.5 * 6 * 0.2 * 104)
    assert found["forward"] == pytest.approx(12 / 5.5 * 104)
    assert Eagle(0.2, rows=60).step_ms(NPU)[1] == 208


def test_the_arms_of_figure_10_differ_as_the_paper_says():
    arms = {arm.name: arm for arm in npu.figure_10(NPU, CPU, EAGLE, 500.0, 300.0, 200.0)}
    baselines = [f"{side}{kind}" for kind in (" vanilla", "-SAM", "-EAGLE") for side in ("NPU", "CPU")]
    assert list(arms) == [*baselines, npu.OURS, npu.BETTER]
    assert arms[npu.OURS].method == "SAM+both, printed" and arms[npu.BETTER].method == "SAM+both"
    assert (arms[npu.OURS].switch_ms, arms[npu.BETTER].switch_ms, arms["NPU-SAM"].switch_ms) == (300.0, 200.0, 500.0)
    assert arms[npu.OURS].calibrate_ms == npu.CALIBRATE_MS == 2.0 and arms["NPU-SAM"].calibrate_ms == 0
    for name, arm in arms.items():
        assert isinstance(arm.engine, Cpu) == name.startswith("CPU") and (arm.eagle is not None) == ("EAGLE" in name)
        assert arm.switch_ms == 0 or not name.startswith("CPU")
