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
memory another order may be better by a few percent, as a load may run ahead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, product
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
MOST_CHOICES = 120_000  # of chunks, that `optimum` tries
Ints = NDArray[np.int64]


class Prefill:
    """What is to be scheduled. All times in one unit.

    p, d: [C, N] compute time of each block in each chunk on G1 and on G2; [N] if all chunks are alike.
    s: [N] load time of each block's G2. chunks: C; may be left out where p or d is [C, N].
    g1, g2: [N] bytes of its graphs, by default 1 each. memory: bytes for graphs, by default those of all G1; all G1 and
    all G2 must fit it; may be infinite. Raises ValueError on what cannot be.
    """

    def __init__(
        self,
        p: ArrayLike,
        d: ArrayLike,
        s: ArrayLike,
        chunks: int | None = None,
        *,
        g1: ArrayLike | None = None,
        g2: ArrayLike | None = None,
        memory: float | None = None,
    ) -> None:
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
        self.p, self.d = (np.broadcast_to(arrays[name], (count, *per_block)) for name in "pd")
        self.s, self.g1, self.g2 = (arrays[name] for name in ("s", "g1", "g2"))
        self.memory = float(self.g1.sum() if memory is None else memory)
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
    numbers = np.array(values, float)
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


def ours(prefill: Prefill) -> list[Load]:
    """Our rule: from many simple plans downhill by one block at a time; from the two best ends on, by two."""
    ends = [downhill(prefill, start, changes(prefill.blocks, 1)) for start in starts(prefill)]
    ends.sort(key=lambda chunk: float(latencies(prefill, chunk[None])[0]))
    plans = [earliest(prefill, downhill(prefill, chunk, changes(prefill.blocks, 2))) for chunk in ends[:2]]
    return min([*plans, greedy(prefill)], key=lambda loads: execute(prefill, loads).latency)


def downhill(prefill: Prefill, chunk: Ints, changes: Ints) -> Ints:
    """A choice of chunks [N] after the best of the changes [M, N], again and again, until none makes T less."""
    for _ in range(2 * chunk.size * prefill.chunks):  # more than any descent takes
        others = np.clip(chunk + np.vstack([0 * chunk, changes]), 0, prefill.chunks)
        latency = latencies(prefill, others)
        if latency.min() >= latency[0] * (1 - 1e-9):
            break
        chunk = others[latency.argmin()]
    return chunk


def changes(blocks: int, most: int) -> Ints:
    """[M, N] moves of at most `most` blocks, 1 or 2, by a chunk each, or of one block by two chunks."""
    single = np.vstack([np.eye(blocks, dtype=int), -np.eye(blocks, dtype=int)])
    pairs = [first + second for first, second in combinations(single, 2)] if most > 1 else []
    return np.vstack([single, 2 * single, *pairs])


def starts(prefill: Prefill) -> Ints:
    """[B, N] plans to begin with: a chunk for all blocks, an earlier one for later or earlier blocks, naive, greedy."""
    chunks = prefill.chunks
    block = np.arange(prefill.blocks)
    same = [np.full(prefill.blocks, chunk) for chunk in range(chunks + 1)]
    falling = [chunks - block * slope // prefill.blocks for slope in range(1, chunks + 1)]
    rising = [plan[::-1] for plan in falling]
    planned = np.full(prefill.blocks, chunks)
    for load in greedy(prefill):
        planned[load.block] = load.chunk
    return np.array([*same, *falling, *rising, np.maximum(0, chunks - block % 2), planned])


def optimum(prefill: Prefill) -> Timeline:
    """The least T of all choices of chunks, loads in due order: the optimum, unless memory lets a load run ahead.

    Raises ValueError where there are more than 120,000 choices.
    """
    if (prefill.chunks + 1) ** prefill.blocks > MOST_CHOICES:
        raise ValueError(f"{prefill.blocks} blocks in {prefill.chunks} chunks have more than {MOST_CHOICES} choices.")
    choices = np.array(list(product(range(prefill.chunks + 1), repeat=prefill.blocks)))
    return execute(prefill, earliest(prefill, choices[latencies(prefill, choices).argmin()]))


RULES: dict[str, Callable[[Prefill], list[Load]]] = {
    "keep both": keep_both,
    "synchronous": synchronous,
    "naive": naive,
    "greedy (paper)": greedy,
    "ours": ours,
}
