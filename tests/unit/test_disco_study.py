"""What is judged: tables cell by cell, with intervals over runs."""

from __future__ import annotations

import inspect

import numpy as np
import pandas as pd
import pytest

from ondevice import evidence
from ondevice.disco import study, traces
from ondevice.disco.distributions import DEVICES
from ondevice.disco.race import Requests, play


@pytest.fixture(scope="module")
def sweep():
    lengths = traces.lengths()
    some = list(DEVICES.values())[:2]
    return study.sweep(
        ["GPT", "LLaMA"], some, [0.0, 0.3, 0.6, 1.0], study.policies(lengths), play, lengths, (4, 300), 0
    )


def test_the_sweep_has_every_setting_once_and_spends_its_budget(sweep):
    assert not sweep.duplicated([*study.CELL, "budget", "policy", "run"]).any()
    assert len(sweep) == 2 * 2 * 2 * 4 * 4 * 4
    spent = sweep.groupby("budget")["use"].mean()
    assert spent.to_numpy() == pytest.approx(spent.index.to_numpy(), abs=0.03)
    assert evidence.kind_of(sweep) == "simulated"


def test_the_sweeps_p99_is_a_ttft_that_occurred():
    drawn = Requests.draw((2, 500), traces.lengths(), traces.server("GPT"), np.random.default_rng(0))
    made = study.policies(traces.lengths())("device", traces.server("GPT"), DEVICES["Pixel 7 Pro, Bloom-560M"], 0.3)
    raced = play(made["Stoch"], drawn, DEVICES["Pixel 7 Pro, Bloom-560M"])
    assert study._by_run(raced, drawn, "device")["p99_s"].tolist() == np.sort(raced.ttft, axis=1)[:, 494].tolist()


def test_answers_belong_to_their_prompts():
    known = set(traces.pairs()[["prompt", "answer"]].itertuples(index=False, name=None))
    server, gaps = traces.server("GPT"), traces.measured("together-70b", "tbt_s")
    default = inspect.signature(study.bill).parameters["pairs"].default
    for pairs, together in ((default, True), (study.joint, True), (study.apart, False)):
        found = study.asked(server, gaps, traces.lengths(), 300, 10**9, pairs, np.random.default_rng(0))
        drawn = set(zip(found.requests.prompt.tolist(), found.answer.tolist(), strict=True))
        assert (drawn <= known) == together


def test_reductions_leave_out_the_ends_and_have_the_right_sign(sweep):
    found = study.reductions(sweep, "mean_s")
    assert set(found.index.get_level_values("budget")) == {0.3, 0.6}
    one = sweep.set_index([*study.CELL, "budget", "policy", "run"])["mean_s"]
    cell = found.index[0]
    assert found.loc[cell, 2] == pytest.approx(100 * (1 - one[(*cell, "DiSCo", 2)] / one[(*cell, "Stoch", 2)]))


def test_a_table_is_compared_cell_by_cell():
    cells = evidence.born(pd.DataFrame([[1.0, 3.0], [10.0, 10.0], [-4.0, -6.0]]), "simulated")
    distance, order, near, above = (x.value for x in study.beside(cells, [2.0, 14.0, 20.0], 5))
    assert distance == pytest.approx((0 + 4 + 25) / 3)
    assert (order, near, above) == (pytest.approx(-0.5), pytest.approx(2 / 3), pytest.approx(2 / 3))


def test_an_interval_over_runs_shrinks_with_them():
    rng = np.random.default_rng(0)
    few, many = (evidence.born(pd.DataFrame(rng.normal(size=(3, n))), "simulated") for n in (5, 80))
    widths = [found.high - found.low for found in (study.over_runs(np.mean, table) for table in (few, many))]
    assert widths[1] < widths[0] / 2


def test_ttfts_reach_beyond_the_tail_wait_but_not_beyond_it_and_the_device():
    lengths = traces.lengths()
    found = study.beyond_the_tail(["LLaMA"], lengths, [0.3], DEVICES["Pixel 7 Pro, Bloom-560M"],
                                  study.policies(lengths), play, 5000, 0)  # fmt: skip
    assert found["over"].item() > 0.05
    assert found["beyond"].item() == 0


def test_a_slow_target_stalls_the_streams_that_a_planned_one_does_not():
    lengths = traces.lengths()
    planned, late = (
        study.bill(["Command"], lengths, [0.9], study.policies(lengths, names=["DiSCo"]), play, 400, 0, "anyscale-70b",
                   slower=slower)
        for slower in (1.0, 3.0)
    )  # fmt: skip
    assert study.stalled(late, "server").value > 0.5
    for side in ("device", "server"):
        assert study.stalled(planned, side).value < study.stalled(late, side).value


def test_a_saving_has_its_interval_over_requests():
    lengths = traces.lengths()
    found = study.bill(
        ["Command"], lengths, [0.5], study.policies(lengths, names=["DiSCo"]), play, 300, 0, "anyscale-70b"
    )
    largest, share = study.savings(found, "server")
    mine = found.settings["constrained"] == "server"
    assert largest.value == pytest.approx(found.saved()[mine].max())
    assert largest.low < largest.value < largest.high
    assert share.value == (found.saved()[mine] > 5).mean()


def test_policy_times_are_taken_in_turns():
    times = study.policy_times([100, 2000], 3, 0)
    assert sorted(times["turn"].unique()) == [0, 1, 2]
    table = study.medians(times)
    assert (table["low"] <= table["ms"]).all() and (table["turns"] == 3).all()
    assert len(table) == 5 + 4  # the optimum is timed on few samples only
