"""Questions about documentation and two sides' documents, by who holds the answer.

A question is about one document of a split. By a hash of its name, what is kept of that document lies on the device, in
the cloud, on both sides, or nowhere. Documents that nobody asks about fill up: one in five the device, the others the
cloud, so that the private documents are the fewer ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ondevice import corpus
from ondevice.corpus.prompts import pick, quotation, tasks

HOLDERS = ("device", "cloud", "both", "neither")
_FEWER = 5  # a document that nobody asks about is the device's with a chance of one over this


@dataclass(frozen=True)
class Question:
    """name: of the document that it is about. answer: what that says. holder: one of HOLDERS."""

    name: str
    query: str
    answer: str
    holder: str


@dataclass(frozen=True)
class World:
    """questions: by hash, so that the first of each holder are a random sample. device, cloud: texts."""

    questions: tuple[Question, ...]
    device: tuple[str, ...]
    cloud: tuple[str, ...]

    @property
    def texts(self) -> dict[str, tuple[str, ...]]:
        """By side."""
        return {"device": self.device, "cloud": self.cloud}

    def first(self, each: int, least: int = 0) -> list[Question]:
        """`each` questions of every holder, in turn, whose answers have at least `least` tokens.

        Raises ValueError where there are fewer.
        """
        tokenizer = corpus.tokenizer()
        eligible = [question for question in self.questions if len(tokenizer(question.answer).input_ids) >= least]
        columns = [[question for question in eligible if question.holder == holder][:each] for holder in HOLDERS]
        if (fewest := min(map(len, columns))) < each:
            raise ValueError(f"A holder has {fewest} such questions, not {each}.")
        return [question for row in zip(*columns, strict=True) for question in row]


@lru_cache(2)
def world(split: str = "test") -> World:
    """All questions and documents of a split of the documentation corpus."""
    documents = corpus.documents(split)
    questions = list[Question]()
    sides = {"device": list[str](), "cloud": list[str]()}
    by_document = {task.name: task for task in tasks(documents, ["rag"])}
    for document in documents:
        name = document.name
        kept = ["\n".join(quotation(document))]
        if name in by_document:
            task = by_document[name]
            holder = HOLDERS[pick(name, "dragon holder", len(HOLDERS))]
            questions.append(Question(name, task.turns[-1][0], task.answer, holder))
            kept += ["\n".join(passage) for passage in task.passages if passage[0] == name]
        else:
            holder = "device" if pick(name, "dragon filler", _FEWER) == 0 else "cloud"
        for side, texts in sides.items():
            if holder in (side, "both"):
                texts += kept
    questions.sort(key=lambda question: placed(question.name))
    return World(tuple(questions), *(tuple(dict.fromkeys(texts)) for texts in sides.values()))


def placed(name: str) -> int:
    """The order of questions: a hash of the document's name."""
    return pick(name, "dragon question", 2**62)
