"""The header of a GGUF file: its facts by their keys, and where its tensors lie."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice import blocks

_MAGIC = b"GGUF"
PLAIN: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_VERSIONS = (2, 3)
_AXES = 4  # most that a tensor has
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in the file. format: its GGUF type. shape: outer axis first. offset, bytes: in the file."""

    format: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself. facts: by their keys. tensors: by their names in the file."""

    path: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    @property
    def name(self) -> str:
        """The file's."""
        return self.path.name

    def whole(self, key: str, default: int | None = None) -> int:
        """A fact that is a whole number above 0. Raises ValueError where it is not, or not there."""
        value = self.facts.get(key, default)
        if value is None:
            raise ValueError(f"{self.name} has no {key}.")
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.name} has {str(value)[:40]} as {key}, which is no whole number above 0.")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A fact that is a number above 0. Raises ValueError where it is not, or not there."""
        value = self.facts.get(key, default)
        if value is None:
            raise ValueError(f"{self.name} has no {key}.")
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ValueError(f"{self.name} has {str(value)[:40]} as {key}, which is no number above 0.")
        return float(value)


def numbers(path: Path, stored: Stored) -> NDArray[np.float32]:
    """A tensor in one of the formats `PLAIN`, in its shape."""
    data = np.fromfile(path, np.uint8, stored.bytes, offset=stored.offset)  # mapped, it would stay in memory
    values = data.view(PLAIN[stored.format]).reshape(stored.shape)
    if stored.format == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def read(path: Path) -> Header:
    """The header of a whole file of one model's tensors.

    Raises ValueError, with one sentence, on what is no GGUF, a part of a split file, big-endian, damaged or truncated,
    and on a tensor in a format that is not read.
    """
    with path.open("rb") as file:
        start = file.read(len(_LFS))
        if start == _LFS:
            raise ValueError(f"{path.name} is a Git LFS pointer, not the file that it points to: run `git lfs pull`.")
        if not start.startswith(_MAGIC):
            raise ValueError(f"{path.name} is no GGUF file; a model in another format is a folder.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _header(path, _Cursor(data))
            except (EOFError, UnicodeDecodeError) as error:
                raise ValueError(f"{path.name} is damaged or truncated: {error}.") from None


class _Cursor:
    """Reads numbers and texts one after another, from behind the magic on. Raises EOFError where they go on too far."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = len(_MAGIC)

    def skip(self, length: int) -> slice:
        """Where the next bytes lie, which must be there."""
        if self.at + length > len(self._data):
            raise EOFError(f"its header goes on behind the file's end, at byte {self.at}")
        start, self.at = self.at, self.at + length
        return slice(start, self.at)

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._data[self.skip(struct.calcsize("<" + form))])[0]

    def text(self) -> str:
        return self._data[self.skip(self.number("Q"))].decode("utf-8")

    def value(self, kind: int) -> Any:
        """The value of a fact, by the number of its type."""
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        entries, count = (self.number("I"), self.number("Q")) if kind == _ARRAY else (kind, 0)
        if entries == _STRING and self.at + 8 * count <= len(self._data):  # a text has 8 bytes of length
            return [self.text() for _ in range(count)]
        if entries not in _SCALARS:
            raise EOFError(f"a value of type {entries} at byte {self.at} is none that GGUF has")
        form = np.dtype(_SCALARS[entries]).newbyteorder("<")
        return np.frombuffer(self._data[self.skip(form.itemsize * count)], form).tolist()


def _header(path: Path, cursor: _Cursor) -> Header:
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        raise ValueError(f"{path.name} is big-endian: only little-endian GGUF files can be read.")
    if version not in _VERSIONS:
        raise ValueError(f"{path.name} is of GGUF's version {version}; 2 and 3 can be read.")
    tensors, count = cursor.number("Q"), cursor.number("Q")
    facts: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        if key in facts:
            raise ValueError(f"{path.name} says {key} twice.")
        facts[key] = cursor.value(cursor.number("I"))
    parts = facts.get("split.count", 1)
    if parts != 1:
        part = f"part {facts.get('split.no', 0) + 1} of {parts} of a split file"
        raise ValueError(f"{path.name} is {part}: join them first, with `llama-gguf-split --merge FIRST-PART WHOLE`.")
    described = [
        (cursor.text(), [cursor.number("Q") for _ in range(_axes(cursor))], cursor.number("I"), cursor.number("Q"))
        for _ in range(tensors)
    ]
    alignment = facts.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise EOFError(f"its alignment is {str(alignment)[:40]}")
    start = -(-cursor.at // alignment) * alignment
    size = path.stat().st_size
    stored: dict[str, Stored] = {}
    for name, lengths, number, offset in described:
        if name in stored:
            raise ValueError(f"{path.name} has {name} twice.")
        form, shape = _format(number), tuple(reversed(lengths))
        stored[name] = Stored(form, shape, start + offset, _bytes(path, name, form, shape))
        if stored[name].offset + stored[name].bytes > size:
            raise ValueError(f"{path.name} is truncated: {name} ends behind the file's end.")
    return Header(path, facts, stored)


def _axes(cursor: _Cursor) -> int:
    """How many a tensor has. Raises EOFError on none or more than there can be."""
    axes = cursor.number("I")
    if not 1 <= axes <= _AXES:
        raise EOFError(f"a tensor at byte {cursor.at} has {axes} axes")
    return axes


def _format(number: int) -> str:
    """A storage type's name by its number in the file."""
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return f"type {number}"


def _bytes(path: Path, name: str, form: str, shape: tuple[int, ...]) -> int:
    """How many a tensor takes. Raises ValueError on a format that is not read, and rows that are not whole blocks."""
    if form not in blocks.FORMATS and form not in PLAIN:
        readable = ", ".join([*blocks.FORMATS, *PLAIN])
        raise ValueError(f"{path.name} has {name} in {form}; {readable} can be read.")
    layout = blocks.FORMATS.get(form)
    weights, size = (layout.weights, layout.bytes) if layout else (1, np.dtype(PLAIN[form]).itemsize)
    if shape[-1] % weights:
        raise ValueError(f"{path.name} is damaged: rows of {shape[-1]} weights in {name} are no blocks of {form}.")
    count = 1
    for length in shape:
        count *= length
    return count // weights * size
