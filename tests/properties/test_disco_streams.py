"""Migrated streams under random rates: never late within the estimate, never early, no token lost or doubled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ondevice.disco.costs import Prices
from ondevice.disco.migration import MigrationRule, expected_remaining, stream

examples = settings(deadline=None, max_examples=80)


@dataclass
class Case:
    """One stream: its rule, and all that happens to it."""

    rule: MigrationRule
    prompt: int
    answer: int
    ttft: float
    source_rate: float
    real_delay: float
    target_rate: float

    def play(self, migrating: bool = True):
        one = [np.array([x]) for x in (self.prompt, self.answer, self.ttft, 1 / self.source_rate, self.real_delay,
                                       1 / self.target_rate)]
        return stream(self.rule if migrating else None, *one, consumption_rate=self.rule.consumption_rate)

    @property
    def due(self) -> np.ndarray:
        return self.ttft + np.arange(self.answer) / self.rule.consumption_rate


@st.composite
def cases(draw: st.DrawFn, kept: bool, handoff: str = "stop") -> Case:
    """kept: the real hand-over takes at most its estimate, and the target writes at least as fast as one reads."""
    pace = draw(st.floats(1, 8))
    source_rate = pace * draw(st.floats(1.05, 10))
    delay = draw(st.floats(0, 3))
    rule = MigrationRule(
        source=Prices(1e-6, 2e-6), target=Prices(0.0, 0.0), delay=delay,
        prefill_rate=draw(st.sampled_from([20.0, 80.0, 500.0, np.inf])), remaining=np.arange(200, 0, -1.0),
        consumption_rate=pace, handoff=handoff, source_rate=source_rate, margin=draw(st.sampled_from([0.0, 0.5])),
    )
    real = draw(st.floats(0, 1)) * (delay + rule.margin) if kept else draw(st.floats(0, 8))
    target_rate = pace * draw(st.floats(1, 6)) if kept else draw(st.floats(0.5, 40))
    return Case(rule, draw(st.integers(1, 60)), draw(st.integers(1, 200)), draw(st.floats(0, 5)), source_rate, real,
                target_rate)


@examples
@given(cases(kept=True))
def test_no_token_is_late_when_the_hand_over_takes_at_most_its_estimate(case):
    found = case.play()
    assume(found.migrated[0])
    assert found.late[0] == 0
    np.testing.assert_allclose(found.delivered[0], case.due, atol=1e-8)


@examples
@given(cases(kept=False))
def test_no_token_is_early_and_gaps_are_at_least_the_reading_time(case):
    found = case.play()
    assert np.all(found.delivered[0] >= case.due - 1e-9)
    assert np.all(np.diff(found.delivered[0]) >= 1 / case.rule.consumption_rate - 1e-9)


@examples
@given(cases(kept=False))
def test_source_and_target_tokens_make_up_the_answer(case):
    found = case.play()
    assert found.source_tokens[0] + found.target_tokens[0] == case.answer
    assert len(found.delivered[0]) == case.answer
    assert np.isfinite(found.delivered[0]).all()


@examples
@given(cases(kept=False))
def test_tokens_before_the_hand_over_are_untouched_by_it(case):
    moved, stayed = case.play(), case.play(migrating=False)
    n0 = moved.handover[0] if moved.migrated[0] else case.answer
    np.testing.assert_array_equal(moved.delivered[0][:n0], stayed.delivered[0][:n0])


@examples
@given(cases(kept=False))
def test_late_counts_the_tokens_shown_after_their_time(case):
    found = case.play()
    assert found.late[0] == (found.delivered[0] > case.due + 1e-9).sum()


@examples
@given(cases(kept=False))
def test_the_hand_over_is_the_first_moment_the_buffer_is_full(case):
    rule, found = case.rule, case.play()
    for n0 in range(1, case.answer):
        elapsed = (n0 - 1) / case.source_rate
        shown = min(n0, int(np.floor(elapsed * rule.consumption_rate + 1e-9)) + 1)
        if n0 - shown >= rule.consumption_rate * float(rule.migration_time(case.prompt, n0)) - 1e-9:
            assert found.handover[0] == n0
            assert found.buffered[0] == n0 - shown
            return
    assert not found.migrated[0]


@examples
@given(cases(kept=False, handoff="overlap"))
def test_overlap_never_makes_a_token_late_for_its_hand_over(case):
    moved, stayed = case.play(), case.play(migrating=False)
    took = case.real_delay + (case.prompt + max(0, moved.handover[0])) / case.rule.prefill_rate
    if moved.migrated[0]:
        assert took <= moved.buffered[0] / case.rule.consumption_rate
        assert moved.delivered[0][moved.handover[0]] == pytest.approx(stayed.delivered[0][moved.handover[0]], abs=1e-8)
    else:
        np.testing.assert_array_equal(moved.delivered, stayed.delivered)
        assert (moved.source_tokens[0], moved.target_tokens[0]) == (case.answer, 0)


@examples
@given(cases(kept=False, handoff="overlap"))
def test_overlap_pays_for_at_least_the_whole_answer(case):
    found = case.play()
    assert case.answer <= found.source_tokens[0] + found.target_tokens[0] <= 2 * case.answer


@examples
@given(cases(kept=False), st.floats(0, 1e-5))
def test_equal_decode_prices_never_migrate(case, prefill):
    price = Prices(prefill, case.rule.source.decode)
    same = MigrationRule(**{**case.rule.__dict__, "target": price})
    assert not Case(**{**case.__dict__, "rule": same}).play().migrated[0]


@examples
@given(cases(kept=False), st.floats(0, 2e-5))
def test_every_migration_saves_money_in_expectation(case, prefill):
    dear = MigrationRule(**{**case.rule.__dict__, "target": Prices(prefill, 0.0)})
    found = Case(**{**case.__dict__, "rule": dear}).play()
    if found.migrated[0]:
        n0 = found.handover[0]
        assert dear.source.decode * dear.remaining[n0] > (case.prompt + n0) * prefill


@examples
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 30))
def test_expected_remaining_equals_the_average_over_longer_answers(answers, cap):
    found = expected_remaining(answers, cap)
    for n0 in range(cap):
        left = [min(n, cap) - n0 for n in answers if min(n, cap) > n0]
        assert found[n0] == pytest.approx(sum(left) / len(left) if left else 0.0)
