"""Migration: the buffer of Eq. 5, the saving of Eq. 4, and streams small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.disco.costs import Prices
from ondevice.disco.distributions import Device, Latency
from ondevice.disco.migration import (
    READING_RATE,
    MigrationRule,
    Streams,
    buffer_tokens,
    expected_remaining,
    stream,
    to_device,
    to_server,
)

DEAR, FREE = Prices(1e-6, 2e-6), Prices(0.0, 0.0)
CAP = np.arange(400, 0, -1.0)  # an answer that may always run to 400 tokens
PHONE = Device("phone", 31.32, 13.93)


def rule(**changed) -> MigrationRule:
    options = {"source": DEAR, "target": FREE, "delay": 1.0, "prefill_rate": np.inf, "remaining": CAP,
               "consumption_rate": 4.0} | changed
    return MigrationRule(**options)


def play(rule: MigrationRule | None, *, prompt=20, answer=100, ttft=0.5, gap=0.05, delay=1.0, target_gap=0.1,
         rate=4.0) -> Streams:
    return stream(rule, np.array([prompt]), np.array([answer]), np.array([ttft]), np.array([gap]), np.array([delay]),
                  np.array([target_gap]), rate)


def test_the_buffer_is_reading_rate_times_hand_over():
    assert buffer_tokens(4.0, [0.0, 2.5]).tolist() == [0.0, 10.0]


def test_the_reading_rate_is_table_3s_pace():
    assert pytest.approx(4.785, abs=1e-3) == READING_RATE


def test_expected_remaining_of_a_small_sample():
    # Answers of 1, 3 and 9 tokens, cut at 4: after 0 tokens 8/3 are left, after 1 (3 and 4 go on) 5/2, ...
    assert expected_remaining([1, 3, 9], 4).tolist() == pytest.approx([8 / 3, 5 / 2, 3 / 2, 1.0])


def test_nothing_remains_beyond_the_longest_answer():
    assert expected_remaining([2, 2], 4).tolist() == [2.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("lengths", [[], [0, 3], [-1], [np.nan, 3.0]])
def test_bad_output_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="at least one token each"):
        expected_remaining(lengths, 4)


def test_without_a_rule_the_source_writes_everything_at_the_reading_pace():
    found = play(None, answer=5)
    assert found.delivered[0].tolist() == pytest.approx([0.5, 0.75, 1.0, 1.25, 1.5])
    assert (found.migrated[0], found.source_tokens[0], found.target_tokens[0], found.late[0]) == (False, 5, 0, 0)


def test_the_hand_over_comes_when_the_unread_tokens_last_for_it():
    # Ready 20 a second, read 4 a second, t_m = 1 s: B = 4. At token 5 (0.2 s) 1 is shown and 4 are unread.
    found = play(rule())
    assert (found.handover[0], found.buffered[0]) == (5, 4.0)
    assert (found.source_tokens[0], found.target_tokens[0], found.target_prefill[0]) == (5, 95, 25)


def test_a_hand_over_as_long_as_estimated_is_not_seen_by_the_reader():
    found = play(rule())
    assert found.late[0] == 0
    assert found.tbt(found.migrated).tolist() == pytest.approx([0.25] * 99)


def test_a_hand_over_longer_than_estimated_delays_all_that_follows():
    found = play(rule(), delay=3.0)
    assert found.late[0] == 95
    assert found.tbt(found.migrated).max() > 0.25


def test_a_margin_starts_the_hand_over_later_and_takes_the_surprise():
    found = play(rule(margin=2.0), delay=3.0)
    assert found.handover[0] > 5
    assert found.late[0] == 0


@pytest.mark.parametrize("rate", [30.0, 60.0, 120.0])
def test_the_hand_over_is_where_the_closed_form_puts_it(rate):
    # Notes 2.6: t* = r_c (l / r_p + c) / (r_g - r_c - r_c r_g / r_p), n0 = r_g t*, up to whole tokens.
    prompt, pace, overhead = 18, READING_RATE, 0.4
    device = Device("phone", PHONE.prefill_rate, PHONE.decode_rate, overhead)
    t_star = pace * (prompt / device.prefill_rate + overhead) / (rate - pace - pace * rate / device.prefill_rate)
    found = play(to_device(DEAR, FREE, device, CAP), prompt=prompt, answer=120, gap=1 / rate, delay=overhead, rate=pace)
    per_token = 1 - pace / rate - pace / device.prefill_rate  # unread tokens above the buffer, gained per token
    assert rate * t_star - 1 <= found.handover[0] <= rate * t_star + 1 / per_token + 1


def test_to_a_server_the_closed_form_has_no_prefill():
    pace, rate = READING_RATE, 14.0
    server = Latency.of([0.3, 0.4, 1.38])
    found = play(to_server(DEAR, FREE, server, CAP), answer=120, gap=1 / rate, delay=1.38, rate=pace)
    t_star = pace * 1.38 / (rate - pace)
    assert rate * t_star - 1 <= found.handover[0] <= rate * t_star + 1 / (1 - pace / rate) + 1


def test_a_target_that_cannot_catch_up_is_never_asked():
    slow = to_device(DEAR, FREE, Device("slow", 4.0, 4.0), CAP, consumption_rate=4.0)  # prefills as fast as one reads
    assert not play(slow).migrated[0]


def test_a_source_slower_than_reading_never_fills_a_buffer():
    assert not play(rule(), gap=0.3).migrated[0]


def test_equal_prices_save_nothing_and_nothing_migrates():
    same = rule(target=DEAR)
    assert not same.pays(0, np.arange(100)).any()
    assert not play(same).migrated[0]


def test_a_dearer_prefill_than_the_saving_forbids_migration():
    # At the hand-over 25 tokens are prefilled and 395 expected: it pays up to 2e-6 * 395 / 25 a token.
    limit = 2e-6 * 395 / 25
    assert play(rule(target=Prices(limit * 0.999, 0.0))).migrated[0]
    assert not play(rule(target=Prices(limit * 1.001, 0.0))).migrated[0]  # later, more is prefilled and less is left


def test_a_target_dearer_in_decode_is_never_worth_it():
    assert not rule(target=Prices(0.0, 3e-6)).pays(0, np.arange(400)).any()


def test_overlap_pays_for_the_sources_tokens_meanwhile():
    # 399 tokens at 2e-6 are saved and 21 prefilled at 37e-6; the source's 20 tokens at 2e-6 tip the balance.
    stop = rule(target=Prices(37e-6, 0.0))
    overlap = rule(target=Prices(37e-6, 0.0), handoff="overlap", source_rate=20.0)
    assert stop.pays(20, 1)
    assert not overlap.pays(20, 1)


def test_overlap_that_is_in_time_hides_the_hand_over_and_wastes_tokens():
    found = play(rule(handoff="overlap", source_rate=20.0))
    assert found.late[0] == 0
    assert (found.handover[0], found.source_tokens[0], found.target_tokens[0]) == (5, 5 + 20, 95)


def test_overlap_that_is_late_is_called_off():
    found = play(rule(handoff="overlap", source_rate=20.0), delay=1.5)
    assert (found.migrated[0], found.late[0], found.source_tokens[0], found.target_tokens[0]) == (False, 0, 100, 0)
    assert found.target_prefill[0] == 25  # it was asked, and is paid for


def test_the_last_token_is_never_handed_over():
    assert not play(rule(), answer=5).migrated[0]
    assert play(rule(), answer=6).target_tokens[0] == 1


def test_streams_of_different_lengths_end_where_their_answers_do():
    two = stream(None, np.array([5, 5]), np.array([2, 4]), np.zeros(2), np.full(2, 0.1), np.zeros(2), np.ones(2), 4.0)
    assert np.isfinite(two.delivered).sum(axis=1).tolist() == [2, 4]


def test_the_servers_hand_over_estimate_is_its_p99():
    server = Latency.of(np.arange(1.0, 101.0))
    assert to_server(DEAR, FREE, server, CAP).migration_time(500, 20) == 99.0


def test_the_devices_hand_over_estimate_prefills_prompt_and_prefix():
    device = Device("d", 50.0, 10.0, 0.5)
    assert to_device(DEAR, FREE, device, CAP, margin=0.25).migration_time(80, 20) == pytest.approx(2.0 + 0.5 + 0.25)


@pytest.mark.parametrize(
    "changed",
    [{"consumption_rate": 0.0}, {"consumption_rate": np.nan}, {"prefill_rate": -1.0}, {"delay": -0.1},
     {"delay": np.nan}, {"margin": -1.0}],
)
def test_bad_rates_and_delays_are_refused(changed):
    with pytest.raises(ValueError, match="positive rates and delays"):
        rule(**changed)


def test_an_unknown_hand_off_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'wait'; there are stop and overlap"):
        rule(handoff="wait")
