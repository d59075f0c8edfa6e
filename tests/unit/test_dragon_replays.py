"""DRAGON's cost model beside the simulator, and the authors' recordings through it: Figures 3, 4, 5, 9, 10, Table 1."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from ondevice.dragon import analysis, printed, replays
from ondevice.dragon.cost import Costs
from ondevice.dragon.scheduler import Stay
from ondevice.dragon.simulator import DEVICE, World, independent, oracle, simulate
from ondevice.network.link import Link

FEW = 10  # sequences, where the means do not matter


class Scripted(Stay):
    """It moves after the given positions, whatever happens."""

    def __init__(self, *positions: int) -> None:
        self.positions = positions

    def moves(self, position: int, local: bool, remote: bool, own: int, peer: int) -> bool:
        return position in self.positions


# Bars of a run


def test_a_timeline_is_the_same_run_and_its_bars_are_what_happened():
    world = World(independent(30, 0.7, 0.6, 1), 0.2, 0.05, Link(0.3), Link(0.1), 5)
    moves = (Scripted(3), Scripted(9))
    run, bars = analysis.timeline(world, DEVICE, moves)
    plain = simulate(world, DEVICE, (Scripted(3), Scripted(9)))
    assert run.seen.tolist() == plain.seen.tolist() and run.moves == 2
    for side in ("device", "cloud"):
        own = bars[(bars["what"] == "decode") & (bars["side"] == side)].sort_values("begin_s")
        assert (own["begin_s"].to_numpy()[1:] >= own["end_s"].to_numpy()[:-1] - 1e-9).all()  # one at a time
        decided = own[own["outcome"].isin(["accepted", "rejected"])]
        assert decided["position"].tolist() == list(range(30))
        share = (decided["outcome"] == "accepted").mean()
        assert share == pytest.approx(world.accepted[:, ["device", "cloud"].index(side)].mean())
        full = own[own["outcome"] != "stopped"]
        assert (full["end_s"] - full["begin_s"]).to_numpy() == pytest.approx(0.2 if side == "device" else 0.05)
    assert (bars["what"] == "switch").sum() == 2 and (bars["what"] == "target").sum() == 30
    up = bars[(bars["what"] != "decode") & (bars["side"] == "device")]
    assert (up["end_s"] - up["begin_s"]).to_numpy() == pytest.approx(0.3) and (up["to"] == "cloud").all()


def test_a_rejection_stops_the_decode_that_runs_and_voids_the_drafts_behind_it():
    flags = np.array([[True, False], [True, True]])
    _, bars = analysis.timeline(World(flags, 1.0, 0.3, Link(1.0), Link(1.0), 3))
    cloud = bars[(bars["what"] == "decode") & (bars["side"] == "cloud")]
    assert cloud[["position", "outcome"]].to_numpy().tolist() == [[0, "rejected"], [1, "void"], [1, "accepted"]]
    flags = np.array([[False, True], [True, True]])
    _, bars = analysis.timeline(World(flags, 1.0, 0.3, Link(0.1), Link(1.0), 3))
    device = bars[(bars["what"] == "decode") & (bars["side"] == "device")]
    stopped = device[device["outcome"] == "stopped"].iloc[0]
    assert (stopped["begin_s"], stopped["end_s"]) == pytest.approx((1.0, 1.3))


# Figures 3, 4, 5, Table 1


def test_decisions_at_rates_have_exactly_these_rates():
    flags = analysis.at_rates(200, 0.3, 0.85, 1)
    assert flags.sum(0).tolist() == [60, 170]
    assert not np.array_equal(flags, analysis.at_rates(200, 0.3, 0.85, 2))
    with pytest.raises(ValueError, match=r"not 1\.2 and 0\.5"):
        analysis.at_rates(10, 1.2, 0.5)


def test_figure_3_is_met_by_the_simulator_outside_of_the_middle():
    table = analysis.difference_curves([0.1, 0.5, 0.7, 0.9, 1.0], tokens=200)
    wide = table.pivot_table(index=["alpha_l", "alpha_r", "decode_local"], columns="kind", values="delta_z")
    gap = (wide["simulated"] - wide["analytic"]).unstack("decode_local").abs()
    assert gap[[0.1, 0.9, 1.0]].to_numpy().max() < 0.005 and gap[0.7].max() > 0.005
    assert (wide["analytic"].xs(0.1, level="decode_local") > 0).all()  # the remote side is the bottleneck
    assert (wide["analytic"].xs(1.0, level="decode_local") < 0).all()
    assert len(analysis.difference_curves([0.1, 0.2, 0.3], [(0.5, 0.5)], every=2, tokens=50)) == 5


def test_figure_4_takes_two_and_four_point_three_seconds():
    bars, tokens = analysis.pipelines(5)
    found = {case: rows["per_token_s"].round(6).tolist() for case, rows in tokens.groupby("case")}
    assert found == {"all accepted": [2.8, 1.2, 2.0, 2.0, 2.0], "all rejected": [2.8, 4.3, 4.3, 4.3, 4.3]}
    assert tokens.groupby("case")["formula_s"].first().round(6).to_dict() == {"all accepted": 2.0, "all rejected": 4.3}
    targets = bars[(bars["case"] == "all rejected") & (bars["what"] == "target")]
    assert targets["end_s"].iloc[0] == pytest.approx(4.3)  # the cloud hears of its rejection
    assert set(bars.loc[bars["case"] == "all accepted", "outcome"]) == {"accepted", ""}
    assert "void" in set(bars.loc[bars["case"] == "all rejected", "outcome"])


def test_figure_5_is_a_lower_bound_and_exact_where_the_device_is_no_slower():
    where = ([0.2, 1.0, 2.0, 8.0], [2.0], [0.0, 0.4, 0.9])
    exact = analysis.speedups(*where)
    found = analysis.speedups(*where, simulated=True)
    ratio = (found["speedup"] / exact["speedup"]).to_numpy().reshape(4, 1, 3)
    assert ratio[[0, 1, 3]] == pytest.approx(1, abs=0.02) and ratio.min() > 0.99
    assert ratio[2, 0, 2] > 1.01
    assert exact["speedup"].max() == pytest.approx(1 / (1 - 0.9 * 2 / 3))
    with pytest.raises(ValueError, match="at least two tokens, not 1"):
        analysis.time_per_token(analysis.EXAMPLE, np.ones((1, 2), bool))


def test_table_1s_waiting_times_are_the_simulators():
    table = analysis.waiting_times(tokens=400)
    assert table["largest_gap_s"].max() < 1e-9 and table["cases"].min() > 10 and table["cases"].sum() == 399
    assert table["simulated_steady_s"].to_numpy() == pytest.approx(table["steady_s"].to_numpy())
    assert table["steady_s"].round(6).tolist() == [2.0, 4.3, 2.0, 4.3]
    assert table["simulated_s"].iloc[2] < 1.7  # what was drafted ahead: the steady form is not the mean
    slow = analysis.waiting_times(Costs(0.5, 3.0, 0.4, 0.2), tokens=400)
    assert slow["largest_gap_s"].max() < 1e-9 and slow["steady_s"].round(6).tolist() == [3.0, 3.6, 3.0, 3.6]
    with pytest.raises(ValueError, match="no draft pair of 50 is rejected, accepted"):
        analysis.waiting_times(rates=(1.0, 1.0), tokens=50)


# Figure 9


def test_a_link_swings_by_a_fifth_of_the_added_delay():
    way = replays.link(300)
    times = np.arange(0, replays.PERIOD, 0.1)
    delays = np.array([way.arrival(t) - t for t in times])
    assert delays.mean() == pytest.approx(0.302, abs=1e-3) and np.ptp(delays) == pytest.approx(0.12, abs=1e-3)
    assert replays.round_trip(300) == pytest.approx(0.61) and way.jitter == 0.006
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"not {wrong} ms"):
            replays.link(wrong)


def test_sequences_have_the_rates_they_are_to_have():
    drawn = replays.drawn()
    assert len(drawn) == 50 and np.mean(drawn, axis=1) == pytest.approx(printed.drawn_rates(), abs=0.16)
    assert len(replays.drawn(60)) == 60
    recorded = replays.recorded()
    assert len({flags.tobytes() for flags in recorded}) == 50 and all(flags.shape == (99, 2) for flags in recorded)
    assert np.array_equal(recorded[0], next(iter(printed.acceptance_traces().values()))[:99])
    first = [flags[:10].mean(0) for flags in replays.changing(length=1000)]
    assert np.mean(first[::2], axis=0) == pytest.approx([0.97, 0.4], abs=0.08)
    assert np.mean(first[1::2], axis=0) == pytest.approx([0.4, 0.97], abs=0.08)


@pytest.fixture(scope="module")
def figure_9() -> pd.DataFrame:
    paces = printed.paces(printed.RECORDINGS[printed.QWEN])
    table = replays.replay(replays.drawn(), *paces, (100.0, 400.0))
    assert len(table) == 50 * 2 * 6
    best = table[table["strategy"] == replays.ORACLE].set_index(["delay_ms", "sequence"])["total_s"]
    joined = table.join(best.rename("best"), on=["delay_ms", "sequence"])
    assert (joined["total_s"] >= joined["best"] - 1e-9).all()  # the bound is one
    return replays.summary(table).set_index(["strategy", "delay_ms"])


def test_the_printed_totals_are_met_within_four_percent(figure_9):
    quoted = printed.scheduling()
    quoted = quoted[quoted["model"] == printed.QWEN].set_index(["strategy", "delay_ms"])["total_s"]
    ratio = (figure_9["total_s"] / quoted).dropna()
    assert len(ratio) == 8 and (ratio - 1).abs().max() < 0.04
    assert (ratio.drop("Random", level="strategy") - 1).abs().max() < 0.02


def test_the_schedulers_on_the_papers_sequences(figure_9):
    rule, ours = figure_9.loc["DRAGON"], figure_9.loc["Lagging"]
    assert rule["over_static_each"].max() < 1.01 and rule.loc[100, "over_static"] > 1
    assert ours["over_static"].max() < 1.001 and ours.loc[400, "over_static"] < rule.loc[400, "over_static"] < 0.9
    assert ours["over_oracle"].max() < 1.06 < rule.loc[400, "over_oracle"]


def test_with_recorded_decisions_no_schedule_beats_the_device():
    paces = printed.paces(printed.RECORDINGS[printed.QWEN])
    table = replays.summary(replays.replay(replays.recorded(FEW), *paces, [300.0]))
    totals = table.set_index("strategy")["total_s"]
    assert totals["Device"] / totals["Oracle"] < 1.001 and totals["DRAGON"] / totals["Device"] < 1.001
    assert totals["Lagging"] / totals["Device"] < 1.001 and totals["Cloud"] / totals["Device"] > 1.5


def test_where_acceptance_changes_a_schedule_matters():
    decisions = replays.changing(FEW)
    table = replays.summary(replays.replay(decisions, 0.1, 0.1, [300.0])).set_index("strategy")
    assert table.loc["Lagging", "over_static"] < 0.7 and table.loc["Lagging", "over_oracle"] < 1.05
    assert table.loc["DRAGON", "over_oracle"] > 1.2 and table.loc["Random", "over_static"] > 1


def test_a_summary_is_of_the_totals():
    rows = [(name, 0.0, n, total, 0) for name, totals in
            {"Device": (1.0, 3.0), "Cloud": (2.0, 1.0), "Oracle": (1.0, 1.0)}.items()
            for n, total in enumerate(totals)]  # fmt: skip
    table = pd.DataFrame(rows, columns=["strategy", "delay_ms", "sequence", "total_s", "moves"])
    found = replays.summary(table).set_index("strategy")
    device = found.loc["Device"]
    assert (device["total_s"], device["stderr_s"]) == pytest.approx((2.0, 1.0))
    assert device["high"] - 2.0 == pytest.approx(12.706, abs=1e-3)  # t of one degree of freedom
    assert device["over_static"] == pytest.approx(2 / 1.5) and device["over_oracle"] == 2
    assert device["over_static_each"] == pytest.approx((1 + 3) / 2)
    with pytest.raises(ValueError, match="totals of Cloud, Oracle too"):
        replays.summary(table[table["strategy"] == "Device"])


def test_unknown_strategies_and_no_sequences_are_refused():
    with pytest.raises(ValueError, match="no strategy Luck; there are Device, Cloud, Random, DRAGON, Lagging, Oracle"):
        replays.replay(replays.drawn(1), 0.1, 0.1, strategies=["Device", "Luck"])
    with pytest.raises(ValueError, match="at least one sequence"):
        replays.figure_9(0)


def test_figure_9_names_its_settings():
    table = replays.figure_9(2, [100.0])
    assert table.groupby("setting", sort=False).size().tolist() == [6] * 5
    assert {f"drawn, {printed.OPT}", "changing, both 100 ms"} <= set(table["setting"]) and (table["n"] == 2).all()


# Figure 10


def test_the_exchanged_case_is_the_papers_to_a_hundredth_of_a_second():
    events, decisions, _ = replays.case_study()
    ours = decisions[decisions["case"] == "exchanged"].reset_index(drop=True)
    quoted = printed.case_decisions()
    assert ours["side"].tolist() == quoted["side"].tolist() and ours["moved"].tolist() == quoted["moved"].tolist()
    assert ours["time_s"].to_numpy() == pytest.approx(quoted["time_s"].to_numpy(), abs=0.02)
    assert ours[["device", "cloud"]].to_numpy() == pytest.approx(quoted[["device", "cloud"]].to_numpy(), abs=1e-6)
    assert ours["delta_z_s"].to_numpy() == pytest.approx(quoted["delta_z_s"].to_numpy(), abs=0.04)
    ends = events[(events["case"] == "exchanged") & (events["what"] == "target")]["end_s"].max()
    assert ends == pytest.approx(printed.case_events()["end_s"].max(), abs=0.02)


def test_with_the_recorded_sides_the_aggregator_never_moves():
    events, decisions, delays = replays.case_study()
    mine = decisions[decisions["case"] == "recorded"]
    assert (mine["side"] == "device").all() and not mine["moved"].any() and (mine["delta_z_s"] < 0).all()
    assert not ((events["case"] == "recorded") & (events["what"] == "switch")).any()
    last = decisions.groupby("case")["time_s"].max()
    assert last["recorded"] < last["exchanged"] - 0.4
    assert delays["one_way_s"].between(0.5, 0.61).all()


def test_the_oracle_agrees_that_the_recorded_case_stays():
    flags, paces = printed.acceptance_traces()[printed.CASE_ACCEPTANCE][:15], printed.paces(printed.CASE_PACES)
    way = replays.link(replays.CASE_DELAY, replays.CASE_PERIOD)
    world = World(flags, paces.device[:15], paces.cloud, way, way, 5)
    assert oracle(world).moves == []
