"""What is judged: tables cell by cell, with intervals over runs."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ondevice import evidence
from ondevice_papers.disco.distributions import DEVICES
from ondevice_papers.disco.race import Requests, play
from ondevice_studies.disco import study, traces
from ondevice_studies.disco.claims import CLAIMS


@pytest.fixture(scope="module")
def sweep():
    lengths = traces.lengths()
    some = list(DEVICES.values())[:2]
    return study.sweep(
        ["GPT", "LLaMA"], some, [0.0, 0.3, 0.6, 1.0], study.policies(lengths), play, lengths, (4, 300), 0
    )


def test_a_policy_of_another_side_or_budget_is_not_compared():
    """One that limited the device won with all of the server's tokens, at a budget of a fifth of them."""
    lengths, some = traces.lengths(), list(DEVICES.values())[:1]
    for wrong in ({"constrained": "device"}, {"budget": 0.9}):

        def policies(side, server, device, b, wrong=wrong):
            made = study.policies(lengths, names=["Stoch"])(side, server, device, b)["Stoch"]
            return {"mine": replace(made, **wrong)}

        with pytest.raises(ValueError, match=r"'mine' holds the .* is to be held to 0\.2"):
            study.sweep(["GPT"], some, [0.2], policies, play, lengths, (2, 50), 0)


def test_a_policy_that_spends_more_than_its_budget_is_not_compared():
    """What races on every request wins with all of the tokens; what tosses a coin of a fifth holds to a fifth."""
    lengths, some = traces.lengths(), list(DEVICES.values())[:1]

    def spendthrift(side, server, device, b):
        return {"mine": replace(study.policies(lengths, names=["race"])(side, server, device, 1.0)["race"], budget=b)}

    with pytest.raises(ValueError, match=r"'mine' has the device read 1\.00 of the tokens at a budget of 0\.2\."):
        study.sweep(["GPT"], some, [0.2], spendthrift, play, lengths, (2, 50), 0)
    for seed in range(20):
        study.sweep(["GPT"], some, [0.05, 0.2], study.policies(lengths), play, lengths, (2, 50), seed)


def test_users_in_one_slow_spell_of_a_server_are_no_sign_of_overspending():
    """Few requests in bursts: what holds to its budget is never refused, what races on all of them is."""
    lengths, some = traces.lengths(), next(iter(DEVICES.values()))

    def spendthrift(side, server, device, b):
        return {"mine": replace(study.policies(lengths, names=["race"])(side, server, device, 1.0)["race"], budget=b)}

    asked = (["replicate-70b"], some, lengths, [0.1, 0.3])
    with pytest.raises(ValueError, match=r"'mine' has the device read 1\.00 of the tokens at a budget of 0\.1\."):
        study.users(*asked, spendthrift, play, [1.0], (1, 50), 0)
    for seed in range(10):  # all requests of a burst fall into one spell
        study.users(*asked, study.policies(lengths, names=["DiSCo", "Stoch"]), play, [1.0], (1, 50), seed)


def test_the_sweeps_p99_is_a_ttft_that_occurred():
    drawn = Requests.draw((2, 500), traces.lengths(), traces.server("GPT"), np.random.default_rng(0))
    made = study.policies(traces.lengths())("device", traces.server("GPT"), DEVICES["Pixel 7 Pro, Bloom-560M"], 0.3)
    raced = play(made["Stoch"], drawn, DEVICES["Pixel 7 Pro, Bloom-560M"])
    assert study._by_run(raced)["p99_s"].tolist() == np.sort(raced.ttft, axis=1)[:, 494].tolist()


def test_answers_belong_to_their_prompts():
    known = set(traces.pairs()[["prompt", "answer"]].itertuples(index=False, name=None))
    server, gaps = traces.server("GPT"), traces.measured("together-70b", "tbt_s")
    default = inspect.signature(study.bill).parameters["pairs"].default
    for pairs, together in ((default, True), (study.joint, True), (study.apart, False)):
        found = study.workload(server, gaps, traces.lengths(), 300, 10**9, pairs, np.random.default_rng(0))
        drawn = set(zip(found.requests.prompt.tolist(), found.answer.tolist(), strict=True))
        assert (drawn <= known) == together


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


@pytest.mark.parametrize("every", [10, 1000])
def test_the_streams_of_a_request_are_drawn_together(every):
    """Each of 50 requests has 20 streams: where they stall together, 50 are counted, not 1,000."""
    request = np.repeat(range(50), 20)
    streams = {"service": "GPT", "constrained": "device", "request": request, "stalled": request % every == every - 1}
    bill = study.Bill(pd.DataFrame(), np.zeros(0), np.zeros(0), evidence.born(pd.DataFrame(streams), "simulated"))
    share = study.stalled(bill, "device")
    assert (share.value, share.n, share.drawn) == (0.1 if every == 10 else 0.0, 50, "requests")
    assert share.low <= 0.04 and share.high > (0.16 if every == 10 else 0.05)


def test_the_correlation_is_over_prompts_and_its_null_has_the_lengths_of_others():
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 60, 30)
    rows = {"request": np.tile(range(30), 4), "length": np.tile(lengths, 4), "ttft_s": 0.01 * np.tile(lengths, 4)}
    alpaca = evidence.born(pd.DataFrame(rows), "recorded")
    alpaca["ttft_s"] += np.tile(rng.normal(0, 0.05, 30), 4)
    ours, null = CLAIMS["disco-c19"].values({"alpaca": alpaca})
    assert (ours.n, ours.drawn) == (null.n, null.drawn) == (30, "prompts")
    assert ours.value > 0.9 and abs(null.value) < 0.4
    alone = evidence.derived(alpaca.iloc[:30], alpaca)
    assert ours.interval == pytest.approx(CLAIMS["disco-c19"].values({"alpaca": alone})[0].interval)


def test_answers_that_change_hands_are_judged_by_the_worst_cell_and_the_mean_share():
    cells = {"over_weaker": [0.1, -0.2, 0.0], "outside": [-0.1, 0.2, 0.0], "over_device": [0.3, 0.1, 0.2]}
    ends = {f"{name}{suffix}": values for name, values in cells.items() for suffix in ("", "_low", "_high")}
    bound = evidence.born(pd.DataFrame({**ends, "n": 200, "changed": [1.0, 0.6, 0.2]}), "recorded")
    for claim, worst in (("disco-c27", -0.2), ("disco-c30", 0.2), ("disco-c31", 0.1)):
        value, share = CLAIMS[claim].values({"bound": bound})[0]
        assert (value.value, value.n, share.value) == (worst, 200, pytest.approx(0.6))


def test_hand_overs_are_judged_by_bill_and_the_null_is_another_one():
    bills = {}
    for name, stalled in {"as planned": False, "by an uneven device": False, "at once": True}.items():
        streams = {"service": "GPT", "constrained": "device", "request": range(400), "stalled": stalled}
        born = evidence.born(pd.DataFrame(streams), "simulated")
        bills[name] = study.Bill(pd.DataFrame(), np.zeros(0), np.zeros(0), born)
    claim = CLAIMS["disco-c17"]
    assert [claim.rule.verdict(value) for value in claim.values({"bills": bills})] == ["reproduced", "contradicted"]
