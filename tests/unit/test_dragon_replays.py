"""DRAGON's cost model beside the simulator, and the authors' recordings through it: Figures 3, 4, 5, 9, 10, Table 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from ondevice.dragon import analysis, printed, replays
from ondevice.dragon.cost import Costs
from ondevice.dragon.scheduler import Stay
from ondevice.dragon.side import Rules, Side, draft_on
from ondevice.dragon.simulator import CLOUD, DEVICE, Bools, Oracle, World, independent, oracle, simulate
from ondevice.dragon.world import placed
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


def test_a_drawing_has_a_bar_for_each_decode_and_a_line_for_each_message():
    bars = analysis.pipelines(4).bars.query("case == 'all rejected'")
    axis = Figure().subplots()
    analysis.draw(axis, bars)
    decodes, messages = bars[bars["what"] == "decode"], bars[bars["what"] != "decode"]
    assert [bar.get_width() for bar in axis.patches] == pytest.approx((decodes["end_s"] - decodes["begin_s"]).tolist())
    lanes = {round(bar.get_y() + bar.get_height() / 2) for bar in axis.patches}
    assert lanes == {0, 1} and [label.get_text() for label in axis.get_yticklabels()] == ["cloud", "device"]
    assert [line.get_xdata().tolist() for line in axis.lines] == messages[["begin_s", "end_s"]].to_numpy().tolist()
    said = {handle.get_label() for handle in analysis.handles(bars)}
    outcomes = {f"decode, {outcome or 'not given'}" for outcome in decodes["outcome"]}
    assert said == outcomes | {"draft sent", "target sent"}


# Figures 3, 4, 5, Table 1


def test_an_experiments_functions_are_the_ones_that_are_used():
    three = analysis.difference_curves([0.1, 0.9], [(0.5, 0.5)], every=9, tokens=20, difference=lambda *_: 3.0)
    assert three.loc[three["kind"] == "analytic", "delta_z"].tolist() == [3.0, 3.0]
    assert analysis.speedups([1.0], [1.0], [0.5], speedup=lambda *_: 9.0)["speedup"].tolist() == [9.0]
    table = analysis.waiting_times(
        tokens=99, latency=lambda costs, rate: rate,
        times=lambda costs, local, remote: [5.0 * i for i in range(len(local) + 1)],
    )  # fmt: skip
    assert table["formula_s"].tolist() == pytest.approx([5.0] * 4) and table["largest_gap_s"].max() > 2
    assert table["steady_s"].tolist() == [float(remote == "accepted") for remote in table["remote"]]

    def one_ahead(side: Side, now: float, actions: list) -> None:
        """Drafts only what comes next, as token-wise aggregation does."""
        if side.next == len(side.tokens):
            draft_on(side, now, actions)

    steady = analysis.pipelines(5, rules=Rules(draft_on=one_ahead)).tokens.groupby("case")["per_token_s"].last()
    assert steady.to_numpy() == pytest.approx([4.3, 4.3])


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


def totals(decisions: Sequence[Bools], paces: printed.Recording, *delays: float) -> pd.DataFrame:
    """Every strategy on every sequence: total_s by strategy, of (delay_ms, sequence)."""
    rows = [dict(sequence=number, **row) for number, flags in enumerate(decisions)
            for row in replays.totals(flags, paces, number, delays)]  # fmt: skip
    assert len(rows) == len(decisions) * len(delays) * (len(replays.STRATEGIES) + 1)
    wide = pd.DataFrame(rows).pivot(index=["delay_ms", "sequence"], columns="strategy", values="total_s")
    assert (wide.min(axis=1) >= wide[replays.ORACLE] - 1e-9).all()  # the bound is one
    return wide


@pytest.fixture(scope="module")
def figure_9() -> pd.DataFrame:
    return totals(replays.drawn(), printed.paces(printed.RECORDINGS[printed.QWEN]), 100.0, 400.0)


def test_the_printed_totals_are_met_within_four_percent(figure_9):
    quoted = printed.scheduling()
    quoted = quoted[quoted["model"] == printed.QWEN].pivot(index="delay_ms", columns="strategy", values="total_s")
    ratio = (figure_9.groupby("delay_ms").mean() / quoted).dropna(how="all").dropna(axis="columns") - 1
    assert ratio.shape == (2, 4) and ratio.abs().max(axis=None) < 0.04
    assert ratio.drop(columns="Random").abs().max(axis=None) < 0.02


def test_the_schedulers_on_the_papers_sequences(figure_9):
    mean = figure_9.groupby("delay_ms").mean()
    static, best = mean[["Device", "Cloud"]].min(axis=1), mean["Oracle"]
    rule, ours = mean["DRAGON"] / static, mean["Lagging"] / static
    each = figure_9["DRAGON"] / figure_9[["Device", "Cloud"]].min(axis=1)
    assert each.groupby("delay_ms").mean().max() < 1.01 and rule[100] > 1
    assert ours.max() < 1.001 and ours[400] < rule[400] < 0.9
    assert (mean["Lagging"] / best).max() < 1.06 < mean["DRAGON"][400] / best[400]


def test_with_recorded_decisions_no_schedule_beats_the_device():
    found = totals(replays.recorded(FEW), printed.paces(printed.RECORDINGS[printed.QWEN]), 300.0).mean()
    assert found["Device"] / found["Oracle"] < 1.001 and found["DRAGON"] / found["Device"] < 1.001
    assert found["Lagging"] / found["Device"] < 1.001 and found["Cloud"] / found["Device"] > 1.5


def test_where_acceptance_changes_a_schedule_matters():
    found = totals(replays.changing(FEW), printed.Recording(np.full(replays.TOKENS, 0.1), 0.1), 300.0).mean()
    static, best = found[["Device", "Cloud"]].min(), found["Oracle"]
    assert found["Lagging"] / static < 0.7 and found["Lagging"] / best < 1.05
    assert found["DRAGON"] / best > 1.2 and found["Random"] / static > 1


def test_totals_are_those_of_the_simulator_and_say_where_tokens_were_decided():
    """All strategies meet the same jitter, that of the sequence's number."""
    (flags,), paces, way = replays.drawn(1), printed.Recording(np.full(replays.TOKENS, 0.1), 0.05), replays.link(200)
    rows = {row["strategy"]: row for row in replays.totals(flags, paces, 7, [200.0])}
    for name, side in (("Device", DEVICE), ("Cloud", CLOUD)):
        run = simulate(World(flags, 0.1, 0.05, way, way, replays.LOOKAHEAD), side, seed=7)
        assert rows[name] == dict(strategy=name, delay_ms=200.0, total_s=run.total, moves=0, on_device=1.0 - side)
    assert 0 < rows["Random"]["on_device"] < 1 and rows["Random"]["moves"] > 10
    assert math.isnan(rows[replays.ORACLE]["on_device"])
    other = {row["strategy"]: row for row in replays.totals(flags, paces, 8, [200.0])}
    assert all(other[name]["total_s"] != rows[name]["total_s"] for name in replays.STRATEGIES)


def test_an_experiments_rules_and_oracle_make_the_totals():
    (flags,), paces = replays.drawn(1), printed.Recording(np.full(replays.TOKENS, 0.1), 0.05)

    def one_ahead(side: Side, now: float, actions: list) -> None:
        if side.next == len(side.tokens):
            draft_on(side, now, actions)

    def first(world: World, side: int) -> Oracle:
        return Oracle(1.0 + side, [])

    plain, wise = (replays.totals(flags, paces, 0, [300.0], rules, first) for rules in (None, Rules(one_ahead)))
    assert plain[-1]["total_s"] == wise[-1]["total_s"] == 1.0  # of both beginnings the better one
    assert all(two["total_s"] > 1.5 * one["total_s"] for one, two in zip(plain[:2], wise[:2], strict=True))


def answers(**lengths: int) -> pd.DataFrame:
    """Of the record `lockstep`: answers of a holder and so many tokens; the cloud's drafts are accepted, the device's
    every second time."""
    return pd.DataFrame([
        dict(question=name, holder=name.rstrip("0123456789"), position=position, side=side,
             greedy=float(side == "cloud" or position % 2))
        for name, length in lengths.items() for position in range(length) for side in ("device", "cloud")
    ])  # fmt: skip


def test_our_answers_decisions_are_repeated_up_to_a_sequence():
    tokens = answers(both1=9, both2=3, both3=8, both4=12, cloud1=8)
    found = replays.answered(tokens, count=2)
    assert {holder: len(decisions) for holder, decisions in found.items()} == {"both": 2, "cloud": 1}
    sizes = {"both1": 9, "both3": 8, "both4": 12}  # answers below the least are left out
    first = sorted(sizes, key=placed)[:2]  # and so is what comes after the count, in the questions' order
    for name, flags in zip(first, found["both"], strict=True):
        assert flags.shape == (replays.TOKENS, 2) and flags[:, 1].all()
        assert flags[:, 0].tolist() == [position % sizes[name] % 2 == 1 for position in range(99)]


def test_settings_have_the_papers_paces_and_names():
    ours = {"both": replays.drawn(2)}
    found = replays.settings(ours, 3)
    assert list(found) == [
        f"drawn, {printed.QWEN}", f"drawn, {printed.OPT}", f"recorded, {printed.QWEN}", f"changing, {printed.QWEN}",
        "changing, both 100 ms", "ours, both",
    ]  # fmt: skip
    assert [len(decisions) for decisions, _ in found.values()] == [3] * 5 + [2]
    qwen, opt = (printed.paces(printed.RECORDINGS[model]) for model in (printed.QWEN, printed.OPT))
    assert found[f"drawn, {printed.OPT}"][1].device.tolist() == opt.device.tolist()
    assert found["ours, both"][1].cloud == found[f"recorded, {printed.QWEN}"][1].cloud == qwen.cloud
    even = found["changing, both 100 ms"][1]
    assert even.device.tolist() == [0.1] * replays.TOKENS and even.cloud == 0.1


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
