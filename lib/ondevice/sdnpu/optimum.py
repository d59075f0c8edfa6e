"""The least latency a graph schedule can have, for few blocks."""

from __future__ import annotations

from itertools import product

import numpy as np

from ondevice.sdnpu.scheduling import Floats, Prefill, Timeline, earliest, execute, latencies, ours

MOST_BLOCKS = 12  # of the dynamic program, which goes through sets of blocks
MOST_CHOICES = 100_000


def exact(prefill: Prefill) -> Timeline:
    """An optimal timeline, by an event-driven dynamic program: at most 12 blocks, milliseconds to 10 s.

    A state is (next compute, set of blocks on G2), its labels the pairs (when the loader is free, when the running
    compute ends) that no other pair beats in both. Decisions fall where the loader is free: which load to start, or to
    wait for the compute's end. States that cannot end before the best plan known are dropped.
    With memory to spare, all choices of chunks are tried, at most MOST_CHOICES. Raises ValueError beyond.
    """
    if prefill.spare:
        return _of_all(prefill)
    if prefill.blocks > MOST_BLOCKS:
        raise ValueError(f"The exact optimum is for at most {MOST_BLOCKS} blocks, not {prefill.blocks}.")
    best = execute(prefill, ours(prefill))
    chunk = _Program(prefill, best.latency).run()
    return best if chunk is None else execute(prefill, earliest(prefill, chunk))


def _of_all(prefill: Prefill) -> Timeline:
    """The best of all choices of chunks."""
    if (prefill.chunks + 1) ** prefill.blocks > MOST_CHOICES:
        raise ValueError(f"With memory to spare the optimum is for at most {MOST_CHOICES} choices of chunks.")
    chunks = np.array(list(product(range(prefill.chunks + 1), repeat=prefill.blocks)))
    return execute(prefill, earliest(prefill, chunks[latencies(prefill, chunks).argmin()]))


# (loader free, compute ends, label before or None, block loaded or -1, its first chunk on G2)
_Label = tuple[float, float, "_Label | None", int, int]


class _Program:
    """One run of the dynamic program."""

    def __init__(self, prefill: Prefill, known: float) -> None:
        self.n, self.blocks = prefill.p.size, prefill.blocks
        self.costs = prefill.p.ravel().tolist(), prefill.d.ravel().tolist()
        self.s = prefill.s.tolist()
        in_set = (np.arange(1 << self.blocks)[:, None] >> np.arange(self.blocks)) & 1
        self.unloaded = ((1 - in_set) @ prefill.s).tolist()
        switched, least = _remaining(prefill.d), _remaining(np.minimum(prefill.p, prefill.d))
        self.rest = (in_set @ switched.T + (1 - in_set) @ least.T).T.tolist()  # [n + 1][sets] computing still to do
        self.states: list[dict[int, list[_Label]]] = [{} for _ in range(self.n + 1)]
        self.best = known
        self.found: list[int] | None = None

    def run(self) -> list[int] | None:
        """[N] each block's first chunk on G2, or None where nothing is better than what was known."""
        self.keep(0, 0, (0.0, 0.0, None, -1, 0))
        for position in range(self.n + 1):
            for size in range(self.blocks):
                for done in [one for one in self.states[position] if one.bit_count() == size]:
                    self.leave(position, done)
            self.states[position].clear()
        return self.found

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
            self.best, self.found = end + self.rest[position][done], self.chunks(label)
            return
        others = self.states[position].setdefault(done, [])
        if any(one[0] <= free and one[1] <= end for one in others):
            return
        others[:] = [one for one in others if one[0] < free or one[1] < end]
        others.append(label)

    def chunks(self, label: _Label | None) -> list[int]:
        """[N] each block's first chunk on G2, from the last label back."""
        found = [0] * self.blocks
        while label is not None:
            if label[3] >= 0:
                found[label[3]] = label[4]
            label = label[2]
        return found


def _remaining(times: Floats) -> Floats:
    """[C N + 1, N] of times [C, N]: what each block still computes from each compute on."""
    n, blocks = times.size, times.shape[1]
    alone = np.zeros((n + 1, blocks))
    alone[np.arange(n), np.arange(n) % blocks] = times.ravel()
    return alone[::-1].cumsum(0)[::-1]
