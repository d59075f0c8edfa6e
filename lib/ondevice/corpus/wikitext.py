"""WikiText-2's test and validation splits: text, paragraphs, and questions of our own about paragraphs.

The text is in the local data folder or fetched into the user's cache; it is never part of the repository. Questions
name a paragraph by its row in the test split (data/corpus/wikitext_questions.jsonl).
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass

from ondevice import assets, fetched

FEWEST = 20  # words of a paragraph that is worth finding
_HEADING = re.compile(r"= [^=].* =")  # of an article
_SPACED = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" ,", ","), (" .", "."), (" ;", ";"), (" 's", "'s"))


@dataclass(frozen=True)
class Paragraph:
    """row: of the split, from 0. text: with the article's heading in a line above it."""

    row: int
    text: str


def text(split: str) -> str:
    """A split, a row of the data set per line: of the local data folder, else as it was fetched.

    Raises FileNotFoundError with the command that fetches it, ValueError for another split than these two.
    """
    local = assets.local_data()
    packed = local / fetched.WIKITEXT / f"{'valid' if split == 'validation' else split}.txt.gz" if local else None
    path = fetched.wikitext(split)
    if packed and packed.is_file():
        return gzip.decompress(packed.read_bytes()).decode()
    if path is None:
        raise FileNotFoundError(f"WikiText-2 is not on this machine; `{fetched.command(fetched.WIKITEXT)}` fetches it.")
    return path.read_text(encoding="utf-8")


def paragraphs(split: str) -> list[Paragraph]:
    """The paragraphs of at least `FEWEST` words, without the spaces that the data set puts before marks."""
    heading = ""
    kept = []
    for row, line in enumerate(text(split).split("\n")):
        words = len(line.split())
        for spaced, mark in _SPACED:
            line = line.replace(spaced, mark)
        line = line.strip()
        if _HEADING.fullmatch(line):
            heading = line.strip("= ")
        elif not line.startswith("=") and words >= FEWEST:
            kept.append(Paragraph(row, f"{heading}\n{line}"))
    return kept


def questions() -> list[tuple[int, str]]:
    """(row of the paragraph that answers, question) about the test split, in the file's order."""
    lines = assets.data("corpus", "wikitext_questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["row"], row["question"]) for row in map(json.loads, lines)]
