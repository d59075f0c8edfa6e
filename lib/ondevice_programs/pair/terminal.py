"""An answer as a person sees it: tokens as they are decided, drafts as provisional, sources and account after it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from ondevice_programs.pair.answer import Answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ondevice_programs.pair.node import Documents

_DIM, _PLAIN, _CLEAR = "\x1b[2m", "\x1b[0m", "\x1b[K"
WORD = re.compile(r"\w+(?:[.,:'’-]\w+)*")
# Words that stand in any text, so that they say nothing about one.
_EVERYWHERE = """a an the of to in on at by for from with and or not no is are was were be been has have had do does
this that these those it its as if then than which who what when where how but so can may will would should must"""
FUNCTION_WORDS = frozenset(_EVERYWHERE.split())
_KINDS = {  # of messages, in words
    "Begin": "the question",
    "Target": "decided tokens",
    "Draft": "drafts with their distributions",
    "Switch": "the aggregator's moves, with drafts",
    "Resume": "resumptions",
    "End": "the end",
}
LEANS = 0.75  # a statement's mean share of the device's documents from which it is marked


class AnswerWriter:
    """Writes an answer's text as it comes. On a terminal the device's undecided drafts follow it, dim, until they are
    decided or replaced; they never wrap, so that they can be erased.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: IO[str]) -> None:
        self._tokenizer, self._out, self._shows = tokenizer, out, out.isatty()
        self._tokens: list[int] = []
        self._written = ""

    def token(self, token: int) -> None:
        """A decided token. Text whose last character is not whole yet waits for the next one."""
        self._tokens.append(token)
        text = self._text(self._tokens)
        if not text.endswith("\ufffd"):
            self._write(text[len(self._written) :])
            self._written = text

    def drafts(self, tokens: list[int]) -> None:
        """This side's undecided drafts."""
        if not self._shows:
            return
        text = self._text(self._tokens + tokens)[len(self._written) :].replace("\n", " ").replace("\ufffd", "")
        column = len(self._written.rpartition("\n")[2]) % max(1, shutil.get_terminal_size().columns)
        text = text[: max(0, shutil.get_terminal_size().columns - column - 1)]
        back = f"\x1b[{len(text)}D" if text else ""
        self._out.write(f"{_CLEAR}{_DIM}{text}{_PLAIN}{back}")
        self._out.flush()

    def end(self) -> None:
        """The answer is whole."""
        self._write(self._text(self._tokens)[len(self._written) :] + "\n")

    def _write(self, text: str) -> None:
        self._out.write((_CLEAR if self._shows else "") + text)
        self._out.flush()

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def statements(answer: Answer, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, float | None]]:
    """The answer's sentences and lines, each with the mean share of the device's documents in its tokens, if known."""
    leaning, held, shares = answer.leaning, list[int](), list[float]()
    for token, share in itertools.zip_longest(answer.tokens, leaning):
        held.append(token)
        shares += [] if share is None else [share]
        text = str(tokenizer.decode(held, skip_special_tokens=True))
        if re.search(r"([.!?]|\n)\s*$", text) and text.strip():
            yield text.strip(), sum(shares) / len(shares) if shares else None
            held = []
            shares = []
    text = str(tokenizer.decode(held, skip_special_tokens=True)).strip()
    if text:
        yield text, sum(shares) / len(shares) if shares else None


def texts_used(answer: Answer, documents: Documents) -> list[str]:
    """The device's texts that an answer was made from."""
    used = {(document.file, document.paragraph) for side, document in answer.sources if side == "device"}
    return [
        text
        for text, source in zip(documents.texts, documents.sources, strict=True)
        if (source.file[-1024:], source.paragraph) in used
    ]


def readable(answer: Answer, tokenizer: PreTrainedTokenizerBase, private: Sequence[str]) -> tuple[int, list[str]]:
    """How many words of the answer the cloud could read, and which of them stand in private texts, each once.

    private: the passages that the device answered from, as of `texts_used`. Function words stand everywhere and are not
    listed.
    """
    words = WORD.findall(str(tokenizer.decode(answer.tokens[: answer.readable], skip_special_tokens=True)))
    marked = {word.lower() for text in private for word in WORD.findall(text)} - FUNCTION_WORDS
    listed = dict.fromkeys(word for word in words if word.lower() in marked)
    return len(words), list(listed)


def notes(answer: Answer, tokenizer: PreTrainedTokenizerBase, private: Sequence[str]) -> list[str]:
    """What is said after an answer: why the device went alone, sources, statements on private text, the account.

    private: as of `readable`.
    """
    lines = []
    if answer.alone_from is not None:
        where = "The device answered alone" if not answer.alone_from else f"Alone from token {answer.alone_from}"
        lines.append(f"{where}: {answer.reason.rstrip('.')}.")
    if answer.sources:
        lines.append("Sources:")
    part = {"device": answer.share, "cloud": None if answer.share is None else 1 - answer.share}
    for side, cited in answer.sources:
        whole = part[side] if answer.alone_from != 0 else 1.0 if side == "device" else 0.0
        percent = f"{100 * cited.weight * (whole or 0):.0f} %"
        weight = percent if whole is not None else f"{100 * cited.weight:.0f} % of its side"
        lines.append(f"  {cited.file}:{cited.paragraph} ({side}, {weight})")
    marked = [text for text, share in statements(answer, tokenizer) if share is not None and share >= LEANS]
    if answer.connections:
        lines += [f"From this device's documents: {text}" for text in marked]
    if answer.connections:
        count, listed = readable(answer, tokenizer, private)
        whole = len(WORD.findall(answer.text))
        listing = "none stands in private text"
        if listed:
            verb = "stands" if len(listed) == 1 else "stand"
            listing = f"{len(listed)} {verb} in private text: {', '.join(listed)}"
        lines.append(f"The cloud could read the question and {count} of the answer's {whole} words; {listing}.")
    sizes = ", ".join(f"{_KINDS.get(kind, kind)} {size}" for kind, size in answer.left.items())
    lines.append(
        f"Left this device: {answer.sent} bytes ({sizes}); came: {answer.received}."
        if answer.sent
        else "Nothing left this device."
    )
    kept = [
        f"{name} {kept} of {decided}"
        for name, (decided, kept) in (("device", answer.device), ("cloud", answer.cloud))
        if decided
    ]
    accepted = f" Drafts accepted: {', '.join(kept)}." if kept else ""
    pace = f", then {1e3 * answer.per_token:.0f} ms each" if len(answer.tokens) > 1 else ""
    first = f"first after {1e3 * answer.ttft:.0f} ms" if answer.times else "none"
    lines.append(f"{len(answer.tokens)} tokens, {first}{pace}.{accepted}")
    return lines


def as_json(query: str, answer: Answer, tokenizer: PreTrainedTokenizerBase, private: Sequence[str]) -> str:
    """The whole account, in a line. private: as of `readable`."""
    count, listed = readable(answer, tokenizer, private)
    account = {name: value for name, value in vars(answer).items() if name not in ("evidence", "sources")}
    return json.dumps(
        {
            "query": query,
            **account,
            "words": {"answer": len(WORD.findall(answer.text)), "cloud_could_read": count, "in_private_text": listed},
            "sources": [
                {"side": side, "file": cited.file, "paragraph": cited.paragraph, "weight": round(cited.weight, 4)}
                for side, cited in answer.sources
            ],
            "statements": [{"text": text, "device_share": share} for text, share in statements(answer, tokenizer)],
        }
    )
