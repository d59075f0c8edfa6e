"""Figure 7 at the paper's paces, against what a hand can count."""

from __future__ import annotations

import pandas as pd
import pytest

from ondevice.evidence import born
from ondevice_studies.dragon import pair, printed, study
from ondevice_studies.dragon.answers import ROUTER
from ondevice_studies.dragon.pair import BASE, BASE_JITTER, CRCG, DRAGON, SW, TW
from ondevice_studies.dragon.paper_paces import at_the_papers
from ondevice_studies.dragon.record import DELAYS, IMPOSED, LEAST
from ondevice_studies.dragon.simulator import DISTRIBUTION, HEADER

PACE, CLOUD_PACE = (1000 * seconds for seconds in printed.alone()[:2])  # ms
JITTER = 1000 * BASE_JITTER


def tokens(
    cloud: str, device: str = "", holder: str = "cloud", name: str = "q1 cloud", eta: float = 0.2
) -> pd.DataFrame:
    """A recorded answer; cloud, device: a letter a token, y where the side's draft is the token. eta: the device's."""
    sides = {"cloud": cloud, "device": device or "y" * len(cloud)}
    rows = [(name, holder, position, side, float(letter == "y")) for side, letters in sides.items()
            for position, letter in enumerate(letters)]  # fmt: skip
    table = pd.DataFrame(rows, columns=["question", "holder", "position", "side", "greedy"])
    return born(table.assign(eta=table["side"].map({"device": eta, "cloud": 1 - eta})), "recorded")


def milliseconds(table: pd.DataFrame, method: str, delay: int) -> float:
    (row,) = table[table["method"] == f"{method} {delay}"].itertuples()
    return row.total_ms / row.steps


def test_the_device_waits_for_nobody_and_drafts_that_are_accepted_hide_the_network():
    table = at_the_papers(tokens("y" * 16))
    for delay in DELAYS:
        assert milliseconds(table, CRCG, delay) == pytest.approx(PACE)
    assert milliseconds(table, DRAGON, 0) == pytest.approx(PACE, abs=JITTER / 15)
    first_wait = 300 + 1000 * BASE + JITTER  # of the first draft, once
    assert PACE <= milliseconds(table, DRAGON, 300) <= PACE + 1.3 * first_wait / 15


def test_a_rejected_draft_costs_a_round_trip_and_token_wise_pays_it_at_each_token():
    spared, rejected = (milliseconds(at_the_papers(tokens(letters)), DRAGON, 300) for letters in ("y" * 16, "n" * 16))
    at_each = [milliseconds(at_the_papers(tokens(letters)), TW, 300) for letters in ("y" * 16, "n" * 16)]
    trip = 300 + 2 * 1000 * BASE + CLOUD_PACE
    assert at_each[0] == pytest.approx(at_each[1])
    assert trip < rejected < at_each[0] < trip + 60 + 2 * JITTER and spared < rejected / 2


def test_sequence_wise_waits_for_one_message_alone():
    n = 16
    table = at_the_papers(tokens("n" * n))
    assert milliseconds(table, SW, 300) == pytest.approx(PACE)  # the cloud has written and sent all of it long before
    arrives = (n - 1) * CLOUD_PACE + 240 + 1000 * BASE + n * (HEADER + DISTRIBUTION) / pair.WIFI * 1000
    assert arrives < (n - 1) * PACE


def test_the_router_has_the_side_of_the_larger_weight_answer_alone():
    on_cloud, on_device = (at_the_papers(tokens("n" * 16, eta=eta)) for eta in (0.49, 0.5))
    assert milliseconds(on_device, ROUTER, 300) == pytest.approx(PACE)
    delay = (milliseconds(on_cloud, ROUTER, 300) - CLOUD_PACE) * 15
    assert 240 <= delay <= 360 + 1000 * BASE + JITTER  # one way, once
    assert milliseconds(on_cloud, ROUTER, 0) == pytest.approx(CLOUD_PACE, abs=(1000 * BASE + JITTER) / 15)


def test_short_answers_are_left_out_and_long_ones_cut():
    short, long = tokens("y" * (LEAST - 1)), tokens("y" * 40, name="q2 cloud")
    table = at_the_papers(born(pd.concat([short, long]), "recorded"))
    assert set(table["question"]) == {"q2 cloud"} and set(table["tokens"]) == {pair.GREEDY.limit}
    assert study.per_token(table, IMPOSED).kind == "recorded+simulated+quoted"
