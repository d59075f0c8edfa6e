"""Questions in natural words whose answer one side holds: private notes, or documentation (data/corpus/sides.jsonl).

The test split has 60 of each kind. The validation split, 36 of each with other notes and other modules, is what the
weights of `ondevice_programs.pair.relevance` and the wording of prompts were chosen on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ondevice import assets, corpus
from ondevice.corpus.excerpts import passages
from ondevice.corpus.prompts import pick
from ondevice_programs.pair.node import Node
from ondevice_studies.dragon import lockstep
from ondevice_studies.dragon.lockstep import ON_CLOUD, ON_DEVICE, USED
from ondevice_studies.dragon.questions import stands

Split = Literal["validation", "test"]
PUBLIC = 3_000  # passages of the cloud


@dataclass(frozen=True)
class SideQuestion:
    """holder: device or cloud. answers: any of these, as whole words, is right. source: the note, or the object."""

    holder: str
    text: str
    answers: tuple[str, ...]
    source: str

    def right(self, answer: str) -> bool:
        """Whether the answer holds one of the expected texts, in any case, and not as a part of a longer word."""
        return stands(self.answers, answer)


def questions(split: Split) -> list[SideQuestion]:
    """Those of a split, the private ones first."""
    lines = assets.data("corpus", "sides.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["split"] == split]
    return [
        SideQuestion(row["holder"], row["question"], tuple(row["answers"]), row.get("note") or row["document"])
        for row in rows
    ]


def texts(split: Split, public: int = PUBLIC) -> dict[str, list[str]]:
    """Each side's documents: all notes; the passages of all objects that are asked about and, by a hash, of others."""
    on_both = questions(split)
    names = {question.source for question in on_both if question.holder == "cloud"}
    every = passages(corpus.documents(split), corpus.tokenizer())
    every.sort(key=lambda passage: (passage.title not in names, pick(passage.text, "sides", 2**62)))
    shown = dict.fromkeys(f"{passage.title}\n{passage.text}" for passage in every)
    return {
        "device": [question.source for question in on_both if question.holder == "device"],
        "cloud": list(shown)[:public],
    }


@dataclass(frozen=True)
class SideAnswers:
    """Greedy tokens by method, and log h of each side."""

    tokens: Mapping[str, list[int]]
    log_weights: Mapping[str, float]

    @property
    def router(self) -> str:
        """The method that answers where the side with the larger weight answers alone."""
        return ON_DEVICE if self.log_weights["device"] >= self.log_weights["cloud"] else ON_CLOUD


def answers(
    nodes: Mapping[str, Node], queries: Sequence[str], methods: Sequence[str], k: int = 2, limit: int = 24
) -> list[SideAnswers]:
    """Greedy answers to some questions at once, in lockstep: a forward takes a token of each.

    methods: of `lockstep.METHODS`, DRAGON and the two sides alone.
    """
    pairs = [{side: node.decoder(query, k)[0] for side, node in nodes.items()} for query in queries]
    tokens: list[dict[str, list[int]]] = [{} for _ in pairs]
    for method in methods:
        used = [{side: sides[side] for side in USED.get(method, sides)} for sides in pairs]
        for decoder in (decoder for sides in pairs for decoder in sides.values()):
            decoder.rollback(0)
        for by_method, (answer, *_) in zip(tokens, lockstep.answers(used, method, limit), strict=True):
            by_method[method] = answer
    weights = [{side: decoder.log_weight for side, decoder in sides.items()} for sides in pairs]
    return [SideAnswers(answer, weight) for answer, weight in zip(tokens, weights, strict=True)]


def groups(questions: Sequence[SideQuestion], size: int) -> Iterator[Sequence[SideQuestion]]:
    """The questions, some at a time."""
    for start in range(0, len(questions), size):
        yield questions[start : start + size]
