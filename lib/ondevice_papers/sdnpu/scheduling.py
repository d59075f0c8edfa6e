"""Progressive graph scheduling: switching the model's blocks from G1 to G2 during prefill (paper, section 3.2).

N blocks run C chunks in order on one compute engine: block i of a chunk takes p_i on the prefill graph G1, d_i on the
decoding graph G2 (the whole chunk, as repeated short runs). One loader brings each block's G2 once, in s_i, without a
break. The latency T is the later of the last compute's and the last load's end.

Memory. All G1 are there at the start. A block's G1 is let go once its last compute on it is over, and what it leaves is
for the block's own G2. So without bytes to spare a block is loaded when its G1 is gone; with some, a load may also run
beside its own block's computes on G1.

A rule plans, `execute` times the plan. A plan is a list of loads in the loader's order.

A fact that the search and the optimum use. Let every block's chunk be given: the first one that it computes on G2. Then
all computing times are given. Without spare memory the load of block i may start when block i's compute in the chunk
before is done (its release), and block i's compute in that chunk waits for its end (its due compute). Both are in the
same order over all loads. So by exchange of neighbours it is best to load in that order and as early as possible: a
plan is C + 1 choices for each block, and nothing else. The same exchange shows that a compute never gains by waiting
for another block's load. And since T is a longest path, it is the same when all of time is turned round. With spare
memory another order may be better by a few percent, as a load may run ahead: `optimum.exact` tries them all.
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
    all G2 must fit it; may be infinite. Raises ValueError on what cannot be.
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
        arrays = {name: _numbers(name, values) for name, values in (("p", p), ("d", d), ("s", s))}
        for name, values in (("g1", g1), ("g2", g2)):
            arrays[name] = np.ones(arrays["s"].shape) if values is None else _numbers(name, values)
        counts = [len(arrays[name]) for name in "pd" if arrays[name].ndim == 2] + ([] if chunks is None else [chunks])
        if len(set(counts)) != 1 or not 1 <= counts[0] < np.inf or counts[0] != int(counts[0]):
            raise ValueError(f"A prefill has one whole number of chunks from 1, not {counts or 'none'}.")
        shapes = {name: array.shape for name, array in arrays.items()}
        count = int(counts[0])
        per_block = shapes["s"]
        allowed = {x: (per_block, (count, *per_block)) if x in "pd" else (per_block,) for x in shapes}
        if len(per_block) != 1 or per_block[0] < 1 or any(shapes[x] not in allowed[x] for x in shapes):
            raise ValueError(f"p, d, s, g1 and g2 have one number for each of the same blocks, not shapes {shapes}.")
        for name, array in arrays.items():
            object.__setattr__(self, name, np.broadcast_to(array, (count, *per_block)) if name in "pd" else array)
            with np.errstate(over="ignore"):
                if not np.isfinite(getattr(self, name).sum() * 4):
                    raise ValueError(f"The blocks' {name} are so large that their sum is no number.")
        object.__setattr__(self, "memory", float(self.g1.sum() if memory is None else memory))
        least = max(self.g1.sum(), self.g2.sum())
        if not self.memory * (1 + 1e-9) >= least:
            raise ValueError(f"The graphs take {least:g} bytes, more than the memory of {self.memory:g}.")

    @property
    def chunks(self) -> int:
        """C, the number of chunks of the prompt."""
        return len(self.p)

    @property
    def blocks(self) -> int:
        """N, the number of blocks of the model."""
        return len(self.s)

    @property
    def spare(self) -> float:
        """Bytes beside all G1, with what rounding may have taken."""
        return float(self.memory * (1 + 1e-9) - self.g1.sum())


def _numbers(name: str, values: ArrayLike) -> Floats:
    try:
        numbers = np.array(values, float)
    except ValueError:
        raise ValueError(f"p, d, s, g1 and g2 are numbers in rows of one length, which {name} is not.") from None
    wrong = numbers[~(np.isfinite(numbers) & (numbers >= 0))]
    if wrong.size:
        raise ValueError(f"Times and sizes are finite and not negative, but {name} holds {wrong[0]:g}.")
    return numbers


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
        """T: when the last compute and the last load are over."""
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
    n = prefill.p.size
    blocks = prefill.blocks
    due = due_computes(prefill, loads)
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


def due_computes(prefill: Prefill, loads: Sequence[Load]) -> list[int]:
    """[N] each block's first compute on G2; beyond the last one for none."""
    n = prefill.p.size
    blocks = prefill.blocks
    due = [n + blocks] * blocks
    for load in loads:
        if not (0 <= load.block < blocks and 0 <= load.chunk <= prefill.chunks and 0 <= load.after <= n):
            raise ValueError(f"{load} names a block, a chunk or a compute that the prefill does not have.")
        if due[load.block] < n + blocks:
            raise ValueError(f"Block {load.block} is loaded twice.")
        due[load.block] = load.chunk * blocks + load.block
    return due


def _fits(prefill: Prefill, loads: Sequence[Load], due: Sequence[int]) -> list[int]:
    """How many computes must be over before each load's graph fits the memory.

    Once its block's G1 is let go, a load may use whatever is free. Before, it may use spare bytes only: not what the G1
    of a block that is still to be loaded has left.
    """
    n, blocks, needed, counts = prefill.p.size, prefill.blocks, -prefill.spare, list[int]()
    released = {load.block: max(0, due[load.block] - blocks + 1) for load in loads}  # computes until its G1 is let go
    freed = np.zeros(n + 1)  # bytes that all blocks have given back, once k computes are over
    left = np.zeros(n + 1)  # and those that are loaded
    for block, over in released.items():
        freed[over:] += prefill.g1[block]
    for block, over in released.items():
        left[over:] += prefill.g1[block]
        needed += prefill.g2[block]
        counts.append(min(max(over, int(np.searchsorted(freed, needed))), int(np.searchsorted(left, needed))))
        if counts[-1] > n:
            raise ValueError(f"Block {block}'s load waits for memory that never comes.")
    return counts


def earliest(prefill: Prefill, chunk: Sequence[int] | Ints) -> list[Load]:
    """Each block computes on G2 from its chunk on, [N] from 0 to C: loads in due order, as early as memory allows."""
    due = np.asarray(chunk) * prefill.blocks + np.arange(prefill.blocks)
    return [Load(int(block), 0, int(chunk[block])) for block in np.argsort(due, kind="stable")]


def latencies(prefill: Prefill, chunk: Ints) -> Floats:
    """[B] T of `earliest` for each of B choices of chunks [B, N]; infinite where a load can never start."""
    (many, blocks) = chunk.shape
    n = prefill.p.size
    row = np.arange(many)[:, None]
    switched = np.arange(prefill.chunks)[:, None] >= chunk[:, None]
    done = np.zeros((many, n + 1))  # computing time of the first k computes
    np.cumsum(np.where(switched, prefill.d, prefill.p).reshape(many, n), 1, out=done[:, 1:])
    due = chunk * blocks + np.arange(blocks)
    order = due.argsort(1, kind="stable")
    due = due[row, order]
    s = prefill.s[order]
    needed = prefill.g2[order].cumsum(1) - prefill.spare
    freed = prefill.g1[order].cumsum(1)
    released = (needed > 0) + (freed[:, None] < needed[:, :, None]).sum(2)  # how many G1 are gone before the k-th load
    after = np.where(released > 0, np.maximum(0, due[row, released - 1] - blocks + 1), 0)
    earlier = (due[:, None] < after[:, :, None]).sum(2)  # loads that the computes before it have waited for
    begin = done[row, after]
    by = done[row, np.minimum(due, n)]
    free = np.zeros(many)
    waited = np.zeros((blocks + 1, many))  # waited[k]: by computes for the first k loads
    for k in range(blocks):
        free = np.maximum(free, begin[:, k] + waited[earlier[:, k], row[:, 0]]) + s[:, k]
        waited[k + 1] = np.maximum(waited[k], free - by[:, k])
    return np.where((after > due).any(1), np.inf, done[:, -1] + waited[-1])


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
    one that is not, and whose G2 fits when its G1 is let go. Where no k is feasible, which the paper leaves open, one
    compute runs without a load. A block that is left at the end is loaded after the prefill.
    """
    n, blocks, position, free = prefill.p.size, prefill.blocks, 0, prefill.spare
    grows = prefill.g2 - prefill.g1
    costs, left, loads = prefill.p.ravel().tolist(), list(range(blocks)), list[Load]()
    while left and position < n:
        covered = [0.0, *accumulate(costs[position : position + blocks])]  # by the next 0, 1 .. computes
        room = {block: min((block - position) % blocks, n - position) for block in left}
        fitting = [
            block for block in left if room[block] and prefill.s[block] <= covered[room[block]] and grows[block] <= free
        ]
        if not fitting:
            position += 1
            continue
        j = max(fitting)
        k = max(1, bisect_left(covered, prefill.s[j]))  # Eq. 1: p_next + .. + p_next+k-1 >= s_j, the least k (Eq. 2)
        chunk = -((j - position) // blocks)
        loads.append(Load(j, position, chunk))
        costs[chunk * blocks + j :: blocks] = prefill.d[chunk:, j].tolist()
        left.remove(j)
        free -= grows[j]
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
    """Our rule: a beam search over loads, then changes of one block's chunk while T falls.

    The changes begin at the best of: the two plans of the search, naive's, naive's with every other block a chunk
    earlier, greedy's.
    """
    late = np.full(prefill.blocks, prefill.chunks)
    each = np.arange(prefill.blocks)
    seeds = np.array([*beam_search(prefill), late, late - each % 2, first_chunks(prefill, greedy(prefill))])
    plan = earliest(prefill, improved(prefill, seeds[latencies(prefill, seeds).argmin()]))
    return min(plan, greedy(prefill), key=lambda loads: execute(prefill, loads).latency)


def improved(prefill: Prefill, chunk: Ints) -> Ints:
    """The choice of chunks after the best changes of one block by one or two chunks, until none makes T less."""
    changes = np.multiply.outer([-2, -1, 1, 2], np.eye(prefill.blocks, dtype=int)).reshape(-1, prefill.blocks)
    best = latencies(prefill, chunk[None])[0]
    while True:
        others = np.clip(chunk + changes, 0, prefill.chunks)
        latency = latencies(prefill, others)
        if latency.min() >= best * (1 - 1e-9):
            return chunk
        chunk = others[latency.argmin()]
        best = latency.min()


def first_chunks(prefill: Prefill, loads: Sequence[Load]) -> Ints:
    """[N] each block's first chunk on G2 in a plan."""
    chunks = np.full(prefill.blocks, prefill.chunks)
    for load in loads:
        chunks[load.block] = load.chunk
    return chunks


def beam_search(prefill: Prefill) -> list[Ints]:
    """Each block's first chunk on G2, [N], found from the end backwards, and from the beginning on.

    Backwards, a block computes on G2 until its load and then on G1, so that loading early is good in itself where G1 is
    the faster; forwards, where G2 is. Memory to spare is not used.
    """
    turned = Prefill(prefill.d[::-1, ::-1], prefill.p[::-1, ::-1], prefill.s[::-1])
    return [_backwards(prefill), prefill.chunks - _backwards(turned)[::-1]]


def _backwards(prefill: Prefill) -> Ints:
    turned = _turned(prefill)
    none = np.zeros(1)
    nothing = np.zeros((1, prefill.blocks), int)
    beam = _Beam(none.astype(int), none, none, nothing > 0, nothing, turned.each.sum(1, keepdims=True))
    for _ in range(prefill.blocks):
        beam = _extend(beam, turned, max(8, 24_000 // prefill.blocks**2))
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
    mean = prefill.p.mean(0)[::-1]
    s = prefill.s[::-1]
    covered = np.minimum(s, mean.sum() - mean)
    each = np.array([s, covered, s - covered, (prefill.d - prefill.p).mean(0)[::-1]])
    return _Turned(p, d, s, np.cumsum(p[::-1])[::-1], each, float(mean.sum()) or 1.0, ahead)


def _extend(beam: _Beam, turned: _Turned, width: int) -> _Beam:
    """The best `width` plans with one more load. Candidate r of a plan: the load due at the r-th next compute."""
    (p, d, s, rest, each, round_time, ahead) = turned
    blocks = len(turned.s)
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
    pick = np.divmod(estimate.argsort(None, kind="stable")[:kept], ahead)  # plan, candidate
    loaded, due, new = beam.loaded[pick[0]], beam.due[pick[0]], (np.arange(kept), block[pick])
    loaded[new] = True
    due[new] = position[pick]
    return _Beam(following[pick], end[pick], busy[pick], loaded, due, todo[:, *pick])


RULES: dict[str, Callable[[Prefill], list[Load]]] = {
    "keep both": keep_both, "synchronous": synchronous, "naive": naive, "greedy (paper)": greedy, "ours": ours,
}  # fmt: skip
