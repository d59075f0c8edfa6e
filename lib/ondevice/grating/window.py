"""The dual-layer sliding window: one layer of weights computes while the next is read (section 4.2).

The paper has a process for reading and one for computing. A thread does here: reads let other threads of Python run.
Beyond the paper, memory for more than two layers keeps some of them for good.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ondevice.grating.checkpoint import Extent, Reader, StoredTensor, extents, pages

Layer = Mapping[str, StoredTensor]


@dataclass
class _Buffer:
    """Memory of one layer. job: the read of `layer` into it, whose result is its seconds. stop: ends that read."""

    memory: mmap.mmap
    layer: int | None = None
    job: Future[float] | None = None
    stop: threading.Event = field(default_factory=threading.Event)


class Window:
    """The layers of a checkpoint, of which memory holds `buffers`, allocated once.

    Two buffers slide: after a layer is asked for, the next that is not there is read into the buffer that is needed
    last, as if layers were asked for in rounds: behind the last one comes the first. With more than two, the others
    hold layers for good, evenly spread, so that there is the more time to read each of those between. Where all
    layers have a buffer, each is read once.

    kept: the layers that stay. read_seconds, stalled_seconds [layers]: of the latest pass, a layer's time on the disk
    and how much of it the caller waited; both are 0 where nothing had to be read.
    Raises ValueError for less than two buffers, or more than there are layers.
    """

    def __init__(self, layers: Sequence[Layer], reader: Reader, buffers: int = 2) -> None:
        count = len(layers)
        if not 2 <= buffers <= max(2, count):
            raise ValueError(f"A window of {count} layers has 2 to {max(2, count)} buffers, not {buffers}.")
        self._layers, self._reader = layers, reader
        self._places = [_placed(layer) for layer in layers]
        self.kept = _spread(count, count if buffers >= count else buffers - 2)
        self._own = {index: _Buffer(pages(self._span(index))) for index in self.kept}
        most = max((self._span(index) for index in range(count) if index not in self._own), default=0)
        self._sliding = [_Buffer(pages(most)) for _ in range(2)] if len(self.kept) < count else []
        self.read_seconds, self.stalled_seconds = np.zeros(count), np.zeros(count)
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "weights")

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(len(buffer.memory) for buffer in [*self._own.values(), *self._sliding])

    def layer(self, index: int) -> dict[str, Tensor]:
        """A layer's parameters by their names inside it: views, valid until another layer is asked for, or `begin`.

        Raises ValueError on an index out of range, after `close`, or where a file falls short; OSError where the disk
        fails. The layer can be asked for again then.
        """
        if not 0 <= index < len(self._layers):
            raise ValueError(f"The model has layers 0 to {len(self._layers) - 1}, not {index}.")
        buffer = self._wanted(index)
        self._read_ahead(index)
        self._wait(buffer, index)
        return views(self._layers[index], self._places[index], buffer.memory)

    def begin(self) -> None:
        """Start to read the first layers of a pass; what was read ahead for another one is given up."""
        self._wanted(0)
        self._read_ahead(0)

    def close(self) -> None:
        """Give up the read in flight, wait for the thread, and let go of the memory. A second call does nothing."""
        if self._thread is None:
            return
        for buffer in [*self._own.values(), *self._sliding]:
            buffer.stop.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = None
        self._own, self._sliding = {}, []

    def _wanted(self, index: int) -> _Buffer:
        """The buffer that holds a layer, or will when its read is done."""
        held = self._held(index)
        return held if held is not None else self._assign(self._room(index, index), index)

    def _read_ahead(self, index: int) -> None:
        """Have read what follows a layer, as far as there are buffers, in the order in which it will be needed."""
        for step in range(1, len(self._layers)):
            following = (index + step) % len(self._layers)
            if self._held(following) is None:
                room = self._room(following, index)
                if room is None:
                    return
                self._assign(room, following)

    def _held(self, index: int) -> _Buffer | None:
        """The buffer of a layer that is read or being read. One read ahead in vain is read again: disks recover."""
        buffers = [self._own[index]] if index in self._own else self._sliding
        held = next((buffer for buffer in buffers if buffer.layer == index), None)
        if held is not None and held.job is not None and held.job.done() and held.job.exception() is not None:
            held.layer = held.job = None
            return None
        return held

    def _room(self, index: int, start: int) -> _Buffer | None:
        """The buffer to read a layer into: of those that slide the one that is needed last, if later than this.

        start: the layer in use, which is needed first.
        """
        if index in self._own:
            return self._own[index]
        count = len(self._layers)

        def due(layer: int | None) -> int:
            return count if layer is None else (layer - start) % count

        last = max(self._sliding, key=lambda buffer: due(buffer.layer), default=None)
        return last if last is not None and due(last.layer) > due(index) else None

    def _assign(self, buffer: _Buffer | None, index: int) -> _Buffer:
        """Queue the read of a layer into a buffer. Reads are done one by one: an older one into it has ended before."""
        if self._thread is None or buffer is None:
            raise ValueError("These weights are closed.")
        if buffer.job is not None:
            buffer.stop.set()
            buffer.job.cancel()
        buffer.layer, buffer.stop = index, threading.Event()
        buffer.job = self._thread.submit(self._read, buffer.memory, index, buffer.stop)
        return buffer

    def _read(self, into: mmap.mmap, index: int, stop: threading.Event) -> float:
        """In the thread: seconds that it took."""
        started = time.perf_counter()
        with memoryview(into) as view:
            for extent, place in self._places[index].items():
                self._reader.read(extent, view[place : place + extent.span], stop)
        return time.perf_counter() - started

    def _wait(self, buffer: _Buffer, index: int) -> None:
        self.read_seconds[index] = self.stalled_seconds[index] = 0.0
        if buffer.job is None:
            return
        started = time.perf_counter()
        try:
            self.read_seconds[index] = buffer.job.result()
        except BaseException:
            buffer.layer = None  # what is in it is no layer
            raise
        finally:
            buffer.job = None
        self.stalled_seconds[index] = time.perf_counter() - started

    def _span(self, index: int) -> int:
        return sum(extent.span for extent in self._places[index])


def views(tensors: Layer, places: Mapping[Extent, int], into: mmap.mmap) -> dict[str, Tensor]:
    """Tensors over memory that their extents were read into. places: where in it each extent's first page is.

    One whose place is no multiple of its element's size, which only odd files have, is a copy.
    """
    found = {}
    whole = torch.frombuffer(into, dtype=torch.uint8)
    for name, tensor in tensors.items():
        begin = next(
            (place + tensor.offset - extent.first for extent, place in places.items() if _covers(extent, tensor)), 0
        )
        raw = whole[begin : begin + tensor.length]
        if begin % tensor.dtype.itemsize:
            raw = raw.clone()
        found[name] = raw.view(tensor.dtype).view(tensor.shape)
    return found


def _covers(extent: Extent, tensor: StoredTensor) -> bool:
    within = extent.offset <= tensor.offset and tensor.offset + tensor.length <= extent.offset + extent.length
    return extent.file == tensor.file and within


def _placed(layer: Layer) -> dict[Extent, int]:
    """Where in a buffer each extent's first page goes."""
    places, end = {}, 0
    for extent in extents(layer.values()):
        places[extent] = end
        end += extent.span
    return places


def _spread(count: int, kept: int) -> tuple[int, ...]:
    """`kept` of `count` layers, evenly spread, the first one among them: nothing is computed before it."""
    return tuple(place * count // kept for place in range(kept))
