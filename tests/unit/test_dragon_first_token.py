"""Figure 8: which method asks what, what is counted and when, units, medians, and the time of a fetch."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from ondevice.dragon import first_token
from ondevice.dragon.experiments import CRCG, DRAGON, Question, added
from ondevice.dragon.first_token import METHODS, fetch_ms, first_tokens, summary
from ondevice.dragon.live.connection import Lost
from ondevice.dragon.live.device import Answer, Asked
from ondevice.dragon.messages import End, Failure, Fetch, Message, Texts

ASKED = Asked(k=3, limit=5, temperature=0.0, seed=7)
QUESTIONS = [Question("one", "What is 1?", ""), Question("two", "What is 2?", "")]


@dataclass
class Relay:
    """The links that were set."""

    links: list[tuple[Any, Any]] = field(default_factory=list)

    def set(self, *, up: Any, down: Any) -> None:
        self.links.append((up, down))


# Methods


@dataclass
class Asking:
    """A device that notes what it is asked. port: of the cloud, 0 for none."""

    node: Any = None
    port: int = 0
    pace: float = 0.0
    prefill: float = 0.0

    def answer(self, query: str, asked: Asked) -> Any:
        return self, query, asked

    async def open(self, first: Message) -> Any:
        raise Refused(first)


class Refused(Exception):
    """Holds what a connection was opened for, or a decoder was made of."""


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Asking:
    """A device with a cloud; those that the methods make are of its kind."""
    monkeypatch.setattr(first_token, "Device", Asking)
    node = SimpleNamespace(
        documents=SimpleNamespace(best=lambda query, k: (["own"], [1.0])), longest=512, weight_temperature=1.0,
        template=SimpleNamespace(prefix=lambda tokenizer, text: [len(text)] * 300, suffix=lambda tokenizer, query: [0]),
        tokenizer=SimpleNamespace(decode=lambda tokens, **options: "", bos_token_id=None), end=None, store=None,
        lm=SimpleNamespace(context=1000), lock=threading.Lock(),
    )  # fmt: skip
    return Asking(node, port=5, pace=0.2, prefill=0.7)


@pytest.mark.parametrize(
    ("name", "port", "changed"),
    [
        (DRAGON, 5, {}),
        (first_token.ON_CLOUD, 5, {"mode": "cloud-only"}),
        (CRCG, 0, {}),
        (first_token.AS_MANY, 0, {"k": 6}),  # those of both sides
    ],
)
def test_what_is_asked_of_which_device(name: str, port: int, changed: dict[str, Any], asking: Asking):
    device, query, asked = METHODS[name](asking, "q", ASKED)  # type: ignore[misc, arg-type]
    assert (query, asked) == ("q", replace(ASKED, **changed))
    assert device == replace(asking, port=port)  # at the same pace, with the same prefill


@pytest.mark.parametrize(("name", "what"), [(first_token.TEXT, "text"), (first_token.ROWS, "rows")])
def test_what_is_fetched_from_the_cloud(name: str, what: str, asking: Asking):
    with pytest.raises(Refused) as refused:
        METHODS[name](asking, "q", ASKED)  # type: ignore[arg-type]
    (fetch,) = refused.value.args
    assert isinstance(fetch, Fetch) and (fetch.query, fetch.k, fetch.what) == ("q", 3, what)
    with pytest.raises(ValueError, match="needs a cloud"):
        METHODS[name](replace(asking, port=0), "q", ASKED)  # type: ignore[arg-type]


def test_all_text_is_in_one_context_and_not_cut_to_a_budget(asking: Asking, monkeypatch: pytest.MonkeyPatch):
    """Cut to the 256 tokens of section 7.3 it would read less than the other methods."""

    def decoder(lm: Any, prefixes: Any, *arguments: Any, **options: Any) -> Any:
        raise Refused(prefixes)

    async def opened(first: Message) -> Cloud:
        return Cloud([(Texts("s", ("public",), (2.0,)), 0.0)])

    monkeypatch.setattr(asking, "open", opened, raising=False)
    monkeypatch.setattr(first_token.centralised, "Decoder", decoder)
    with pytest.raises(Refused) as refused:
        METHODS[first_token.TEXT](asking, "q", ASKED)  # type: ignore[arg-type]
    assert refused.value.args == ([(6,) * 300 + (3,) * 300],)  # one prompt, the more relevant document first


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


@dataclass
class Cloud:
    """A device whose cloud answers a fetch with each of these messages in turn, after so many seconds each."""

    answers: list[tuple[Message | Exception, float]]
    now: float = 0.0
    fetched: list[Any] = field(default_factory=list)
    closed: int = 0
    sent: int = 0
    received: int = 0
    rtt: float = 0.0

    def send(self, message: Message) -> None: ...

    async def open(self, first: Message) -> Cloud:
        self.fetched.append(first)
        self.now += 0.005  # to connect
        return self

    async def receive(self) -> Message:
        message, seconds = self.answers.pop(0)
        self.now += seconds
        if isinstance(message, Exception):
            raise message
        return message

    async def close(self) -> None:
        self.closed += 1
        self.now += 10.0


TEXTS = Texts("fetch", ("text",), (1.0,))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`clock(cloud)`: time is the cloud's."""
    return lambda cloud: monkeypatch.setattr(first_token, "time", SimpleNamespace(perf_counter=lambda: cloud.now))


def test_a_fetch_is_timed_from_connecting_to_the_texts(clock: Any):
    cloud, relay = Cloud([(TEXTS, 0.9), (TEXTS, 0.1), (TEXTS, 0.2)]), Relay()
    clock(cloud)
    assert fetch_ms(cloud, relay, "q", 4, 0.3) == pytest.approx(205.0)  # type: ignore[arg-type]
    assert relay.links == [added(0.3)]
    assert [(one.query, one.k, one.what) for one in cloud.fetched] == [("q", 4, "text")] * 3
    assert cloud.closed == 3


@pytest.mark.parametrize(
    ("came", "error", "said"),
    [
        (Failure(None, "it gives no documents"), ValueError, "The cloud refuses: it gives no documents"),
        (End("fetch", 0), ValueError, "An? End came in the place of texts"),
        (Lost("the other side is gone"), Lost, "gone"),
    ],
)
def test_what_is_no_texts_is_an_error_and_the_connection_is_closed(came: Any, error: Any, said: str, clock: Any):
    cloud = Cloud([(TEXTS, 0.1), (came, 0.1)])
    clock(cloud)
    with pytest.raises(error, match=said):
        fetch_ms(cloud, Relay(), "q", 4, 0.0)  # type: ignore[arg-type]
    assert cloud.closed == 2
