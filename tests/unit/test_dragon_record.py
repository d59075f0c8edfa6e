"""What is recorded of DRAGON: which method answers what, an answer in a row, and rows that can be made again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from ondevice import assets
from ondevice.evidence import born, sidecars
from ondevice_programs.pair.answer import Answer, AnswerSettings
from ondevice_studies.dragon import pair, record, study
from ondevice_studies.dragon.pair import AS_MANY, CRCG, DRAGON, ON_CLOUD, SW, TW
from ondevice_studies.dragon.questions import HOLDERS, questions
from ondevice_studies.dragon.record import IMPOSED


@pytest.mark.parametrize(
    ("name", "how", "changed"),
    [(DRAGON, "both", {}), (TW, "both", {"mode": "token-wise"}), (SW, "both", {"mode": "sequence-wise"}),
     (ON_CLOUD, "both", {"mode": "cloud-only"}), (CRCG, "alone", {}), (AS_MANY, "alone", {"k": 6})],
)  # fmt: skip
def test_what_is_asked_of_which_device(name: str, how: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    asked = AnswerSettings(k=3, limit=5, temperature=0.0, seed=7)
    monkeypatch.setattr(pair, "alone", lambda device, query, options: ("alone", options))
    device = SimpleNamespace(answer=lambda query, options: ("both", options))
    assert pair.method(name, asked)(device, "q") == (how, replace(asked, **changed))  # type: ignore[arg-type]


# An answer in a row


def test_an_answer_is_a_row_that_is_read_back():
    answer = Answer(
        tokens=[5, 6, 7, 8, 9], times=[0.25, 0.3004, 0.4, 0.41, 0.42], prefilled=0.2, sent=11, received=22,
        decisions=[(0, True, True, 0.2, 0.21), (1, True, False, 0.01, 0.02), (2, False, True, 0.03, 0.0449),
                   (3, False, False, 0.05, 0.06)], alone_from=4,
    )  # fmt: skip
    row = record.account(answer)
    assert row == {
        "tokens": 5, "alone": True, "prefilled": "200.0", "times": "250.0 300.4 400.0 410.0 420.0", "decided": "bdcn",
        "device": "200.0 10.0 30.0 50.0", "cloud": "210.0 20.0 44.9 60.0", "sent": 11, "received": 22,
    }  # fmt: skip
    asked = {"pace": IMPOSED, "question": "q", "holder": "both", "delay_ms": 100, "method": DRAGON}
    (again,) = study.latencies(born(pd.DataFrame([asked | row]), "recorded")).itertuples()
    assert (again.ttft_ms, again.total_ms, again.steps) == (250.0, 220.0, 4)
    assert study.decisions(again).tolist() == [list(one[1:3]) for one in answer.decisions]


# Questions with times


def test_timed_questions_have_long_answers_and_take_the_holders_in_turn():
    rows = [{"question": question.name, "method": method, "tokens": 12 if number % 4 else 11}
            for number, question in enumerate(questions()) for method in (DRAGON, CRCG)]  # fmt: skip
    chosen = record.timed_questions(pd.DataFrame(rows), 5)
    assert [question.holder for question in chosen] == list(HOLDERS) * 5
    short = {question.name for question in questions()[::4]}
    assert not short & {question.name for question in chosen}
    with pytest.raises(ValueError, match="100"):
        record.timed_questions(pd.DataFrame(rows), 100)


# Recorders


def test_shares_record_what_misses_and_the_last_one_says_that_all_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sidecars, "checkout", lambda: (sidecars.UNKNOWN, False))
    units = {(number,): (number,) for number in range(5)}
    made = []

    def rows_of(number: int) -> list[dict[str, Any]]:
        made.append(number)
        return [{"window": number, "rank": rank} for rank in (0, 1)]

    assert [record.recorded("windows", units, rows_of, share, 2) for share in (0, 1, 0)] == [False, True, True]
    assert made == [0, 2, 4, 1, 3]
    assert len(record.recorder("windows").rows()) == 10
