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
    The paper has d_i >= p_i; nothing here needs it. Raises ValueError on lengths that differ, a chunk count below 1,
    no block, and times that are negative or not finite.
    """

    p: Floats
    d: Floats
    s: Floats

    def __init__(self, p: ArrayLike, d: ArrayLike, s: ArrayLike, chunks: int | None = None) -> None:
        times = {name: np.array(values, float) for name, values in (("p", p), ("d", d), ("s", s))}
        for name, values in times.items():
            wrong = values[~(np.isfinite(values) & (values >= 0))]
            if wrong.size:
                raise ValueError(f"A block's time is finite and not negative, but {name} holds {wrong[0]:g}.")
        if any(times[name].ndim > 2 for name in "pd"):
            raise ValueError(f"p and d are [N] or [C, N], not of {times['p'].ndim} and {times['d'].ndim} dimensions.")
        counts = [len(times[name]) for name in "pd" if times[name].ndim == 2] + ([] if chunks is None else [chunks])
        if len(set(counts)) != 1:
            raise ValueError(f"A prefill has one number of chunks, not {counts or 'none'}.")
        if counts[0] < 1 or counts[0] != int(counts[0]):
            raise ValueError(f"A prefill has a whole number of chunks from 1, not {counts[0]}.")
        shapes = {name: values.shape for name, values in times.items()}
        if times["s"].ndim != 1 or not times["s"].size or any(shapes[x][-1:] != shapes["s"] for x in "pd"):
            raise ValueError(f"p, d and s have one time for each of the same blocks, not the shapes {shapes}.")
        for name in "pd":
            object.__setattr__(self, name, np.broadcast_to(times[name], (int(counts[0]), len(times["s"]))))
        object.__setattr__(self, "s", times["s"])

    @property
    def chunks(self) -> int:
        """C."""
        return len(self.p)

    @property
    def blocks(self) -> int:
        """N."""
        return len(self.s)


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

    A block without a load stays on G1. Raises ValueError on a plan that loads a block twice or while it computes, or
    that never ends because a compute waits for a load that comes after it.
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

    for load in loads:
        compute_until(load.after)
        start = max(free, ends[load.after])
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
        if not (0 <= load.block < blocks and 0 <= load.chunk <= prefill.chunks):
            raise ValueError(f"{load} names a block or a chunk that the prefill does not have.")
        if due[load.block] < n + blocks:
            raise ValueError(f"Block {load.block} is loaded twice.")
        due[load.block] = load.chunk * blocks + load.block
        if not max(0, due[load.block] - blocks + 1) <= load.after <= min(n, due[load.block]):
            raise ValueError(f"{load} does not start between the block's computes in chunk {load.chunk} and before.")
    return due


def earliest(prefill: Prefill, chunk: Sequence[int] | Ints) -> list[Load]:
    """The best plan in which each block computes on G2 from its chunk on: chunk [N], each 0 to C."""
    due = np.asarray(chunk) * prefill.blocks + np.arange(prefill.blocks)
    return [
        Load(int(block), int(max(0, due[block] - prefill.blocks + 1)), int(chunk[block])) for block in np.argsort(due)
    ]


# The rules


def keep_both(prefill: Prefill) -> list[Load]:
    """Both graphs stay in memory: no load, at twice the memory. Not a switch; what switching is measured against."""
    return []


def synchronous(prefill: Prefill) -> list[Load]:
    """All loads after the prefill (Figure 8b, 1)."""
    return [Load(block, prefill.p.size, prefill.chunks) for block in range(prefill.blocks)]


def naive_asynchronous(prefill: Prefill) -> list[Load]:
    """In the last chunk, each block's load once it has computed (Figure 8b, 2)."""
    return earliest(prefill, [prefill.chunks] * prefill.blocks)


def greedy(prefill: Prefill, *, start: int = 0) -> list[Load]:
    """The paper's rule: the fewest next computes that cover a load run beside it, then the next round (Eqs. 1, 2).

    start: the compute at which the rounds begin. The paper's j, "the last block not switched", may be among the
    computes that should cover its load; we take the last one that is not. Where no k is feasible, which the paper
    leaves open, one compute runs without a load. A block that never fits, and any other that is left at the end, is
    loaded after the prefill.
    """
    return _rounds(prefill, start, partial=False)


def greedy_partial(prefill: Prefill, *, start: int = 0) -> list[Load]:
    """As `greedy`, but where no k is feasible, the load that sticks out least is started anyway and waited for.

    So a block that never fits is loaded beside as many computes as there are between two of its own; equal ones from
    the last.
    """
    return _rounds(prefill, start, partial=True)


def late_start(prefill: Prefill) -> list[Load]:
    """`greedy_partial`, begun at the compute from which T is least, of equal ones the last: O((C N)^2)."""
    plans = [greedy_partial(prefill, start=start) for start in range(prefill.p.size, -1, -1)]
    return min(plans, key=lambda loads: execute(prefill, loads).latency)


def _rounds(prefill: Prefill, position: int, *, partial: bool) -> list[Load]:
    n, blocks = prefill.p.size, prefill.blocks
    if not 0 <= position <= n:
        raise ValueError(f"The rounds start at a compute from 0 to {n}, not {position}.")
    costs, d, s = prefill.p.ravel().tolist(), prefill.d.ravel().tolist(), prefill.s.tolist()
    most = np.maximum(prefill.p, prefill.d).max(0)
    never = np.zeros(blocks, bool) if partial else prefill.s > most.sum() - most  # only saves trying them
    left, loads = np.flatnonzero(~never).tolist(), []
    while left and position < n:
        sums = [0.0, *accumulate(costs[position : position + blocks])]  # of the next 0, 1 .. computes
        room = {block: min((block - position) % blocks, n - position) for block in left}
        short = {block: s[block] - sums[room[block]] for block in left}
        fitting = [block for block in left if short[block] <= 0 < room[block]]
        if not fitting and not partial:
            position += 1
            continue
        block = max(fitting) if fitting else min(reversed(left), key=short.__getitem__)
        k = max(1, bisect_left(sums, s[block])) if fitting else room[block]
        chunk = -((block - position) // blocks)
        loads.append(Load(block, position, chunk))
        costs[chunk * blocks + block :: blocks] = d[chunk * blocks + block :: blocks]
        left.remove(block)
        position += k
    late = sorted(set(range(blocks)) - {load.block for load in loads})
    return loads + [Load(block, n, prefill.chunks) for block in late]


# Our rule


class _Beam(NamedTuple):
    """Partial plans in turned time, each after its last load so far. B of them."""

    next: Ints  # [B] the compute that starts next; the one before runs until `busy`
    free: Floats  # [B] when the loader is free; at most `busy`
    busy: Floats  # [B]
    loaded: NDArray[np.bool_]  # [B, N]
    due: Ints  # [B, N] the first compute after the load
    todo: Floats  # [4, B] of what is not loaded: load time, what it can overlap, what it cannot, extra time a chunk


def beam_search(prefill: Prefill, width: int | None = None) -> list[Load]:
    """Our rule: a beam search over loads in turned time, compared with the simple rules' plans by `execute`.

    In turned time a block computes on G2 until its load and then on G1, so that loading early is good in itself, the
    loader is hardly ever idle, and a late start needs no rule. After each load, each partial plan is continued with
    each block, right away and, if it computes soon, after that compute; the `width` plans of the least estimated T are
    kept. A block that never fits is taken like any other. About N steps of O(width N^2), whatever C is.
    """
    if width is not None and width < 1:
        raise ValueError(f"A beam is at least 1 wide, not {width}.")
    seeds = [rule(prefill) for rule in (greedy, greedy_partial, naive_asynchronous)]
    found = earliest(prefill, _search(prefill, width or max(8, 256 // prefill.blocks)))
    return min([found, *seeds], key=lambda loads: execute(prefill, loads).latency)


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
    "synchronous": synchronous,
    "naive asynchronous": naive_asynchronous,
    "keep both graphs": keep_both,
    "greedy (paper)": greedy,
    "greedy, partial overlap": greedy_partial,
    "late start": late_start,
    "beam search (ours)": beam_search,
}
