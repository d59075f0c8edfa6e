"""What the bytes of weights were when a model was first opened, so that a damaged byte is an error and never a score.

A checksum (xxh3, faster than memory) of every tensor of a layer and of the rest, and one of every embedding row, as
rows are read alone. They are kept in the cache by the files' names, sizes and times: files that change afterwards
without telling, by a failing disk, are found out at the next read; files that are written anew are read anew.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ondevice import assets
from ondevice_papers.grating.checkpoint import Checkpoint, Extent, Reader, StoredTensor, pages

_PIECE = 4 << 20  # bytes read at a time


@dataclass(frozen=True)
class Checksums:
    """tensors: by full name. rows: [V] of the embedding table and of an output head of its own, by full name."""

    tensors: Mapping[str, int]
    rows: Mapping[str, NDArray[np.uint32]]

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> Checksums:
        """Those of an earlier run, or made now by reading the whole files once."""
        path = assets.cache_folder("grating") / f"{stamp(checkpoint)}.checksums.npz"
        with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            kept = assets.arrays(path)
            sums = dict(zip(kept["names"].tolist(), kept["sums"].tolist(), strict=True))
            return cls(sums, {name: kept[f"rows of {name}"] for name in kept["tables"].tolist()})
        computed = _computed(checkpoint)
        names = np.array(list(computed.tensors))
        tensor_sums = np.array(list(computed.tensors.values()), np.uint64)
        rows = {f"rows of {name}": of_rows for name, of_rows in computed.rows.items()}
        # Where nothing can be written, they are made anew every time.
        with contextlib.suppress(OSError), assets.writing(path) as temporary, temporary.open("wb") as file:
            tables = np.array(list(computed.rows))
            np.savez(file, names=names, sums=tensor_sums, tables=tables, **rows)  # type: ignore[arg-type]
        return computed

    def check(self, tensor: StoredTensor, data: memoryview) -> None:
        """Raise ValueError unless the bytes are the tensor's."""
        checksum = xxhash.xxh3_64()
        checksum.update(data)  # lets other threads run meanwhile, which the digest at once does not
        if checksum.intdigest() != self.tensors[tensor.name]:
            raise ValueError(f"{tensor.file.name} is damaged: {tensor.name} is not what it was when it was first read.")

    def check_row(self, table: StoredTensor, row: int, data: memoryview) -> None:
        """The same of one row of the embedding table."""
        if xxhash.xxh32_intdigest(data) != self.rows[table.name][row]:
            raise ValueError(f"{table.file.name} is damaged: row {row} of {table.name} is not what it was.")


def _computed(checkpoint: Checkpoint) -> Checksums:
    groups = checkpoint.groups
    reader = Reader(checkpoint.files)
    try:
        by_row = [table for table in (groups.table, groups.head) if table is not None]
        rows = {table.name: np.array(_rows(table, reader), np.uint32) for table in by_row}
        tensors = dict[str, int]()
        for tensor in checkpoint.tensors.values():
            if tensor.name not in rows:
                checksum = xxhash.xxh3_64()
                _pieces(tensor, reader, checksum.update, _PIECE)
                tensors[tensor.name] = checksum.intdigest()
    finally:
        reader.close()
    return Checksums(tensors, rows)


def _rows(table: StoredTensor, reader: Reader) -> list[int]:
    size = table.length // table.shape[0]
    sums = list[int]()

    def add(piece: memoryview) -> None:
        sums.extend(xxhash.xxh32_intdigest(piece[at : at + size]) for at in range(0, len(piece), size))

    _pieces(table, reader, add, max(1, _PIECE // size) * size)
    return sums


def _pieces(tensor: StoredTensor, reader: Reader, use: Callable[[memoryview], None], most: int) -> None:
    """A tensor's bytes, at most so many at a time."""
    memory = pages(most + 2 * 4096)
    with memoryview(memory) as view:
        for start in range(tensor.offset, tensor.offset + tensor.length, most):
            extent = Extent(tensor.file, start, min(most, tensor.offset + tensor.length - start))
            reader.read(extent, view)
            use(view[start - extent.first : start - extent.first + extent.length])


def stamp(checkpoint: Checkpoint, config: bytes = b"") -> str:
    """Names the files by their places, sizes and times, and a configuration by its content."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in checkpoint.files]
    return xxhash.xxh3_64_hexdigest(repr(stats).encode() + config)
