"""The embedding table's rows of the tokens used lately, the others on disk (section 4.4)."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ondevice.grating.checkpoint import Reader, StoredTensor, drop_pages, named

Integers = NDArray[np.int64]


class EmbeddingCache:
    """Rows of an embedding table [V, d] in a file: at most `capacity` in memory, which is touched as they come.

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
        self._rows = torch.empty(self.capacity, table.shape[1], dtype=table.dtype)
        self._slot = np.full(table.shape[0], -1, np.int32)  # [V] where a row is kept, -1: nowhere
        self._id = np.full(self.capacity, -1, np.int64)  # [capacity] which row is there
        self._used = np.zeros(self.capacity, np.int64)  # [capacity] the request that had it last
        self._request = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes once every row is filled, with what keeps account of them."""
        return self._rows.nbytes + self._slot.nbytes + self._id.nbytes + self._used.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        """[n, d] the rows of token ids [n], which may be more than the cache holds: then it is filled in turns."""
        wanted, place = np.unique(checked(ids, self.table.shape[0], self._closed), return_inverse=True)
        self._request += 1
        kept = self._slot[wanted] >= 0
        self.hits += int(kept.sum())
        self.misses += int(len(wanted) - kept.sum())
        if len(wanted) <= self.capacity:
            self._fetch(wanted[~kept], wanted[kept])
            return self._rows[torch.from_numpy(self._slot[wanted][place].astype(np.int64))]
        found = self._rows.new_empty(len(place), self.table.shape[1])
        missing = wanted[~kept]
        turns = [wanted[kept], *(missing[at : at + self.capacity] for at in range(0, len(missing), self.capacity))]
        for turn in turns:
            self._fetch(turn[self._slot[turn] < 0], wanted[:0])
            given = np.flatnonzero(np.isin(wanted, turn)[place])
            source = self._slot[wanted[place[given]]].astype(np.int64)
            found[torch.from_numpy(given)] = self._rows[torch.from_numpy(source)]
        return found

    def close(self) -> None:
        """Forget all rows."""
        self._closed = True
        self._rows = self._rows.new_empty(0, self.table.shape[1])

    def _fetch(self, missing: Integers, kept: Integers) -> None:
        """Read rows into the slots used longest ago, others than those of the rows to keep."""
        self._used[self._slot[kept]] = self._request
        if not len(missing):
            return
        slots = np.argsort(self._used, kind="stable")[: len(missing)]
        self._forget(slots)
        started = time.perf_counter()
        _read_into(self.table, missing, self._rows, slots, self._reader)
        self.read_seconds += time.perf_counter() - started
        self._slot[missing], self._id[slots], self._used[slots] = slots, missing, self._request

    def _forget(self, slots: Integers) -> None:
        """Before the read, so that one that fails leaves no wrong row behind."""
        old = self._id[slots]
        self._slot[old[old >= 0]] = -1
        self._id[slots], self._used[slots] = -1, 0


def read_rows(table: StoredTensor, ids: Tensor, reader: Reader) -> Tensor:
    """[n, d] rows of a table in a file for token ids [n]; nothing is kept. Errors as `EmbeddingCache` has them."""
    wanted, place = np.unique(checked(ids, table.shape[0]), return_inverse=True)
    rows = torch.empty(len(wanted), table.shape[1], dtype=table.dtype)
    _read_into(table, wanted, rows, np.arange(len(wanted)), reader)
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


def _read_into(table: StoredTensor, ids: Integers, into: Tensor, slots: Integers, reader: Reader) -> None:
    """Read the rows of increasing ids into the slots, rows of `into`.

    All are asked for before the first is read, so that the disk works on many at once: three times as fast here as
    one after the other. That is through the page cache, which is told to drop them in the end.
    """
    size = table.shape[1] * table.dtype.itemsize
    target = into.view(torch.uint8).numpy().reshape(-1).data
    places = (table.offset + ids * size).tolist()
    handle, started = reader.handle(table.file), time.perf_counter()
    try:
        if hasattr(os, "posix_fadvise"):
            for place in places:
                os.posix_fadvise(handle, place, size, os.POSIX_FADV_WILLNEED)
        for place, slot in zip(places, slots.tolist(), strict=True):
            _read_row(handle, table, target[slot * size : (slot + 1) * size], place)
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
