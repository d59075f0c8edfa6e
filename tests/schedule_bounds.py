"""A second way to the optimum of a graph schedule, which the first must agree with: a mixed-integer program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from ondevice.sdnpu.scheduling import Prefill, Timeline, earliest, execute, ours


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
    best = execute(prefill, ours(prefill))
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
