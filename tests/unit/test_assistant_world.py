"""Questions by who holds the answer: what lies on which side, and which questions are asked."""

from __future__ import annotations

from collections import Counter

import pytest

from ondevice import corpus
from ondevice.corpus.prompts import normal, quotation
from ondevice_studies.assistant.world import HOLDERS, World, world

WHERE = {"device": (True, False), "cloud": (False, True), "both": (True, True), "neither": (False, False)}


@pytest.fixture(scope="module")
def tested() -> World:
    return world("test")


def sides_of(texts_of: World) -> dict[str, tuple[list[str], list[str]]]:
    """By document, the texts of it on the device and in the cloud; each begins with its document's name."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for side, texts in enumerate((texts_of.device, texts_of.cloud)):
        for text in texts:
            found.setdefault(text.partition("\n")[0], ([], []))[side].append(text)
    return found


@pytest.mark.long  # reads the whole corpus
def test_what_is_kept_of_a_document_lies_where_its_answer_is_held(tested: World):
    texts = sides_of(tested)
    for question in tested.questions:
        device, cloud = texts.get(question.name, ([], []))
        assert (bool(device), bool(cloud)) == WHERE[question.holder], question
        assert not (device and cloud) or device == cloud
        if held := device or cloud:
            assert any(normal(question.answer) in normal(text) for text in held), question


@pytest.mark.long  # reads the whole corpus
def test_every_other_document_is_on_one_side_and_one_in_five_of_them_on_the_device(tested: World):
    texts, asked = sides_of(tested), {question.name for question in tested.questions}
    documents = corpus.documents("test")
    assert set(texts) <= {document.name for document in documents}
    fillers = [document for document in documents if document.name not in asked]
    for document in fillers:
        assert sorted(texts[document.name]) == [[], ["\n".join(quotation(document))]]
    on_device = sum(bool(texts[document.name][0]) for document in fillers)
    assert on_device / len(fillers) == pytest.approx(0.2, abs=0.025)


@pytest.mark.long  # reads the whole corpus
def test_holders_are_a_fourth_each_and_no_text_is_on_a_side_twice(tested: World):
    counts = Counter(question.holder for question in tested.questions)
    assert set(counts) == set(HOLDERS) and min(counts.values()) > 0.2 * len(tested.questions)
    for texts in (tested.device, tested.cloud):
        assert len(set(texts)) == len(texts)
    validation = {question.name for question in world("validation").questions}
    assert not validation & {question.name for question in tested.questions}
