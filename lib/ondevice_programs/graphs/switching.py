"""Graph switching as it happens: a prefill in one thread while another loads the decoding graphs (section 3.2).

What `scheduling` plans and simulates, on real blocks, chunks and files; what comes back is a `Timeline` of what was
measured, the graphs that decoding goes on with, and the rows of the last block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice import meters
from ondevice_papers.sdnpu.scheduling import Load, Prefill, Timeline
from ondevice_programs.graphs import static_graphs
from ondevice_programs.graphs.static_graphs import Cache, Graph, Graphs, Rows


class Profile(NamedTuple):
    """Median seconds of each block, [N], nothing else running: p a run of G1, d a run of G2, s to load G2.

    g1, g2: bytes of its graphs.
    """

    p: NDArray[np.float64]
    d: NDArray[np.float64]
    s: NDArray[np.float64]
    g1: NDArray[np.float64]
    g2: NDArray[np.float64]

    def instance(self, rows: Sequence[int], small: int, memory: float = 1.0) -> Prefill:
        """What is to be scheduled, in milliseconds, for chunks of so many rows. memory: over the bytes of all G1."""
        runs = np.array([-(-count // small) for count in rows])[:, None]
        p, d, s = (1e3 * part for part in (self.p, self.d, self.s))
        limit = max(memory * self.g1.sum(), self.g2.sum())
        return Prefill(np.tile(p, (len(rows), 1)), runs * d, s, g1=self.g1, g2=self.g2, memory=limit)


def profile(built: Graphs, repeats: int = 5, cold: bool = False) -> Profile:
    """Times of every block, of a full run into an otherwise empty cache.

    The blocks are timed in turn, as a prefill runs them, so that none finds its own weights in the processor's cache.
    cold: whether a file to load is on the disk only, instead of in the page cache.
    """
    medians: list[NDArray[np.float64]] = []
    for files, rows in ((built.large_files, built.large), (built.small_files, built.small)):
        active = [built.load(path) for path in files]
        caches = built.caches()
        hidden = np.zeros((rows, built.facts["hidden"]), np.float32)
        causal = np.tri(rows, dtype=bool)
        turns = [
            [
                seconds(static_graphs.forward, graph, hidden, cache, 0, causal, range(rows))
                for graph, cache in zip(active, caches, strict=True)
            ]
            for _ in range(repeats + 1)
        ][1:]
        medians.append(np.median(turns, axis=0))
    loads = []
    for _ in range(repeats):
        if cold:
            meters.evict(built.small_files)
        loads.append([seconds(built.load, path) for path in built.small_files])
    both = built.large_files, built.small_files
    g1, g2 = (np.array([float(path.stat().st_size) for path in files]) for files in both)
    return Profile(medians[0], medians[1], np.median(loads, axis=0), g1, g2)


def seconds(run: Callable[..., object], *arguments: object) -> float:
    """Of a call."""
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


class GraphSwitch:
    """The blocks' graphs of one request, and two threads on them: the caller's computes, its own loads.

    plan: the loads, as `scheduling.execute` takes them. A block's G1 is let go when its last compute on it is over, and
    a load begins when the one before it is over, its computes are done and its graph fits the memory.
    Everything that both threads see changes under one condition only.
    """

    def __init__(
        self,
        built: Graphs,
        first: list[Graph],
        prefill: Prefill,
        plan: Sequence[Load],
        forward: Callable[..., Rows] = static_graphs.forward,
    ) -> None:
        self.built, self.prefill, self.plan, self.forward = built, prefill, list(plan), forward
        self.large: list[Graph | None] = list(first)
        self.small: list[Graph | None] = [None] * built.blocks
        self._chunk = dict.fromkeys(range(built.blocks), prefill.chunks) | {load.block: load.chunk for load in plan}
        self._bytes = float(prefill.g1.sum())
        self._over = 0  # computes
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._spans = np.zeros((2, *prefill.p.shape))
        self._loads: list[tuple[float, float]] = []
        self._loader = threading.Thread(target=self._load_all, name="sdnpu-loader", daemon=True)
        for block, chunk in self._chunk.items():
            if chunk == 0:
                self._release(block)

    def __enter__(self) -> GraphSwitch:
        self._zero = time.perf_counter()
        self._loader.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the remaining loads; raise what went wrong in one of them."""
        if error is not None:
            self._fail(error)
        self._loader.join()
        if error is None and self._failure is not None:
            raise self._failure

    def compute(self, chunk: int, block: int, rows: Rows, cache: Cache, start: int, sees: NDArray[np.bool_]) -> Rows:
        """One block on one chunk, on the graph that it has then."""
        with self._changed:
            switched = chunk >= self._chunk[block]
            held = self.small if switched else self.large
            self._changed.wait_for(lambda: self._failure is not None or held[block] is not None)
            if self._failure is not None:
                raise self._failure
            graph = held[block]
        assert graph is not None
        begun = self._now()
        rows = self.forward(graph, rows, cache, start, sees, range(start, start + len(rows)))
        del graph  # before the loader may go on: else the old graph would stay in memory beside the new one
        with self._changed:
            self._spans[:, chunk, block] = begun, self._now()
            self._over += 1
            if chunk == self._chunk[block] - 1:
                self._release(block)
            self._changed.notify_all()
        return rows

    @property
    def timeline(self) -> Timeline:
        """What was measured, in milliseconds, once all is over."""
        graph = 1 + (np.arange(self.prefill.chunks)[:, None] >= [self._chunk[i] for i in range(self.built.blocks)])
        starts, ends = np.reshape(self._loads, (-1, 2)).T
        blocks = np.array([load.block for load in self.plan], np.int64)
        return Timeline(self.prefill, self._spans[0], self._spans[1], graph, blocks, starts, ends)

    def _release(self, block: int) -> None:
        if self.plan:  # else both graphs are kept
            self.large[block] = None
            self._bytes -= self.prefill.g1[block]

    def _load_all(self) -> None:
        try:
            for load in self.plan:
                size = self.prefill.g2[load.block]
                with self._changed:
                    self._changed.wait_for(lambda: self._failure is not None or self._may(load.after, size))  # noqa: B023
                    if self._failure is not None:
                        return
                    self._bytes += size
                start = self._now()
                graph = self.built.load(self.built.small_files[load.block])
                with self._changed:
                    self._loads.append((start, self._now()))
                    self.small[load.block] = graph
                    self._changed.notify_all()
        except BaseException as error:
            self._fail(error)

    def _may(self, after: int, size: float) -> bool:
        return self._over >= after and self._bytes + size <= self.prefill.memory * (1 + 1e-9)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _now(self) -> float:
        return 1e3 * (time.perf_counter() - self._zero)
