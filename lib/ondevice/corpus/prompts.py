"""Task prompts whose answers the documents hold: seven families, deterministic, each from one document."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ondevice.corpus import sections
from ondevice.corpus.reading import Document

USER, ASSISTANT, PASSAGE = "<|user|>", "<|assistant|>", "<|passage|>"  # of the rerankers trained here

_PASSAGE_LENGTH = 280  # characters, about 70 tokens
_LONGEST_ANSWER = 240  # characters
_LONGEST_SECTION = 900
_LONGEST_OUTPUT = 120
Turn = tuple[str, str]


@dataclass(frozen=True)
class Task:
    """A prompt with the answer that its document holds.

    family: one of FAMILIES. name: the document's. passages: (title, text) each, quoted from documents.
    turns: (user, assistant) each; the last assistant turn is the answer, those before it belong to the prompt.
    """

    family: str
    name: str
    passages: tuple[Turn, ...]
    turns: tuple[Turn, ...]

    @property
    def answer(self) -> str:
        """What the model should say."""
        return self.turns[-1][1]


def tasks(documents: Sequence[Document], families: Sequence[str] | None = None) -> Iterator[Task]:
    """At most one task of each family from every document; all documents should come from one split.

    documents: in order of their names; a retrieval task takes its other passages from neighbours.
    families: all by default. Raises ValueError on an unknown one.
    """
    for family in families or ():
        if family not in FAMILIES:
            raise ValueError(f"There is no task family {family!r}; there are {', '.join(FAMILIES)}.")
    for index in range(len(documents)):
        for family in families or FAMILIES:
            task = FAMILIES[family](documents, index)
            if task is not None and normal(task.answer) in normal(documents[index].docstring):
                yield task


def pick(name: str, salt: str, count: int) -> int:
    """A number in [0, count) that depends on the name and the salt alone: the same on every machine."""
    return int.from_bytes(blake2b(f"{salt}:{name}".encode(), digest_size=8).digest(), "big") % count


def quotation(document: Document) -> Turn:
    """(title, text): the first lines of a document, about a passage long."""
    text = document.docstring
    return document.name, text if len(text) <= _PASSAGE_LENGTH else text[:_PASSAGE_LENGTH].rsplit(None, 1)[0]


def normal(text: str) -> str:
    """Text with every run of white space as one space: how an answer is looked up in its document."""
    return " ".join(text.split())


def _question(documents: Sequence[Document], index: int) -> Task | None:
    """Closed book: what is this parameter, what is returned."""
    document = documents[index]
    question = _field_question(document, "question")
    return Task("question", document.name, (), (question[:2],)) if question else None


def _rag(documents: Sequence[Document], index: int) -> Task | None:
    """The same kind of question with passages: one holds the answer, one or two are from neighbouring documents."""
    document = documents[index]
    turn = _field_question(document, "rag")
    if turn is None or len(documents) < 3:
        return None
    question, answer, line = turn
    passage = _passage_around(document, line, answer)
    if passage is None:
        return None
    offset = 1 + pick(document.name, "neighbour", 3)
    steps = (offset, -offset)[: 1 + pick(document.name, "passages", 2)]
    passages = [quotation(documents[(index + step) % len(documents)]) for step in steps]
    passages.insert(pick(document.name, "place", len(passages) + 1), (document.name, passage))
    return Task("rag", document.name, tuple(passages), ((question, answer),))


def _summary(documents: Sequence[Document], index: int) -> Task | None:
    """One line that says what a function's body does."""
    document = documents[index]
    line = sections.summary(document.docstring)
    if not document.source or not _short(line):
        return None
    asks = ("Summarize this function in one line.", "What does this function do?")
    ask = asks[pick(document.name, "summary", len(asks))]
    return Task("summary", document.name, (), ((f"{ask}\n{document.source}", line),))


def _parameters(documents: Sequence[Document], index: int) -> Task | None:
    """The parameter section, from the signature."""
    document = documents[index]
    section = sections.sections(document.docstring).get("parameters")
    if section is None or document.kind == "module":
        return None
    text = textwrap.dedent("\n".join(document.docstring.splitlines()[section.start : section.end])).strip()
    if not 20 <= len(text) <= _LONGEST_SECTION:
        return None
    return Task("parameters", document.name, (), ((f"Describe the parameters.\n{document.heading}", text),))


def _doctest(documents: Sequence[Document], index: int) -> Task | None:
    """What the last example of a doctest prints."""
    document = documents[index]
    examples = _doctest_examples(document.docstring)
    choices = [i for i, (_, output) in enumerate(examples) if 0 < len(output) <= _LONGEST_OUTPUT]
    if not choices:
        return None
    last = choices[pick(document.name, "doctest", len(choices))]
    before = [f"{source}\n{output}".rstrip() for source, output in examples[max(last - 6, 0) : last]]
    shown = "\n".join([*before, examples[last][0]])
    return Task("doctest", document.name, (), ((f"What does the last line print?\n{shown}", examples[last][1]),))


def _see_also(documents: Sequence[Document], index: int) -> Task | None:
    """A short reply: what to look at next."""
    document = documents[index]
    section = sections.sections(document.docstring).get("see also")
    if section is None:
        return None
    lines = [line.strip() for line in document.docstring.splitlines()[section.start : section.end] if line.strip()]
    reply = "\n".join(lines[:2])
    if not _short(reply):
        return None
    question = f"See also?\n{document.heading}\n{sections.summary(document.docstring)}"
    return Task("see_also", document.name, (), ((question, reply),))


def _turns(documents: Sequence[Document], index: int) -> Task | None:
    """Several turns on one object: what it is, then one of its parameters or what it returns, then another."""
    document = documents[index]
    first = _field_question(document, "first turn")
    second = _field_question(document, "second turn")
    line = sections.summary(document.docstring)
    if not first or not second or first[1] == second[1] or not _short(line):
        return None
    opening = (f"What is {document.name}?", line)
    follow_ups = [(question.replace(f" of {document.name}", ""), answer) for question, answer, _ in (first, second)]
    return Task("turns", document.name, (), (opening, *follow_ups))


FAMILIES: dict[str, Callable[[Sequence[Document], int], Task | None]] = {
    "question": _question,
    "rag": _rag,
    "summary": _summary,
    "parameters": _parameters,
    "doctest": _doctest,
    "see_also": _see_also,
    "turns": _turns,
}


def _field_question(document: Document, salt: str) -> tuple[str, str, int] | None:
    """A question on a parameter or the return value, its answer, and the line of the docstring where that begins."""
    fields = [(f"the parameter {field.name}", field) for field in sections.parameters(document.docstring)]
    if result := sections.returned(document.docstring):
        fields.append(("the return value", result))
    choices = [
        (what, first_sentence, field.line)
        for what, field in fields
        if _short(first_sentence := sections.first_sentence(field.description))
    ]
    if not choices:
        return None
    what, answer, line = choices[pick(document.name, salt, len(choices))]
    return f"What is {what} of {document.name}?", answer, line


def _passage_around(document: Document, line: int, answer: str) -> str | None:
    """A stretch of the docstring that begins a few lines before an entry and holds the answer."""
    lines = document.docstring.splitlines()
    start = max(line - pick(document.name, "lead", 5), 0)
    text = ""
    end = start
    while end < len(lines) and (len(text) < _PASSAGE_LENGTH or normal(answer) not in normal(text)):
        end += 1
        text = "\n".join(lines[start:end]).strip()
    return text if normal(answer) in normal(text) and len(text) < 2 * _PASSAGE_LENGTH else None


def _doctest_examples(docstring: str) -> list[tuple[str, str]]:
    """[(source with its prompts, output)] of a docstring's doctests."""
    examples: list[tuple[list[str], list[str]]] = []
    inside = False
    for line in map(str.strip, docstring.splitlines()):
        if line.startswith(">>> "):
            examples.append(([line], []))
            inside = True
        elif inside and line.startswith("..."):
            examples[-1][0].append(line)
        elif inside and line and not line.startswith("```"):
            examples[-1][1].append(line)
        else:
            inside = False
    return [("\n".join(source), "\n".join(output)) for source, output in examples]


def _short(text: str) -> bool:
    return 10 <= len(text) <= _LONGEST_ANSWER
