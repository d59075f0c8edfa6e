"""Passages of a file: its text, out of any of the formats, in paragraphs, none longer than a prompt takes."""

from __future__ import annotations

import codecs
import io
import json
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ondevice.digests import tokenizer_digest
from ondevice_programs.pair.decoder import Template
from ondevice_programs.pair.node import PLAIN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Placed = tuple[int, str]  # (place from 1, text)

EMPTY, UNREADABLE, UNKNOWN = "empty", "unreadable", "of another kind"
NO_PYPDF = "PDF, which `pip install ondevice[pair]` reads"
_MARKS = (  # UTF-32's begin as UTF-16's do
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_PARAGRAPHS = re.compile(r"\n\s*\n")
_TOP_LEVEL = re.compile(r"\n\s*\n(?=\S)")
_BREAKS = (_PARAGRAPHS, re.compile(r"\n|(?<=[.!?])\s|(?<=[。！？])"), re.compile(r"\s"))  # the best first
_BLOCKS = [
    "address", "article", "aside", "blockquote", "body", "dd", "details", "div", "dl", "dt", "figcaption", "figure",
    "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre",
    "section", "summary", "table", "title", "tr", "ul",
]  # fmt: skip
_WIDEST = 6  # characters a token, where a passage's end is looked for first
_SLACK = 8  # tokens: what a tokenizer may add where a text begins


class Skipped(Exception):
    """Why a file has no passages. reason: EMPTY, UNREADABLE, UNKNOWN or NO_PYPDF. detail: more of it, or nothing."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Splitter:
    """Cuts a text into pieces that a prompt takes whole.

    longest: tokens of a prompt up to its document's end. Raises ValueError where these leave no room for a document.
    """

    tokenizer: PreTrainedTokenizerBase
    longest: int = 512
    template: Template = PLAIN

    def __post_init__(self) -> None:
        if self._before + _SLACK > self.longest:
            raise ValueError(f"A document has {self._before} tokens before it, so that {self.longest} leave no room.")

    @cached_property
    def key(self) -> str:
        """What the pieces depend on."""
        return f"{tokenizer_digest(self.tokenizer)} {self.longest} {self.template.text}"

    def __call__(self, text: str) -> list[str]:
        """Pieces of the text in order, all of it but blanks at their ends.

        They end with a paragraph, else a line or sentence, else a word, of the second half of what fits; else anywhere.
        """
        pieces = []
        start = 0
        while start < len(text):
            end = self._end(text, start)
            pieces.append(text[start:end].strip())
            start = end
        return [piece for piece in pieces if piece]

    def _end(self, text: str, start: int) -> int:
        size = min(_WIDEST * self.longest, len(text) - start)
        while True:
            end = start + size
            if end < len(text):
                end = _break(text, start, end)
            piece = text[start:end].strip()
            if self._before + _SLACK + len(piece) <= self.longest and piece.isascii():
                return end  # no tokenizer makes more tokens of ASCII than there are letters
            tokens = len(self.template.prefix(self.tokenizer, piece))
            if tokens <= self.longest or end == start + 1:
                return end
            fit = (end - start) * (self.longest - self._before) // (tokens - self._before)
            size = max(1, min(fit, end - start - 1))

    @cached_property
    def _before(self) -> int:
        """Tokens before a document."""
        return len(self.template.prefix(self.tokenizer, ""))


def _break(text: str, low: int, high: int) -> int:
    """Where a piece of text[low:high] best ends: within its second half, or at `high`."""
    for pattern in _BREAKS:
        ends = [match.end() for match in pattern.finditer(text, (low + high + 1) // 2, high)]
        if ends:
            return ends[-1]
    return high


def blocks(suffix: str, data: bytes) -> list[Placed]:
    """The paragraphs of a file's bytes with their places. suffix: in lower case. Raises Skipped where it has none."""
    if suffix not in FORMATS:
        raise Skipped(UNKNOWN)
    try:
        paragraphs = [(number, _valid(text).strip()) for number, text in FORMATS[suffix](data)]
    except Skipped:
        raise
    except Exception as error:  # whatever a reader of a foreign format raises
        raise Skipped(UNREADABLE, " ".join(_valid(str(error)).split())[:100] or type(error).__name__) from None
    if not any(text for _, text in paragraphs):
        raise Skipped(EMPTY)
    return [(number, text) for number, text in paragraphs if text]


def decoded(data: bytes) -> str:
    """A text file's bytes as text, with \\n as its line break: by its mark, else UTF-8, else guessed.

    Raises Skipped where it is none.
    """
    text = next((data.decode(encoding) for mark, encoding in _MARKS if data.startswith(mark)), None)
    if text is None:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = _guessed(data)
    if "\0" in text:
        raise Skipped(UNREADABLE, "no text in a known encoding")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _guessed(data: bytes) -> str:
    from charset_normalizer import from_bytes

    best = from_bytes(data).best()
    return "\0" if best is None else str(best)


def _valid(text: str) -> str:
    """Halves of surrogate pairs, which JSON and PDF may hold, are no text to a tokenizer."""
    return text.encode("utf-8", "replace").decode()


def _text(data: bytes) -> Iterable[Placed]:
    return enumerate(filter(str.strip, _PARAGRAPHS.split(decoded(data))), 1)


def _python(data: bytes) -> Iterable[Placed]:
    return enumerate(filter(str.strip, _TOP_LEVEL.split(decoded(data))), 1)


def _lines(data: bytes) -> Iterable[Placed]:
    for number, line in enumerate(decoded(data).split("\n"), 1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str) or not text.strip():
                raise Skipped(UNREADABLE, f"line {number} is no JSON object with a `text`")
            yield number, text


def _html(data: bytes) -> Iterable[Placed]:
    from bs4 import BeautifulSoup, NavigableString

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what looks like something else than HTML
        soup = BeautifulSoup(decoded(data), "html.parser")
    for string in soup.find_all(string=True):
        if type(string) is NavigableString and not string.find_parent("pre"):
            string.replace_with(re.sub(r"\s+", " ", string))
    for tag in soup("br"):
        tag.replace_with("\n")
    for tag in soup(["td", "th"]):
        tag.insert_after(" ")
    for tag in soup(_BLOCKS):
        tag.insert_before("\n\n")
        tag.insert_after("\n\n")
    return enumerate(filter(str.strip, _PARAGRAPHS.split(soup.get_text())), 1)


def _notebook(data: bytes) -> Iterable[Placed]:
    import nbformat

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of cells without ids
        cells = nbformat.reads(decoded(data), as_version=4).cells
    return [(number, cell.source) for number, cell in enumerate(cells, 1) if cell.cell_type != "raw"]


def _pdf(data: bytes) -> Iterable[Placed]:
    try:
        import pypdf
    except ImportError:
        raise Skipped(NO_PYPDF) from None
    return [(number, page.extract_text()) for number, page in enumerate(pypdf.PdfReader(io.BytesIO(data)).pages, 1)]


FORMATS: dict[str, Callable[[bytes], Iterable[Placed]]] = {
    ".txt": _text,
    ".md": _text,
    ".rst": _text,
    ".html": _html,
    ".htm": _html,
    ".ipynb": _notebook,
    ".py": _python,
    ".pdf": _pdf,
    ".jsonl": _lines,
}
