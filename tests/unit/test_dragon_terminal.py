"""What a person sees of an answer."""

from __future__ import annotations

import io
import json
import re

import pytest

from ondevice.retrieval import SparseIndex
from ondevice_papers.dragon.messages import Cited
from ondevice_programs.pair import terminal
from ondevice_programs.pair.answer import Answer
from ondevice_programs.pair.node import Documents, Source

WORDS = ["It ", "rains", ". ", "Snow ", "is ", "white.", "\n", "caf\ufffd", "é"]


class Words:
    """A tokenizer; of a character of two tokens, the first one alone is no text."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(WORDS[token] for token in tokens).replace("\ufffdé", "é")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_comes_with_each_token_and_whole_characters():
    out = io.StringIO()
    stream = terminal.AnswerWriter(Words(), out)  # type: ignore[arg-type]
    seen = []
    for token in (0, 1, 7, 8):
        stream.token(token)
        stream.drafts([3, 4])
        seen.append(out.getvalue())
    assert seen == ["It ", "It rains", "It rains", "It rainscafé"]
    stream.end()
    assert out.getvalue() == "It rainscafé\n"


def screen(written: str, width: int = 80) -> list[str]:
    """The lines of a terminal that gets this."""
    lines, column = [""], 0
    for number, kind, character in re.findall(r"\x1b\[([0-9;]*)([A-Za-z])|([^\x1b])", written):
        if kind == "K":
            lines[-1] = lines[-1][:column]
        elif kind == "D":
            column -= int(number)
        elif character == "\n":
            lines, column = [*lines, ""], 0
        elif character:
            lines[-1] = lines[-1][:column] + character + lines[-1][column + 1 :]
            column += 1
            assert column <= width
    return lines


def test_drafts_are_shown_until_they_are_decided_or_replaced():
    out = Terminal()
    stream = terminal.AnswerWriter(Words(), out)  # type: ignore[arg-type]
    stream.token(0)
    stream.drafts([1, 2, 6, 3])
    assert screen(out.getvalue()) == ["It rains.  Snow "]
    stream.token(1)
    stream.drafts([2])
    assert screen(out.getvalue()) == ["It rains. "]
    stream.token(3)
    stream.drafts([])
    assert screen(out.getvalue()) == ["It rainsSnow "]
    stream.drafts([3] * 100)  # more than the line holds
    stream.end()
    assert screen(out.getvalue()) == ["It rainsSnow ", ""]


def answer(**more: object) -> Answer:
    return Answer(
        tokens=[0, 1, 2, 3, 4, 5], times=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], device=[3, 1], cloud=[3, 3],
        sources=[("device", Cited("a.txt", 3, 0.75)), ("cloud", Cited("b.md", 1, 1.0))], share=0.4, sent=180,
        received=900, left={"Begin": 80, "Target": 100}, connections=1, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_line_of_json_has_all_of_it():
    answered = answer(alone_from=0, reason="it was silent", text="It rains.")
    account = json.loads(terminal.as_json("Rain?", answered, Words(), []))  # type: ignore[arg-type]
    assert (account["query"], account["text"], account["alone_from"]) == ("Rain?", "It rains.", 0)
    assert account["sources"][0] == {"side": "device", "file": "a.txt", "paragraph": 3, "weight": 0.75}
    assert [statement["text"] for statement in account["statements"]] == ["It rains.", "Snow is white."]
    assert account["left"] == answered.left


@pytest.mark.parametrize(("readable", "count", "private"), [(6, 5, ["Snow", "white"]), (3, 2, [])])
def test_the_words_that_the_cloud_could_read_are_counted_and_private_ones_named(readable, count, private):
    """Not `is`, which stands in any text."""
    answered = answer(text="It rains. Snow is white.", readable=readable)
    assert terminal.readable(answered, Words(), ["Snow is white in May."]) == (count, private)  # type: ignore[arg-type]
    account = json.loads(terminal.as_json("Rain?", answered, Words(), ["Snow is white in May."]))  # type: ignore[arg-type]
    assert account["words"] == {"answer": 5, "cloud_could_read": count, "in_private_text": private}
    notes = " ".join(terminal.notes(answered, Words(), ["Snow is white in May."]))  # type: ignore[arg-type]
    assert all(word in notes for word in private) and "180 bytes" in notes


def test_the_device_s_texts_that_an_answer_was_made_from_are_found_by_their_places():
    texts, places = ["It rains.", "Snow is white.", "Ice is cold."], [("a.txt", 2), ("a.txt", 3), ("b.md", 1)]
    held = Documents(texts, SparseIndex.build(texts), [Source(*place) for place in places])
    assert terminal.texts_used(answer(), held) == ["Snow is white."]  # the cited b.md is the cloud's
    assert terminal.texts_used(Answer(), held) == []
