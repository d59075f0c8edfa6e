"""DRAGON's cost model beside the simulator, and the authors' recordings through it: Figures 3, 4, 5, 9, 10, Table 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from scripted import Scripted

from ondevice.network.link import Link
from ondevice_papers.dragon.cost import Costs
from ondevice_studies.dragon import analysis, printed, replays
from ondevice_studies.dragon.questions import placed
from ondevice_studies.dragon.simulator import CLOUD, DEVICE, Bools, World, independent, simulate

# Bars of a run


ALWAYS = np.ones((2, 2, 2, 32), bool)


def test_a_timeline_is_the_same_run_and_its_bars_are_what_happened():
    world = World(independent(30, 0.7, 0.6, 1), 0.2, 0.05, Link(0.3), Link(0.1), 5)
    moves = (Scripted([3]), Scripted([9]))
    run, bars = analysis.timeline(world, DEVICE, moves)
    plain = simulate(world, DEVICE, (Scripted([3]), Scripted([9])))
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
    with pytest.raises(ValueError, match=r"1\.2"):
        analysis.at_rates(10, 1.2, 0.5)


def test_figure_3_is_met_by_the_simulator_outside_of_the_middle():
    table = analysis.difference_curves([0.1, 0.5, 0.7, 0.9, 1.0], tokens=200)
    wide = table.pivot_table(index=["alpha_l", "alpha_r", "decode_local"], columns="kind", values="delta_z")
    gap = (wide["simulated"] - wide["analytic"]).unstack("decode_local").abs()
    assert gap[[0.1, 0.9, 1.0]].to_numpy().max() < 0.005 and gap[0.7].max() > 0.005
    assert (wide["analytic"].xs(0.1, level="decode_local") > 0).all()  # the remote side is the bottleneck
    assert (wide["analytic"].xs(1.0, level="decode_local") < 0).all()
    assert len(analysis.difference_curves([0.1, 0.2, 0.3], [(0.5, 0.5)], every=2, tokens=50)) == 5


def test_figure_5_is_a_lower_bound_and_exact_where_the_device_is_no_slower():
    where = ([0.2, 1.0, 2.0, 8.0], [2.0], [0.0, 0.4, 0.9])
    exact = analysis.speedups(*where)
    found = analysis.speedups(*where, simulated=True)
    ratio = (found["speedup"] / exact["speedup"]).to_numpy().reshape(4, 1, 3)
    assert ratio[[0, 1, 3]] == pytest.approx(1, abs=0.02) and ratio.min() > 0.99
    assert ratio[2, 0, 2] > 1.01
    assert exact["speedup"].max() == pytest.approx(1 / (1 - 0.9 * 2 / 3))


def test_table_1s_waiting_times_are_the_simulators():
    table = analysis.waiting_times(tokens=400)
    assert table["largest_gap_s"].max() < 1e-9 and table["cases"].min() > 10 and table["cases"].sum() == 399
    assert table["simulated_steady_s"].to_numpy() == pytest.approx(table["steady_s"].to_numpy())
    assert table["steady_s"].round(6).tolist() == [2.0, 4.3, 2.0, 4.3]
    assert table["simulated_s"].iloc[2] < 1.7  # what was drafted ahead: the steady form is not the mean
    slow = analysis.waiting_times(Costs(0.5, 3.0, 0.4, 0.2), tokens=400)
    assert slow["largest_gap_s"].max() < 1e-9 and slow["steady_s"].round(6).tolist() == [3.0, 3.6, 3.0, 3.6]


# Figure 9


def test_a_link_swings_by_a_fifth_of_the_added_delay():
    way = replays.link(300)
    times = np.arange(0, replays.PERIOD, 0.1)
    delays = np.array([way.arrival(t) - t for t in times])
    assert delays.mean() == pytest.approx(0.302, abs=1e-3) and np.ptp(delays) == pytest.approx(0.12, abs=1e-3)
    assert replays.round_trip(300) == pytest.approx(0.61) and way.jitter == 0.006
    with pytest.raises(ValueError, match="-1"):
        replays.link(-1.0)


def totals(decisions: Sequence[Bools], paces: printed.Recording, *delays: float) -> pd.DataFrame:
    """Every strategy on every sequence: total_s by strategy, of (delay_ms, sequence)."""
    rows = [dict(sequence=number, **row) for number, flags in enumerate(decisions)
            for row in replays.totals(flags, paces, number, delays)]  # fmt: skip
    assert len(rows) == len(decisions) * len(delays) * (len(replays.STRATEGIES) + 1)
    wide = pd.DataFrame(rows).pivot(index=["delay_ms", "sequence"], columns="strategy", values="total_s")
    assert (wide.min(axis=1) >= wide[replays.ORACLE] - 1e-9).all()  # the bound is one
    return wide


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


@pytest.mark.parametrize(
    ("hook", "strategy"), [({"should_move": lambda *_: True}, "DRAGON"), ({"plan": lambda *_: ALWAYS}, "Lagging")]
)
def test_an_experiments_rule_moves_the_aggregator_of_its_strategy_alone(hook, strategy):
    flags, paces = replays.drawn(1)[0], printed.paces(printed.RECORDINGS[printed.QWEN])
    plain, edited = (
        {row["strategy"]: row for row in replays.totals(flags, paces, 7, [200.0], **options)} for options in ({}, hook)
    )
    assert {name for name in plain if plain[name]["moves"] != edited[name]["moves"]} == {strategy}
