"""The outputs of earlier requests of a task group, which later ones resemble (sections 2.2 and 3.3), kept on disk."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from ondevice import assets

LIMIT = 250_000  # tokens
_KEPT = 0.75  # of the limit, when old responses are dropped, so that it does not happen with every response
_FORMAT = "sd.npu history 2"


class History:
    """The finished responses of one task group, oldest first; in a file where a path is given, else in memory.

    vocabulary: V; ids are below it. tokenizer: digest of the tokenizer whose ids these are. limit: most tokens; the
    oldest responses are dropped to stay below, `dropped` so far. Of a longer response the last tokens are kept.

    The file is a line of JSON that says whose it is, and then a line per response, a checksum and its ids. It is only
    appended to, and replaced whole when responses are dropped. After a crash the lines that are whole are read, and the
    rest is dropped, with a warning. One process at a time may write.
    Raises ValueError on a file of another tokenizer or vocabulary, on one that is no history, and on a limit below 4.
    """

    def __init__(self, vocabulary: int, tokenizer: str = "", path: Path | None = None, limit: int = LIMIT) -> None:
        if vocabulary < 1 or limit < 4:
            raise ValueError(f"A history has at least one token id and room for 4, not {vocabulary} and {limit}.")
        self.vocabulary, self.tokenizer, self.limit = vocabulary, tokenizer, limit
        self.path = None if path is None else Path(path)
        self.responses: list[tuple[int, ...]] = []
        self.dropped = 0
        self._header = json.dumps({"format": _FORMAT, "tokenizer": tokenizer, "vocabulary": vocabulary})
        if self.path is not None:
            self._read(self.path)

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def size(self) -> int:
        """Tokens of all responses."""
        return sum(map(len, self.responses))

    def append(self, response: Sequence[int]) -> None:
        """Add a finished response; an empty one is not kept. Raises ValueError on ids outside the vocabulary."""
        if not len(response):
            return
        if not 0 <= min(response) <= max(response) < self.vocabulary:
            odd = min(response) if min(response) < 0 else max(response)
            raise ValueError(f"A response has token ids from 0 to {self.vocabulary - 1}, not {odd}.")
        kept = tuple(map(int, response[-int(_KEPT * self.limit) :]))
        if self.path is not None:
            _append(self.path, _line(kept))
        self.responses.append(kept)
        if self.size > self.limit:
            self._drop()

    def _drop(self) -> None:
        """Drop the oldest responses, until the rest is well below the limit."""
        while self.size > _KEPT * self.limit:
            del self.responses[0]
            self.dropped += 1
        self._replace()

    def _text(self) -> str:
        return self._header + "\n" + "".join(map(_line, self.responses))

    def _replace(self) -> None:
        if self.path is not None:
            assets.write_text(self.path, self._text())

    def _read(self, path: Path) -> None:
        content = path.read_bytes() if path.is_file() else b""
        header, *lines = content.split(b"\n")
        if header != self._header.encode():
            self._refuse(path.name, header)
        for line in lines:
            response = _response(line, self.vocabulary)
            if not response:
                break
            self.responses.append(response)
        damaged = len(content) - len(self._text())
        if damaged > 0:
            words = f"The last {damaged} bytes of {path.name} are damaged and dropped; {len(self)} responses are kept."
            warnings.warn(words, stacklevel=3)
        if damaged:
            self._replace()
        if self.size > self.limit:
            self._drop()

    def _refuse(self, name: str, header: bytes) -> None:
        """Raise ValueError, unless all there is of the header is its beginning."""
        if self._header.encode().startswith(header):
            return
        try:
            named = json.loads(header)
            identity = named["format"], named["tokenizer"], named["vocabulary"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{name} is no history of responses.") from None
        if identity[0] != _FORMAT:
            raise ValueError(f"{name} has the format {identity[0]!r}, not {_FORMAT!r}.")
        raise ValueError(
            f"{name} was made for another tokenizer ({identity[1]!r} with {identity[2]} ids, "
            f"not {self.tokenizer!r} with {self.vocabulary})."
        )


def _line(response: Sequence[int]) -> str:
    ids = " ".join(map(str, response))
    return f"{crc32(ids.encode()):08x} {ids}\n"


def _response(line: bytes, vocabulary: int) -> tuple[int, ...]:
    """The ids of a whole line, none of a damaged one."""
    checksum, _, ids = line.partition(b" ")
    if checksum != f"{crc32(ids):08x}".encode():
        return ()
    response = tuple(map(int, ids.split()))
    return response if max(response, default=0) < vocabulary else ()


def _append(path: Path, line: str) -> None:
    """Write a line behind the file's end, and wait until it is on the disk; if that fails, take it back."""
    with path.open("ab") as file:
        end = file.tell()
        try:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise
