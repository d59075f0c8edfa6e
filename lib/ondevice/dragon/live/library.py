"""A side's documents from a file, a folder or the documentation corpus, with their index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from ondevice import corpus
from ondevice.corpus.excerpts import passages
from ondevice.dragon.live.node import Documents
from ondevice.retrieval.store import sparse_index

SUFFIXES = (".txt", ".md", ".rst")
CORPUS = "corpus"  # the name that stands for the documentation corpus


def documents(source: str, part: str = "1/1", most: int | None = None, length: int = 64) -> Documents:
    """Documents with a BM25 index.

    source: a JSON-lines file with a `text` in each line; a folder of .txt, .md and .rst files, whose paragraphs are
        the documents; or `corpus`, the passages of the documentation corpus's train split.
    part: `i/n` takes the documents whose text's hash is i - 1 modulo n: n sides share a corpus and none is on two.
    most: at most so many, those of the lowest hashes. length: tokens of a corpus passage.
    Raises ValueError on a source that is none of these, an empty one, a line that is no document, and a wrong part.
    """
    which, of = _part(part)
    chosen = sorted((_hash(text), text) for text in dict.fromkeys(_texts(source, length)))
    texts = [text for number, text in chosen if number % of == which][:most]
    if not texts:
        raise ValueError(f"Part {part} of {source!r} has no document.")
    return Documents(texts, sparse_index(texts))


def write(path: Path, texts: Sequence[str]) -> None:
    """A JSON-lines file that `documents` reads."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def _texts(source: str, length: int) -> list[str]:
    path = Path(source)
    if source == CORPUS:
        tokenizer = corpus.tokenizer()
        return [found.text for found in passages(corpus.documents("train"), tokenizer, length)]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        found = [part.strip() for file in files for part in file.read_text(encoding="utf-8").split("\n\n")]
        return [text for text in found if text]
    if path.is_file():
        return [_line(number, line) for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)]
    raise ValueError(f"There are no documents at {source!r}: neither a file, nor a folder, nor `{CORPUS}`.")


def _line(number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"Line {number} of the documents is no JSON object with a `text`.")
    return text


def _part(part: str) -> tuple[int, int]:
    which, _, of = part.partition("/")
    if not (which.isdigit() and of.isdigit() and 1 <= int(which) <= int(of)):
        raise ValueError(f"A part is `i/n` with i from 1 to n, not {part!r}.")
    return int(which) - 1, int(of)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
