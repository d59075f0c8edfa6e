"""Migration: Eqs. 4 and 5, and what becomes of a stream."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice_papers.disco import migration
from ondevice_papers.disco.costs import Prices
from ondevice_papers.disco.distributions import DEVICES
from ondevice_papers.disco.migration import Answers, Migration, expected_remaining, stream
from ondevice_papers.disco.race import play
from ondevice_studies.disco import study, traces

DEAR, CHEAP = Prices(0.0, 4.0), Prices(0.5, 1.0)
LEFT = np.full(200, 100.0)


def rule(seconds=1.0, source=DEAR, target=CHEAP, pace=5.0, **more) -> Migration:
    return Migration(source, target, LEFT, lambda tokens: seconds, pace, **more)


def one(ttft=1.0, gap=0.02, length=60, delay=1.0, prefill=0.0, target_gap=0.05, prompt=10) -> Answers:
    return Answers(*map(np.array, ([prompt], [length], [ttft], [gap], [target_gap], [delay])), prefill=prefill)


def test_the_buffer_is_reading_rate_times_hand_over():
    assert migration.buffer(4.8, 2.5) == 12.0
    assert pytest.approx(0.209) == 1 / migration.READING_RATE


def test_expected_remaining_is_the_mean_of_the_longer_answers():
    assert expected_remaining([1, 3, 3, 9], 4).tolist() == pytest.approx([11 / 4, 7 / 3, 4 / 3, 1.0, 0.0])


@pytest.mark.parametrize(
    ("source", "target", "due"),
    [(DEAR, CHEAP, True), (CHEAP, DEAR, False), (DEAR, Prices(0.0, 4.0), False), (DEAR, Prices(10.0, 1.0), False)],
)
def test_a_hand_over_pays_where_the_saving_exceeds_the_second_prefill(source, target, due):
    assert rule(source=source, target=target).due(10, 20, 5) == due


def test_a_source_that_goes_on_meanwhile_costs_its_tokens():
    assert rule(source_rate=60.0).due(10, 20, 5)  # saves 300, costs 15 + 240
    assert not rule(source_rate=80.0).due(10, 20, 5)


def test_the_hand_over_comes_when_the_unread_tokens_last_for_it_and_is_not_seen():
    found = stream(rule(), one(), 5.0)
    assert (found.handover_at[0], found.unread[0]) == (6, 5)  # 6 tokens at 1.1 s, of which one is shown
    assert found.migrated[0]
    assert np.diff(found.delivered[0]).max() == pytest.approx(0.2)
    assert (found.source_tokens[0], found.target_tokens[0]) == (6, 54)


def test_a_late_target_stalls_the_reader_or_is_called_off_in_overlap():
    stopped, overlapped = (stream(rule(), one(delay=3.0), 5.0, overlap=each) for each in (False, True))
    assert np.diff(stopped.delivered[0]).max() == pytest.approx(1.1 + 3.0 - 2.0)  # the 7th at 4.1 s instead of 2.2
    assert (stopped.migrated[0], overlapped.migrated[0]) == (True, False)
    assert np.diff(overlapped.delivered[0]).max() == pytest.approx(0.2)
    assert overlapped.source_tokens[0] == 60


def test_overlap_pays_for_what_the_source_decodes_meanwhile():
    assert stream(rule(), one(), 5.0, overlap=True).source_tokens[0] == 6 + 50


@pytest.mark.parametrize("answer", [one(length=1), one(length=6), one(gap=0.3)])
def test_nothing_is_handed_over_at_the_last_token_or_before_a_buffer_fills(answer):
    found = stream(rule(), answer, 5.0)
    assert not found.migrated[0]
    assert found.source_tokens[0] == answer.length[0]


def test_a_bill_without_savings_is_the_bill_without_migration():
    lengths, dear = traces.lengths(), lambda *given, **more: Migration(given[1], given[0], *given[2:], **more)
    only = study.policies(lengths, names=["DiSCo"])
    never, found = (
        study.bill(["Command"], lengths, [0.5, 0.9], only, play, 200, 0, "anyscale-70b", migration=each)
        for each in (dear, Migration)
    )
    np.testing.assert_allclose(never.cost, never.without)
    np.testing.assert_allclose(never.without, found.without)
    assert found.saved().max() > 20
    free = study.bill(["Command"], lengths, [0.9], only, play, 200, 0, "anyscale-70b", generous=True)
    assert (free.saved() >= found.saved()[1::2] - 1e-9).all()
    assert set(found.settings["device"]) == set(DEVICES)
