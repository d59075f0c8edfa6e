"""Questions about invented documents of two sides, by who holds the answer (data/corpus/both_sides.jsonl).

A private note and a public page belong together. One question asks of the note, one of the page and one of both. The
device has all notes, the cloud has all pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from ondevice import assets
from ondevice.corpus.prompts import pick

HOLDERS = ("device", "cloud", "both")
_TEXTS = {"device": "note_question", "cloud": "page_question", "both": "question"}


def stands(texts: Sequence[str], within: str) -> bool:
    """Whether any of the texts stands in another one, in any case, and not as a part of a longer word."""
    return any(re.search(rf"(?<!\w){re.escape(text.lower())}(?!\w)", within.lower()) for text in texts)


@dataclass(frozen=True)
class Question:
    """holder: one of HOLDERS. note, page: the pair's documents. private, public: what note and page have to say on it,
    each as texts of which one must stand in an answer."""

    name: str
    family: str
    holder: str
    text: str
    note: str
    page: str
    private: tuple[str, ...]
    public: tuple[str, ...]

    def has(self, answer: str) -> dict[str, bool]:
        """Whether the private and the public part of the pair stand in an answer."""
        return {"private": stands(self.private, answer), "public": stands(self.public, answer)}

    def right(self, answer: str) -> bool:
        """Whether an answer has the parts that the question asks for."""
        has = self.has(answer)
        return (has["private"] or self.holder == "cloud") and (has["public"] or self.holder == "device")


@cache
def questions() -> tuple[Question, ...]:
    """All of them by a hash of their pair, so that the first ones are a random sample; the three of a pair in turn."""
    lines = assets.data("corpus", "both_sides.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: placed(row["id"]))
    return tuple(
        Question(f"{row['id']} {holder}", row["family"], holder, row[_TEXTS[holder]], row["note"], row["page"],
                 *map(tuple, row["answers"]))
        for row in rows for holder in HOLDERS
    )  # fmt: skip


def placed(name: str) -> int:
    """The order of pairs, by the hash of a pair's name, or of a question's."""
    return pick(name.partition(" ")[0], "dragon question", 2**62)


def first(each: int) -> Sequence[Question]:
    """The questions of the first pairs, `each` of every holder."""
    return questions()[: each * len(HOLDERS)]


def documents() -> dict[str, list[str]]:
    """Each side's texts."""
    pairs = questions()[:: len(HOLDERS)]
    return {"device": [pair.note for pair in pairs], "cloud": [pair.page for pair in pairs]}


def halves() -> tuple[list[str], list[str]]:
    """The notes in two halves, by the pairs' random order: the attack's device has the first, and nobody the other."""
    notes = documents()["device"]
    return notes[::2], notes[1::2]
