"""Passages to search, which of them answer a query, and which must not be shown as if they did not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ondevice import corpus, retrieval
from ondevice.corpus import Document, Passage, Query, sections

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTH = 96  # tokens of a passage
_OPENING = 200  # characters: passages that begin alike are copies


@dataclass(frozen=True)
class Unfit:
    """Says of a passage whether a query's candidates must lack it: it gives the query away, or may answer it as well.

    Asked only of passages that do not count as relevant. twins: documents that the same query could be about.
    openings: how the relevant passages begin.
    """

    query: Query
    twins: frozenset[str]
    openings: frozenset[str]

    def __call__(self, passage: Passage) -> bool:
        if passage.title in self.twins or _opening(passage) in self.openings:
            return True
        text = _folded(passage.text)
        own = passage.title == self.query.name
        if self.query.kind == "summary":
            return (own and passage.index == 0) or _folded(self.query.text) in text
        answer = _folded(self.query.answer)
        middle = len(answer) // 2  # of its own document not even half an answer, cut by a passage's end
        return answer in text or (own and (answer[:middle] in text or answer[middle:] in text))


@dataclass(frozen=True)
class Collection:
    """Passages of documents in order. texts: as they are indexed and read: title, line break, text."""

    passages: Sequence[Passage]
    texts: Sequence[str]
    by_title: dict[str, list[int]] = field(repr=False)
    names_by_subject: dict[tuple[str, str], set[str]] = field(repr=False)

    @classmethod
    def from_documents(cls, documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> Collection:
        """Cut documents into passages. Raises ValueError when there are none."""
        passages = corpus.passages(documents, tokenizer, LENGTH)
        by_title: dict[str, list[int]] = {}
        for index, passage in enumerate(passages):
            by_title.setdefault(passage.title, []).append(index)
        names: dict[tuple[str, str], set[str]] = {}
        for document in documents:
            for subject in _subjects(document):
                names.setdefault(subject, set()).add(document.name)
        return cls(passages, retrieval.plain(passages), by_title, names)

    def relevant(self, query: Query) -> list[int]:
        """Positions of the passages that answer a query."""
        return [index for index in self.by_title.get(query.name, []) if query.relevant(self.passages[index])]

    def unfit(self, query: Query) -> Unfit:
        """Which passages must not be among the query's candidates."""
        subject = query.text if query.kind == "summary" else query.text.rpartition(" of ")[2]
        twins = self.names_by_subject.get((query.kind, _folded(subject)), set()) - {query.name}
        openings = frozenset(_opening(self.passages[index]) for index in self.relevant(query))
        return Unfit(query, frozenset(twins), openings)


def _subjects(document: Document) -> Iterator[tuple[str, str]]:
    """What queries may call a document: its summary, and its name as parameter queries shorten it."""
    yield "summary", _folded(sections.summary(document.docstring))
    yield "parameter", _folded(".".join(document.name.split(".")[-2:]))


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


def _opening(passage: Passage) -> str:
    return _folded(passage.text)[:_OPENING]
