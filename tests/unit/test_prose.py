"""Patterns over which a reader stumbles, in README, docs, cards and the notebooks' texts."""

import json
import re
from collections.abc import Iterator

import pytest

from ondevice.assets import ROOT

COUNTED = "tokens?|ms|seconds?|lines?|rows?|passes|requests|questions|prompts|answers|drafts?|bytes|forwards?|points"
PER = "token|pass|request|step|second|answer|question|query|layer|prompt|device|task|pool|document|message|user"
FAULTS = {
    "a rate without 'per'": re.compile(rf"\b(?:{COUNTED}) an? (?:{PER})\b"),
    "a statement that opens with 'What'": re.compile(r"^(?:- )?What\b.*[^?]$"),
    "'so that' for 'so'": re.compile(r"\bso that\b"),
}
TWO_MARKS = re.compile(r"[:;].*[:;]")
SHARE = 0.05  # of sentences with two colons or semicolons, at most


def pages() -> Iterator[tuple[str, str]]:
    front = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for path in [*front, *(ROOT / "docs").rglob("*.md"), *(ROOT / "data").rglob("README.md")]:
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        yield str(path.relative_to(ROOT)), "\n\n".join(texts)


def sentences(text: str) -> Iterator[str]:
    """Of running text: without code, formulas, tables, headings and markup."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$|`[^`]*`|\$[^$\n]*\$", "X", text, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if not re.match(r"[|#<!]| {4}", line)]
        plain = re.sub(r"\*|\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(lines))
        yield from (part.strip() for part in re.split(r"(?<=[.!?])\s+", plain) if part.count(" ") > 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_sentence_has_the_fault(fault):
    hits = [f"{name}: {part}" for name, text in pages() for part in sentences(text) if FAULTS[fault].search(part)]
    assert hits == []


def test_few_sentences_have_two_colons_or_semicolons():
    every = [part for _, text in pages() for part in sentences(text)]
    assert len(every) > 1000 and sum(bool(TWO_MARKS.search(part)) for part in every) < SHARE * len(every)
