"""The embedding table's rows of the tokens used lately, the others on disk (section 4.4)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ondevice.grating.checkpoint import Reader, StoredTensor, drop_pages, named

Integers = NDArray[np.int64]
_BLOCK = 1024  # rows whose memory is allocated together


class EmbeddingCache:
    """Rows of an embedding table [V, d] in a file: at most `capacity` in memory.

    Memory is allocated in blocks as rows come, so that a cache with room for a tenth of a large table costs a process
    under a limit no more than its queries needed.
    The rows whose last request is the longest ago make room, never one that the same request has still to give.
    hits, misses: distinct rows of all requests so far. read_seconds: of all reads.
    Raises ValueError on a table without rows, a capacity below 1, and where the file falls short; OSError where the
    disk fails.
    """

    def __init__(self, table: StoredTensor, capacity: int, reader: Reader) -> None:
        if len(table.shape) != 2 or not table.length:
            raise ValueError(f"An embedding table has rows and columns, and {table.name} the shape {table.shape}.")
        if capacity < 1:
            raise ValueError(f"An embedding cache has at least one row, not {capacity}.")
        self.table, self.capacity = table, min(capacity, table.shape[0])
        self.hits = self.misses = 0
        self.read_seconds = 0.0
        self._reader = reader
        self._blocks: list[Tensor] = []  # of _BLOCK rows
        self._slot = np.full(table.shape[0], -1, np.int32)  # [V] where a row is kept, -1: nowhere
        self._id = np.full(self.capacity, -1, np.int64)  # [capacity] which row is there
        self._used = np.zeros(self.capacity, np.int64)  # [capacity] the request that had it last
        self._request = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes once every row is filled, with what keeps account of them."""
        rows = self.capacity * self.table.shape[1] * self.table.dtype.itemsize
        return rows + self._slot.nbytes + self._id.nbytes + self._used.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        """[n, d] the rows of token ids [n], which may be more than the cache holds: then it is filled in turns."""
        wanted, place = np.unique(checked(ids, self.table.shape[0], self._closed), return_inverse=True)
        self._request += 1
        kept = self._slot[wanted] >= 0
        self.hits += int(kept.sum())
        self.misses += int(len(wanted) - kept.sum())
        if len(wanted) <= self.capacity:
            self._fetch(wanted[~kept], wanted[kept])
            return self._taken(self._slot[wanted][place])
        found = torch.empty(len(place), self.table.shape[1], dtype=self.table.dtype)
        missing = wanted[~kept]
        turns = [wanted[kept], *(missing[at : at + self.capacity] for at in range(0, len(missing), self.capacity))]
        for turn in turns:
            self._fetch(turn[self._slot[turn] < 0], wanted[:0])
            given = np.flatnonzero(np.isin(wanted, turn)[place])
            found[torch.from_numpy(given)] = self._taken(self._slot[wanted[place[given]]])
        return found

    def close(self) -> None:
        """Forget all rows."""
        self._closed = True
        self._blocks = []

    def _fetch(self, missing: Integers, kept: Integers) -> None:
        """Read rows into the slots used longest ago, others than those of the rows to keep."""
        self._used[self._slot[kept]] = self._request
        if not len(missing):
            return
        slots = np.argsort(self._used, kind="stable")[: len(missing)]
        self._forget(slots)
        started = time.perf_counter()
        while len(self._blocks) * _BLOCK <= slots.max():
            size = min(_BLOCK, self.capacity - len(self._blocks) * _BLOCK)
            self._blocks.append(torch.empty(size, self.table.shape[1], dtype=self.table.dtype))
        parts = [_bytes_of(block) for block in self._blocks]
        rows = (parts[block][row] for block, row in zip(*(one.tolist() for one in divmod(slots, _BLOCK)), strict=True))
        _read_into(self.table, missing, rows, self._reader)
        self.read_seconds += time.perf_counter() - started
        self._slot[missing], self._id[slots], self._used[slots] = slots, missing, self._request

    def _taken(self, slots: NDArray[np.int32]) -> Tensor:
        """[n, d] copies of the rows in these slots."""
        found = torch.empty(len(slots), self.table.shape[1], dtype=self.table.dtype)
        block, row = (torch.from_numpy(one.astype(np.int64)) for one in divmod(slots, _BLOCK))
        for number in block.unique().tolist():
            here = block == number
            found[here] = self._blocks[number][row[here]]
        return found

    def _forget(self, slots: Integers) -> None:
        """Before the read, so that one that fails leaves no wrong row behind."""
        old = self._id[slots]
        self._slot[old[old >= 0]] = -1
        self._id[slots], self._used[slots] = -1, 0


def read_rows(table: StoredTensor, ids: Tensor, reader: Reader) -> Tensor:
    """[n, d] rows of a table in a file for token ids [n]; nothing is kept. Errors as `EmbeddingCache` has them."""
    wanted, place = np.unique(checked(ids, table.shape[0]), return_inverse=True)
    rows = torch.empty(len(wanted), table.shape[1], dtype=table.dtype)
    _read_into(table, wanted, _bytes_of(rows), reader)
    return rows[torch.from_numpy(place)]


def checked(ids: Tensor, vocabulary: int, closed: bool = False) -> Integers:
    """Token ids [n] as an array. Raises ValueError on ids that have no row, or where the weights are closed."""
    if closed:
        raise ValueError("These weights are closed.")
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"Token ids are a vector of integers, not of shape {tuple(ids.shape)} and {ids.dtype}.")
    found: Integers = ids.cpu().numpy().astype(np.int64)
    if len(found) and not 0 <= found.min() <= found.max() < vocabulary:
        odd = found.min() if found.min() < 0 else found.max()
        raise ValueError(f"Token ids are from 0 to {vocabulary - 1}, not {odd}.")
    return found


def _bytes_of(rows: Tensor) -> NDArray[np.uint8]:
    """[n, bytes of a row] the same memory."""
    return rows.view(torch.uint8).numpy()


def _read_into(table: StoredTensor, ids: Integers, rows: Iterable[NDArray[np.uint8]], reader: Reader) -> None:
    """Read the rows of increasing ids.

    All are asked for before the first is read, so that the disk works on many at once: three times as fast here as
    one after the other. That is through the page cache, which is told to drop them in the end.
    """
    size = table.shape[1] * table.dtype.itemsize
    places = (table.offset + ids * size).tolist()
    handle, started = reader.handle(table.file), time.perf_counter()
    try:
        if hasattr(os, "posix_fadvise"):
            for place in places:
                os.posix_fadvise(handle, place, size, os.POSIX_FADV_WILLNEED)
        for place, row in zip(places, rows, strict=True):
            _read_row(handle, table, row.data, place)
    finally:
        drop_pages(handle, table.offset, table.length)
    if reader.throttle is not None:
        reader.throttle.wait(len(ids) * size, started)


def _read_row(handle: int, table: StoredTensor, row: memoryview, place: int) -> None:
    done = 0
    while done < len(row):
        try:
            count = os.preadv(handle, [row[done:]], place + done)
        except OSError as error:
            raise named(error, table.file) from error
        if not count:
            raise ValueError(f"{table.file.name} ended before a row of {table.name}, at byte {place}: it is truncated.")
        done += count
