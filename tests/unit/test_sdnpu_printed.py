"""sd.npu's transcribed tables under our names, and what the printed numbers say, which others would not."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from ondevice import assets
from ondevice.sdnpu import npu, printed

TABLE_3 = assets.paper_table("sdnpu", "table_03_ablation_latency")
TABLE_4 = assets.paper_table("sdnpu", "table_04_acceptance_ratio")
MODELS = {"Qwen2.5-1.5B": "larger", "LLaMA3.2-1B": "small"}
TASKS = {"summary": "summary", "rag": "rag", "parameters": "ui", "turns": "tweet"}


@pytest.fixture
def altered(monkeypatch):
    """Puts another value into a printed table."""
    original = assets.paper_table

    def put(stem: str, value: float, **where: str) -> None:
        def table(paper: str, asked: str) -> pd.DataFrame:
            found = original(paper, asked)
            if asked == stem:
                rows = pd.Series(True, index=found.index)
                for column, wanted in where.items():
                    rows &= found[column] == wanted
                assert rows.sum() == 1
                found.loc[rows, found.select_dtypes("float").columns[0]] = value
            return found

        monkeypatch.setattr(assets, "paper_table", table)

    return put


def latency(altered, value: float, model: str, arm: str) -> None:
    altered("table_03_ablation_latency", value, model=model, paper_label=arm)


# The transcription


def test_the_tables_are_whole():
    assert len(printed.hardware()) == 4 and len(printed.rejections()) == 3
    assert len(TABLE_3) == 3 * 5 and len(TABLE_4) == 4 * 2 * 2 * 3
    keys = ["dataset", "drafter", "with_sdnpu_techniques", "model"]
    assert not TABLE_4.duplicated(keys).any() and not TABLE_3.duplicated(["model", "variant"]).any()
    assert printed.rejections()["share"].sum() == pytest.approx(1)
    assert printed.hardware().set_index("soc")["int8_performance_tops"].to_dict() == {
        "8 Gen 3": 73, "A18": 35, "K9300": 60, "Kirin-9000": 16,
    }  # fmt: skip


def test_the_printed_gains_are_quotients_of_the_printed_acceptance():
    """Two digits of each: a quotient may differ from its printed value by what rounding allows, and no more."""
    names = {name: name for name in TABLE_4["model"].unique()}
    found = printed.acceptance(names, {name: name for name in TABLE_4["dataset"].unique()})
    quoted = TABLE_4["reported_gain_over_drafter_x"].fillna(1.0)
    base = found["accepted"] / found["gain"]
    allowed = 0.005 + 0.005 / base + 0.005 * found["gain"] / base
    assert len(found) == 48 and ((found["gain"] - quoted).abs() <= allowed).all()
    assert (found["gain"][quoted > 1] > 1.05).all()
    gains = found[found["gain"] > 1].groupby("method")["gain"].agg(["min", "max"]).round(2)
    assert gains.to_numpy().tolist() == [[1.05, 1.25], [1.06, 1.24]]  # the ranges of section 4.5


# Under our names


def test_acceptance_is_table_4_of_the_models_and_tasks_that_we_have():
    found = printed.acceptance(MODELS, TASKS)
    assert set(found["model"]) == {"larger", "small"} and len(found) == 2 * 4 * 4
    cells = found.set_index(["model", "method", "task"])["accepted"]
    assert cells["larger", "SAM+Ours", "parameters"] == 4.01 and cells["small", "PLD", "turns"] == 1.49
    gain = found.set_index(["model", "method", "task"])["gain"]
    assert gain["larger", "SAM+Ours", "rag"] == pytest.approx(5.47 / 4.42) and gain["small", "SAM", "rag"] == 1
    assert set(printed.acceptance(MODELS, {"summary": "summary"})["task"]) == {"summary"}


@pytest.mark.parametrize(("models", "tasks"), [({"GPT-2": "small"}, TASKS), (MODELS, {"rag": "translation"})])
def test_names_that_the_paper_does_not_have_are_refused(models, tasks):
    with pytest.raises(ValueError, match=r"no (model GPT-2|task translation); it has"):
        printed.acceptance(models, tasks)


def test_ablation_is_table_3_under_the_names_of_the_simulated_arms():
    found = printed.ablation().set_index(["model", "arm"])
    assert found.loc[("Qwen2.5-1.5B", "Ours"), "speedup"] == pytest.approx(57.41 / 15.08)
    arms = npu.table_3(npu.Npu(printed.npu_curve()), 0.0, 0.0)
    assert [arm.name for arm in arms] == list(found.loc["LLaMA3.2-3B"].index)


# The fit


def test_the_fit_meets_two_numbers_and_foretells_a_third():
    curve = printed.npu_curve()
    assert (curve.intercept, curve.slope) == pytest.approx((46.86, 4.235), abs=0.005)
    assert printed.throughput_loss(curve) == pytest.approx(50.8, abs=0.05)
    assert printed.throughput_loss(npu.Curve(51.1, 0.0)) == pytest.approx(87.5)  # not so if F were flat
    assert printed.throughput_loss(npu.Curve(0.0, 5.7)) == 0
    table = printed.fit_residuals().set_index("what")
    assert table.loc[table["role"] == "fit", "residual_percent"].abs().max() < 1e-9
    assert table["residual_percent"].round(1).tolist()[2:] == [1.6, 14.0, -72.9, 341.9]
    worse = printed.fit_residuals(npu.Curve(60.0, 4.0))
    assert worse.loc[worse["role"] == "fit", "residual_percent"].abs().min() > 1


def test_the_cpu_has_the_printed_gain_of_sam():
    curve = printed.cpu_curve(rows=20.0, accepted=3.6)
    assert float(curve(1)) == pytest.approx(51.1)
    assert 3.6 * 51.1 / float(curve(20.0)) == pytest.approx(math.sqrt(0.92 * 1.13))
    for rows, accepted in ((1.0, 3.6), (20.0, 1.0)):
        with pytest.raises(ValueError, match=f"not {rows} rows for {accepted} tokens"):
            printed.cpu_curve(rows, accepted)


def test_the_printed_memory_is_that_of_16_bit_weights():
    found = printed.weights().set_index("model")
    assert 3.05 <= found.loc["qwen2.5-1.5b", "weights_gb"] <= 3.12 and found.loc["qwen2.5-1.5b", "twice_gb"] > 6
    assert printed.weights(8).set_index("model").loc["qwen2.5-1.5b", "twice_gb"] < 3.12
    assert found["draft_gb"].round(2).tolist() == [0.30, 0.56, 0.99]  # against 0.84 to 1.22


# Findings


def test_figure_5s_160_ms_is_a_forward(monkeypatch):
    found = printed.figure_5()
    assert found["forward_as_printed"] == pytest.approx(672)
    assert found["prefill_as_printed"] == pytest.approx(21) and found["prefill_as_printed"] > found["prefill_bound"]
    assert found["prefill_at_one"] == 5 < found["prefill_bound"]
    monkeypatch.setitem(printed.FIG_5, "decode", 60.0)
    assert printed.figure_5()["prefill_as_printed"] < 8  # 60 ms would not contradict


def test_graphs_save_a_constant_of_a_request(altered):
    found = printed.graph_saving().set_index("model")
    assert found["equal"].to_dict() == {"Qwen2.5-1.5B": True, "Qwen2.5-0.5B": False, "LLaMA3.2-3B": True}
    assert found["plain"].round(2).tolist() == [9.69, 1.03, 1.68]
    assert found["speculative"].round(2).tolist() == [9.69, 0.30, 1.68]
    latency(altered, 17.72, "Qwen2.5-0.5B", "+G+SD")
    assert printed.graph_saving()["equal"].all()
    latency(altered, 25.36, "Qwen2.5-1.5B", "+G+SD")
    assert not printed.graph_saving().set_index("model")["equal"]["Qwen2.5-1.5B"]


def test_table_3_bounds_the_forwards(altered):
    found = printed.forward_bounds().set_index("what").round(2)
    assert found.loc["c"].tolist() == [0, 4.91] and found.loc["vanilla"].tolist() == [42.81, 47.72]
    assert found.loc["sam"].tolist() == [73.58, 91.26] and found.loc["ours"].tolist() == [42.81, 63.49]
    assert found.loc["sam_over_ours"].tolist() == [1.44, 1.72]
    charged = printed.forward_bounds(draft_ms=3.0).set_index("what")
    assert charged.loc["c", "high"] == pytest.approx((63.4868 - 3 - 47.72) / 3.21)
    assert printed.spill_share() == pytest.approx((0.437, 0.719), abs=0.001)
    latency(altered, 25.35 / 3.6 * 3.0, "Qwen2.5-1.5B", "+G+SD")
    assert printed.spill_share()[0] == pytest.approx(0.437 * 3 / 3.6 - 0.6 / 3.6, abs=0.001)


def test_at_both_ends_of_c_the_equations_hold():
    bounds = printed.forward_bounds().set_index("what")
    for c, end in ((0.0, "high"), (bounds.loc["c", "high"], "low")):
        assert c + bounds.loc["vanilla", end] == pytest.approx(47.72)
        assert c + bounds.loc["sam", end] / 3.60 == pytest.approx(25.35)
        assert c + bounds.loc["ours", end] / 4.21 == pytest.approx(15.08)
    assert bounds.loc["ours", "low"] == pytest.approx(bounds.loc["vanilla", "low"])


def test_spilled_drafts_cannot_explain_the_smallest_model(altered):
    found = printed.spill_account().set_index("model")
    assert found["gain"].round(2).to_dict() == {"Qwen2.5-1.5B": 1.68, "Qwen2.5-0.5B": 2.57, "LLaMA3.2-3B": 1.11}
    assert (found["most"] == 2.48).all()
    assert found["explained"].to_dict() == {"Qwen2.5-1.5B": True, "Qwen2.5-0.5B": False, "LLaMA3.2-3B": True}
    latency(altered, 7.50, "Qwen2.5-0.5B", "Ours")
    assert printed.spill_account()["explained"].all()


def test_the_decoding_cut_is_more_than_the_acceptance(altered):
    assert printed.vanilla_over_ours() == pytest.approx((1.247, 1.936), abs=0.001)
    keys = {"dataset": "summary", "drafter": "SAM", "with_sdnpu_techniques": "yes", "model": "Qwen2.5-1.5B"}
    altered("table_04_acceptance_ratio", 8.5, **keys)
    assert max(printed.vanilla_over_ours()) < 1


def test_table_3_is_outside_the_printed_range_over_sam(altered):
    found = printed.over_sam().set_index("model")
    assert found["speedup"].round(2).to_dict() == {"Qwen2.5-1.5B": 2.32, "Qwen2.5-0.5B": 2.62, "LLaMA3.2-3B": 1.15}
    assert found["inside"].to_dict() == {"Qwen2.5-1.5B": True, "Qwen2.5-0.5B": False, "LLaMA3.2-3B": True}
    latency(altered, 18.0, "Qwen2.5-0.5B", "+SD")
    assert printed.over_sam()["inside"].all()


def test_table_3_has_no_room_for_prefill_and_calibration():
    most = printed.longest_prompt()
    assert most == pytest.approx(1.356, abs=0.001)
    ours = 4.21 * (15.08 - 3 * most)  # 1 ms of prefill and 2 of calibration a prompt token
    assert ours == pytest.approx(47.72 - most)
    low, high = printed.prompt_by_shares()
    assert (low, high) == pytest.approx((15.04, 23.50), abs=0.005) and low > most
    assert printed.longest_prompt(calibrate_ms=0.0) == pytest.approx(15.7668 / 3.21)


def test_by_its_shares_the_npu_decodes_faster_than_the_cpu(monkeypatch):
    low, high = printed.cpu_over_npu_decoding()
    assert (low, high) == pytest.approx((2.394, 3.355), abs=0.001)
    for share in (0.74, 0.67):
        assert 0.872 / 0.128 / (share / (1 - share)) in (pytest.approx(low), pytest.approx(high))
    monkeypatch.setattr(printed, "DECODE_SHARE_CPU", (0.60, 0.65))
    assert max(printed.cpu_over_npu_decoding()) < 1


def test_energy_gains_beyond_those_in_time_are_power():
    found = printed.power_ratios().set_index("baseline")["power"]
    assert found.round(2).to_dict() == {"NPU vanilla": 1.10, "CPU vanilla": 1.40, "SAM": 1.21, "EAGLE": 2.62}


@pytest.mark.parametrize(
    ("shares", "size"),
    [([15.4, 23.1, 61.5], 13), ([50.0, 50.0], 2), ([33.3, 66.7], 3), ([15.4, 23.2, 61.4], 228)],
)
def test_the_least_sample_that_gives_the_printed_shares(shares, size):
    def gives(total: int) -> bool:
        """Whether any counts do, by trying all of the first kind and all of the second."""
        first = {n for n in range(total + 1) if round(100 * n / total, 1) == shares[0]}
        second = {n for n in range(total + 1) if round(100 * n / total, 1) == shares[1]}
        third = [total - a - b for a in first for b in second] if len(shares) == 3 else []
        if not third:
            return len(shares) == 2 and any(total - n in second for n in first)
        return any(round(100 * n / total, 1) == shares[2] for n in third)

    assert printed.least_sample(shares) == size
    assert [total for total in range(1, size + 1) if gives(total)] == [size]


def test_shares_of_no_sample_are_refused():
    with pytest.raises(ValueError, match=r"has the shares 15.4, 23.1, 50 percent"):
        printed.least_sample([15.4, 23.1, 50.0], most=500)


def test_the_summary_says_what_the_functions_say(altered):
    found = printed.consistency()
    assert not found.duplicated(["where", "finding"]).any()
    agrees = [f"{row.where}: {row.computed}" for row in found[found["agrees"]].itertuples()]
    assert agrees == ["Fig. 6: 50.8 %", "Fig. 5: 5.0 ms", "Table 3: 9.69 ms", "Table 3: 1.68 ms",
                      "Table 3: 1.44 to 1.72: 44% to 72% of SAM's steps spill"]  # fmt: skip
    assert found.loc[~found["agrees"], "computed"].tolist() == [
        "9.0x", "21.0 ms", "0.30 ms", "at most 2.48x", "up to 2.62x", "1.25 to 1.94", "at most 1.36", "2.4 to 3.4",
        "13",
    ]  # fmt: skip
    latency(altered, 18.0, "Qwen2.5-0.5B", "+SD")
    assert printed.consistency().set_index("finding")["agrees"]["sd.npu over NPU-SAM by Table 3"]
