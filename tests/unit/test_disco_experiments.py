"""DiSCo's experiments: tables have the rows they promise, and their numbers agree with each other."""

import asyncio

import numpy as np
import pytest

from ondevice.disco import costs, demonstration, dispatch, experiments, migration, plots, traces
from ondevice.disco.distributions import DEVICES, Lengths
from ondevice.disco.expectation import evaluate
from ondevice.disco.migration_experiments import migration_sweep

DEVICE = DEVICES["Pixel 7 Pro, Bloom-560M"]
LENGTHS = traces.lengths()


@pytest.fixture(scope="module")
def sweep():
    return experiments.budget_sweep(["GPT", "together-70b"], [DEVICE], LENGTHS, [0.0, 0.3, 0.7, 1.0], 0.2)


def test_the_sweep_has_every_setting_once_and_keeps_its_budgets(sweep):
    assert len(sweep) == 2 * 2 * 4 * 4 and not sweep.duplicated(["service", "constrained", "budget", "policy"]).any()
    assert np.allclose(sweep["use"], sweep["budget"], atol=1e-9)


def test_reductions_leave_out_the_ends_and_have_the_right_sign(sweep):
    gain = experiments.reductions(sweep)
    assert sorted(gain["budget"].unique()) == [0.3, 0.7]
    row = gain[(gain["service"] == "GPT") & (gain["constrained"] == "device") & (gain["budget"] == 0.3)].iloc[0]
    server = traces.server("GPT")
    ours = evaluate(dispatch.disco_d(LENGTHS, server, 0.3, 0.2), LENGTHS, server, DEVICE)
    theirs = evaluate(dispatch.stochastic(LENGTHS, "device", 0.3), LENGTHS, server, DEVICE)
    assert row["mean_percent"] == pytest.approx(100 * (1 - ours.mean / theirs.mean))
    assert row["p99_percent"] == pytest.approx(100 * (1 - ours.p99 / theirs.p99))


def test_sampled_runs_agree_with_the_exact_expectation():
    server = traces.server("together-70b")
    policy = dispatch.disco_d(LENGTHS, server, 0.5, 0.2)
    runs = experiments.repeated_runs(policy, LENGTHS, server, DEVICE, requests=2000, runs=5, seed=0)
    exact = evaluate(policy, LENGTHS, server, DEVICE)
    assert runs["mean_s"].mean() == pytest.approx(exact.mean, rel=0.02)
    assert runs["use"].mean() == pytest.approx(0.5, abs=0.02)


def test_migration_never_raises_the_bill_when_the_target_is_free_to_prefill():
    bills, seen = migration_sweep(["GPT"], LENGTHS, [0.3, 0.9], 0.2, 200, 0, "anyscale-70b", free_prefill=True)
    assert (bills["cost"] <= bills["cost_without"] + 1e-15).all() and (bills["migrated"] > 0).any()
    seen = seen.set_index("constrained")
    assert seen.loc["server", "late_mean"] == 0 and seen.loc["server", "stalled"] == 0
    assert 0 < seen.loc["device", "stalled"] < 0.2, "the server misses its P99 now and then"
    assert seen["streams"].sum() == round((bills["migrated"] * 200).sum())


def test_the_second_prefill_is_charged_where_a_stream_migrates():
    free, paid = (
        migration_sweep(["GPT"], LENGTHS, [0.9], 0.2, 200, 0, "anyscale-70b", free_prefill=free)[0]
        for free in (True, False)
    )
    assert (free["migrated"] == paid["migrated"]).all() and (free["migrated"] > 0).all()
    assert (paid["cost"] > free["cost"]).all() and (paid["cost_without"] == free["cost_without"]).all()


def test_answers_of_one_token_are_never_migrated():
    one = Lengths(np.bincount([1]))
    bills, seen = migration_sweep(["GPT"], LENGTHS, [0.9], 0.2, 100, 0, "anyscale-70b", answers=one)
    assert (bills["migrated"] == 0).all() and (bills["cost"] == bills["cost_without"]).all()
    assert (seen["streams"] == 0).all() and seen["buffered_mean"].isna().all()


def test_drift_shows_the_hard_budget_kept(sweep):
    table = experiments.drift("together-70b", "replicate-70b", DEVICE, LENGTHS, 0.3, 0.2, 600, 0)
    most = table.groupby("policy")["used"].max()
    assert most["online, hard budget"] <= 0.3 + 1e-9 < most["DiSCo-D, computed before"]


def test_figures_can_be_drawn_from_the_tables(sweep):
    figure = plots.budget_curves(sweep, "mean_s", DEVICE, "simulated", "mean TTFT (s)")
    assert len(figure.axes) == 4 and figure.get_supxlabel() == "budget b"
    labels = {line.get_label() for line in figure.axes[0].lines}
    assert {"DiSCo", "Stoch", "race", "mean-optimal", "server only", "device only"} <= labels


def test_the_demonstrated_streams_are_intact_and_accounted_for():
    remaining = migration.expected_remaining(np.full(10, 40), 128)
    price = (costs.Prices(1e-7, 1e-7), costs.Prices(1e-6, 2e-6))
    rule = migration.to_device(price[1], price[0], DEVICE, remaining, consumption_rate=60)
    streams, router = asyncio.run(
        demonstration.route(
            ["word " * n for n in (4, 20, 40)], dispatch.race(LENGTHS, "server", 1.0), traces.measured("groq-70b"),
            0.002, DEVICE, price, pace=60, migration=rule, max_tokens=40, seed=0,
        )
    )  # fmt: skip
    assert streams["intact"].all() and len(streams) == 3
    assert router.ledger.share("server") == 1.0 and router.ledger.requests == 3
