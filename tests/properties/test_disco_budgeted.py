"""The budget holds for any traffic, in time and in the order of the requests; what is learned is near the optimum."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice_papers.disco.budgeted import Account, Dispatcher
from ondevice_papers.disco.distributions import DEVICES, Latency
from ondevice_papers.disco.policy import SIDES
from ondevice_papers.disco.race import Requests, in_time, play
from ondevice_papers.disco.traffic import Traffic, line, survived
from ondevice_studies.disco import study, traces

PHONE = DEVICES["Pixel 7 Pro, Bloom-560M"]


@given(
    st.sampled_from(SIDES), st.floats(0, 1), st.integers(0, 2**16),
    st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 5), st.floats(0, 60), st.floats(0.01, 60)),
             min_size=1, max_size=80),
)  # fmt: skip
def test_no_traffic_overdraws_the_budget_at_any_moment_or_prefix(side, budget, seed, requests):
    prompts, gaps, server, device = (np.array(column) for column in zip(*requests, strict=True))
    state = Dispatcher(side, budget).state()
    dispatcher = Dispatcher(side, budget, json.loads(json.dumps(state)) if seed % 2 else None)
    raced, ledger = in_time(dispatcher, np.cumsum(gaps), prompts, {"device": device, "server": server})
    assert (ledger[:, 1] <= budget * ledger[:, 0] + 1e-6).all()
    used = np.where(raced.ran(side), prompts, 0)
    assert (np.cumsum(used) <= budget * np.cumsum(prompts) + 1e-6).all()
    assert np.isfinite(raced.ttft).all()
    assert dispatcher.account.spent == used.sum() == ledger[-1, 1]


@given(st.floats(0, 1), st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(0, 20), max_size=3)), max_size=30))
def test_an_account_holds_for_every_prefix_whoever_starts_when(b, steps):
    account, tokens, used, closed = Account(b), [], [], 0
    for length, starts in steps:
        number = account.arrive(length)
        tokens.append(length)
        used.append(0)
        for who in starts:
            at = closed + who % (number - closed + 1)
            if account.start(at, tokens[at]):
                used[at] += tokens[at]
        assert (np.cumsum(used) <= b * np.cumsum(tokens) + 1e-6).all()
        if length % 3 == 0:
            closed = number
            account.forget(number)


@pytest.mark.parametrize(
    ("side", "ttft"), [("server", {"device": 1.0, "server": 0.1}), ("device", {"device": 0.1, "server": 1.0})]
)
def test_a_budget_is_used_where_all_prompts_have_one_length(side, ttft):
    """At one price all of them are worth a start, or none: the dearer one alone left nine tenths of a budget unused."""
    seconds = {name: np.full(400, value) for name, value in ttft.items()}
    raced, _ = in_time(Dispatcher(side, 0.1), 2.0 * np.arange(400), np.full(400, 100), seconds)
    assert 0.075 <= raced.ran(side).mean() <= 0.1


def test_a_start_that_is_given_back_can_be_had_again():
    account = Account(0.5)
    number = account.arrive(100)
    assert account.start(number, 50)
    assert not account.start(number, 1)
    account.take(number, -50)
    assert account.start(number, 50)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("series", ["together-70b", "bedrock-13b", "replicate-7b"])
def test_what_is_learned_comes_near_the_optimum_that_knows_all(series, side):
    found = study.learned([series], PHONE, traces.lengths(), [0.3], study.policies(traces.lengths()), play, 2000, 1, 0)
    found = found[found["constrained"] == side].set_index("policy")
    assert found.loc["learned", "mean_s"] < 1.1 * found.loc["mean-optimal", "mean_s"]
    assert 0.8 * 0.3 < found.loc["learned", "use"] <= found.loc["learned", "most"] <= 0.3 + 1e-9


def test_a_state_goes_on_where_it_stopped_and_a_damaged_one_is_refused():
    drawn = Requests.draw(400, traces.lengths(), traces.measured("replicate-7b"), np.random.default_rng(0))
    both = {"device": PHONE.ttft(drawn.prompt), "server": drawn.server_ttft}
    first = Dispatcher("device", 0.3)
    in_time(first, np.arange(400) * 60.0, drawn.prompt, both)
    kept = json.loads(json.dumps(first.state()))
    again = Dispatcher("device", 0.3, kept)
    assert again.account.spent == first.account.spent
    assert again.traffic.server.mean == pytest.approx(traces.measured("replicate-7b").mean, rel=0.2)
    assert Dispatcher("server", 0.3, kept).account.spent == 0  # another side's account
    for broken in ({}, kept | {"version": 0}, kept | {"kept": {}}, kept | {"account": {"spent": 1}}):
        with pytest.raises(ValueError, match="version"):
            Dispatcher("device", 0.3, broken)


def test_a_ttft_that_was_cut_off_is_not_taken_for_one_that_came():
    rng = np.random.default_rng(0)
    true, patience = rng.exponential(2.0, 4000), rng.exponential(3.0, 4000)
    learned = survived(np.minimum(true, patience), true <= patience, 30.0)
    assert learned.mean == pytest.approx(2.0, rel=0.1)
    assert Latency.from_seconds(true[true <= patience]).mean < 1.4
    exact = survived(np.array([1.0, 2.0, 4.0]), np.ones(3, bool), 30.0)
    assert exact.mean == pytest.approx(7 / 3)
    assert survived(np.array([1.0, 1.0]), np.array([True, False]), 30.0).samples[-1] == pytest.approx(30.0)


def test_the_devices_line_is_found_with_some_cut_off():
    tokens = np.array([10.0, 20, 40, 80, 160, 320])
    seconds = 0.5 + tokens / 50
    assert line(tokens, seconds, np.ones(6, bool)) == pytest.approx((0.5, 0.02))
    cut = np.where(np.arange(6) > 3, 1.0, seconds)
    assert line(tokens, cut, np.arange(6) <= 3) == pytest.approx((0.5, 0.02))
    assert Traffic().device_ttft(100) == pytest.approx(2.0)
