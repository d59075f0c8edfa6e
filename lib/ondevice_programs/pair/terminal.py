"""An answer as a person sees it: tokens as they are decided, drafts as provisional, sources and account after it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from ondevice_programs.pair.answer import Answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DIM, _PLAIN, _CLEAR = "\x1b[2m", "\x1b[0m", "\x1b[K"
LEANS = 0.75  # a statement's mean share of the device's documents from which it is marked


class Stream:
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
    for token, one in itertools.zip_longest(answer.tokens, leaning):
        held.append(token)
        shares += [] if one is None else [one]
        text = str(tokenizer.decode(held, skip_special_tokens=True))
        if re.search(r"([.!?]|\n)\s*$", text) and text.strip():
            yield text.strip(), sum(shares) / len(shares) if shares else None
            held = []
            shares = []
    text = str(tokenizer.decode(held, skip_special_tokens=True)).strip()
    if text:
        yield text, sum(shares) / len(shares) if shares else None


def notes(answer: Answer, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What is said after an answer: why the device went alone, sources, statements on private text, the account."""
    found = []
    if answer.alone_from is not None:
        where = "The device answered alone" if not answer.alone_from else f"Alone from token {answer.alone_from}"
        found.append(f"{where}: {answer.reason.rstrip('.')}.")
    if answer.sources:
        found.append("Sources:")
    part = {"device": answer.share, "cloud": None if answer.share is None else 1 - answer.share}
    for side, cited in answer.sources:
        whole = part[side] if answer.alone_from != 0 else 1.0 if side == "device" else 0.0
        known = f"{100 * cited.weight * (whole or 0):.0f} %"
        weight = known if whole is not None else f"{100 * cited.weight:.0f} % of its side"
        found.append(f"  {cited.file}:{cited.paragraph} ({side}, {weight})")
    marked = [text for text, one in statements(answer, tokenizer) if one is not None and one >= LEANS]
    if answer.connections:
        found += [f"From this device's documents: {text}" for text in marked]
    sizes = ", ".join(f"{kind} {size}" for kind, size in answer.left.items())
    found.append(f"Left this device: {answer.sent} bytes ({sizes}); came: {answer.received}."
                 if answer.sent else "Nothing left this device.")  # fmt: skip
    kept = [f"{name} {kept} of {decided}" for name, (decided, kept) in
            (("device", answer.device), ("cloud", answer.cloud)) if decided]  # fmt: skip
    accepted = f" Drafts accepted: {', '.join(kept)}." if kept else ""
    pace = f", then {1e3 * answer.per_token:.0f} ms each" if len(answer.tokens) > 1 else ""
    first = f"first after {1e3 * answer.ttft:.0f} ms" if answer.times else "none"
    found.append(f"{len(answer.tokens)} tokens, {first}{pace}.{accepted}")
    return found


def as_json(query: str, answer: Answer, tokenizer: PreTrainedTokenizerBase) -> str:
    """The whole account, in a line."""
    account = {name: value for name, value in vars(answer).items() if name not in ("evidence", "sources")}
    return json.dumps({
        "query": query, **account,
        "sources": [{"side": side, "file": one.file, "paragraph": one.paragraph, "weight": round(one.weight, 4)}
                    for side, one in answer.sources],
        "statements": [{"text": text, "device_share": share} for text, share in statements(answer, tokenizer)],
    })  # fmt: skip
