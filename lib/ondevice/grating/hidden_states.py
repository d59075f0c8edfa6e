"""Hidden states of all candidates, chunk by chunk: in memory, or offloaded to a file (section 4.3).

A pass over a layer is
    for chunk, hidden in states.each(order): states.put(chunk, layer(hidden))
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ondevice import assets
from ondevice.grating.checkpoint import PAGE, drop_pages, pages

_Transfer = Callable[[int, list[memoryview], int], int]


class HiddenStates(Protocol):
    """The hidden states [b, t, d] of each chunk of candidates, by the chunk's number."""

    def put(self, chunk: int, hidden: Tensor) -> None:
        """Keep a chunk's states in place of those that were there; they may be fewer than before."""

    def each(self, order: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Chunks and their states in this order; to be read only, until the chunk is put or the next one comes."""

    def close(self) -> None:
        """Forget everything. A second call does nothing."""


class Resident:
    """All chunks in memory."""

    def __init__(self) -> None:
        self._chunks: dict[int, Tensor] = {}

    def put(self, chunk: int, hidden: Tensor) -> None:
        """Keep a copy in the memory that the chunk has, where it has the same shape; else the tensor itself.

        A new tensor at each layer, among the layer's temporaries, would leave holes in the heap.
        """
        kept = self._chunks.get(chunk)
        if kept is None or kept.shape != hidden.shape or kept.dtype != hidden.dtype:
            self._chunks[chunk] = hidden
        else:
            kept.copy_(hidden)

    def each(self, order: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """The chunks in this order. Raises ValueError on one that was never put."""
        for chunk in order:
            if chunk not in self._chunks:
                raise ValueError(f"There is no chunk {chunk}.")
            yield chunk, self._chunks[chunk]

    def close(self) -> None:
        """Forget all chunks."""
        self._chunks.clear()


@dataclass
class _Buffer:
    """Memory of one chunk. job: the last write from it or read into it. used: when it was last given out."""

    memory: mmap.mmap
    chunk: int | None = None
    job: Future[None] | None = None
    used: int = 0


@dataclass(frozen=True)
class _Place:
    """Where in the file a chunk is, how many bytes it may have there, and what they are."""

    offset: int
    room: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def length(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Its bytes in whole pages."""
        return -(-self.length // PAGE) * PAGE


class Offloaded:
    """All chunks in a file, at most three of them in memory: one computes, one is written, one is read.

    folder: on a disk, by default one in the cache; in a memory file system the states would stay in memory. The file
    has no name, so that nothing is left of it, whatever happens. One thread reads and writes, in the order in which it
    is asked to: a chunk is on the disk before it is read again. A single chunk is never read. waited: seconds that
    the caller waited for the disk; busy: seconds that the disk took.
    Raises OSError where the disk is full or fails; everything is given back then.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = assets.cache_folder("grating") if folder is None else folder
        if not self._folder.is_dir():
            raise ValueError(f"There is no folder {self._folder} for hidden states.")
        self._file = _File(self._folder)
        self._error: OSError | None = None
        self._places: dict[int, _Place] = {}
        self._buffers = [_Buffer(pages(0)) for _ in range(3)]
        self._end = self._clock = 0
        self.waited = self.busy = 0.0
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "hidden-states")

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the three chunks, so far."""
        return sum(len(buffer.memory) for buffer in self._buffers)

    def put(self, chunk: int, hidden: Tensor) -> None:
        """Copy a chunk's states, and have them written."""
        place = self._place(chunk, hidden)
        buffer = self._held(chunk) or self._oldest(None)
        self._finish(buffer)
        if len(buffer.memory) < place.span:
            buffer.memory = pages(place.span)
        buffer.chunk = chunk
        self._places[chunk] = place
        _view(buffer.memory, place).copy_(hidden)
        self._queue(buffer, _pwritev, place)

    def each(self, order: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """The chunks in this order, the next one read ahead; behind the last comes the first, for the next layer.

        Raises ValueError on a chunk that was never put.
        """
        for at, chunk in enumerate(order):
            buffer = self._held(chunk) or self._fetch(chunk, None)
            self._touch(buffer)
            following = order[(at + 1) % len(order)]
            if self._held(following) is None:
                self._fetch(following, buffer)
            self._finish(buffer)
            yield chunk, _view(buffer.memory, self._places[chunk])

    def close(self) -> None:
        """Wait for the thread; the file and the memory are gone then. A second call does nothing."""
        if self._thread is None:
            return
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = None
        self._buffers, self._places = [], {}
        self._file.close()

    def _place(self, chunk: int, hidden: Tensor) -> _Place:
        """The chunk's old place where it fits, else a new one at the end."""
        self._check_open()
        old, made = self._places.get(chunk), _Place(self._end, 0, tuple(hidden.shape), hidden.dtype)
        if old is not None and made.span <= old.room:
            return replace(made, offset=old.offset, room=old.room)
        self._end += made.span
        return replace(made, room=made.span)

    def _held(self, chunk: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.chunk == chunk), None)

    def _oldest(self, but: _Buffer | None) -> _Buffer:
        return min((buffer for buffer in self._buffers if buffer is not but), key=lambda buffer: buffer.used)

    def _touch(self, buffer: _Buffer) -> None:
        self._clock += 1
        buffer.used = self._clock

    def _fetch(self, chunk: int, but: _Buffer | None) -> _Buffer:
        """Have a chunk read into the buffer used longest ago, after that one's write."""
        self._check_open()
        if chunk not in self._places:
            raise ValueError(f"There is no chunk {chunk}.")
        place, buffer = self._places[chunk], self._oldest(but)
        if len(buffer.memory) < place.span:
            self._finish(buffer)
            buffer.memory = pages(place.span)
        buffer.chunk = chunk
        self._queue(buffer, _preadv, place)
        return buffer

    def _queue(self, buffer: _Buffer, transfer: _Transfer, place: _Place) -> None:
        assert self._thread is not None
        buffer.job = self._thread.submit(self._move, transfer, buffer.memory, place)
        self._touch(buffer)

    def _move(self, transfer: _Transfer, memory: mmap.mmap, place: _Place) -> None:
        """In the thread: write or read a chunk. After a failure nothing is done, as what follows may build on it."""
        if self._error is not None:
            raise self._error
        started = time.perf_counter()
        try:
            with memoryview(memory) as view:
                self._file.transfer(transfer, view[: place.span], place.offset)
        except OSError as error:
            self._error = error
            raise
        self.busy += time.perf_counter() - started

    def _finish(self, buffer: _Buffer) -> None:
        """Wait for a buffer's last transfer; one that failed, of whichever buffer, ends everything."""
        job, buffer.job = buffer.job, None
        started = time.perf_counter()
        if job is not None:
            wait([job])
        self.waited += time.perf_counter() - started
        if self._error is not None:
            error = self._error
            self.close()
            place = f"hidden states could not be kept in {self._folder.name}"
            raise OSError(error.errno, f"{place}: {error.strerror or error}") from error

    def _check_open(self) -> None:
        if self._thread is None:
            raise ValueError("These hidden states are closed.")


class _File:
    """A file without a name, read and written past the page cache where its file system can."""

    def __init__(self, folder: Path) -> None:
        self._plain, name = tempfile.mkstemp(prefix=".hidden-states-", dir=folder)
        self._direct: int | None = None
        try:
            if hasattr(os, "O_DIRECT"):
                with contextlib.suppress(OSError):
                    self._direct = os.open(name, os.O_RDWR | os.O_DIRECT)
        finally:
            os.unlink(name)

    def transfer(self, transfer: _Transfer, memory: memoryview, offset: int) -> None:
        """Read or write whole pages. What a short transfer leaves does not begin at a page: it cannot be direct."""
        done = 0
        while done < len(memory):
            try:
                count = self._once(transfer, memory[done:], offset + done)
            except OSError as error:
                if self._direct is None or error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)  # opened, but not able to: some network and stacked file systems
                self._direct = None
                continue
            if not count:
                raise OSError(errno.EIO, "the file of hidden states has become shorter")
            done += count

    def close(self) -> None:
        """Close, and with that remove, the file."""
        for handle in (self._plain, self._direct):
            if handle is not None:
                os.close(handle)

    def _once(self, transfer: _Transfer, memory: memoryview, offset: int) -> int:
        if self._direct is not None and offset % PAGE == 0 and len(memory) % PAGE == 0:
            return transfer(self._direct, [memory], offset)
        count = transfer(self._plain, [memory], offset)
        os.fsync(self._plain)  # pages that are not written yet cannot be dropped
        drop_pages(self._plain, offset, count)
        return count


def _preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
    return os.preadv(handle, buffers, offset)


def _pwritev(handle: int, buffers: list[memoryview], offset: int) -> int:
    return os.pwritev(handle, buffers, offset)


def _view(memory: mmap.mmap, place: _Place) -> Tensor:
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[: place.length].view(place.dtype).view(place.shape)
