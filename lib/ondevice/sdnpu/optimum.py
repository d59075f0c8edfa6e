"""The least latency a graph schedule can have: exactly for few blocks, from below and above for many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from ondevice.sdnpu.scheduling import Floats, Prefill, Timeline, beam_search, earliest, execute

MOST_BLOCKS = 12  # of the dynamic program, which goes through sets of blocks


def exact(prefill: Prefill) -> Timeline:
    """An optimal timeline, by an event-driven dynamic program: at most 12 blocks, milliseconds to 10 s.

    A state is (next compute, set of blocks on G2), its labels the pairs (when the loader is free, when the running
    compute ends) that no other pair beats in both. Decisions fall where the loader is free: which load to start, or to
    wait for the compute's end. States that cannot end before the best plan known are dropped.
    Raises ValueError beyond 12 blocks: use `bounds`.
    """
    if prefill.blocks > MOST_BLOCKS:
        raise ValueError(f"The exact optimum is for at most {MOST_BLOCKS} blocks, not {prefill.blocks}.")
    best = execute(prefill, beam_search(prefill))
    chunk = _Program(prefill, best.latency).run()
    return best if chunk is None else execute(prefill, earliest(prefill, chunk))


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


@dataclass(frozen=True)
class Between:
    """What is known of the optimum: at least `lower`, at most the timeline's latency."""

    lower: float
    timeline: Timeline


def simple_bound(prefill: Prefill) -> float:
    """A latency that no schedule beats, at no cost.

    All loads are one after another. And while a block loads, the others compute at most once each, so that what of its
    load is longer than they take on the faster graph adds to the computing time.
    """
    fastest = np.minimum(prefill.p, prefill.d)
    most = fastest.max(0)
    uncovered = np.maximum(0, prefill.s - (most.sum() - most))
    return float(max(prefill.s.sum(), fastest.sum() + uncovered.sum()))


def bounds(prefill: Prefill, seconds: float = 60.0) -> Between:
    """The optimum between bounds, by a mixed-integer program (HiGHS) stopped after `seconds`; any number of blocks.

    Let x_q be 1 where a load is due at compute q = c N + i, for c from 0 to C: exactly one c for each block. With L_q
    the end of the loads due up to q and E_q the end of compute q,
        L_q >= max(L_(q-1), E_(q-N)) + s_i x_q,    E_q >= max(E_(q-1), L_q) + (p or d by whether the load was due),
    minimise the last of both. Without a load at q the first line asks nothing that later ones do not, so it needs no
    large constant.
    """
    best = execute(prefill, beam_search(prefill))
    n, blocks = prefill.p.size, prefill.blocks
    count = n + blocks
    due, loads, ends, last = np.split(np.arange(2 * count + n + 1), np.cumsum([count, count, n]))
    rows = _Rows(2 * count + n + 1)
    for block in range(blocks):
        rows.add(1.0, dict.fromkeys(due[block::blocks], 1.0), 1.0)
    p, d = prefill.p.ravel(), prefill.d.ravel()
    for q in range(count):
        load = {loads[q]: 1.0, due[q]: -prefill.s[q % blocks]}
        rows.add(0.0, load | ({loads[q - 1]: -1.0} if q else {}))
        if q >= blocks:
            rows.add(0.0, load | {ends[q - blocks]: -1.0})
        if q < n:
            compute = {ends[q]: 1.0} | dict.fromkeys(due[q % blocks : q + 1 : blocks], p[q] - d[q])
            rows.add(p[q], compute | {loads[q]: -1.0})
            rows.add(p[q], compute | ({ends[q - 1]: -1.0} if q else {}))
    rows.add(0.0, {last[0]: 1.0, ends[-1]: -1.0})
    rows.add(0.0, {last[0]: 1.0, loads[-1]: -1.0})
    whole = np.r_[np.ones(count), np.zeros(count + n + 1)]
    low = np.r_[np.zeros(2 * count + n), simple_bound(prefill)]
    high = np.r_[np.ones(count), np.full(count + n + 1, np.inf)]
    solved = milp(
        np.eye(1, len(whole), len(whole) - 1)[0],
        integrality=whole,
        bounds=Bounds(low, high),
        constraints=rows.constraint(),
        options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )
    if solved.x is not None:
        chunk = solved.x[:count].reshape(-1, blocks).argmax(0)
        best = min(best, execute(prefill, earliest(prefill, chunk)), key=lambda timeline: timeline.latency)
    lower = simple_bound(prefill) if solved.mip_dual_bound is None else float(solved.mip_dual_bound)
    return Between(min(lower, best.latency), best)


class _Rows:
    """Linear constraints, built row by row."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.low: list[float] = []
        self.high: list[float] = []
        self.entries: list[tuple[int, int, float]] = []

    def add(self, low: float, row: dict[np.int64, float], high: float = np.inf) -> None:
        self.entries += [(len(self.low), int(column), value) for column, value in row.items()]
        self.low.append(low)
        self.high.append(high)

    def constraint(self) -> LinearConstraint:
        row, column, value = zip(*self.entries, strict=True)
        matrix = coo_array((value, (row, column)), (len(self.low), self.columns)).tocsr()
        return LinearConstraint(matrix, self.low, self.high)
