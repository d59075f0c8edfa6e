"""The NPU's model of time: graphs, arms and what each part of a request takes, against direct computation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from ondevice.sdnpu.measuring import Measured

from ondevice import shapes
from ondevice.sdnpu import npu, sensitivity
from ondevice.sdnpu.npu import Arm, Cpu, Curve, Eagle, Npu, Prefill
from ondevice.speculation import Generation, Step
from ondevice.speculation.request_set import Request

CURVE = Curve(40.0, 2.0)  # F(32) = 104
NPU, CPU, EAGLE = Npu(CURVE), Cpu(Curve(30.0, 10.0)), Eagle(0.2)


def generation(prompt: int, steps: Sequence[tuple[int, int]]) -> Generation:
    """steps: (drafted, emitted) of each."""
    logged = [Step(drafted, emitted - 1, emitted, 0, 0) for drafted, emitted in steps]
    return Generation(prompt, [1] * (1 + sum(emitted for _, emitted in steps)), False, logged)


PLAIN = generation(300, [(0, 1)] * 12)
SAM = generation(300, [(39, 8), (0, 1), (31, 3)])
OURS = generation(300, [(31, 8), (31, 4)])


def measured(task: str = "summary", prompt: int = 0) -> list[Measured]:
    request = Request(task, prompt, "a", (1,), (), 13, frozenset())
    found = {"vanilla": PLAIN, "SAM": SAM, "sd.npu": OURS}
    return [Measured(name, request, 0, one, PLAIN.tokens) for name, one in found.items()]


# F


def test_two_points_are_met_and_more_are_fitted_in_relative_error():
    curve = npu.fit([1, 32], [51.1, 32 * 5.7])
    assert curve([1, 32]) == pytest.approx([51.1, 182.4]) and curve.slope == pytest.approx(131.3 / 31)
    assert npu.fit([1, 8, 64], CURVE([1, 8, 64])).ratio == pytest.approx(0.05)
    sizes, times = np.array([1.0, 8, 64]), np.array([50.0, 40, 200])
    best = npu.fit(sizes, times)

    def error(curve: Curve) -> float:
        return float(((curve(sizes) / times - 1) ** 2).sum())

    near = [Curve(best.intercept + a, best.slope + b) for a in (-0.1, 0, 0.1) for b in (-0.01, 0, 0.01)]
    assert min(map(error, near)) == error(best) < error(near[0])


def test_a_graph_costs_the_same_whatever_its_fill_and_runs_again_beyond_it():
    rows = np.array([1, 31, 32, 33, 40, 41, 64, 65])
    assert NPU.runs(rows).tolist() == [1, 1, 1, 2, 2, 2, 2, 3]
    assert NPU.forward_ms(rows).tolist() == [104.0 * n for n in (1, 1, 1, 2, 2, 2, 2, 3)]
    assert Npu(CURVE, 64).forward_ms(40) == 168 and Npu(CURVE, 1).forward_ms(3) == 126
    assert CPU.forward_ms(np.array([1, 3])).tolist() == [40, 60]


def test_prefill_pads_its_last_chunk():
    assert [Prefill()(n) for n in (1, 256, 257, 1000)] == [256, 256, 512, 1024]
    assert Prefill(64, 10.0)(65) == 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Curve(-1.0, 2.0), "-1.0, 2.0"),
        (lambda: Curve(0.0, 0.0), "0.0, 0.0"),
        (lambda: Curve(float("nan"), 1.0), "nan"),
        (lambda: npu.fit([1, 1], [2, 3]), "two sizes"),
        (lambda: npu.fit([1, 2], [2, 0]), "positive times"),
        (lambda: npu.fit([1, 2], [9, 3]), "falls with its rows"),
        (lambda: Npu(CURVE, 0), "not 0"),
        (lambda: NPU.runs([4, 0]), "the root, not 0"),
        (lambda: Prefill(256, 0.0), "0.0 ms"),
        (lambda: Eagle(1.5), "share=1.5"),
        (lambda: Eagle(0.1, accepted=0.5), "accepted=0.5"),
        (lambda: Arm("x", "vanilla", NPU, switch_ms=-1.0), "x cannot take negative time"),
        (lambda: npu.latency(Generation(3, [], False, []), Arm("x", "vanilla", NPU)), "without an output"),
        (lambda: npu.by_shape(CURVE, [32], 0.9), "not 0.9"),
        (lambda: npu.simulate(measured(), [Arm("x", "PLD", NPU)]), "no measured steps of PLD"),
        (lambda: npu.energy(pd.DataFrame({"arm": ["x"], "total_ms": [1.0]}), {"x": 0.0}), "needed for x"),
        (lambda: sensitivity.Log.of([]), "not 0 and 0"),
        (lambda: sensitivity.held(CURVE, -0.1), "-0.1"),
        (lambda: sensitivity.speedups(LOGS["ours"], LOGS["sam"], CURVE, [0.1], [32], [-5.0]), "-5.0"),
    ],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# A request


def test_a_request_is_the_sum_of_its_parts():
    arm = Arm("x", "sd.npu", NPU, draft_ms=3.0, calibrate_ms=2.0, switch_ms=70.0)
    found = npu.latency(OURS, arm, Prefill(256, 250.0))
    assert (found.prefill_ms, found.calibrate_ms, found.switch_ms, found.draft_ms) == (500, 600, 70, 6)
    assert found.forward_ms == 2 * 104 and found.decode_ms == 214 and found.total_ms == 1384
    assert found.per_token_ms == pytest.approx(1384 / 13) and found.decode_per_token_ms == pytest.approx(214 / 12)


def test_vanilla_runs_a_graph_for_every_token():
    found = npu.latency(PLAIN, Arm("x", "vanilla", NPU))
    assert found.decode_ms == 12 * 104 and found.decode_per_token_ms == 104


def test_a_draft_that_spills_costs_a_second_run():
    spilled, kept = (npu.latency(generation(9, [(n, 5)] * 3), Arm("x", "SAM", NPU)) for n in (39, 31))
    assert spilled.forward_ms == 2 * kept.forward_ms == 2 * 3 * 104
    assert npu.latency(SAM, Arm("x", "SAM", NPU)).forward_ms == 4 * 104


def test_one_token_from_the_prefill_needs_no_step():
    found = npu.latency(generation(9, []), Arm("x", "vanilla", NPU))
    assert found.decode_ms == 0 and found.per_token_ms == 256 and np.isnan(found.decode_per_token_ms)


def test_eagle_is_charged_for_its_draft_model():
    found = npu.latency(PLAIN, Arm("x", "vanilla", NPU, eagle=EAGLE))
    assert found.steps == pytest.approx(12 / 5.5)
    assert found.draft_ms == pytest.approx(12 / 5.5 * 6 * 0.2 * 104)
    assert found.forward_ms == pytest.approx(12 / 5.5 * 104)
    as_published = Eagle(0.2, rows=60)
    assert as_published.step_ms(NPU) == pytest.approx((6 * 0.2 * 104, 208))  # two runs
    assert as_published.step_ms(CPU) == pytest.approx((6 * 0.2 * 130, 630))


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "llama-3.2-3b"])
def test_the_draft_model_is_a_layer_and_the_head(name):
    model = shapes.shape(name).empty()
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    head = model.lm_head.weight.numel()
    layers = sum(p.numel() for p in model.model.layers.parameters())
    assert npu.draft_parameters(name) == pytest.approx((layer + head, layers + head), rel=1e-3)
    assert npu.draft_share(name) == pytest.approx((layer + head) / (layers + head), rel=1e-3)  # one norm more


# Arms and tables


def test_larger_graphs_speed_prefill_and_slow_decoding():
    found = npu.by_shape(CURVE, [16, 32, 256], accepted=4.2)
    assert found.loc[1].tolist() == pytest.approx([32, 104, 104 / 32, 107 / 4.2])
    assert found["prefill_ms"].is_monotonic_decreasing and found["decode_ms"].is_monotonic_increasing


def test_the_arms_of_figure_10_differ_as_the_paper_says():
    arms = {arm.name: arm for arm in npu.figure_10(NPU, CPU, EAGLE, 50.0)}
    assert list(arms) == ["NPU vanilla", "CPU vanilla", "NPU-SAM", "CPU-SAM", "NPU-EAGLE", "CPU-EAGLE", "sd.npu"]
    table = npu.simulate(measured(), list(arms.values()), "m").set_index("arm")
    assert set(table["prefill_ms"]) == {512.0}  # all prefill on the NPU
    assert table["switch_ms"].to_dict() == {name: 50.0 * name.startswith("NPU") for name in arms}
    assert table.loc["CPU-SAM", "forward_ms"] == sum(30 + 10 * n for n in (40, 1, 32))
    assert table.loc["CPU vanilla", "forward_ms"] == 12 * 40
    assert table["calibrate_ms"].to_dict() == {name: 600.0 * (name == "sd.npu") for name in arms}


def test_in_table_3_graphs_save_the_same_with_and_without_speculation():
    found = npu.by_task(npu.simulate(measured(), npu.table_3(NPU, 130.0, calibrate_ms=0.0), "m"))
    per = found[found["task"] == "summary"].set_index("arm")["per_token_ms"]
    assert per["NPU"] - per["+G"] == pytest.approx(10) == per["+SD"] - per["+G+SD"]
    assert per["+G+SD"] - per["Ours"] == pytest.approx((4 * 104 + 9 - 2 * 104 - 6) / 13)


def test_averages_are_over_tasks_and_speedups_are_their_ratios():
    twice = [*measured("a"), *measured("a", 1), *measured("b")]
    table = npu.simulate(twice, npu.figure_10(NPU, CPU, EAGLE, 50.0), "m")
    assert len(table) == 7 * 3
    table.loc[(table["arm"] == "NPU vanilla") & (table["task"] == "b"), "per_token_ms"] *= 2
    cells = npu.by_task(table).set_index(["arm", "task"])["per_token_ms"]
    one = cells["NPU vanilla", "a"]
    assert cells["NPU vanilla", "average"] == pytest.approx(1.5 * one)
    gains = npu.speedups(npu.by_task(table)).set_index(["arm", "task"])["speedup"]
    assert gains["NPU vanilla", "b"] == pytest.approx(2 * one / cells["sd.npu", "b"])
    assert gains["NPU vanilla", "average"] == pytest.approx(1.5 * one / cells["sd.npu", "a"])
    assert (gains["sd.npu"] == 1).all()
    with pytest.raises(ValueError, match="no arm 'ours'"):
        npu.speedups(npu.by_task(table), over="ours")


def test_energy_is_power_times_time():
    table = npu.simulate(measured(), npu.table_3(NPU, 130.0), "m")
    found = npu.energy(table, dict.fromkeys(table["arm"], 4.0))
    assert found["joules"].tolist() == pytest.approx((table["total_ms"] * 0.004).tolist())
    with pytest.raises(ValueError, match=r"needed for \+G, \+G\+SD, \+SD, Ours"):
        npu.energy(table, {"NPU": 4.0})


# Sensitivity

LOGS = {name: sensitivity.Log.of([one]) for name, one in (("vanilla", PLAIN), ("sam", SAM), ("ours", OURS))}
RATIOS, SHAPES, CONSTANTS = [0.0, 0.05, 1.0], [16, 32, 64], [0.0, 10.0]


def test_a_log_counts_verifications_and_spills():
    log = sensitivity.Log.of([SAM, OURS])
    assert log.rows.tolist() == [40, 1, 32, 32, 32] and log.tokens == 24 and log.accepted == pytest.approx(4.8)
    assert log.spilled() == 0.2 and log.spilled(16) == 0.8 and log.spilled(64) == 0


def test_a_held_curve_keeps_one_time_and_takes_the_ratio():
    for ratio in RATIOS:
        found = sensitivity.held(CURVE, ratio)
        assert float(found(32)) == pytest.approx(104) and found.ratio == pytest.approx(ratio)


def test_speedups_are_those_of_the_formula():
    found = sensitivity.speedups(LOGS["ours"], LOGS["sam"], CURVE, RATIOS, SHAPES, CONSTANTS)
    assert found.shape == (3, 3, 2)
    for (r, s, c), value in np.ndenumerate(found):
        intercept = 104 / (1 + 32 * RATIOS[r])
        run = intercept * (1 + RATIOS[r] * SHAPES[s])
        runs = {16: (6, 4), 32: (4, 2), 64: (3, 2)}[SHAPES[s]]  # of SAM's 40, 1 and 32 rows; of ours, 32 and 32
        sam, ours = (runs[0] * run + 9) / 12, (runs[1] * run + 6) / 12
        assert value == pytest.approx((CONSTANTS[c] + sam) / (CONSTANTS[c] + ours))


def test_on_one_graph_the_form_of_f_cancels_and_constants_dilute():
    found = sensitivity.speedups(LOGS["ours"], LOGS["vanilla"], CURVE, RATIOS, [32], [0, 5, 500], base_draft_ms=0.0)
    np.testing.assert_allclose(found, found[:1].repeat(3, axis=0))
    assert (np.diff(found[0, 0]) < 0).all() and found[0, 0, 0] == pytest.approx(12 * 104 / (2 * 107))
    own = sensitivity.speedups(LOGS["ours"], LOGS["vanilla"], CURVE, RATIOS, [32], base_draft_ms=0.0, base_shape=1)
    assert (np.diff(own[:, 0, 0]) < 0).all()  # the steeper F, the less a graph of one row costs


def test_the_table_is_the_arrays():
    table = sensitivity.table(LOGS["ours"], LOGS["sam"], LOGS["vanilla"], CURVE, RATIOS, SHAPES, CONSTANTS)
    assert len(table) == 18 and not table.isna().any(axis=None)
    row = table[(table["ratio"] == 0.05) & (table["shape"] == 64) & (table["constant_ms"] == 10)].iloc[0]
    grid = ([0.05], [64], [10.0])
    assert row["over_sam"] == sensitivity.speedups(LOGS["ours"], LOGS["sam"], CURVE, *grid).item()
    plain = sensitivity.speedups(LOGS["ours"], LOGS["vanilla"], CURVE, *grid, base_draft_ms=0.0, base_shape=1)
    assert row["over_one_row"] == plain.item() and row["over_vanilla"] > row["over_one_row"]
