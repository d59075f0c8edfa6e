"""Hidden states of all candidates between layers: in memory, or offloaded to a file (section 4.3).

A candidate's states [t, d] have a place of their own, so that chunks can be made anew whenever candidates leave. A pass
over a part of a layer is
    for group, hidden in zip(groups, states.each(groups)): states.put(group, part(hidden))
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ondevice import assets
from ondevice_papers.grating.checkpoint import PAGE, PastCache, pages

Group = Sequence[int]
T = TypeVar("T")


class Resident:
    """All of them in memory, outside of the heap: a long-lived tensor among a layer's temporaries would leave holes."""

    def __init__(self, lengths: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self.lengths = lengths
        self.starts = np.cumsum([0, *lengths]).tolist()
        count = self.starts[-1] * width
        self.all = torch.frombuffer(pages(count * dtype.itemsize), dtype=dtype)[:count].view(-1, width)

    def put(self, group: Group, hidden: Tensor) -> None:
        """Keep a copy of the states of a group."""
        if (block := self._block(group)) is not None:
            block.copy_(hidden)
            return
        for row, candidate in enumerate(group):
            self._states_of(candidate).copy_(hidden[row, : self.lengths[candidate]])

    def each(self, groups: Sequence[Group]) -> Iterator[Tensor]:
        """The states of one group after the other: a view where they stand side by side as they are."""
        for group in groups:
            block = self._block(group)
            yield padded([self._states_of(candidate) for candidate in group]) if block is None else block

    def close(self) -> None:
        """Give back the memory of all states."""
        self.all = torch.empty(0)

    def _states_of(self, candidate: int) -> Tensor:
        return self.all[self.starts[candidate] : self.starts[candidate + 1]]

    def _block(self, group: Group) -> Tensor | None:
        """[n, width, d] of neighbours of one length, which texts that were cut are."""
        first, count, width = group[0], len(group), self.lengths[group[0]]
        lengths = {self.lengths[candidate] for candidate in group}
        if list(group) != list(range(first, first + count)) or lengths != {width}:
            return None
        return self.all[self.starts[first] : self.starts[first + count]].view(count, width, -1)


class Offloaded:
    """All of them in a file: while one group computes, the next is read and the one before is written.

    folder: on a disk, by default one in the cache; in a memory file system the states would stay in memory. The file
    has no name, so that nothing is left of it, whatever happens. One thread reads and writes in the order in which it
    is asked to: a group is on the disk before it is read again. Raises OSError where the disk is full or fails.
    """

    def __init__(self, lengths: Sequence[int], width: int, dtype: torch.dtype, folder: Path | None = None) -> None:
        self.lengths, self.width, self.dtype = lengths, width, dtype
        self.folder = assets.cache_folder("grating") if folder is None else folder
        row = width * dtype.itemsize
        self.starts = np.cumsum([0, *(-(-length * row // PAGE) * PAGE for length in lengths)]).tolist()  # whole pages
        handle, name = tempfile.mkstemp(prefix=".hidden-states-", dir=self.folder)
        try:
            os.close(handle)
            self.file = PastCache(Path(name), "r+b")
        finally:
            os.unlink(name)
        self.thread = ThreadPoolExecutor(1, "hidden-states")
        self.writing: Future[None] | None = None

    def put(self, group: Group, hidden: Tensor) -> None:
        """Have the states of a group written, once those before are."""
        self._finish()
        self.writing = self.thread.submit(self._write, group, hidden)

    def each(self, groups: Sequence[Group]) -> Iterator[Tensor]:
        """The states of one group after the other, the next one read ahead."""
        reading = self.thread.submit(self._read, groups[0])
        for following in [*groups[1:], None]:
            hidden = self._done(reading)
            if following is not None:
                reading = self.thread.submit(self._read, following)
            yield hidden
        self._finish()

    def close(self) -> None:
        """Wait for the thread; the file is gone then."""
        self.thread.shutdown(wait=True, cancel_futures=True)
        self.file.close()

    def _finish(self) -> None:
        if self.writing is not None:
            self._done(self.writing)
            self.writing = None

    def _done(self, job: Future[T]) -> T:
        try:
            return job.result()
        except OSError as error:
            message = f"hidden states could not be kept in {self.folder.name}"
            raise OSError(error.errno, f"{message}: {error.strerror or error}") from error

    def _write(self, group: Group, hidden: Tensor) -> None:
        """Write a group's states to the file; runs in the thread."""
        for row, candidate in enumerate(group):
            memory = self._memory(candidate)
            self._view(memory, candidate).copy_(hidden[row, : self.lengths[candidate]])
            self.file.transfer(os.pwritev, memory, self.starts[candidate], len(memory))

    def _read(self, group: Group) -> Tensor:
        """A group's states from the file, padded; runs in the thread."""
        parts = []
        for candidate in group:
            memory = self._memory(candidate)
            if self.file.transfer(os.preadv, memory, self.starts[candidate], len(memory)) < len(memory):
                raise OSError(errno.EIO, "the file of hidden states has become shorter")
            parts.append(self._view(memory, candidate))
        return padded(parts)

    def _memory(self, candidate: int) -> memoryview:
        return memoryview(pages(self.starts[candidate + 1] - self.starts[candidate]))

    def _view(self, memory: memoryview, candidate: int) -> Tensor:
        count = self.lengths[candidate] * self.width
        return torch.frombuffer(memory, dtype=self.dtype)[:count].view(-1, self.width)


HiddenStates = Resident | Offloaded  # what `each` gives is to read, until it is put again


def padded(parts: Sequence[Tensor]) -> Tensor:
    """[n, longest, d] states [t, d] of several candidates, zeros behind them."""
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
