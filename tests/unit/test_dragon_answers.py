"""Who answers: each method on a tiny model, and what the records say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
from ondevice_studies.dragon import answers, lockstep
from ondevice_studies.dragon.answers import EQUAL, ONE_SIDE, ROUTER
from ondevice_studies.dragon.lockstep import DRAGON, NONE, ON_CLOUD, ON_DEVICE
from ondevice_studies.dragon.questions import Question
from ondevice_studies.speculation.prompts import digest

QUESTION = Question(
    "z-1 both", "zoo", "both", "who sees zebras?", "Ann sees zebras", "zebras eat 12 plants", ("Ann",), ("12",)
)
OTHER = replace(QUESTION, name="z-2 both", text="is there a river?", note="no", page="no")


@pytest.fixture(scope="module")
def nodes() -> dict[str, Node]:
    lm = CausalLM(random_model("llama", torch.float32, vocabulary=300, context=256, spread=0.3))
    texts = {"device": [QUESTION.note, "rain at dusk"], "cloud": ["a long river", QUESTION.page, "zebras sleep"]}
    return {
        side: Node(
            lm, shapes.byte_tokenizer(), Documents(those, SparseIndex.build(those)), Template("{document}\n{query}\n")
        )
        for side, those in texts.items()
    }


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "LONGEST", 6)


def test_questions_of_both_are_answered_by_two_methods_more():
    assert answers.methods(QUESTION) == (*answers.methods(replace(QUESTION, holder="device")), EQUAL, ONE_SIDE)


@pytest.mark.usefixtures("one_thread")
def test_questions_in_one_forward_are_answered_as_alone(nodes: dict[str, Node]):
    for method in answers.OF_BOTH:
        rows, words = answers.answered(nodes, [QUESTION, OTHER], method)
        assert [(row["question"], row["method"]) for row in rows] == [("z-1 both", method), ("z-2 both", method)]
        assert [words == [] for _ in rows] == [method != DRAGON] * 2
        for question, row in zip((QUESTION, OTHER), rows, strict=True):
            (alone,), each = answers.answered(nodes, [question], method)
            assert row == alone | {"margin": pytest.approx(alone["margin"], abs=1e-6)}
            own = [word for word in words if word["question"] == question.name]
            assert [word["token"] for word in own] == [word["token"] for word in each]
            assert row["tokens"] == len(own) / 2 or method != DRAGON
            assert [word["position"] for word in own] == [place for place in range(len(own) // 2) for _ in nodes]


@pytest.mark.usefixtures("one_thread")
def test_each_method_reads_what_it_should(nodes: dict[str, Node]):
    def sha(of: Mapping[str, Node], method: str, k: int = 2) -> str:
        return digest(lockstep.answer(of, QUESTION.text, method, k, 6)[0])  # type: ignore[arg-type]

    both = [f"{QUESTION.note}\n\n{QUESTION.page}"]
    joined = {"device": replace(nodes["device"], documents=Documents(both, SparseIndex.build(both)))}
    expected = {method: sha(nodes, method) for method in (DRAGON, ON_DEVICE, ON_CLOUD, NONE)}
    expected[ONE_SIDE] = sha(joined, ON_DEVICE, 1)
    for method, answer in expected.items():
        assert answers.answered(nodes, [QUESTION], method)[0][0]["answer_sha"] == answer
    equal = answers.session(nodes, QUESTION, EQUAL)
    assert share(*(decoder.log_weight for decoder in equal.values())) == 0.5
    plain = nodes["device"].decoder(QUESTION.text, 2)[0]
    assert np.array_equal(
        equal["device"].next_distribution(), plain.next_distribution()
    )  # its own documents keep theirs


@pytest.mark.usefixtures("one_thread")
def test_an_edit_reaches_the_answer(nodes: dict[str, Node]):
    (row,), _ = answers.answered(nodes, [QUESTION], DRAGON)
    (edited,), _ = answers.answered(nodes, [QUESTION], DRAGON, target=lambda p, q, *weights: p)
    assert edited["margin"] != row["margin"]


# What the records say


def records(right: dict[str, list[int]], holder: str = "both") -> tuple[pd.DataFrame, pd.DataFrame]:
    """Answers, whose private part is as they are right, and tokens: even questions are more the device's."""
    rows = [
        {"question": f"q{number}", "holder": holder, "method": method, "right": bool(hit), "private": bool(hit),
         "public": False}
        for method, hits in right.items() for number, hit in enumerate(hits)
    ]  # fmt: skip
    count = len(next(iter(right.values())))
    tokens: list[dict[str, Any]] = [
        {"question": f"q{number}", "side": side, "eta": eta}
        for number in range(count)
        for side, eta in zip(("device", "cloud"), (0.9, 0.1) if number % 2 == 0 else (0.2, 0.8), strict=True)
    ]
    return born(pd.DataFrame(rows), "recorded"), born(pd.DataFrame(tokens), "recorded")


def test_the_router_answers_as_the_side_of_the_larger_share():
    hits = {DRAGON: [1, 1, 1, 1], ON_DEVICE: [1, 0, 0, 0], ON_CLOUD: [0, 1, 1, 0], EQUAL: [0, 0, 0, 0]}
    compared = answers.routed(*records(hits))
    routed = compared[compared["method"] == ROUTER].set_index("question")["right"]
    assert routed.to_dict() == {"q0": True, "q1": True, "q2": False, "q3": False}
    over = answers.over(compared, "both", ROUTER)
    assert over.value == 50 and 0 <= over.low < 50 < over.high <= 100 and over.n == 4
    assert answers.over(compared, "both", ROUTER, ROUTER).interval == (0, 0)
    assert list(answers.right(compared).names) == [DRAGON, ON_DEVICE, ON_CLOUD, ROUTER]


@pytest.mark.parametrize(("value", "low", "brings"), [(20, 1, True), (19, 5, False), (40, -1, False), (40, 0, False)])
def test_what_brings_something(value: float, low: float, brings: bool):
    over = answers.over(answers.routed(*records({DRAGON: [1, 1], ON_DEVICE: [1, 0], ON_CLOUD: [1, 0]})), "both", ROUTER)
    assert answers.brings(replace(over, value=value, low=low)) == brings


def test_halves_are_of_the_questions_of_both():
    hits = {method: [1, 0] for method in answers.OF_BOTH}
    both, other = records(hits), records(hits | {DRAGON: [1, 1]}, "device")
    table = answers.halves(answers.routed(pd.concat([both[0], other[0]]), both[1])).set_index("method")
    assert table.loc[DRAGON, ["right", "private", "public"]].tolist() == [50, 50, 0]
    assert ROUTER in table.index and NONE not in table.index
