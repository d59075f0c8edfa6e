"""Graph switching as it happens: a prefill in one thread while another loads the decoding graphs (paper, section 3.2).

The counterpart on a CPU of what `scheduling` only simulates: the blocks, chunks and loads are real (see `graphs`),
and what comes back is the measured timeline, the logits and the cache that decoding goes on with.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ondevice.sdnpu import graphs
from ondevice.sdnpu.graphs import Cache, Floats, Graph, Graphs

Position = tuple[int, int]  # (chunk, block), both from 0, of one compute


class Load(NamedTuple):
    """When the small graph of a block may be loaded. after: the compute that must be over; None is from the start."""

    block: int
    after: Position | None


class Interval(NamedTuple):
    """What one of the two threads did. what: a compute with G1 or with G2, or a load of G2, whose chunk is None."""

    what: Literal["G1", "G2", "load"]
    block: int
    chunk: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prefill that was run. timeline: by start, in seconds from the first compute. logits: [V], of the last token.

    caches: one a block, filled up to the prompt's length.
    """

    timeline: list[Interval]
    logits: torch.Tensor
    caches: list[Cache]

    @property
    def total_s(self) -> float:
        """T: the end of the last compute or load; embedding and head are outside of it."""
        return max(interval.end_s for interval in self.timeline)

    @property
    def loading_s(self) -> float:
        """Seconds of all loads, hidden or not."""
        return sum(interval.end_s - interval.start_s for interval in self.timeline if interval.what == "load")


@dataclass(frozen=True)
class Profile:
    """Medians in seconds, [N] each, nothing else running: p a large chunk on G1, d the same on G2, s to load G2."""

    p: NDArray[np.float64]
    d: NDArray[np.float64]
    s: NDArray[np.float64]


def synchronous(blocks: int, chunks: int) -> list[Load]:
    """All loads after the last compute."""
    return [Load(block, (chunks - 1, blocks - 1)) for block in range(blocks)]


def naive(blocks: int, chunks: int) -> list[Load]:
    """Each block's load after its own last compute."""
    return [Load(block, (chunks - 1, block)) for block in range(blocks)]


def prefill(built: Graphs, ids: ArrayLike, plan: Sequence[Load] | None) -> Prefilled:
    """Prefill a prompt of n tokens in C = ceil(n / c1) chunks while the graphs are switched by a plan.

    plan: the loads in the order in which they happen, each block once. A load begins when the one before it and the
        compute that it names are over, and its block is not computing; a load that is due goes before its block's
        next compute, and a block does not compute while it loads. A block that is switched runs the later chunks on
        its small graph, in sub-chunks. None keeps both graphs in memory: nothing is loaded, all runs on G1.
    The large graphs are loaded before the clock starts, and each is let go before its successor is read, so only
    `None` holds more than N graphs.
    """
    hidden = built.embed(ids)
    parts = [hidden[start : start + built.large] for start in range(0, len(hidden), built.large)]
    loads = [] if plan is None else _checked(plan, built.blocks, len(parts))
    active = [graphs.load(path) for path in built.large_files]
    kept = [graphs.load(path) for path in built.small_files] if plan is None else []  # only there to take memory
    caches = built.caches()
    switch = _Switch(built, active, loads)
    with switch:
        for chunk, rows in enumerate(parts):
            for block in range(built.blocks):
                rows = switch.compute(chunk, block, rows, caches[block])
    del kept
    return Prefilled(sorted(switch.timeline, key=lambda interval: interval.start_s), built.logits(rows[-1:])[0], caches)


def profile(built: Graphs, repeats: int = 5, cold: bool = False) -> Profile:
    """p, d and s of every block, of a full chunk into an otherwise empty cache.

    The blocks are timed in turn, as a prefill runs them, so that none finds its own weights in the processor's cache.
    cold: whether a file to load is on the disk only, instead of in the page cache.
    """
    if repeats < 1:
        raise ValueError(f"A profile needs at least one repeat, not {repeats}.")
    rows, caches = built.embed(np.zeros(min(built.large, built.capacity), np.int64)), built.caches()

    def turn(active: list[Graph]) -> list[float]:
        return [_seconds(built.run, graph, i, rows, caches[i], 0) for i, graph in enumerate(active)]

    medians = []
    for files in (built.large_files, built.small_files):
        active = [graphs.load(path) for path in files]
        medians.append(np.median([turn(active) for _ in range(repeats)], axis=0))
    loads = []
    for _ in range(repeats):
        for path in built.small_files if cold else ():
            graphs.drop_from_page_cache(path)
        loads.append([_seconds(graphs.load, path) for path in built.small_files])
    p, d = medians
    return Profile(p, d, np.median(loads, axis=0))


def _seconds(run: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


def _checked(plan: Sequence[Load], blocks: int, chunks: int) -> list[Load]:
    """The plan, if it switches every block once and names computes that happen."""
    loads = [Load(*load) for load in plan]
    if sorted(load.block for load in loads) != list(range(blocks)):
        raise ValueError(f"A plan loads each of {blocks} blocks once, not {[load.block for load in loads]}.")
    for load in loads:
        if load.after is not None and not (0 <= load.after[0] < chunks and 0 <= load.after[1] < blocks):
            raise ValueError(
                f"Block {load.block} waits for compute {load.after}, of {chunks} chunks and {blocks} blocks."
            )
    return loads


class _Switch:
    """Two threads at work on the same blocks: the caller's computes, its own loads.

    Everything that both see (`_active`, `_over`, `_busy`, `_next`, `_failure`) changes under one condition only.
    """

    def __init__(self, built: Graphs, active: list[Graph], loads: list[Load]) -> None:
        self.timeline: list[Interval] = []
        self._built, self._loads = built, loads
        self._active: list[Graph | None] = list(active)
        self._over = 0  # computes
        self._next = 0  # the load that is under way or waits
        self._busy: dict[Literal["compute", "load"], int | None] = {"compute": None, "load": None}  # blocks
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._loader = threading.Thread(target=self._load_all, name="sdnpu-loader", daemon=True)
        self._zero = 0.0

    def __enter__(self) -> None:
        self._zero = time.perf_counter()
        self._loader.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the remaining loads; raise what went wrong in one of them."""
        if error is not None:
            self._set_failure(error)
        self._loader.join()
        if error is None and self._failure is not None:
            raise self._failure

    def compute(self, chunk: int, block: int, rows: Floats, cache: Cache) -> Floats:
        """Run one block on one chunk, on the graph that it has now."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._taken(block))
            if self._failure is not None:
                raise self._failure
            graph, self._busy["compute"] = self._active[block], block
        assert graph is not None
        start = self._now()
        rows = self._built.run(graph, block, rows, cache, chunk * self._built.large)
        end = self._now()
        what: Literal["G1", "G2"] = "G1" if graph.chunk == self._built.large else "G2"
        del graph  # before the loader may go on: else the old graph would stay in memory beside the new one
        with self._changed:
            self.timeline.append(Interval(what, block, chunk, start, end))
            self._busy["compute"], self._over = None, self._over + 1
            self._changed.notify_all()
        return rows

    def _load_all(self) -> None:
        try:
            for number, load in enumerate(self._loads):
                with self._changed:
                    self._changed.wait_for(lambda: self._failure is not None or self._startable())
                    if self._failure is not None:
                        return
                    self._busy["load"], self._active[load.block] = load.block, None
                start = self._now()
                graph = graphs.load(self._built.small_files[load.block])
                end = self._now()
                with self._changed:
                    self.timeline.append(Interval("load", load.block, None, start, end))
                    self._active[load.block], self._busy["load"], self._next = graph, None, number + 1
                    self._changed.notify_all()
        except BaseException as error:
            self._set_failure(error)

    def _startable(self) -> bool:
        """Whether the next load may begin."""
        return self._due() and self._busy["compute"] != self._loads[self._next].block

    def _due(self) -> bool:
        after = self._loads[self._next].after
        return after is None or self._over > after[0] * self._built.blocks + after[1]

    def _taken(self, block: int) -> bool:
        """Whether a block is loading, or is about to."""
        if self._busy["load"] is not None:
            return self._busy["load"] == block
        return self._next < len(self._loads) and self._loads[self._next].block == block and self._due()

    def _set_failure(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _now(self) -> float:
        return time.perf_counter() - self._zero
