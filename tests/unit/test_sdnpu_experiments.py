"""sd.npu's experiments: what is compared, and the tables and claim values that come from it."""

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice.causal_lm import CausalLM
from ondevice.sdnpu import (
    accounts,
    experiments,
    findings,
    instances,
    measuring,
    npu,
    optimum,
    printed,
    real_switching,
    scheduling,
)
from ondevice.sdnpu.experiments import TASKS
from ondevice.sdnpu.measuring import AVERAGE
from ondevice.sdnpu.switching import Interval, Prefilled, Profile
from ondevice.speculation.request_set import Request

V = 48


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return CausalLM(LlamaForCausalLM(config).eval())


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    random = np.random.default_rng(0)
    prompts = [(task, place) for task in ("summary", "rag") for place in range(3)]
    return [Request(task, place, f"{task}{place}", tuple(random.integers(0, V, 20).tolist()), (), 24, frozenset())
            for task, place in prompts]  # fmt: skip


@pytest.fixture(scope="module")
def found(lm, requests) -> list[measuring.Measured]:
    return experiments.measured(lm, requests, experiments.methods(V))


def test_every_method_says_what_plain_decoding_says(found):
    runs = measuring.runs(found, "m")
    same, tokens = experiments.identical(runs)
    assert same == 1 and tokens == 24 * 6 * (len(experiments.methods(V)) - 1)
    runs.loc[(runs["method"] == "SAM") & (runs["prompt"] == 0), "identical"] = False
    assert experiments.identical(runs)[0] < 1


def test_a_group_begins_with_an_empty_history(lm, requests):
    """The second task's first request is drafted as if the first task had never been."""
    method = [one for one in experiments.methods(V) if one.name in ("vanilla", "SAM")]
    both = [one for one in experiments.measured(lm, requests, method) if one.request.task == "rag"]
    alone = experiments.measured(lm, [one for one in requests if one.task == "rag"], method)
    assert [[step.drafted for step in one.found.steps] for one in both] == [
        [step.drafted for step in one.found.steps] for one in alone]  # fmt: skip
    assert any(step.drafted for one in both for step in one.found.steps)


def test_methods_differ_in_what_they_say():
    made = {one.name: one.make() for one in experiments.methods(V) if "+" in one.name}
    parts = {name: (one.calibration is not None, one.reuse is not None) for name, one in made.items()}
    for base in ("PLD", "SAM"):
        assert parts[f"{base}+calibration"] == (True, False) and parts[f"{base}+reuse"] == (False, True)
        assert parts[f"{base}+Ours"] == (True, True)
    assert made["SAM+Ours, printed"].order == "printed" and made["SAM+Ours, printed"].reuse.rule == "printed"
    assert made["SAM+Ours, verified"].calibration.learns == "verified"
    assert not made["PLD+Ours, forgetting"].calibration.keeps


def test_gains_are_over_the_base_and_averages_are_of_the_tasks(found):
    table = experiments.acceptance(measuring.runs(found, "m")).set_index(["method", "task"])
    ours, base = table.loc["SAM+Ours"], table.loc["SAM"]
    for task in ("summary", "rag"):
        assert ours.loc[task, "gain"] == pytest.approx(ours.loc[task, "accepted"] / base.loc[task, "accepted"])
    assert ours.loc[AVERAGE, "gain"] == pytest.approx((ours.loc["summary", "gain"] + ours.loc["rag", "gain"]) / 2)
    assert np.isnan(base["gain"]).all() and np.isnan(table.loc["vanilla", "gain"]).all()


def test_draft_lengths_are_shares_of_all_steps(found):
    table = experiments.draft_lengths(found, "m")
    sums = table.groupby(["method", "task"])["share"].sum()
    assert np.allclose(sums, 1)
    plain = table[table["method"] == "vanilla"]
    assert (plain["drafted"] == 0).all()


def test_rejections_are_counted_by_task_with_intervals_around_the_share(lm, requests):
    table = experiments.rejections(lm, "m", requests)
    assert set(table["cause"]) == {"missing", "synonym", "redundant"}
    assert np.allclose(table.groupby("task")["share"].sum(), 1)
    assert (table["low"] <= table["share"] + 1e-12).all() and (table["share"] <= table["high"] + 1e-12).all()
    redundant = table[table["cause"] == "redundant"]["count"].sum() / table["count"].sum()
    assert findings.rejections(table)["sdnpu-c62"] == pytest.approx(100 - 100 * redundant)
    with pytest.raises(ValueError, match="No draft was rejected"):
        experiments.rejections(lm, "m", [Request("rag", 0, "", (1, 2), (), 1, frozenset())])


def test_the_cost_of_calibration_has_a_row_a_vocabulary_and_rule():
    table = experiments.calibration_cost([64, 256], chunk=16, repeats=1)
    assert len(table) == 4 and (table["ms_per_token"] > 0).all()


def test_drafting_cost_adds_what_a_step_drafts_and_learns(found):
    steps = measuring.steps(found, "m")
    mine = experiments.drafting_cost(steps).set_index("method").loc["SAM+Ours"]
    own = steps[steps["method"] == "SAM+Ours"]
    assert mine["mean_ms"] == pytest.approx(1e3 * (own["draft_s"] + own["observe_s"]).mean())
    assert mine["draft_ms"] < mine["mean_ms"] <= mine["p99_ms"]


# Switching


CASE = Profile(np.array([0.010, 0.020]), np.array([0.015, 0.030]), np.array([0.012, 0.008]))


@pytest.mark.parametrize("way", list(real_switching.WAYS))
def test_a_plan_says_in_chunks_and_blocks_what_a_schedule_says_in_computes(way):
    case = real_switching.instance(CASE, 3)
    loads = real_switching.WAYS[way](case)
    for load, real in zip(loads, real_switching.plan(case, loads), strict=True):
        assert real.block == load.block
        done = 0 if real.after is None else real.after[0] * case.blocks + real.after[1] + 1
        assert done == load.after


def test_a_measured_prefill_becomes_a_timeline():
    case = real_switching.instance(CASE, 1)
    intervals = [
        Interval("G1", 0, 0, 0.0, 0.01),
        Interval("load", 0, None, 0.01, 0.02),
        Interval("G2", 1, 0, 0.01, 0.05),
    ]
    line = real_switching.timeline(case, Prefilled(intervals, torch.zeros(1), []))
    assert line.latency == pytest.approx(50) and line.graph.tolist() == [[1, 2]]
    assert line.load_block.tolist() == [0] and line.load_end[0] == pytest.approx(20)
    plain = real_switching.timeline(case, Prefilled([intervals[0], intervals[2]], torch.zeros(1), []))
    assert not len(plain.load_block)


def test_what_is_exposed_is_over_the_prefill_that_keeps_both_graphs():
    def done(seconds: float, shift: float = 0.0) -> Prefilled:
        return Prefilled([Interval("G1", 0, 0, 0.0, seconds)], torch.tensor([1.0, 2.0 + shift]), [])

    rounds = [{"keep both": done(1.0), "synchronous": done(1.4), "progressive": done(1.1, 1e-3)}]
    table = real_switching.exposed(rounds).set_index("method")
    assert table["exposed_s"].to_dict() == pytest.approx({"keep both": 0, "synchronous": 0.4, "progressive": 0.1})
    assert table["hidden"].to_dict() == pytest.approx({"keep both": 1, "synchronous": 0, "progressive": 0.75})
    assert table["logits"]["progressive"] == pytest.approx(1e-3, rel=1e-3)
    values = findings.switching(table.reset_index(), plain_s=1.0, drafted_s=0.5)
    assert values["sdnpu-c38"] == pytest.approx((2.4 / 2.1, 1.9 / 1.6)) and values["sdnpu-c39"] == pytest.approx(
        2.4 / 2.1
    )
    assert values["sdnpu-c49"] == pytest.approx(100 * 0.4 / 2.0)
    assert findings.first_step(table.reset_index(), 0.1)["sdnpu-c35"] == pytest.approx(1.2 / 1.4)


def test_ratios_are_never_below_the_optimum_and_leave_out_what_switches_nothing():
    families = {"small": lambda random: instances.heterogeneous(random, blocks=3, chunks=2)}
    table = instances.ratios(families, 5)
    assert set(table["rule"]) == set(scheduling.RULES) - {"keep both graphs"} and len(table) == 5 * 6
    assert (table["ratio"] >= 1 - 1e-9).all()
    first = instances.heterogeneous(np.random.default_rng(0), blocks=3, chunks=2)
    greedy = scheduling.execute(first, scheduling.greedy(first)).latency / optimum.exact(first).latency
    assert table[table["rule"] == "greedy (paper)"]["ratio"].iloc[0] == pytest.approx(greedy)


# Latency


@pytest.fixture(scope="module")
def cells(found) -> pd.DataFrame:
    curve = printed.npu_curve()
    arms = npu.figure_10(npu.Npu(curve), npu.Cpu(curve), npu.Eagle(0.1), 500.0, ours="SAM+Ours")
    return npu.by_task(npu.simulate(found, arms, "m"))


def test_shares_of_prefill_and_decoding_are_of_plain_decoding(found, cells):
    runs = measuring.runs(found, "m")
    table = accounts.prefill_and_decode(runs, cells)
    assert len(table) == 4 and set(table["source"]) == {accounts.HERE, accounts.THERE}
    here = table[(table["source"] == accounts.HERE) & (table["task"] == "rag")].iloc[0]
    plain = runs[(runs["method"] == "vanilla") & (runs["task"] == "rag")]
    assert here["decode_ms"] == pytest.approx(1e3 * plain["decode_s"].mean())
    assert here["decode_share"] == pytest.approx(here["decode_ms"] / (here["decode_ms"] + here["prefill_ms"]))
    claimed = findings.decoding_shares(cells)
    there = table[table["source"] == accounts.THERE].set_index("task")["decode_share"]
    assert claimed["sdnpu-c45"] == pytest.approx(100 * there["rag"])


def test_parts_add_up_to_the_request(found, cells):
    table = accounts.parts(measuring.runs(found, "m"), cells)
    simulated = table[table["source"] == accounts.THERE].groupby("arm")["ms"].sum()
    totals = cells[cells["task"] == "summary"].set_index("arm")["total_ms"]
    assert simulated.to_dict() == pytest.approx(totals.to_dict())
    assert set(table[table["source"] == accounts.HERE]["arm"]) == {"CPU vanilla", "CPU-SAM", npu.OURS}


def test_energy_is_time_at_one_power_and_scaled_at_others(cells):
    table = accounts.energies(cells).set_index(["assumption", "task", "arm"])["joules_over_ours"]
    wide = cells.set_index(["task", "arm"])["decode_per_token_ms"]
    ratio = wide["rag", "NPU-SAM"] / wide["rag", npu.OURS]
    assert table["one power", "rag", "NPU-SAM"] == pytest.approx(ratio)
    watts = accounts.powers()["implied powers"]["NPU-SAM"]
    assert table["implied powers", "rag", "NPU-SAM"] == pytest.approx(ratio * watts) and watts > 1


def test_claims_of_speed_are_spans_over_tasks_and_arms(cells):
    speedups = npu.speedups(cells, "decode_per_token_ms")
    values = findings.faster(speedups)
    vanilla = speedups[(speedups["arm"] == "NPU vanilla") & (speedups["task"] != AVERAGE)]["speedup"]
    assert values["sdnpu-c07"] == pytest.approx((vanilla.min(), vanilla.max()))
    assert values["sdnpu-c01"] >= values["sdnpu-c07"][1]
    assert values["sdnpu-c03"][0] <= values["sdnpu-c08"][0] and values["sdnpu-c03"][1] >= values["sdnpu-c07"][1]


def test_implied_speedups_have_our_names():
    table = accounts.implied("m")
    assert set(table["task"]) == set(TASKS) and set(table["model"]) == {"m"}
    summary = table[(table["task"] == "summary") & (table["arm"] == "NPU-SAM")]["speedup"].iloc[0]
    assert summary == pytest.approx(4.21 / 3.60, rel=0.01)


def test_table_4s_claims_are_least_and_mean_without_averages():
    rows = [("m", "PLD+Ours", "a", 1.2), ("m", "PLD+Ours", "b", 1.0), ("m", "PLD+Ours", AVERAGE, 9.0),
            ("m", "SAM+Ours", "a", 1.5), ("m", "SAM+reuse", "a", 0.1)]  # fmt: skip
    values = findings.table_4(pd.DataFrame(rows, columns=["model", "method", "task", "gain"]))
    assert values == {"sdnpu-c41": pytest.approx((1.0, 1.1)), "sdnpu-c42": pytest.approx((1.5, 1.5))}


def test_eagle_on_a_cpu_pays_for_its_rows():
    flat, steep = npu.Curve(10.0, 0.0), npu.Curve(10.0, 10.0)
    assert findings.eagle_on_cpu("qwen2.5-0.5b", flat) > 1 > findings.eagle_on_cpu("qwen2.5-0.5b", steep)


def test_lengths_are_judged_on_summaries_of_one_model():
    rows = [("m", "summary", "PLD", 0, 0.6), ("m", "summary", "PLD", 10, 0.4), ("m", "rag", "PLD", 10, 1.0),
            ("m", "summary", "SAM", 9, 0.9), ("m", "summary", "SAM", 39, 0.1)]  # fmt: skip
    lengths = pd.DataFrame(rows, columns=["model", "task", "method", "drafted", "share"])
    values = findings.draft_lengths(lengths, {1: 4.0, 32: 16.0}, "m")
    assert values == pytest.approx({"sdnpu-c58": 8.0, "sdnpu-c59": 0.6, "sdnpu-c61": 0.9})
