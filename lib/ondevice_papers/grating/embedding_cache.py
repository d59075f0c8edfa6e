"""The embedding table's rows of the tokens used lately, the others on disk (section 4.4)."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ondevice_papers.grating.checkpoint import Reader, StoredTensor, drop_pages, named, pages
from ondevice_papers.grating.checksums import Checksums

Integers = NDArray[np.int64]


class EmbeddingCache:
    """Rows of an embedding table [V, d] in a file: at most `capacity` in memory, which takes room only once it is used.

    The rows whose last request is the longest ago make room, never one that the same request has still to give.
    hits, misses: distinct rows of all requests so far.
    """

    def __init__(self, table: StoredTensor, capacity: int, reader: Reader, sums: Checksums | None = None) -> None:
        self.table = table
        self.capacity = min(max(1, capacity), table.shape[0])
        self.reader = reader
        self.sums = sums
        self.hits = self.misses = self.request = 0
        memory = pages(self.capacity * table.shape[1] * table.dtype.itemsize)
        self.kept = torch.frombuffer(memory, dtype=table.dtype)[: self.capacity * table.shape[1]].view(
            self.capacity, -1
        )
        self.slot = np.full(table.shape[0], -1, np.int32)  # [V] where a row is kept, -1: nowhere
        self.id = np.full(self.capacity, -1, np.int64)  # [capacity] which row is there
        self.used = np.zeros(self.capacity, np.int64)  # [capacity] the request that had it last

    def rows(self, ids: Tensor) -> Tensor:
        """[n, d] the rows of token ids [n]; where they are more than the cache holds, it is filled in turns."""
        wanted, index = np.unique(checked(ids, self.table.shape[0]), return_inverse=True)
        rows = torch.empty(len(index), self.table.shape[1], dtype=self.table.dtype)
        for turn in np.array_split(wanted, -(-len(wanted) // self.capacity)):
            self.fetch(turn)
            given = np.flatnonzero(np.isin(wanted, turn)[index])
            slots = self.slot[wanted[index[given]]].astype(np.int64)
            rows[torch.from_numpy(given)] = self.kept[torch.from_numpy(slots)]
        return rows

    def fetch(self, wanted: Integers) -> None:
        """Have these distinct rows, at most `capacity`, read into the slots used longest ago."""
        self.request += 1
        there = self.slot[wanted] >= 0
        missing = wanted[~there]
        self.hits, self.misses = self.hits + int(there.sum()), self.misses + len(missing)
        self.used[self.slot[wanted[there]]] = self.request
        slots = np.argsort(self.used, kind="stable")[: len(missing)]
        forgotten = self.id[slots]
        self.slot[forgotten[forgotten >= 0]] = -1  # before the read: one that fails leaves no wrong row behind
        self.id[slots] = -1
        self.used[slots] = 0
        read_into(self.table, missing, (bytes_of(self.kept[slot]) for slot in slots.tolist()), self.reader, self.sums)
        self.slot[missing], self.id[slots], self.used[slots] = slots, missing, self.request

    def close(self) -> None:
        """Give back the memory of all rows."""
        self.kept = torch.empty(0)


def read_rows(table: StoredTensor, ids: Tensor, reader: Reader, sums: Checksums | None = None) -> Tensor:
    """[n, d] rows of a table in a file for token ids [n]; nothing is kept."""
    wanted, index = np.unique(checked(ids, table.shape[0]), return_inverse=True)
    rows = torch.empty(len(wanted), table.shape[1], dtype=table.dtype)
    read_into(table, wanted, map(bytes_of, rows), reader, sums)
    return rows[torch.from_numpy(index)]


def checked(ids: Tensor, vocabulary: int) -> Integers:
    """Token ids [n] as an array. Raises ValueError on ids that have no row."""
    array: Integers = ids.cpu().numpy().astype(np.int64)
    if len(array) and not 0 <= array.min() <= array.max() < vocabulary:
        odd = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"Token ids are from 0 to {vocabulary - 1}, not {odd}.")
    return array


def bytes_of(row: Tensor) -> memoryview:
    """A row of an embedding table as bytes, in the same memory."""
    return row.view(torch.uint8).numpy().data


def read_into(
    table: StoredTensor, ids: Integers, rows: Iterable[memoryview], reader: Reader, sums: Checksums | None = None
) -> None:
    """Read a table's rows of increasing token ids into the given memory.

    All are asked for before the first is read, so that the disk works on many at once: three times as fast here as
    one after the other. That is through the page cache, which is told to drop them in the end.
    """
    if not len(ids):
        return
    size = table.length // table.shape[0]
    offsets = (table.offset + ids * size).tolist()
    handle = reader.handle(table.file)
    try:
        if hasattr(os, "posix_fadvise"):
            for offset in offsets:
                os.posix_fadvise(handle, offset, size, os.POSIX_FADV_WILLNEED)
        for row_id, offset, row in zip(ids.tolist(), offsets, rows, strict=True):
            _read_row(handle, table, row, offset)
            if sums is not None:
                sums.check_row(table, row_id, row)
    finally:
        drop_pages(handle, table.offset, table.length)


def _read_row(handle: int, table: StoredTensor, row: memoryview, offset: int) -> None:
    done = 0
    while done < len(row):
        try:
            count = os.preadv(handle, [row[done:]], offset + done)
        except OSError as error:
            raise named(error, table.file) from error
        if not count:
            early = f"ended before a row of {table.name}, at byte {offset}"
            raise ValueError(f"{table.file.name} {early}: it is truncated.")
        done += count
