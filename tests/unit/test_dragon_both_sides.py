"""Questions whose answer needs a document of each side: the data, the rows of the record, and what is read off them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import random_model

from ondevice import shapes
from ondevice.causal_lm import CausalLM
from ondevice.evidence import born
from ondevice.retrieval import SparseIndex
from ondevice_papers.dragon.aggregation import share
from ondevice_programs.pair.decoder import Template
from ondevice_programs.pair.node import Documents, Node
from ondevice_studies.dragon import both_sides, lockstep, sides
from ondevice_studies.dragon.both_sides import EQUAL, ONE_SIDE, TwoSided
from ondevice_studies.dragon.lockstep import DRAGON, ON_CLOUD, ON_DEVICE
from ondevice_studies.dragon.sides import ROUTER

QUESTION = TwoSided(
    "z-1", "zoo", "who sees zebras?", "Ann sees zebras", "zebras eat 12 plants", (("Ann", "Anna"), ("12", "twelve"))
)

# The questions


def test_100_questions_of_many_kinds():
    asked = both_sides.questions()
    assert len(asked) == 100
    families = Counter(question.family for question in asked)
    beginnings = Counter(" ".join(question.text.split()[:3]) for question in asked)
    assert len(families) >= 12 and max(families.values()) <= 10 and max(beginnings.values()) <= 10
    for field in ("name", "text", "note", "page"):
        assert len({getattr(question, field) for question in asked}) == 100


@pytest.mark.parametrize("question", both_sides.questions(), ids=lambda question: question.name)
def test_no_answer_is_in_one_document_alone(question: TwoSided):
    assert set(question.holders) == {"device", "cloud"}, "each part stands on one side, and each side has one"
    assert not any(sides.stands(part, question.text) for part in question.answers)
    for document in (question.note, question.page):
        assert not question.right(document) and 40 <= len(document.split()) <= 120
    assert question.right(f"{question.note} {question.page}")


def test_a_document_of_another_question_does_not_answer():
    """A page that has one question's private part by chance would not be seen by the test of its own two documents."""
    asked = both_sides.questions()
    texts = [text for question in asked for text in (question.note, question.page)]
    assert not [(question.name, text) for question in asked for text in texts if question.right(text)]


def test_an_answer_is_right_that_has_the_parts_of_both_sides():
    assert QUESTION.holders == ["device", "cloud"]
    assert QUESTION.right("Twelve, and ANN.") and QUESTION.has("Anna: 12") == {"device": True, "cloud": True}
    assert QUESTION.has("Ann, 121") == {"device": True, "cloud": False} and not QUESTION.right("Ann, 121")
    assert replace(QUESTION, answers=(("zebras",), ("lions",))).holders == ["both", "neither"]


# Answers, on a tiny model


@pytest.mark.usefixtures("one_thread")
def test_each_method_is_a_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(both_sides, "LIMIT", 6)
    lm = CausalLM(random_model("llama", torch.float32, vocabulary=300, context=256, spread=0.3))
    template = Template("{document}\n{query}\n")
    texts = {"device": [QUESTION.note, "rain at dusk"], "cloud": ["a long river", QUESTION.page, "zebras sleep"]}
    pair = {
        side: Node(lm, shapes.byte_tokenizer(), Documents(those, SparseIndex.build(those)), template)
        for side, those in texts.items()
    }
    other = replace(QUESTION, name="z-2", text="is there a river?", note="no", page="no")
    rows = both_sides.answered(pair, [QUESTION, other])
    assert [(row["question"], row["method"]) for row in rows] == [
        (name, method) for name in ("z-1", "z-2") for method in both_sides.METHODS
    ]
    table = pd.DataFrame(rows).set_index(["question", "method"])
    assert table.loc["z-1", "retrieved"].eq(2).all() and table.loc["z-2", "retrieved"].eq(0).all()
    decode = pair["device"].tokenizer.decode

    def text(of: dict[str, Node], method: str, k: int = 2) -> str:
        tokens = lockstep.answer(of, QUESTION.text, method, k, 6)[0]
        assert len(tokens) <= 6
        return str(decode(tokens, skip_special_tokens=True))

    expected = {method: text(pair, method) for method in (ON_DEVICE, ON_CLOUD, DRAGON)}
    weights = {side: node.decoder(QUESTION.text, 2)[0].log_weight for side, node in pair.items()}
    larger = ON_DEVICE if weights["device"] >= weights["cloud"] else ON_CLOUD
    both = [f"{QUESTION.note}\n\n{QUESTION.page}"]
    joined = {"device": replace(pair["device"], documents=Documents(both, SparseIndex.build(both)))}
    expected |= {ROUTER: expected[larger], ONE_SIDE: text(joined, ON_DEVICE, 1)}
    for method, words in expected.items():
        assert table.loc[("z-1", method), "text"] == words
        for side, log_h in weights.items():
            assert table.loc[("z-1", method), f"log_h_{side}"] == log_h
    alike = [replace(node, decodes=both_sides._Equal).decoder(QUESTION.text, 2)[0] for node in pair.values()]
    assert share(*(decoder.log_weight for decoder in alike)) == 0.5
    plain = pair["device"].decoder(QUESTION.text, 2)[0]
    assert np.array_equal(alike[0].next_distribution(), plain.next_distribution())  # its own documents keep theirs


# What the record says


def record(right: dict[str, list[int]]) -> pd.DataFrame:
    """private: as right; public: never."""
    rows = [
        {"question": f"q{number}", "family": "f", "method": method, "right": bool(hit), "private": bool(hit),
         "public": False}
        for method, hits in right.items() for number, hit in enumerate(hits)
    ]  # fmt: skip
    return born(pd.DataFrame(rows), "recorded")


def test_points_over_the_router_are_of_pairs():
    hits = {method: [0, 0, 0, 0] for method in both_sides.METHODS}
    rows = record(hits | {ROUTER: [1, 0, 1, 0], DRAGON: [1, 1, 1, 1], ONE_SIDE: [1, 0, 1, 0]})
    over = both_sides.over_router(rows)
    assert over.value == 50 and 0 <= over.low < 50 < over.high <= 100 and over.n == 4
    same = both_sides.over_router(rows, ONE_SIDE)
    assert (same.value, same.low, same.high) == (0, 0, 0)  # the same questions, whatever is drawn
    table = both_sides.table(rows).set_index("method")
    assert list(table.index) == list(both_sides.METHODS)
    assert table.loc[DRAGON, ["right", "private", "public", "over_router"]].tolist() == [100, 100, 0, 50]
    assert table.loc[EQUAL, "over_router"] == -50 and table.loc[ROUTER, "high"] == 0
