"""The least latency a graph schedule can have, for few blocks."""

from __future__ import annotations

from itertools import product

import numpy as np

from ondevice_papers.sdnpu.scheduling import (
    Floats,
    Ints,
    Load,
    Prefill,
    Timeline,
    _fits,
    earliest,
    execute,
    latencies,
    ours,
)

MOST_BLOCKS = 12  # of the dynamic program, which goes through sets of blocks
MOST_CHOICES = 100_000  # of chunks, of the branch and bound


def exact(prefill: Prefill) -> Timeline:
    """An optimal timeline: of at most 12 blocks, or, where memory lets a load run ahead, of 100,000 choices of chunks.

    Raises ValueError beyond.
    """
    best = execute(prefill, ours(prefill))
    if not (np.array_equal(prefill.g1, prefill.g2) and prefill.spare < prefill.g2.min()):
        return _branch_and_bound(prefill, best)
    if prefill.blocks > MOST_BLOCKS:
        raise ValueError(f"The exact optimum is for at most {MOST_BLOCKS} blocks, not {prefill.blocks}.")
    chunk = _Program(prefill, best.latency).run()
    return best if chunk is None else execute(prefill, earliest(prefill, chunk))


def _branch_and_bound(prefill: Prefill, best: Timeline) -> Timeline:
    """Choices of chunks in the order of what they take with endless memory; of each, all orders of its loads."""
    if (prefill.chunks + 1) ** prefill.blocks > MOST_CHOICES:
        raise ValueError(f"With spare memory or unlike graphs, at most {MOST_CHOICES} choices of chunks can be tried.")
    chunks = np.array(list(product(range(prefill.chunks + 1), repeat=prefill.blocks)))
    least = latencies(Prefill(prefill.p, prefill.d, prefill.s, memory=np.inf), chunks)
    for index in least.argsort(kind="stable"):
        if least[index] >= best.latency:
            break
        if order := _order(prefill, chunks[index], best.latency):
            best = execute(prefill, [Load(block, 0, int(chunks[index, block])) for block in order])
    return best


def _order(prefill: Prefill, chunk: Ints, bound: float) -> list[int]:
    """The blocks in the order of loads that makes T least for a choice of chunks; none if T is not below `bound`."""
    due = chunk * prefill.blocks + np.arange(prefill.blocks)
    costs = np.where(np.arange(prefill.chunks)[:, None] >= chunk, prefill.d, prefill.p)
    done = np.r_[0.0, costs.ravel().cumsum()]  # computing time of the first k computes
    by = done[np.minimum(due, prefill.p.size)]
    best = list[int]()

    def extend(order: list[int], left: list[int], free: float, late: dict[int, float]) -> None:
        nonlocal bound, best  # late: by how much each load so far ends after `by`
        total = float(done[-1] + max(0.0, *late.values(), *(free + prefill.s[left].cumsum() - by[left])))
        if total >= bound:
            return
        if not left:
            bound = total
            best = order
        for block in left:
            rest = [other for other in left if other != block]
            after = _fits(prefill, [Load(other, 0, 0) for other in (*order, block, *rest)], due.tolist())[len(order)]
            if (after <= due[left]).all():
                waited = max([0.0, *(late[other] for other in order if due[other] < after)])
                end = max(free, done[after] + waited) + prefill.s[block]
                extend([*order, block], rest, end, late | {block: end - by[block]})

    extend([], due.argsort(kind="stable").tolist(), 0.0, {})
    return best


# (loader free, compute ends, label before or None, block loaded or -1, its first chunk on G2)
_Label = tuple[float, float, "_Label | None", int, int]


class _Program:
    """One run of the dynamic program, driven by events, for graphs of a size and no memory to spare.

    A state is (next compute, set of blocks on G2), its labels the pairs (when the loader is free, when the running
    compute ends) that no other pair beats in both. Decisions fall where the loader is free: which load to start, or to
    wait for the compute's end. States that cannot end before the best plan known are dropped.
    """

    def __init__(self, prefill: Prefill, bound: float) -> None:
        self.n = prefill.p.size
        self.blocks = prefill.blocks
        self.costs = prefill.p.ravel().tolist(), prefill.d.ravel().tolist()
        self.s = prefill.s.tolist()
        in_set = (np.arange(1 << self.blocks)[:, None] >> np.arange(self.blocks)) & 1
        self.unloaded = ((1 - in_set) @ prefill.s).tolist()
        switched = _remaining(prefill.d)
        least = _remaining(np.minimum(prefill.p, prefill.d))
        self.rest = (in_set @ switched.T + (1 - in_set) @ least.T).T.tolist()  # [n + 1][sets] computing still to do
        self.states: list[dict[int, list[_Label]]] = [{} for _ in range(self.n + 1)]
        self.best = bound
        self.best_chunks: list[int] | None = None

    def run(self) -> list[int] | None:
        """[N] each block's first chunk on G2, or None where nothing is better than what was known."""
        self.keep(0, 0, (0.0, 0.0, None, -1, 0))
        for position in range(self.n + 1):
            for size in range(self.blocks):
                for done in [loaded for loaded in self.states[position] if loaded.bit_count() == size]:
                    self.leave(position, done)
            self.states[position].clear()
        return self.best_chunks

    def leave(self, position: int, done: int) -> None:
        """Every decision at a state: load a block, or let the next compute begin with the loader idle."""
        for label in self.states[position][done]:
            for block in range(self.blocks):
                if not done >> block & 1:
                    self.load(position, done, label, block)
            if position < self.n:
                end = label[1]
                cost = self.costs[done >> position % self.blocks & 1][position]
                self.keep(position + 1, done, (end, end + cost, label, -1, 0))

    def load(self, position: int, done: int, label: _Label, block: int) -> None:
        """Load a block and let computes run on until the load's end."""
        free, end, *_ = label
        free = (end if block == (position - 1) % self.blocks else free) + self.s[block]  # the one that runs must end
        due = position + (block - position) % self.blocks
        chunk = due // self.blocks
        while end < free and position < min(due, self.n):
            end += self.costs[done >> position % self.blocks & 1][position]
            position += 1
        self.keep(position, done | 1 << block, (free, max(end, free), label, block, chunk))

    def keep(self, position: int, done: int, label: _Label) -> None:
        """Add a label to a state, unless it is beaten there or cannot lead to anything better."""
        free, end, *_ = label
        if max(end + self.rest[position][done], free + self.unloaded[done]) >= self.best:
            return
        if done == (1 << self.blocks) - 1:
            self.best, self.best_chunks = end + self.rest[position][done], self.chunks(label)
            return
        others = self.states[position].setdefault(done, [])
        if any(other[0] <= free and other[1] <= end for other in others):
            return
        others[:] = [other for other in others if other[0] < free or other[1] < end]
        others.append(label)

    def chunks(self, label: _Label | None) -> list[int]:
        """[N] each block's first chunk on G2, from the last label back."""
        chunks = [0] * self.blocks
        while label is not None:
            if label[3] >= 0:
                chunks[label[3]] = label[4]
            label = label[2]
        return chunks


def _remaining(times: Floats) -> Floats:
    """[C N + 1, N] of times [C, N]: what each block still computes from each compute on."""
    n = times.size
    blocks = times.shape[1]
    alone = np.zeros((n + 1, blocks))
    alone[np.arange(n), np.arange(n) % blocks] = times.ravel()
    return alone[::-1].cumsum(0)[::-1]
