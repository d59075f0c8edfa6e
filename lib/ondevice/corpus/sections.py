"""Sections and fields of a docstring, in the NumPy, Google and Sphinx styles."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

_UNDERLINE = re.compile(r"^\s*-{3,}\s*$")
_GOOGLE = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|See Also|Notes?):\s*$")
_NAMES = {"args": "parameters", "arguments": "parameters", "return": "returns", "example": "examples"}
_NUMPY_FIELD = re.compile(r"^(\*{0,2}\w+)(?:, \*{0,2}\w+)*(?:\s*:\s*(.*))?$")
_NUMPY_RESULT = re.compile(r"^(\S.*?)(?:\s+:\s*(.*))?$")  # a type may stand alone: "list of float"
_GOOGLE_FIELD = re.compile(r"^(\*{0,2}\w+)\s*(?:\(([^)]*)\))?\s*:\s*(.*)$")
_SPHINX_FIELD = re.compile(r"^:param\s+(?:\w+\s+)?(\w+):\s*(.*)$")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")


@dataclass(frozen=True)
class Field:
    """A parameter or a return value. line: where its entry begins in the docstring, counted from 0."""

    name: str
    type: str
    description: str
    line: int


@dataclass(frozen=True)
class Section:
    """Lines [start, end) of a docstring below a heading such as `parameters`; style: of its fields, numpy or google."""

    name: str
    start: int
    end: int
    style: str


def sections(docstring: str) -> dict[str, Section]:
    """The sections of a docstring by lower-case name; the first of each name."""
    lines = docstring.splitlines()
    heads = []
    for i, line in enumerate(lines):
        if i + 1 < len(lines) and line.strip() and not line.startswith(" ") and _UNDERLINE.match(lines[i + 1]):
            heads.append((line.strip(), i, i + 2, "numpy"))
        elif match := _GOOGLE.match(line):
            heads.append((match.group(1), i, i + 1, "google"))
    by_name: dict[str, Section] = {}
    for index, (name, _, start, style) in enumerate(heads):
        end = heads[index + 1][1] if index + 1 < len(heads) else len(lines)
        if style == "google":  # an indented block: it ends where the indentation does
            end = next((i for i in range(start, end) if lines[i] and not lines[i].startswith(" ")), end)
        key = _NAMES.get(name.lower(), name.lower())
        by_name.setdefault(key, Section(key, start, end, style))
    return by_name


def parameters(docstring: str) -> list[Field]:
    """The described parameters of a docstring."""
    lines = docstring.splitlines()
    section = sections(docstring).get("parameters")
    if section is None:
        return [field for i in range(len(lines)) if (field := _sphinx_field(lines, i))]
    return _fields(lines, section, _NUMPY_FIELD if section.style == "numpy" else _GOOGLE_FIELD)


def returned(docstring: str) -> Field | None:
    """The described return value of a docstring, if it has one."""
    section = sections(docstring).get("returns")
    if section is None:
        return None
    lines = docstring.splitlines()
    if section.style == "numpy":
        return next(iter(_fields(lines, section, _NUMPY_RESULT)), None)
    text = _joined(lines[section.start : section.end])
    return Field("", "", text, section.start) if text else None


def first_sentence(text: str) -> str:
    """The first sentence of a text, its line breaks turned to spaces."""
    return _SENTENCE.split(" ".join(text.split()), maxsplit=1)[0]


def summary(docstring: str) -> str:
    """The first paragraph's first sentence, or "" when the docstring opens with a section."""
    opening = docstring.split("\n\n", 1)[0]
    lines = opening.splitlines()
    if not lines or _GOOGLE.match(lines[0]) or any(map(_UNDERLINE.match, lines)):
        return ""
    return first_sentence(opening)


def _fields(lines: list[str], section: Section, pattern: re.Pattern[str]) -> list[Field]:
    body = range(section.start, section.end)
    indents = [len(lines[i]) - len(lines[i].lstrip()) for i in body if lines[i].strip()]
    base = min(indents, default=0)
    heads = [i for i in body if lines[i].strip() and len(lines[i]) - len(lines[i].lstrip()) == base]
    fields = []
    for i, end in itertools.pairwise([*heads, section.end]):
        match = pattern.match(lines[i].strip())
        if not match:
            continue
        beside = match.group(3) if section.style == "google" else ""
        description = _joined([beside, *lines[i + 1 : end]])
        if description:
            fields.append(Field(match.group(1), (match.group(2) or "").strip(), description, i))
    return fields


def _sphinx_field(lines: list[str], i: int) -> Field | None:
    match = _SPHINX_FIELD.match(lines[i])
    if not match:
        return None
    end = next((j for j in range(i + 1, len(lines)) if not lines[j].startswith(" ")), len(lines))
    description = _joined([match.group(2), *lines[i + 1 : end]])
    return Field(match.group(1), "", description, i) if description else None


def _joined(lines: list[str]) -> str:
    """One paragraph: the lines up to the first blank one after text, joined by spaces."""
    text = "\n".join(line.strip() for line in lines).strip()
    return " ".join(text.split("\n\n", 1)[0].split())
