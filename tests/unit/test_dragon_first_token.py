"""Figure 8: which method asks what, what is counted and when, units, medians, and the time of a fetch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from ondevice.dragon import first_token
from ondevice.dragon.experiments import CRCG, DRAGON, Question, added
from ondevice.dragon.first_token import METHODS, fetch_ms, first_tokens, summary
from ondevice.dragon.live.answer import Answer, Asked

ASKED = Asked(k=3, limit=5, temperature=0.0, seed=7)
QUESTIONS = [Question("one", "What is 1?", ""), Question("two", "What is 2?", "")]


@dataclass
class Relay:
    """The links that were set."""

    links: list[tuple[Any, Any]] = field(default_factory=list)

    def set(self, *, up: Any, down: Any) -> None:
        self.links.append((up, down))


# Methods


@pytest.mark.parametrize(
    ("name", "how", "changed"),
    [
        (DRAGON, "answer", {}),
        (first_token.ON_CLOUD, "answer", {"mode": "cloud-only"}),
        (CRCG, "alone", {}),
        (first_token.AS_MANY, "alone", {"k": 6}),  # those of both sides
        (first_token.TEXT, "texts", {}),
        (first_token.ROWS, "rows", {}),
    ],
)
def test_what_is_asked_of_which_device(name: str, how: str, changed: dict, monkeypatch: pytest.MonkeyPatch):
    calls = list[Any]()

    def noted(kind: str) -> Any:
        return lambda device, query, asked, **options: calls.append((kind, query, asked, options))

    device = SimpleNamespace(answer=lambda query, asked: noted("answer")(None, query, asked))
    monkeypatch.setattr(first_token, "METHODS", None)
    monkeypatch.setattr(first_token, "alone", noted("alone"))
    for kind in ("texts", "rows"):
        monkeypatch.setattr(first_token.centralised, f"fetched_{kind}", noted(kind))
    METHODS[name](device, "q", ASKED)  # type: ignore[arg-type]
    # all text is in one context and not cut: with the 256 tokens of section 7.3 it would read less than the others
    options = {"aggregation": "context", "budget": None} if how == "texts" else {}
    assert calls == [(how, "q", replace(ASKED, **changed), options)]


def test_six_methods_of_six_names():
    assert list(METHODS) == ["DRAGON", "CRCG/Device", "CRCG/Cloud", "DRCG/Text", "DRCG/KV",
                             "CRCG/Device, as many documents"]  # fmt: skip


# Rows


def table(relay: Relay, delays: list[float], device: list[str], **options: Any) -> pd.DataFrame:
    """Two methods whose answers say how many came before, by their ttft in ms, and how many links had been set.

    device: gets the queries.
    """
    count = iter(range(1, 1000))

    def method(sent: int) -> first_token.Method:
        def answered(device: Any, query: str, asked: Asked) -> Answer:
            assert asked == ASKED
            device.append(query)
            ttft = 0.001 * next(count)
            return Answer(times=[ttft, ttft + 0.01, ttft + 0.04], sent=sent, received=len(relay.links))

        return answered

    methods = {"first": method(10), "second": method(20)}
    return first_tokens(device, relay, QUESTIONS, delays, ASKED, methods, **options)  # type: ignore[arg-type]


def test_a_row_for_each_delay_question_and_method_in_turn_after_a_round_that_warms_up():
    queries = list[str]()
    rows = table(Relay(), [0.0, 0.3], queries)
    assert list(rows) == ["setting", "method", "delay_ms", "question", "ttft_ms", "per_token_ms", "sent", "received"]
    assert rows["ttft_ms"].tolist() == pytest.approx(list(range(5, 13)))  # milliseconds; four calls are not counted
    assert rows["per_token_ms"].tolist() == pytest.approx([20.0] * 8)
    assert rows["delay_ms"].tolist() == pytest.approx([0.0] * 4 + [300.0] * 4)
    assert rows["question"].tolist() == ["one", "one", "two", "two"] * 2
    assert rows["method"].tolist() == ["first", "second"] * 4
    assert queries[4:] == ["What is 1?", "What is 1?", "What is 2?", "What is 2?"] * 2
    assert sorted(queries[:4]) == sorted(queries[4:8])
    assert rows["sent"].tolist() == [10, 20] * 4
    assert rows["setting"].unique().tolist() == ["unpaced"]


def test_the_delay_is_set_before_what_is_measured_with_it():
    relay = Relay()
    rows = table(relay, [0.1, 0.0], [], setting="imposed")
    assert relay.links == [added(0.1), added(0.0)]
    assert rows["received"].tolist() == [1] * 4 + [2] * 4  # links set when the answer came
    assert rows["setting"].unique().tolist() == ["imposed"]


def test_an_answer_of_one_token_has_no_time_between_tokens():
    one = {"one": lambda device, query, asked: Answer(times=[0.5])}
    rows = first_tokens(None, Relay(), QUESTIONS[:1], [0.0], ASKED, one)  # type: ignore[arg-type]
    assert rows["ttft_ms"].tolist() == [500.0] and math.isnan(rows["per_token_ms"].item())


# Summary


def test_a_summary_is_of_one_setting_method_and_delay_in_the_order_of_the_rows():
    values = {
        ("unpaced", "b", 300.0): [9.0, 1.0, 2.0],
        ("unpaced", "b", 0.0): [4.0, 5.0],
        ("unpaced", "a", 300.0): [7.0],
        ("imposed", "b", 300.0): [8.0, 3.0],
    }
    rows = [dict(setting=s, method=m, delay_ms=d, question=i, ttft_ms=ms, per_token_ms=99.0)
            for (s, m, d), series in values.items() for i, ms in enumerate(series)]  # fmt: skip
    found = summary(pd.DataFrame(rows))
    assert list(found) == ["setting", "method", "delay_ms", "ttft_ms", "low", "high"]
    assert list(found.itertuples(index=False, name=None)) == [
        ("unpaced", "b", 300.0, 2.0, 1.0, 9.0),
        ("unpaced", "b", 0.0, 4.5, 4.0, 5.0),
        ("unpaced", "a", 300.0, 7.0, 7.0, 7.0),
        ("imposed", "b", 300.0, 5.5, 3.0, 8.0),
    ]


# Fetching


def test_a_fetch_is_timed_from_the_question_to_the_texts(monkeypatch: pytest.MonkeyPatch):
    now, asked, closed, relay = [0.0], list[Any](), list[int](), Relay()

    class Asking:
        def __init__(self, device: Any, begin: Any) -> None:
            asked.append((begin.query, begin.k))
            self.began = now[0]

        def close(self) -> None:
            closed.append(1)
            now[0] += 10.0

    async def fetched(asking: Asking, what: str) -> None:
        assert what == "text"
        now[0] += (0.9, 0.1, 0.2)[len(closed)]

    def run(work: Any) -> Any:
        with pytest.raises(StopIteration) as ended:
            work.send(None)
        return ended.value.value

    monkeypatch.setattr(first_token, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(first_token, "Asking", Asking)
    monkeypatch.setattr(first_token.centralised, "fetched", fetched)
    device = SimpleNamespace(run=run, connect=lambda: None)
    assert fetch_ms(device, relay, "q", 4, 0.3) == pytest.approx(200.0)  # type: ignore[arg-type]
    assert relay.links == [added(0.3)] and asked == [("q", 4)] * 3 and len(closed) == 3
