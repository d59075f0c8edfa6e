"""Progressive graph scheduling: switching the model's blocks from G1 to G2 during prefill (paper, section 3.2).

N blocks run C chunks in order on one compute engine: block i of a chunk takes p_i on the prefill graph G1, d_i on the
decoding graph G2 (the whole chunk, as repeated short runs). One loader brings each block's G2 once, in s_i, without a
break and not while that block computes. The latency T is the later of the last compute's and the last load's end.

A rule plans, `execute` times the plan. A plan is a list of loads in the loader's order.

A fact that the search and the optimum use. Let every block's chunk be given: the first one that it computes on G2. Then
all computing times are given, and the load of block i may start when block i's compute in the chunk before is done
(its release), and block i's compute in that chunk waits for its end (its due compute). Both are in the same order over
all loads. So by exchange of neighbours it is best to load in that order and as early as possible: a plan is C + 1
choices for each block, and nothing else. The same exchange shows that a compute never gains by waiting for another
block's load. And since T is a longest path, it is the same when all of time is turned round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False, init=False)
class Prefill:
    """What is to be scheduled. All times in one unit.

    p, d: [C, N] compute time of each block in each chunk on G1 and on G2; [N] if all chunks are alike.
    s: [N] load time of each block's G2. chunks: C; may be left out where p or d is [C, N].
    g1, g2: [N] bytes of its graphs, by default 1 each. memory: bytes for graphs, by default those of all G1; all G1 and
    all G2 must fit it. Raises ValueError on what cannot be.
    """

    p: Floats
    d: Floats
    s: Floats
    g1: Floats
    g2: Floats
    memory: float

    def __init__(
        self, p: ArrayLike, d: ArrayLike, s: ArrayLike, chunks: int | None = None, *, g1: ArrayLike | None = None,
        g2: ArrayLike | None = None, memory: float | None = None,
    ) -> None:  # fmt: skip
        times = {name: np.array(values, float) for name, values in (("p", p), ("d", d), ("s", s))}
        if any(times[name].ndim > 2 for name in "pd"):
            raise ValueError(f"p and d are [N] or [C, N], not of {times['p'].ndim} and {times['d'].ndim} dimensions.")
        counts = [len(times[name]) for name in "pd" if times[name].ndim == 2] + ([] if chunks is None else [chunks])
        if len(set(counts)) != 1 or not 1 <= counts[0] < np.inf or counts[0] != int(counts[0]):
            raise ValueError(f"A prefill has one whole number of chunks from 1, not {counts or 'none'}.")
        count = len(times["s"]) if times["s"].ndim == 1 else 0
        for name, sizes in (("g1", g1), ("g2", g2)):
            times[name] = np.ones(count) if sizes is None else np.array(sizes, float)
        shapes = {name: values.shape for name, values in times.items()}
        if not count or any(shape[-1:] != (count,) for shape in shapes.values()):
            raise ValueError(f"p, d, s, g1 and g2 have one number for each of the same blocks, not shapes {shapes}.")
        for name, values in times.items():
            wrong = values[~(np.isfinite(values) & (values >= 0))]
            if wrong.size:
                raise ValueError(f"Times and sizes are finite and not negative, but {name} holds {wrong[0]:g}.")
        for name, values in times.items():
            with np.errstate(over="ignore"):
                total = values.sum() * counts[0] * 4
            if not np.isfinite(total):
                raise ValueError(f"The blocks' {name} are so large that their sum is no number.")
            whole = np.broadcast_to(values, (int(counts[0]), count)) if name in "pd" else values
            object.__setattr__(self, name, whole)
        object.__setattr__(self, "memory", float(self.g1.sum() if memory is None else memory))
        least = max(self.g1.sum(), self.g2.sum())
        if not self.memory * (1 + 1e-9) >= least:
            raise ValueError(f"The graphs take {least:g} bytes, more than the memory of {self.memory:g}.")

    @property
    def chunks(self) -> int:
        """C."""
        return len(self.p)

    @property
    def blocks(self) -> int:
        """N."""
        return len(self.s)

    @property
    def spare(self) -> int:
        """How many G2 fit beside all G1."""
        return int((self.memory * (1 + 1e-9) - self.g1.sum()) // max(self.g2.max(), 1e-300))


class Load(NamedTuple):
    """One load in a plan. Computes are counted over chunks and blocks: compute c * N + i is block i in chunk c.

    after: how many computes are done before the load may start.
    chunk: the first chunk that the block computes on G2; that compute waits for the load. C: none.
    """

    block: int
    after: int
    chunk: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """What happens when: of each compute [C, N], and of each load [loads] in order.

    graph: 1 or 2, the graph of each compute. latency: T.
    """

    prefill: Prefill
    compute_start: Floats
    compute_end: Floats
    graph: Ints
    load_block: Ints
    load_start: Floats
    load_end: Floats

    @property
    def latency(self) -> float:
        """T."""
        return float(max(self.compute_end[-1, -1], self.load_end.max(initial=0.0)))

    @property
    def exposed(self) -> float:
        """What switching adds to a prefill on G1 alone: waiting, slower computes and loads after the end."""
        return self.latency - float(self.prefill.p.sum())

    @property
    def hidden(self) -> float:
        """The share of the load time, all of which synchronous switching exposes, that is saved; 1 if s is 0."""
        total = float(self.prefill.s.sum())
        return 1 - self.exposed / total if total else 1.0


def execute(prefill: Prefill, loads: Sequence[Load]) -> Timeline:
    """Run a plan: computes and loads in their orders, each as soon as it may.

    A block without a load stays on G1. Raises ValueError on a plan that loads a block twice, or that never ends because
    a compute waits for a load that comes after it, or a load for memory that is not given back.
    """
    n, blocks = prefill.p.size, prefill.blocks
    due = _due_computes(prefill, loads)
    times = prefill.p.ravel().tolist(), prefill.d.ravel().tolist(), prefill.s.tolist()
    begins: list[float] = []
    ends = [0.0]  # ends[k]: of the first k computes
    ready: dict[int, float] = {}
    spans: list[tuple[float, float]] = []
    free = 0.0

    def compute_until(count: int) -> None:
        for position in range(len(begins), count):
            block = position % blocks
            switched = position >= due[block]
            if switched and block not in ready:
                raise ValueError(f"Block {block} waits in chunk {position // blocks} for a load that comes after it.")
            begins.append(max(ends[-1], ready[block]) if switched else ends[-1])
            ends.append(begins[-1] + times[switched][position])

    for load, fits in zip(loads, _fits(prefill, loads, due), strict=True):
        after = max(load.after, fits)
        compute_until(after)
        start = max(free, ends[after])
        free = ready[load.block] = start + times[2][load.block]
        spans.append((start, free))
    compute_until(n)
    shape = prefill.p.shape
    graph = 1 + (np.arange(n).reshape(shape) >= np.asarray(due))
    loaded = np.array([load.block for load in loads], np.int64)
    starts, stops = np.array(spans).reshape(-1, 2).T
    return Timeline(prefill, np.reshape(begins, shape), np.reshape(ends[1:], shape), graph, loaded, starts, stops)


def _due_computes(prefill: Prefill, loads: Sequence[Load]) -> list[int]:
    """[N] each block's first compute on G2; beyond the last one for none."""
    n, blocks = prefill.p.size, prefill.blocks
    due = [n + blocks] * blocks
    for load in loads:
        if not (0 <= load.block < blocks and 0 <= load.chunk <= prefill.chunks and 0 <= load.after <= n):
            raise ValueError(f"{load} names a block, a chunk or a compute that the prefill does not have.")
        if due[load.block] < n + blocks:
            raise ValueError(f"Block {load.block} is loaded twice.")
        due[load.block] = load.chunk * blocks + load.block
    return due


def _fits(prefill: Prefill, loads: Sequence[Load], due: Sequence[int]) -> list[int]:
    """How many computes must be over before each load's graph fits the memory beside those that are there."""
    n, blocks = prefill.p.size, prefill.blocks
    freed = np.zeros(n + 1)  # bytes of G1 that are let go once k computes are over
    for load in loads if loads else ():
        freed[max(0, due[load.block] - blocks + 1) :] += prefill.g1[load.block]
    needed = prefill.g1.sum() + np.cumsum([prefill.g2[load.block] for load in loads]) - prefill.memory * (1 + 1e-9)
    counts = np.searchsorted(freed, needed).tolist()
    if counts and max(counts) > n:
        raise ValueError(f"Block {loads[counts.index(max(counts))].block}'s load waits for memory that never comes.")
    return counts


def earliest(prefill: Prefill, chunk: Sequence[int] | Ints) -> list[Load]:
    """The best plan in which each block computes on G2 from its chunk on: chunk [N], each 0 to C."""
    due = np.asarray(chunk) * prefill.blocks + np.arange(prefill.blocks)
    return [Load(int(block), 0, int(chunk[block])) for block in np.argsort(due)]


def latencies(prefill: Prefill, chunk: Ints) -> Floats:
    """[B] T of the best plan for each of B choices of chunks [B, N]; graphs are taken to be of one size."""
    many, blocks = chunk.shape
    row = np.arange(many)
    busy, free, loaded = np.zeros(many), np.zeros(many), np.zeros(many, int)
    released, count = np.zeros((blocks + 1, many)), np.zeros(many, int)  # when the k-th G1 was let go; how many were
    count += (chunk == 0).sum(1)
    spare = prefill.spare

    def load(which: NDArray[np.bool_], block: int) -> None:
        nonlocal free, loaded
        room = released[np.clip(loaded + 1 - spare, 0, blocks), row]
        free = np.where(which, np.maximum(free, room) + prefill.s[block], free)
        loaded = loaded + which

    for number in range(prefill.chunks):
        for block in range(blocks):
            switched = chunk[:, block] <= number
            if (first := chunk[:, block] == number).any():
                load(first, block)
                busy = np.where(first, np.maximum(busy, free), busy)
            busy = busy + np.where(switched, prefill.d[number, block], prefill.p[number, block])
            if (last := chunk[:, block] == number + 1).any():
                count = count + last
                released[count, row] = np.where(last, busy, released[count, row])
    for block in range(blocks):
        load(chunk[:, block] == prefill.chunks, block)
    return np.maximum(busy, free)


# The rules


def keep_both(prefill: Prefill) -> list[Load]:
    """Both graphs stay in memory: no load, at twice the memory. Not a switch; what switching is measured against."""
    return []


def synchronous(prefill: Prefill) -> list[Load]:
    """All loads after the prefill (Figure 8b, 1)."""
    return [Load(block, prefill.p.size, prefill.chunks) for block in range(prefill.blocks)]


def naive(prefill: Prefill) -> list[Load]:
    """In the last chunk, each block's load once it has computed (Figure 8b, 2)."""
    return [Load(block, prefill.p.size - prefill.blocks + block + 1, prefill.chunks) for block in range(prefill.blocks)]


def greedy(prefill: Prefill) -> list[Load]:
    """The paper's rule (Eqs. 1, 2): the fewest next computes that cover a load run beside it, then the next round.

    The paper's j, "the last block not switched", may be among the computes that should cover its load; we take the last
    one that is not. Where no k is feasible, which the paper leaves open, one compute runs without a load. A block that
    is left at the end is loaded after the prefill.
    """
    n, blocks, position = prefill.p.size, prefill.blocks, 0
    costs, left, loads = prefill.p.ravel().tolist(), list(range(blocks)), list[Load]()
    while left and position < n:
        covered = [0.0, *accumulate(costs[position : position + blocks])]  # by the next 0, 1 .. computes
        room = {block: min((block - position) % blocks, n - position) for block in left}
        fitting = [block for block in left if room[block] and prefill.s[block] <= covered[room[block]]]
        if not fitting:
            position += 1
            continue
        j = max(fitting)
        k = max(1, bisect_left(covered, prefill.s[j]))  # Eq. 1: p_next + .. + p_next+k-1 >= s_j, the least k (Eq. 2)
        chunk = -((j - position) // blocks)
        loads.append(Load(j, position, chunk))
        costs[chunk * blocks + j :: blocks] = prefill.d[chunk:, j].tolist()
        left.remove(j)
        position += k
    return loads + [Load(block, n, prefill.chunks) for block in left]


# Our rule


class _Beam(NamedTuple):
    """Partial plans in turned time, each after its last load so far. B of them."""

    next: Ints  # [B] the compute that starts next; the one before runs until `busy`
    free: Floats  # [B] when the loader is free; at most `busy`
    busy: Floats  # [B]
    loaded: NDArray[np.bool_]  # [B, N]
    due: Ints  # [B, N] the first compute after the load
    todo: Floats  # [4, B] of what is not loaded: load time, what it can overlap, what it cannot, extra time a chunk


def ours(prefill: Prefill) -> list[Load]:
    """Our rule: a beam search over loads in turned time, then changes of one block's chunk while T falls.

    It begins at the beam's plan, greedy's, naive's, and naive's with every other block a chunk earlier. Turned, a block
    computes on G2 until its load and then on G1, so that loading early is good in itself.
    """
    late, each = np.full(prefill.blocks, prefill.chunks), np.arange(prefill.blocks)
    seeds = [_search(prefill, max(8, 256 // prefill.blocks)), _chunks(prefill, greedy(prefill)), late, late - each % 2]
    plans = [earliest(prefill, improved(prefill, seed)) for seed in seeds]
    return min([*plans, greedy(prefill)], key=lambda loads: execute(prefill, loads).latency)


def improved(prefill: Prefill, chunk: Ints) -> Ints:
    """The choice of chunks that no change of one block makes better."""
    each, every = np.arange(prefill.blocks), np.arange(prefill.chunks + 1)
    best = latencies(prefill, chunk[None])[0]
    while True:
        others = np.tile(chunk, (prefill.blocks, prefill.chunks + 1, 1))
        others[each, :, each] = every
        others = others.reshape(-1, prefill.blocks)
        found = latencies(prefill, others)
        if found.min() >= best * (1 - 1e-9):
            return chunk
        chunk, best = others[found.argmin()], found.min()


def _chunks(prefill: Prefill, loads: Sequence[Load]) -> Ints:
    """[N] each block's first chunk on G2 in a plan."""
    found = np.full(prefill.blocks, prefill.chunks)
    for load in loads:
        found[load.block] = load.chunk
    return found


def _search(prefill: Prefill, width: int) -> Ints:
    """[N] each block's first chunk on G2."""
    turned = _turned(prefill)
    none, nothing = np.zeros(1), np.zeros((1, prefill.blocks), int)
    beam = _Beam(none.astype(int), none, none, nothing > 0, nothing, turned.each.sum(1, keepdims=True))
    for _ in range(prefill.blocks):
        beam = _extend(beam, turned, width)
    best = np.argmin(beam.busy + turned.rest[beam.next])
    return (prefill.chunks - np.minimum(beam.due[best] // prefill.blocks, prefill.chunks))[::-1]


class _Turned(NamedTuple):
    """A prefill in turned time: the last compute first, the last block is block 0. A = ahead."""

    p: Floats  # [C N + A] of each compute, 0 beyond the end
    d: Floats
    s: Floats  # [N]
    rest: Floats  # [C N + A] time on G1 from a compute on
    each: Floats  # [4, N] of each block, as _Beam.todo
    round_time: float  # a chunk's time on G1
    ahead: int  # how many next computes are looked at as a load's due


def _turned(prefill: Prefill) -> _Turned:
    ahead = prefill.blocks + min(prefill.blocks, max(4, prefill.blocks // 4))
    p, d = (np.r_[times.ravel()[::-1], np.zeros(ahead)] for times in (prefill.p, prefill.d))
    mean, s = prefill.p.mean(0)[::-1], prefill.s[::-1]
    covered = np.minimum(s, mean.sum() - mean)
    each = np.array([s, covered, s - covered, (prefill.d - prefill.p).mean(0)[::-1]])
    return _Turned(p, d, s, np.cumsum(p[::-1])[::-1], each, float(mean.sum()) or 1.0, ahead)


def _extend(beam: _Beam, turned: _Turned, width: int) -> _Beam:
    """The best `width` plans with one more load. Candidate r of a plan: the load due at the r-th next compute."""
    (p, d, s, rest, each, round_time, ahead), blocks = turned, len(turned.s)
    n, reach, row = len(p) - ahead, np.arange(ahead), np.arange(len(beam.next))[:, None]
    position = beam.next[:, None] + reach
    block = position % blocks
    was_loaded = beam.loaded[row, block]
    costs = np.where(was_loaded, p[position], d[position])
    starts = np.concatenate([beam.busy[:, None], costs], 1).cumsum(1)  # of the r-th next compute
    at_once = np.repeat(beam.free[:, None], blocks - 1, 1)
    end = np.concatenate([at_once, starts[:, : ahead - blocks + 1]], 1) + s[block]  # these after the block's compute
    begun = np.minimum(reach, (starts[:, None] < end[..., None]).sum(-1))
    busy = np.maximum(starts[row, begun], end)
    following = np.minimum(beam.next[:, None] + begun, n)
    load, covered, uncovered, extra = todo = beam.todo[..., None] - each[:, block]
    slow = np.minimum(covered / (2 * round_time), (n - following) / blocks)  # chunks a block still runs on G2, guessed
    estimate = np.maximum(busy + rest[following] + uncovered + extra * slow, end + load)
    estimate[was_loaded] = np.inf
    kept = min(width, int((~was_loaded).sum()))
    pick = np.divmod(np.argpartition(estimate, kept - 1, None)[:kept], ahead)  # plan, candidate
    loaded, due, new = beam.loaded[pick[0]], beam.due[pick[0]], (np.arange(kept), block[pick])
    loaded[new] = True
    due[new] = position[pick]
    return _Beam(following[pick], end[pick], busy[pick], loaded, due, todo[:, *pick])


RULES: dict[str, Callable[[Prefill], list[Load]]] = {
    "keep both": keep_both, "synchronous": synchronous, "naive": naive, "greedy (paper)": greedy, "ours": ours,
}  # fmt: skip
