"""What is recorded of DRAGON: which method answers what, an answer in a row, and rows that can be made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ondevice import assets, corpus, shapes
from ondevice.causal_lm import CausalLM
from ondevice.corpus.excerpts import passages
from ondevice.dragon import language_modelling, lockstep, pair, record, replays, study
from ondevice.dragon.live.answer import Answer, Asked
from ondevice.dragon.live.decoder import Template
from ondevice.dragon.live.node import Documents, Node
from ondevice.dragon.pair import AGAIN, AS_MANY, CRCG, DRAGON, FETCHED, ON_CLOUD, ROWS, SW, TEXT, TW, Paces, added
from ondevice.dragon.printed import Recording
from ondevice.dragon.record import DELAYS, FIRST, IMPOSED, PACES, UNPACED
from ondevice.dragon.simulator import independent
from ondevice.dragon.windows import Retrieved, retrieve, windows
from ondevice.dragon.world import Question
from ondevice.evidence import born
from ondevice.retrieval import SparseIndex
from ondevice.speculation.prompts import digest

pytestmark = pytest.mark.usefixtures("one_thread")

ASKED = Asked(k=3, limit=5, temperature=0.0, seed=7)
QUESTION = Question("zebras.seen", "When are zebras seen?", "at dusk", "device")


# Methods


@dataclass
class Asks:
    """In the place of a device, or of what answers with one: notes what is asked of it."""

    calls: list[Any] = field(default_factory=list)

    def noted(self, kind: str) -> Callable[..., Answer]:
        def answered(*arguments: Any, **options: Any) -> Answer:
            query, asked = (one for one in arguments if isinstance(one, str | Asked))
            self.calls.append((kind, query, asked, options))
            return Answer(times=[0.5])

        return answered

    @property
    def answer(self) -> Callable[..., Answer]:
        return self.noted("answer")


@pytest.mark.parametrize(
    ("name", "how", "changed"),
    [
        (DRAGON, "answer", {}),
        (AGAIN, "answer", {}),
        (TW, "answer", {"mode": "token-wise"}),
        (SW, "answer", {"mode": "sequence-wise"}),
        (ON_CLOUD, "answer", {"mode": "cloud-only"}),
        (CRCG, "alone", {}),
        (AS_MANY, "alone", {"k": 6}),  # those of both sides
        (TEXT, "texts", {}),
        (ROWS, "rows", {}),
    ],
)
def test_what_is_asked_of_which_device(name: str, how: str, changed: dict, monkeypatch: pytest.MonkeyPatch):
    device = Asks()
    monkeypatch.setattr(pair, "alone", device.noted("alone"))
    for kind in ("texts", "rows"):
        monkeypatch.setattr(pair.centralised, f"fetched_{kind}", device.noted(kind))
    pair.method(name, ASKED)(device, "q")  # type: ignore[arg-type]
    # all text is in one context and not cut: with the 256 tokens of section 7.3 it would read less than the others
    options = {"aggregation": "context", "budget": None} if how == "texts" else {}
    assert device.calls == [(how, "q", replace(ASKED, **changed), options)]


def test_a_fetch_is_timed_from_the_question_to_the_texts(monkeypatch: pytest.MonkeyPatch):
    now, asked, closed = [3.0], list[Any](), list[float]()

    class Asking:
        def __init__(self, device: Any, begin: Any) -> None:
            asked.append((begin.query, begin.k))
            self.began, self.answer = now[0], Answer()

        def close(self) -> None:
            closed.append(now[0])

    async def fetched(asking: Asking, what: str) -> None:
        assert what == "text"
        now[0] += 0.25

    def run(work: Any) -> Any:
        with pytest.raises(StopIteration) as ended:
            work.send(None)
        return ended.value.value

    monkeypatch.setattr(pair, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(pair, "Asking", Asking)
    monkeypatch.setattr(pair.centralised, "fetched", fetched)
    answer = pair.method(FETCHED, ASKED)(SimpleNamespace(run=run), "q")  # type: ignore[arg-type]
    assert answer.ttft == pytest.approx(0.25) and asked == [("q", 3)] and closed == [3.25]


def test_the_methods_of_a_pace():
    assert record.methods(IMPOSED, 0, DELAYS) == [DRAGON, TW, SW, CRCG]
    assert record.methods(IMPOSED, 50, DELAYS) == [DRAGON, TW, SW]
    assert record.methods(IMPOSED, 150, DELAYS) == [DRAGON, TW, SW, AGAIN]
    firsts = [TEXT, ROWS, ON_CLOUD, AS_MANY]
    assert record.methods(UNPACED, 100, DELAYS) == [DRAGON, TW, SW, *firsts]
    assert record.methods(UNPACED, 300, DELAYS) == [DRAGON, TW, SW, CRCG, *firsts]
    assert record.methods(UNPACED, 200, DELAYS) == [DRAGON, TW, SW]
    assert all(record.methods(FIRST, delay, DELAYS) == [DRAGON, CRCG] for delay in DELAYS)
    assert record.methods(record.FETCH, 0, DELAYS) == [FETCHED]
    assert PACES[UNPACED] == PACES[record.FETCH] == Paces() != PACES[IMPOSED]
    assert replace(PACES[FIRST], device_prefill=0.0, cloud_prefill=0.0) == PACES[IMPOSED]


def test_latencies_are_of_each_delay_and_method_in_turn_and_short_where_only_a_first_token_counts(
    monkeypatch: pytest.MonkeyPatch,
):
    links, asked = list[Any](), list[tuple[str, int]]()

    def method(name: str, how: Asked) -> Callable[..., Answer]:
        def answered(device: Any, query: str) -> Answer:
            assert query == QUESTION.query and replace(how, limit=20) == pair.GREEDY
            asked.append((name, how.limit))
            return Answer(tokens=[1, 2], times=[0.1 * len(links), 0.9], sent=len(asked))

        return answered

    monkeypatch.setattr(pair, "method", method)
    relay = SimpleNamespace(set=lambda *, up, down: links.append((up, down)))
    rows = record.latencies(None, relay, QUESTION, UNPACED, (0, 50, 300))  # type: ignore[arg-type]
    assert links == [added(0.0), added(0.05), added(0.3)]
    ends = [(DRAGON, 20), (TW, 20), (SW, 20), (CRCG, 20), (TEXT, 3), (ROWS, 3), (ON_CLOUD, 3), (AS_MANY, 3)]
    assert asked == [*ends, (DRAGON, 20), (TW, 20), (SW, 20), (AGAIN, 20), *ends]
    assert [row["delay_ms"] for row in rows] == [0] * 8 + [50] * 4 + [300] * 8
    assert [row["method"] for row in rows] == [name for name, _ in asked]
    assert {(row["pace"], row["question"], row["holder"]) for row in rows} == {(UNPACED, QUESTION.name, "device")}
    assert rows[0]["times"] == "100.0 900.0" and rows[-1]["times"] == "300.0 900.0"  # the delay was set before
    only = record.latencies(None, relay, QUESTION, FIRST, (300,), [DRAGON])  # type: ignore[arg-type]
    assert [row["method"] for row in only] == [DRAGON] and asked[-1] == (DRAGON, 3)


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


def test_what_did_not_answer_has_an_empty_account():
    fetched = record.account(Answer(times=[0.04]))
    assert fetched["times"] == "40.0" and fetched["prefilled"] == "0.0" and not fetched["alone"]
    assert fetched["decided"] == fetched["device"] == fetched["cloud"] == "" and fetched["tokens"] == 0


# Answers and relevance, on a tiny model

DEVICE = ["zebras are seen at dusk", "the doctor was told", "zebras sleep standing"]
CLOUD = ["a pharmacy by the river", "zebras eat grass, and sleep", "rain at dusk"]


@pytest.fixture(scope="module")
def nodes() -> dict[str, Node]:
    config = AutoConfig.for_model(
        "llama", vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    lm, template = CausalLM(model), Template("{document}\n{query}\n")
    return {side: Node(lm, shapes.byte_tokenizer(), Documents(texts, SparseIndex.build(texts)), template)
            for side, texts in (("device", DEVICE), ("cloud", CLOUD))}  # fmt: skip


def test_relevance_is_recorded_by_its_parts_and_the_answer_after_each_document_alone(nodes: dict[str, Node]):
    rows = record.weighed(nodes, QUESTION, "validation")
    assert [(row["side"], row["rank"]) for row in rows] == [(side, rank) for side in nodes for rank in (0, 1)]
    assert {(row["split"], row["question"], row["holder"]) for row in rows} == {("validation", "zebras.seen", "device")}
    for side, node in nodes.items():
        texts, relevance = node.documents.best(QUESTION.query, 2)
        mine = [row for row in rows if row["side"] == side]
        assert [row["score"] / row["ceiling"] for row in mine] == pytest.approx(relevance)
        weight = np.log(np.exp(32 * np.array(relevance)).sum())  # at the temperature that the record chose
        assert node.decoder(QUESTION.query, 2)[0].log_weight == pytest.approx(weight)
        for row, text in zip(mine, texts, strict=True):
            prompt = node.tokenizer(f"{text}\n{QUESTION.query}\n", add_special_tokens=False).input_ids
            said = [*node.tokenizer(QUESTION.answer, add_special_tokens=False).input_ids, node.end]
            with torch.inference_mode():
                logits = node.lm.model(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[range(len(said)), said].tolist()
            assert [float(one) for one in row["log_probs"].split()] == pytest.approx(expected, abs=1e-4)


def test_an_answer_is_a_row_and_dragons_tokens_are_rows(nodes: dict[str, Node], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record, "LONGEST", 6)
    tokens, margin, parts = lockstep.answer(nodes, QUESTION.query, lockstep.DRAGON, 2, 6)
    row, rows = record.answered(nodes, QUESTION, lockstep.DRAGON)
    about = {"question": QUESTION.name, "holder": "device"}
    said = {"tokens": len(tokens), "answer_sha": digest(tokens), "margin": margin, "right": False}
    assert row == {**about, "method": "DRAGON", **said}
    assert [one["position"] for one in rows] == [position for position in range(len(tokens)) for _ in nodes]
    word = nodes["device"].tokenizer.decode([tokens[0]])
    assert rows[0] == about | {"position": 0, "word": word} | parts[0]
    right = replace(QUESTION, answer=str(nodes["device"].tokenizer.decode(tokens, skip_special_tokens=True)))
    assert record.answered(nodes, right, lockstep.DRAGON)[0]["right"]
    alone, none = record.answered(nodes, QUESTION, lockstep.ON_DEVICE)
    assert none == [] and alone["method"] == lockstep.ON_DEVICE and alone["margin"] != margin
    edited, _ = record.answered(nodes, QUESTION, lockstep.DRAGON, target=lambda p, q, *weights: p)  # a reader's
    assert edited["margin"] != margin


# Windows


@pytest.fixture(scope="module")
def retrieved() -> list[Retrieved]:
    """Of a few documents each, so that no large index is needed."""
    tokenizer = corpus.tokenizer()
    chosen = passages(corpus.documents("train")[:60], tokenizer)
    index = SparseIndex.build([one.text for one in chosen])
    return retrieve(windows(corpus.documents("test")[:30], tokenizer, 6), chosen, index, 4)


def test_a_window_is_made_again_from_its_rows_without_the_index(retrieved: list[Retrieved]):
    for number, one in enumerate(retrieved):
        rows = record.found_rows("test", number, one)
        assert [(row["rank"], row["window"], row["split"]) for row in rows] == [(n, number, "test") for n in range(4)]
        shuffled = pd.DataFrame(rows).sample(frac=1, random_state=0)
        again = record.window_again(shuffled)
        assert (again.window, again.passages) == (one.window, one.passages)
        assert again.scores == pytest.approx(one.scores)
    assert len({one.window.start for one in retrieved}) > 1 and any(p.place for one in retrieved for p in one.passages)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A model whose documents' log-probabilities are known, in the place of forwards; what is asked of it."""
    read = language_modelling.Read(np.log([[0.5], [0.2], [0.4]]), np.empty(0), np.array([3]), np.array([2.0, 0.0]),
                                   np.array([1, 2, 3]))  # fmt: skip
    asked = list[Any]()

    def methods(*arguments: Any, **options: Any) -> list[tuple[Any, ...]]:
        asked.append((arguments, options))
        return [("DRAGON", 2, 512, 7.5, 99), ("DRCG", 2, 0, 8.5, 98)]

    monkeypatch.setattr(record, "Fronts", lambda model, tokenizer: (model, tokenizer))
    monkeypatch.setattr(record, "read_window", lambda model, fronts, one: read)
    monkeypatch.setattr(record.language_modelling, "methods", methods)
    return asked


def test_rows_of_windows_and_temperatures(scored: list[Any], retrieved: list[Retrieved]):
    loaded: Any = SimpleNamespace(model="model", tokenizer="tokenizer")
    rows = record.window_rows(loaded, "m", 5, retrieved[0], 4.0, caps=(8, 512))
    about = {"model": "m", "window": 5, "tokens": 64}
    assert rows == [
        about | {"method": "DRAGON", "documents": 2, "cap": 512, "nats": 7.5, "read": 99},
        about | {"method": "DRCG", "documents": 2, "cap": 0, "nats": 8.5, "read": 98},
    ]  # fmt: skip
    assert scored == [(("model", ("model", "tokenizer"), retrieved[0], 4.0), {"caps": (8, 512)})]
    losses = record.temperature_rows(loaded, "m", 5, retrieved[0], "validation")
    assert [row["temperature"] for row in losses] == list(language_modelling.TEMPERATURES)
    share = 1 / (1 + np.exp(-2.0 / 4))
    of_four = next(row for row in losses if row["temperature"] == 4)
    assert of_four["nats"] == pytest.approx(-np.log(share * 0.2 + (1 - share) * 0.4))
    assert study.temperature(born(pd.DataFrame(losses), "recorded"), "m") == max(language_modelling.TEMPERATURES)


# Schedules and the attack


def test_a_schedules_rows_are_the_replays():
    flags, paces = independent(20, 0.7, 0.9), Recording(np.full(20, 0.1), 0.02)
    rows = record.schedule_rows("drawn", 3, flags, paces)
    assert len(rows) == len(replays.DELAYS) * (len(replays.STRATEGIES) + 1)
    assert [row.pop("setting") for row in rows] == ["drawn"] * len(rows)
    assert [row.pop("sequence") for row in rows] == [3] * len(rows)
    assert str(rows) == str(replays.totals(flags, paces, 3))  # as words, for the oracle's NaN


def test_the_attack_is_on_the_devices_documents_among_the_nearest_of_a_pool(
    nodes: dict[str, Node], monkeypatch: pytest.MonkeyPatch
):
    seen = list[Any]()

    def attack(device: Any, cloud: Any, query: str, shown: Sequence[str], k: int, limit: int, **evidence: Any) -> list:
        seen.append((device, cloud, query, set(shown), k, limit, evidence))
        return [{"mode": "query alone"}]

    monkeypatch.setattr(record.membership, "attack", attack)
    rows = record.attacked(nodes, QUESTION, [*DEVICE, *CLOUD], 4, from_tokens="edited")
    assert rows == [{"question": QUESTION.name, "holder": "device", "mode": "query alone"}]
    ((device, cloud, query, shown, k, limit, evidence),) = seen
    assert (device, cloud, query) == (nodes["device"], nodes["cloud"], QUESTION.query)
    assert len(shown) == 4 and {DEVICE[0], DEVICE[2]} < shown and (k, limit) == (2, 20)
    assert evidence == {"from_tokens": "edited"}


# Recorders


def test_every_record_has_a_recorder_whose_keys_its_rows_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path))
    names = [name for made in record.RECORDS.values() for name in made]
    assert len(names) == len(set(names)) == 9
    for name in names:
        made = record.recorder(name)
        assert made.keys and made.made["parameters"]["threads"] == 1 and made.done == set()
        assert ("." in made.name) == (name == "latency")
    with pytest.raises(KeyError):
        record.recorder("first tokens")
