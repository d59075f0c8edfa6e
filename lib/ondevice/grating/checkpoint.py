"""Weights on disk: where each tensor of a model's safetensors files lies, and reading its bytes past the page cache.

Only the files' headers are read to find the tensors; no library reads a tensor or keeps a file mapped into memory.
Bytes are read directly (O_DIRECT) where the file system can, and else through the page cache, which is then told to
drop them. So the memory that a run needs is the memory that it holds, and the speed of the disk is the disk's.
`checksums` knows what the bytes were.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import safetensors
import torch

T = TypeVar("T")

PAGE = 4096  # bytes: places in the file and in memory are multiples of it in direct reads
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer)\.(\d+)\.(.+)")
_TABLE = re.compile(r"(?:^|\.)(?:embed_tokens|word_embeddings|tok_embeddings)\.weight")
_HEAD = "lm_head.weight"
_COMPUTED = ("rotary_emb.inv_freq", "position_ids")  # in some old files; models compute them
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `length` bytes from byte `offset` on."""

    name: str
    file: Path
    offset: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Groups(Generic[T]):
    """A model's tensors in groups.

    layers: of each layer, by the name inside it. table: the token embedding. head: the language model's output head,
    None where there is none of its own. rest: the others, by full name.
    """

    layers: tuple[Mapping[str, T], ...]
    table: T
    head: T | None
    rest: Mapping[str, T]


@dataclass(frozen=True)
class Extent:
    """Bytes of a file that are read together, with what of the pages around them comes along."""

    file: Path
    offset: int
    length: int

    @property
    def first(self) -> int:
        """Where the page begins that holds the first byte: the memory's first byte after a read."""
        return self.offset // PAGE * PAGE

    @property
    def span(self) -> int:
        """Bytes of memory that a read needs: whole pages."""
        return -(-(self.offset + self.length) // PAGE) * PAGE - self.first


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model's folder, by full name and in groups."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    groups: Groups[StoredTensor]

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Read the headers of a folder's model.safetensors, or of the files that its index names.

        Raises FileNotFoundError where there are none, and ValueError on a damaged or truncated file, an index that
        does not fit, or tensors that are no whole transformer.
        """
        folder = Path(folder)
        if (folder / INDEX).is_file():
            found = _sharded(folder)
        elif (folder / SINGLE).is_file():
            found = _header(folder / SINGLE)
        else:
            raise FileNotFoundError(f"{folder.name} has neither {SINGLE} nor {INDEX}: no weights to stream.")
        tensors = {name: tensor for name, tensor in found.items() if not name.endswith(_COMPUTED)}
        return cls(folder, tensors, grouped(tensors, folder.name))

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensors."""
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))


def grouped(tensors: Mapping[str, T], model: str) -> Groups[T]:
    """A model's tensors, or parameters, by full name, in groups. model: its name, for messages.

    Raises ValueError where there are no layers or one is missing, or there is not one token embedding.
    """
    layers: dict[int, dict[str, T]] = {}
    rest, tables, head = {}, {}, None
    for name, tensor in tensors.items():
        inside = _LAYER.search(name)
        if inside:
            layers.setdefault(int(inside[1]), {})[inside[2]] = tensor
        elif _TABLE.search(name):
            tables[name] = tensor
        elif name == _HEAD:
            head = tensor
        else:
            rest[name] = tensor
    if len(tables) != 1:
        raise ValueError(f"{model} must have one token embedding, not {len(tables)}.")
    missing = sorted(set(range(max(layers, default=0) + 1)) - set(layers))
    if missing:
        raise ValueError(f"{model} lacks layer {missing[0]}.")
    (table,) = tables.values()
    return Groups(tuple(layers[index] for index in range(len(layers))), table, head, rest)


def extents(tensors: Iterable[StoredTensor]) -> list[Extent]:
    """What to read for these tensors: those that follow each other in a file, or nearly so, at once."""
    found: list[Extent] = []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
        last = found[-1] if found else None
        if last and last.file == tensor.file and tensor.offset - last.offset - last.length < PAGE:
            found[-1] = Extent(last.file, last.offset, tensor.offset + tensor.length - last.offset)
        elif tensor.length:
            found.append(Extent(tensor.file, tensor.offset, tensor.length))
    return found


class Reader:
    """Reads extents of weight files into memory, by O_DIRECT where the file system can; else pages are dropped."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._plain = {file: _opened(file) for file in files}
        self._direct = {file: _opened(file, os.O_DIRECT) for file in files if hasattr(os, "O_DIRECT")}

    def read(self, extent: Extent, into: memoryview) -> None:
        """Fill page-aligned memory of `extent.span` bytes with the pages of an extent.

        Raises ValueError where the file ends before the extent does, and OSError where the disk fails.
        """
        end, done = extent.offset + extent.length - extent.first, 0
        while done < end:
            count = self._piece(extent, into[done : extent.span], extent.first + done)
            if not count:
                raise ValueError(
                    f"{extent.file.name} ended at byte {extent.first + done}, {end - done} bytes before the last one "
                    f"wanted: it is truncated."
                )
            done += count

    def handle(self, file: Path) -> int:
        """The descriptor of a file for small reads through the page cache, without read-ahead."""
        return self._plain[file].fileno()

    def close(self) -> None:
        """Close the files."""
        for file in [*self._plain.values(), *self._direct.values()]:
            if file is not None:
                file.close()

    def _piece(self, extent: Extent, into: memoryview, offset: int) -> int:
        """Bytes read, 0 at the file's end. After a short read the place is no page's, so the rest cannot be direct."""
        direct = self._direct.get(extent.file)
        if direct is not None and offset % PAGE == 0:
            try:
                return os.preadv(direct.fileno(), [into], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise named(error, extent.file) from error
                self._direct[extent.file] = None  # opened, but not able to: some network and stacked file systems
        plain = self._plain[extent.file].fileno()
        try:
            count = os.preadv(plain, [into], offset)
        except OSError as error:
            raise named(error, extent.file) from error
        drop_pages(plain, offset, count)
        return count


def pages(count: int) -> mmap.mmap:
    """At least `count` bytes of page-aligned memory of this process alone, which takes room only once it is used."""
    size = max(1, -(-count // PAGE)) * PAGE
    if hasattr(mmap, "MAP_ANONYMOUS"):  # without these flags Python's mapping is shared memory
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)


def drop_pages(handle: int, offset: int, length: int) -> None:
    """Take part of a file out of the page cache, the pages at both ends included."""
    if hasattr(os, "posix_fadvise"):
        first = offset // PAGE * PAGE
        os.posix_fadvise(handle, first, -(-(offset + length) // PAGE) * PAGE - first, os.POSIX_FADV_DONTNEED)


def named(error: OSError, file: Path) -> OSError:
    """The error of a read, with the file's name."""
    return OSError(error.errno, f"{error.strerror or error} (while weights were read)", file.name)


def _opened(file: Path, flags: int = 0) -> Any:
    """The unbuffered file, without read-ahead; None where its file system does not know the flags."""
    try:
        opened = open(file, "rb", buffering=0, opener=lambda path, mode: os.open(path, mode | flags))  # noqa: SIM115
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            return None
        raise
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return opened


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    """The tensors that the folder's index names, each from its own file."""
    try:
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{INDEX} of {folder.name} is damaged: it has no map of tensors to files.") from None
    headers = {}
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise ValueError(f"{INDEX} of {folder.name} names {file!r}, which is no file of the folder.")
        headers[file] = _header(folder / file)
    for name, file in places.items():
        if name not in headers[file]:
            raise ValueError(f"{INDEX} of {folder.name} has {name} in {file}, where it is not.")
    return {name: headers[file][name] for name, file in places.items()}


def _header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, once safetensors has found that its header and its length agree to the byte."""
    try:
        with safetensors.safe_open(path, "np"):
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path.name} is damaged or truncated ({error}).") from None
    with contextlib.closing(_opened(path)) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(start - 8))
        drop_pages(file.fileno(), 0, os.fstat(file.fileno()).st_size)  # the library's mapping read ahead
    found = dict[str, StoredTensor]()
    for name, entry in entries.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in _DTYPES:
                raise ValueError(f"{path.name} cannot be streamed: {name} has the type {entry['dtype']!r}.")
            found[name] = StoredTensor(
                name, path, start + begin, end - begin, _DTYPES[entry["dtype"]], tuple(entry["shape"])
            )
    return found
