"""What is recorded of DRAGON: which method answers what, an answer in a row, and rows that can be made again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import random_model

from ondevice import assets, corpus, shapes
from ondevice.causal_lm import CausalLM
from ondevice.corpus.excerpts import passages
from ondevice.evidence import born, sidecars
from ondevice.retrieval import SparseIndex
from ondevice_programs.pair.answer import Answer, Asked
from ondevice_programs.pair.decoder import Template
from ondevice_programs.pair.node import Documents, Node
from ondevice_studies.dragon import lockstep, pair, record, study
from ondevice_studies.dragon.language_modelling import Retrieved, retrieve, windows
from ondevice_studies.dragon.pair import AS_MANY, CRCG, DRAGON, ON_CLOUD, SW, TW
from ondevice_studies.dragon.record import IMPOSED
from ondevice_studies.dragon.world import Question
from ondevice_studies.speculation.prompts import digest

pytestmark = pytest.mark.usefixtures("one_thread")

QUESTION = Question("zebras.seen", "When are zebras seen?", "at dusk", "device")


@pytest.mark.parametrize(
    ("name", "how", "changed"),
    [(DRAGON, "both", {}), (TW, "both", {"mode": "token-wise"}), (SW, "both", {"mode": "sequence-wise"}),
     (ON_CLOUD, "both", {"mode": "cloud-only"}), (CRCG, "alone", {}), (AS_MANY, "alone", {"k": 6})],
)  # fmt: skip
def test_what_is_asked_of_which_device(name: str, how: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    asked = Asked(k=3, limit=5, temperature=0.0, seed=7)
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


# Answers and relevance, on a tiny model

DEVICE = ["zebras are seen at dusk", "the doctor was told", "zebras sleep standing"]
CLOUD = ["a pharmacy by the river", "zebras eat grass, and sleep", "rain at dusk"]


@pytest.fixture(scope="module")
def nodes() -> dict[str, Node]:
    model = random_model("llama", torch.float32, vocabulary=300, context=256, spread=0.3)
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


@pytest.mark.long  # reads the whole corpus
def test_a_window_is_made_again_from_its_rows_without_the_index(retrieved: list[Retrieved]):
    for number, one in enumerate(retrieved):
        rows = record.found_rows("test", number, one)
        assert [(row["rank"], row["window"], row["split"]) for row in rows] == [(n, number, "test") for n in range(4)]
        shuffled = pd.DataFrame(rows).sample(frac=1, random_state=0)
        again = record.window_again(shuffled)
        assert (again.window, again.passages) == (one.window, one.passages)
        assert again.scores == pytest.approx(one.scores)
    assert len({one.window.start for one in retrieved}) > 1 and any(p.index for one in retrieved for p in one.passages)


# Recorders


def test_shares_record_what_misses_and_the_last_one_says_that_all_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sidecars, "checkout", lambda: (sidecars.UNKNOWN, False))
    units = {("test", number): ("test", number) for number in range(5)}
    made = []

    def rows_of(split: str, number: int) -> list[dict[str, Any]]:
        made.append(number)
        return [{"split": split, "window": number, "rank": rank} for rank in (0, 1)]

    assert [record.recorded("found", units, rows_of, share, 2) for share in (0, 1, 0)] == [False, True, True]
    assert made == [0, 2, 4, 1, 3]
    assert len(record.recorder("found").rows()) == 10
