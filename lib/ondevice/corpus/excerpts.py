"""Passages (a title and a stretch of a document, as DRAGON's) and retrieval queries whose documents are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ondevice.corpus import sections
from ondevice.corpus.prompts import normal, pick
from ondevice.corpus.reading import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FEWEST_TOKENS = 16  # a shorter last piece of a document is left out, unless it is the only one
_FEWEST_WORDS = 4  # in a query


@dataclass(frozen=True)
class Passage:
    """A stretch of one document. title: its qualified name. index: 0 for the document's first passage."""

    title: str
    text: str
    index: int


@dataclass(frozen=True)
class Query:
    """A retrieval query. kind: parameter or summary. name: the document it is about. answer: for a parameter."""

    kind: str
    text: str
    name: str
    answer: str

    def relevant(self, passage: Passage) -> bool:
        """Whether a passage answers: it holds the answer, or is a later one of the summarised document."""
        if passage.title != self.name:
            return False
        return normal(self.answer) in normal(passage.text) if self.kind == "parameter" else passage.index > 0


def passages(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, length: int = 64) -> list[Passage]:
    """Cut every docstring into consecutive stretches of `length` tokens, quoted verbatim, in order of the documents."""
    if length < 1:
        raise ValueError(f"A passage needs at least one token, not {length}.")
    stretches = []
    for start in range(0, len(documents), 1000):
        group = documents[start : start + 1000]
        encoded = tokenizer([d.docstring for d in group], return_offsets_mapping=True, verbose=False)
        for document, offsets in zip(group, encoded["offset_mapping"], strict=True):
            for index, text in enumerate(_pieces(document.docstring, offsets, length)):
                stretches.append(Passage(document.name, text, index))
    return stretches


def queries(documents: Sequence[Document]) -> Iterator[Query]:
    """At most one query a document: a parameter of an object called by its short name, or the document's summary."""
    for document in documents:
        fields = [field for field in sections.parameters(document.docstring) if len(field.description) > 20]
        short = ".".join(document.name.split(".")[-2:])
        if fields and pick(document.name, "query kind", 2):
            field = fields[pick(document.name, "query", len(fields))]
            answer = sections.first_sentence(field.description)
            if normal(answer) in normal(document.docstring):
                yield Query("parameter", f"parameter {field.name} of {short}", document.name, answer)
            continue
        summary = sections.summary(document.docstring)
        if len(summary.split()) >= _FEWEST_WORDS:
            yield Query("summary", summary, document.name, "")


def _pieces(text: str, offsets: Sequence[tuple[int, int]], length: int) -> Iterator[str]:
    for start in range(0, len(offsets), length):
        piece = offsets[start : start + length]
        if start == 0 or len(piece) >= min(_FEWEST_TOKENS, length):
            yield text[piece[0][0] : piece[-1][1]].strip()
