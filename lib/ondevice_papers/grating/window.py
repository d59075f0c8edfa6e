"""The sliding window: one unit of weights computes while the next one is read (section 4.2).

The paper's unit is a layer, so that two layers are in memory. Half a layer (attention, then feed-forward) is as fast
and takes half. The paper has a process for reading and one for computing; a thread does, as reads let others run.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ondevice_papers.grating.checkpoint import StoredTensor, extents, pages

Unit = Mapping[str, StoredTensor]
"""Tensors that are in memory together, by their names inside the layer."""
Read = Callable[[Unit, mmap.mmap], None]


class WeightWindow:
    """Units of weights, of which memory holds `slots`: two slide, as many as there are units stay.

    read: fills memory with a unit. stalled: seconds that the caller waited. read_bytes: of all units so far.
    """

    def __init__(self, units: Sequence[Unit], read: Read, slots: int = 2) -> None:
        self.units = units
        self.read = read
        self.memory = [pages(max(map(span, units[slot::slots]))) for slot in range(slots)]
        self.holds: list[int] = [-1] * slots  # which unit a slot has, or will have when its read is done
        self.jobs: list[Future[None] | None] = [None] * slots
        self.thread = ThreadPoolExecutor(1, "weights")
        self.stalled = 0.0
        self.read_bytes = 0

    def ahead(self, index: int) -> None:
        """Have a unit read, unless it is there. Reads are done in their order: an older one into its slot has ended."""
        slot = index % len(self.memory)
        job = self.jobs[slot]
        failed = job is not None and job.done() and job.exception() is not None
        if self.holds[slot] != index or failed:
            self.holds[slot] = index
            self.jobs[slot] = self.thread.submit(self.read, self.units[index], self.memory[slot])
            self.read_bytes += sum(tensor.length for tensor in self.units[index].values())

    def unit(self, index: int) -> dict[str, Tensor]:
        """A unit's tensors, while the next one is read: views, valid until another unit is asked for.

        Raises what the read did; the unit can be asked for again.
        """
        slot = index % len(self.memory)
        self.ahead(index)
        if index + 1 < len(self.units):
            self.ahead(index + 1)
        started = time.perf_counter()
        if (job := self.jobs[slot]) is not None:
            job.result()
        self.stalled += time.perf_counter() - started
        return views(self.units[index], self.memory[slot])

    def close(self) -> None:
        """Wait for the thread and let go of the memory."""
        self.thread.shutdown(wait=True, cancel_futures=True)
        self.memory = []
        self.jobs = []


def span(unit: Unit) -> int:
    """Bytes of memory that a unit's read needs."""
    return sum(extent.span for extent in extents(unit.values()))


def starts_in_memory(unit: Unit) -> dict[str, int]:
    """Where in its memory each of a unit's tensors begins, extent after extent."""
    starts = dict[str, int]()
    start = 0
    for extent in extents(unit.values()):
        for name, tensor in unit.items():
            inside = extent.offset <= tensor.offset and tensor.offset + tensor.length <= extent.offset + extent.length
            if tensor.file == extent.file and inside:
                starts[name] = start + tensor.offset - extent.first
        start += extent.span
    return starts


def views(unit: Unit, memory: mmap.mmap) -> dict[str, Tensor]:
    """Tensors over the memory that a unit was read into.

    One whose place is no multiple of its element's size, which only odd files have, is a copy.
    """
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    tensors = dict[str, Tensor]()
    for name, begin in starts_in_memory(unit).items():
        tensor = unit[name]
        raw = whole[begin : begin + tensor.length]
        if begin % tensor.dtype.itemsize:
            raw = raw.clone()
        tensors[name] = raw.view(tensor.dtype).view(tensor.shape)
    return tensors
