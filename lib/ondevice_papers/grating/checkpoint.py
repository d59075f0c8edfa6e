"""Weights on disk: where each tensor of a model's safetensors files lies, and reading its bytes past the page cache.

Only the files' headers are read to find the tensors; no tensor is opened by a library or mapped into memory. Bytes are
read directly (O_DIRECT) where the file system can, and else through the page cache, which is then told to drop them. So
the memory that a run needs is the memory that it holds, and the speed of the disk is the disk's. `checksums` knows what
the bytes were.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
Transfer = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev

PAGE = 4096  # bytes: places in the file and in memory are multiples of it in direct reads
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes, as in safetensors itself
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
        """Read the headers of a folder's model.safetensors, or else of the files that its index names.

        Raises FileNotFoundError where there are none, and ValueError on a damaged or truncated file, an index that
        does not fit, or tensors that are no whole transformer.
        """
        folder = Path(folder)
        if (folder / SINGLE).is_file():  # transformers, too, reads it where an index stands beside it
            stored = _header(folder / SINGLE)
        elif (folder / INDEX).is_file():
            stored = _sharded(folder)
        else:
            raise FileNotFoundError(f"{folder.name} has neither {SINGLE} nor {INDEX}: no weights to stream.")
        tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(_COMPUTED)}
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
    merged: list[Extent] = []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
        last = merged[-1] if merged else None
        if last and last.file == tensor.file and tensor.offset - last.offset - last.length < PAGE:
            merged[-1] = Extent(last.file, last.offset, tensor.offset + tensor.length - last.offset)
        elif tensor.length:
            merged.append(Extent(tensor.file, tensor.offset, tensor.length))
    return merged


class PastCache:
    """A file that is read and written past the page cache where its file system can (O_DIRECT); else pages are dropped.

    mode: "rb" or "r+b".
    """

    def __init__(self, path: Path, mode: str = "rb") -> None:
        self.plain = _opened(path, mode)
        self._direct = _opened(path, mode, os.O_DIRECT) if hasattr(os, "O_DIRECT") else None

    def transfer(self, call: Transfer, memory: memoryview, offset: int, least: int) -> int:
        """Bytes read or written, in whole pages: `least` or more, fewer only where the file ends."""
        done = 0
        while done < least:
            position = offset + done
            direct = self._direct if position % PAGE == 0 else None  # after a short transfer the place is no page's
            try:
                count = call((direct or self.plain).fileno(), [memory[done:]], position)
            except OSError as error:
                if direct is None or error.errno != errno.EINVAL:
                    raise
                self._direct = None  # opened, but not able to: some network and stacked file systems
                continue
            if direct is None:
                if self.plain.writable():
                    os.fsync(self.plain.fileno())  # pages that are not written yet cannot be dropped
                drop_pages(self.plain.fileno(), position, count)
            if not count:
                break
            done += count
        return done

    def close(self) -> None:
        """Close both descriptors of the file."""
        for file in (self.plain, self._direct):
            if file is not None:
                file.close()


class Reader:
    """Reads extents of weight files into memory."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = {file: PastCache(file) for file in files}

    def read(self, extent: Extent, into: memoryview) -> None:
        """Fill page-aligned memory of `extent.span` bytes with the pages of an extent.

        Raises ValueError where the file ends before the extent does, and OSError where the disk fails.
        """
        wanted = extent.offset + extent.length - extent.first
        try:
            done = self._files[extent.file].transfer(os.preadv, into[: extent.span], extent.first, wanted)
        except OSError as error:
            raise named(error, extent.file) from error
        if done < wanted:
            early = f"ended at byte {extent.first + done}, {wanted - done} bytes before the last one wanted"
            raise ValueError(f"{extent.file.name} {early}: it is truncated.")

    def handle(self, file: Path) -> int:
        """The descriptor of a file for small reads through the page cache, without read-ahead."""
        return self._files[file].plain.fileno()

    def close(self) -> None:
        """Close all weight files."""
        for file in self._files.values():
            file.close()


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


def _opened(path: Path, mode: str = "rb", flags: int = 0) -> Any:
    """The unbuffered file, without read-ahead; None where its file system does not know the flags."""
    try:
        opened = open(path, mode, buffering=0, opener=lambda name, own: os.open(name, own | flags))  # noqa: SIM115
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            return None
        raise
    if mode == "rb" and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return opened


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    """The tensors that the folder's index names, each from its own file."""
    try:
        file_of = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(file_of.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{INDEX} of {folder.name} is damaged: it has no map of tensors to files.") from None
    headers = {}
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise ValueError(f"{INDEX} of {folder.name} names {file!r}, which is no file of the folder.")
        headers[file] = _header(folder / file)
    for name, file in file_of.items():
        if name not in headers[file]:
            raise ValueError(f"{INDEX} of {folder.name} has {name} in {file}, where it is not.")
    return {name: headers[file][name] for name, file in file_of.items()}


def _header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises ValueError unless its header and its length agree to the byte."""
    with contextlib.closing(_opened(path)) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"{path.name} is damaged or truncated: its {size} bytes do not hold its header.")
        raw = file.read(length)
        drop_pages(file.fileno(), 0, 8 + length)
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        tensors = [_tensor(path, name, entry, 8 + length) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is damaged: its header cannot be read ({str(error)[:100]}).") from None
    end = 8 + length
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.length)):
        if tensor.offset != end:
            raise ValueError(f"{path.name} is damaged: {tensor.name} begins at byte {tensor.offset}, not {end}.")
        end += tensor.length
    if end != size:
        raise ValueError(f"{path.name} is {'truncated' if size < end else 'damaged'}: {size} bytes, not {end}.")
    return {tensor.name: tensor for tensor in tensors}


def _tensor(path: Path, name: str, entry: Mapping[str, Any], start: int) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the type {entry['dtype']!r}")
    dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if any(type(value) is not int or value < 0 for value in (*shape, begin, end)):
        raise ValueError(f"{name} has a shape or place that is no count")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has {end - begin} bytes, not those of {shape}")
    return StoredTensor(name, path, start + begin, end - begin, dtype, shape)
