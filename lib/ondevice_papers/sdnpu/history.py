"""The outputs of earlier requests of a task group, which later ones resemble (sections 2.2 and 3.3), kept on disk."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ondevice import assets

LIMIT = 2**20  # bytes: some 260,000 tokens
_FORMAT = "sd.npu history 1"
_KEPT = 0.75  # of the limit, when old responses are dropped, so that it does not happen with every response
_FRAME = 8  # bytes before each record: how many tokens, and the checksum of these four bytes and the tokens'


class History:
    """The finished responses of one task group, oldest first; in a file where a path is given, else in memory.

    vocabulary: V; ids are below it. tokenizer: digest of the tokenizer whose ids these are.
    limit: most bytes; the oldest responses are dropped to stay below. Of a longer response the last tokens are kept.
    dropped: how many responses were dropped so far.

    The file is a line that says whose it is, and then a record for each response: its number of tokens, a checksum, its
    tokens, all as little-endian 32-bit integers. It is only appended to, and replaced whole when responses are dropped.
    After a crash at any byte the records that are whole are read; the rest is dropped, with a warning. One process at
    a time may write. Nothing is pickled.
    Raises ValueError on a file of another tokenizer or vocabulary, on one that is no history, and on a limit too small.
    """

    def __init__(self, vocabulary: int, tokenizer: str = "", path: Path | None = None, limit: int = LIMIT) -> None:
        self.vocabulary, self.tokenizer, self.limit = vocabulary, tokenizer, limit
        self.path = None if path is None else Path(path)
        self.responses: list[tuple[int, ...]] = []
        self.dropped = 0
        self._header = _header(vocabulary, tokenizer)
        if vocabulary < 1:
            raise ValueError(f"A vocabulary has at least one token id, not {vocabulary}.")
        if _KEPT * limit < len(self._header) + _size([0]):
            raise ValueError(f"A history of {limit} bytes could not hold a response.")
        self._bytes = len(self._header)
        if self.path is not None:
            self._open(self.path)

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def size(self) -> int:
        """Bytes of the history file, or that it would have if there were one."""
        return self._bytes

    def append(self, response: Sequence[int]) -> None:
        """Add a finished response; an empty one is not kept. Raises ValueError on ids outside the vocabulary."""
        if not len(response):
            return
        if not 0 <= min(response) <= max(response) < self.vocabulary:
            odd = min(response) if min(response) < 0 else max(response)
            raise ValueError(f"A response has token ids from 0 to {self.vocabulary - 1}, not {odd}.")
        room = (int(_KEPT * self.limit) - len(self._header) - _FRAME) // 4
        kept = tuple(map(int, response[-room:]))
        full = self._bytes + _size(kept) > self.limit
        if self.path is not None and not full:
            _append(self.path, _record(kept), self._bytes)
        self.responses.append(kept)
        self._bytes += _size(kept)
        if full:
            self._drop()
            self._replace()

    def _drop(self) -> None:
        """Drop the oldest responses, until the rest is well below the limit."""
        first = 0
        while self._bytes > _KEPT * self.limit:
            self._bytes -= _size(self.responses[first])
            first += 1
        del self.responses[:first]
        self.dropped += first

    def _replace(self) -> None:
        if self.path is not None:
            with assets.writing(self.path) as temporary:
                temporary.write_bytes(b"".join([self._header, *map(_record, self.responses)]))

    def _open(self, path: Path) -> None:
        content = path.read_bytes() if path.is_file() else b""
        if not content.startswith(self._header):
            self._refuse(path.name, content)
            self._replace()
            return
        self.responses, end = _records(content, len(self._header), self.vocabulary)
        self._bytes = end
        if end < len(content):
            _warn(path.name, len(content) - end, len(self.responses))
            os.truncate(path, end)  # so that what is appended follows whole records
        if self._bytes > self.limit:
            self._drop()
            self._replace()

    def _refuse(self, name: str, content: bytes) -> None:
        """Raise ValueError, unless all there is of the file is the beginning of its right header."""
        if self._header.startswith(content):
            if content:
                _warn(name, len(content), 0)
            return
        try:
            header = json.loads(content[: content.index(b"\n")])
            identity = header["format"], header["tokenizer"], header["vocabulary"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{name} is no history of responses.") from None
        if identity[0] != _FORMAT:
            raise ValueError(f"{name} has the format {identity[0]!r}, not {_FORMAT!r}.")
        raise ValueError(
            f"{name} was made for another tokenizer ({identity[1]!r} with {identity[2]} ids, "
            f"not {self.tokenizer!r} with {self.vocabulary})."
        )


def _header(vocabulary: int, tokenizer: str) -> bytes:
    named = {"format": _FORMAT, "tokenizer": tokenizer, "vocabulary": vocabulary}
    return json.dumps(named).encode() + b"\n"


def _size(response: Sequence[int]) -> int:
    return _FRAME + 4 * len(response)


def _record(response: Sequence[int]) -> bytes:
    """The count is checksummed, too, so that a damaged one is not taken for the length of what follows."""
    count = _integers([len(response)])
    tokens = _integers(response)
    return count + _integers([crc32(count + tokens)]) + tokens


def _integers(values: Sequence[int]) -> bytes:
    return np.asarray(values, "<u4").tobytes()


def _records(content: bytes, start: int, vocabulary: int) -> tuple[list[tuple[int, ...]], int]:
    """The whole records from `start` on, and where the last of them ends."""
    responses = []
    while start + _FRAME <= len(content):
        count, checksum = (int(value) for value in np.frombuffer(content, "<u4", 2, start))
        end = start + _FRAME + 4 * count
        if not count or end > len(content):
            break
        if crc32(content[start : start + 4] + content[start + _FRAME : end]) != checksum:
            break
        tokens: NDArray[np.uint32] = np.frombuffer(content, "<u4", count, start + _FRAME)
        if tokens.max() >= vocabulary:
            break
        responses.append(tuple(tokens.tolist()))
        start = end
    return responses, start


def _append(path: Path, record: bytes, end: int) -> None:
    """Write a record behind the first `end` bytes, and wait until it is on the disk; if that fails, take it back."""
    with path.open("ab") as file:
        try:
            file.write(record)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def _warn(name: str, lost: int, kept: int) -> None:
    warnings.warn(f"The last {lost} bytes of {name} are damaged and dropped; {kept} responses are kept.", stacklevel=4)
