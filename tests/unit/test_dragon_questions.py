"""Questions by who holds the answer: what is asked, and what lies on which side."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ondevice_studies.dragon.questions import HOLDERS, Question, documents, first, questions, stands

QUESTION = Question(
    "z-1 both", "zoo", "both", "who sees zebras?", "Ann sees zebras", "zebras eat 12 plants", ("Ann", "Anna"),
    ("12", "twelve"),
)  # fmt: skip


def test_a_hundred_questions_of_each_holder_and_many_kinds():
    asked = questions()
    assert Counter(question.holder for question in asked) == dict.fromkeys(HOLDERS, 100)
    families = Counter(question.family for question in asked)
    assert len(families) >= 12 and max(families.values()) <= 30
    for holder in HOLDERS:
        beginnings = Counter(" ".join(q.text.split()[:3]) for q in asked if q.holder == holder)
        assert max(beginnings.values()) <= 10
    assert len({question.text for question in asked}) == len({question.name for question in asked}) == 300
    assert [question.holder for question in first(2)] == [*HOLDERS, *HOLDERS]
    assert len({question.family for question in first(10)}) > 5  # no family first


def test_the_device_has_the_notes_and_the_cloud_the_pages():
    texts = documents()
    assert {side: len(set(each)) for side, each in texts.items()} == {"device": 100, "cloud": 100}
    for question in questions():
        assert question.note in texts["device"] and question.page in texts["cloud"]


@pytest.mark.parametrize("pair", questions()[::3], ids=lambda pair: pair.name)
def test_each_part_stands_in_its_document_alone(pair: Question):
    for part, own, other in ((pair.private, pair.note, pair.page), (pair.public, pair.page, pair.note)):
        assert stands(part, own) and not stands(part, other) and 40 <= len(own.split()) <= 120
    asked = [question for question in questions() if question.note == pair.note]
    assert [question.holder for question in asked] == list(HOLDERS)
    for question in asked:
        read = {"device": [pair.note], "cloud": [pair.page], "both": [pair.note, pair.page]}[question.holder]
        assert question.right(" ".join(read)) and not question.right(question.text)
        assert (question.right(pair.note), question.right(pair.page)) == (read == [pair.note], read == [pair.page])


def test_a_document_of_another_question_does_not_answer_both():
    """A page that has one question's private part by chance would not be seen by the test of its own two documents."""
    both = [question for question in questions() if question.holder == "both"]
    texts = [text for each in documents().values() for text in each]
    assert not [(question.name, text) for question in both for text in texts if question.right(text)]


def test_an_answer_is_right_that_has_what_is_asked_for():
    assert QUESTION.right("Twelve, and ANN.") and QUESTION.has("Anna: 12") == {"private": True, "public": True}
    assert QUESTION.has("Ann, 121") == {"private": True, "public": False} and not QUESTION.right("Ann, 121")
    assert replace(QUESTION, holder="device").right("Ann") and replace(QUESTION, holder="cloud").right("12")
    assert not replace(QUESTION, holder="device").right("12") and not replace(QUESTION, holder="cloud").right("Ann")
