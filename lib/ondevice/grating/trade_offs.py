"""What a threshold or a promise trades, over all recorded pools: exact sweeps, calibration, curves, guarantees.

A sweep replays the paper's rule for many pools at once, each at its own threshold: what `replay` and
`calibration.curve` do pool by pool, in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import expit

from ondevice.grating.calibration import Curve, calibrate, interval
from ondevice.grating.guarantee import CHANCES, fit, last_certified, require
from ondevice.grating.pruning import ClusterRule, Rule
from ondevice.grating.recordings import Recording
from ondevice.grating.replay import Measured, Pools, measure

Floats = NDArray[np.float64]
OVERLAP, POINT = 0.98, 0.01  # what `high` and `low` are calibrated for, see `findings`
_LEAST_MEAN = 1e-12  # as in `pruning`
_GRID = 60  # thresholds of a certified family, at equal steps of rank
_NUDGE = 1 + 1e-9  # of a calibrated threshold, which is a value of the statistic: rounding must not decide
MARGIN, CERTIFIED, CALIBRATED = "margin, certified", "CV threshold, certified", "CV threshold, calibrated"


# Many pools at once


def curve(pools: Pools, k: int, rule: ClusterRule, exact_order: bool = False) -> Curve:
    """All that `rule` can do with these pools as its threshold falls from infinity; as `calibration.curve`.

    Raises ValueError on a rule with other than three clusters, or another statistic than CV or standard deviation.
    """
    _require_three(rule)
    thresholds, open_ = np.full(len(pools), np.inf), np.arange(len(pools))
    steps: list[tuple[Floats, NDArray[np.int64], Floats]] = []
    while len(open_):
        some = pools.take(open_)
        kept, layer, highest = _decided(some, k, thresholds[open_], rule, exact_order)
        steps.append((highest, open_, _rows(some, k, kept, layer)))
        thresholds[open_] = np.nextafter(highest, -np.inf)
        open_ = open_[highest > -np.inf]
    return _summed(steps, len(pools))


def at(pools: Pools, k: int, rule: ClusterRule, exact_order: bool = False) -> Measured:
    """`replay.measure` of the paper's rule, for all pools at once. Raises ValueError as `curve` does."""
    _require_three(rule)
    kept, layer, _ = _decided(pools, k, np.full(len(pools), rule.threshold), rule, exact_order)
    return Measured(*_rows(pools, k, kept, layer).T)


def _require_three(rule: ClusterRule) -> None:
    if rule.clusters != 3 or rule.statistic == "iqr":
        raise ValueError(f"A sweep is of three clusters and cv or std, not of {rule.clusters} and {rule.statistic}.")


def _summed(steps: Sequence[tuple[Floats, NDArray[np.int64], Floats]], count: int) -> Curve:
    """Means over pools from each pool's step functions. steps: (where each begins, of which pools, rows [m, 4])."""
    starts = np.concatenate([one for one, _, _ in steps])
    owners, rows = (np.concatenate([step[part] for step in steps]) for part in (1, 2))
    thresholds = np.unique(np.append(starts, np.inf))[::-1]
    # A step is good from its start up: it ends the one before, of the same pool, which began higher.
    total = np.zeros((len(thresholds), 4))
    order = np.lexsort((-starts, owners))
    starts, owners, rows = starts[order], owners[order], rows[order]
    first = np.r_[True, owners[1:] != owners[:-1]]
    total[0] = rows[first].sum(0)
    ends = np.searchsorted(-thresholds, -starts[:-1][~first[1:]], side="right")  # just below the last one's start
    np.add.at(total, ends, (rows[1:] - rows[:-1])[~first[1:]])
    saved, precision, full, overlap = (np.cumsum(total, 0) / count).T
    return Curve(thresholds, saved, precision, overlap, float(full[0]))


def _decided(
    pools: Pools, k: int, thresholds: Floats, rule: ClusterRule, exact: bool
) -> tuple[NDArray[np.bool_], NDArray[np.int64], Floats]:
    """(kept [P, N], layer [P, N], highest statistic that did not exceed the threshold [P]); see `pruning.Selection`."""
    there = ~np.isnan(pools.relevance)
    active, kept = there.copy(), np.zeros_like(there)
    layer, highest = np.zeros(there.shape, np.int64), np.full(len(pools), -np.inf)
    slots = np.minimum(k, there.sum(1))
    if not exact:
        everyone = slots == there.sum(1)
        kept[everyone], active[everyone] = there[everyone], False
    for number in range(1, pools.layers + 1):
        layer[active] = number
        z = np.where(active, pools.scores[:, number - 1], -np.inf)
        if number == pools.layers:
            rank = np.argsort(np.argsort(-z, 1, "stable"), 1)
            kept |= active & (rank < slots[:, None])
            break
        count = active.sum(1)
        strength = _strength(z, active, count, rule.statistic)
        asked = (slots < count) & (number >= rule.first)
        highest = np.where(asked & (strength <= thresholds), np.maximum(highest, strength), highest)
        hit = np.flatnonzero(asked & (strength > thresholds))
        if len(hit):
            _prune(hit, z[hit], count[hit], slots, active, kept, rule.on, exact)
    return kept, layer, highest


def _prune(
    hit: NDArray[np.int64], z: Floats, count: NDArray[np.int64], slots: NDArray[np.int64], active: NDArray[np.bool_],
    kept: NDArray[np.bool_], on: str, exact: bool,
) -> None:  # fmt: skip
    """Decide around the boundary cluster of the pools `hit`. z: [m, N] their logits, -inf where inactive."""
    order = np.argsort(-z, 1, "stable")
    rank = np.argsort(order, 1)
    values = np.take_along_axis(expit(z) if on == "probability" else z, order, 1)
    first, second = _splits(values, count)
    place = slots[hit] - 1
    begin = np.where(place < first, 0, np.where(place < second, first, second))
    end = np.where(place < first, first, np.where(place < second, second, count))
    accepted = (rank < begin[:, None]) & active[hit] & (not exact)
    dropped = (rank >= end[:, None]) & active[hit]
    kept[hit] |= accepted
    left = active[hit] & ~accepted & ~dropped
    slots[hit] -= accepted.sum(1)
    if not exact:  # the rest has a place each, or none is left
        settled = (slots[hit] == 0) | (slots[hit] == left.sum(1))
        kept[hit] |= left & (settled & (slots[hit] > 0))[:, None]
        left &= ~settled[:, None]
    active[hit] = left


def _strength(z: Floats, active: NDArray[np.bool_], count: NDArray[np.int64], statistic: str) -> Floats:
    """[P] dispersion of the active candidates; -inf for fewer than two."""
    values = expit(z) if statistic == "cv" else np.where(active, z, 0.0)
    n = np.maximum(count, 1)
    mean = values.sum(1) / n
    deviation = np.sqrt((np.where(active, values - mean[:, None], 0.0) ** 2).sum(1) / n)
    found = deviation / np.maximum(mean, _LEAST_MEAN) if statistic == "cv" else deviation
    return np.where(count > 1, found, -np.inf)


def _splits(values: Floats, count: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the second and the third of three optimal clusters begin, [m] each, by trying all pairs.

    values: [m, N] falling, the first `count` of each row; those behind are no part of it. With two distinct values the
    third cluster is empty, with one the second, too.
    """
    m, width = values.shape
    inside = np.arange(width) < count[:, None]
    centred = np.where(inside, values - (np.where(inside, values, 0).sum(1) / count)[:, None], 0.0)
    sums, squares = (np.concatenate([np.zeros((m, 1)), np.cumsum(centred**power, 1)], 1) for power in (1, 2))
    new = np.zeros((m, width + 1), bool)  # whether a cluster can begin at a place: where the value is a new one
    new[:, 1:width] = (values[:, 1:] != values[:, :-1]) & inside[:, 1:]
    i, j = np.triu_indices(width + 1, 1)
    i, j = i[i > 0], j[i > 0]
    end = count[:, None]
    allowed = new[:, i] & new[:, j]
    pairs = (new.sum(1) == 1)[:, None]  # two distinct values: the third cluster begins at the end
    allowed = np.where(pairs, new[:, i] & (j == end), allowed)

    def cost(start: NDArray[np.int64], stop: NDArray[np.int64]) -> Floats:
        total, square = (np.take_along_axis(one, stop, 1) - np.take_along_axis(one, start, 1)
                         for one in (sums, squares))  # fmt: skip
        return square - total**2 / np.maximum(stop - start, 1)

    shape = (m, len(i))
    a, b, c = (np.broadcast_to(one, shape) for one in (i, j, end))
    total = cost(np.zeros(shape, np.int64), a) + cost(a, b) + cost(b, c)
    best = np.where(allowed, total, np.inf).argmin(1)
    flat = ~allowed.any(1)
    return np.where(flat, count, i[best]), np.where(flat, count, j[best])


def _rows(pools: Pools, k: int, kept: NDArray[np.bool_], layer: NDArray[np.int64]) -> Floats:
    """[P, 4] saved, precision, full, overlap of decided pools."""
    there = ~np.isnan(pools.relevance)
    relevance, n = np.where(there, pools.relevance, 0.0), there.sum(1)
    final = np.where(there, pools.scores[:, -1], -np.inf)
    best = np.argsort(np.argsort(-final, 1, "stable"), 1) < np.minimum(k, n)[:, None]
    least = np.maximum(1, np.minimum(k, relevance.sum(1)))
    saved = 1 - layer.sum(1) / (n * pools.layers)
    precision, full = ((relevance * chosen).sum(1) / least for chosen in (kept, best))
    return np.stack([saved, precision, full, (kept & best).sum(1) / best.sum(1)], 1)


# Calibration


def calibrated(
    recordings: Iterable[Recording], ks: Sequence[int] = (1, 5, 10), rule: ClusterRule | None = None,
    overlap: float = OVERLAP, points: float = POINT,
) -> pd.DataFrame:  # fmt: skip
    """Thresholds from validation recordings: model, queries, k, name, threshold (infinity: never prune).

    `high` keeps the mean overlap with the full model's top K, `low` keeps Precision@K within so much of the full
    model's (section 4.1 has a threshold for a precision floor; the paper's two are not stated).
    """
    rows = []
    for recording in recordings:
        for queries in dict.fromkeys(recording.queries.tolist()):
            pools = recording.of(queries)
            for k in ks:
                found = curve(pools, k, rule or ClusterRule(np.inf))
                low = calibrate(found, found.full - points, "precision")
                for name, threshold in (("low", low), ("high", calibrate(found, overlap))):
                    rows.append((recording.model, queries, k, name, threshold * _NUDGE))
    return pd.DataFrame(rows, columns=["model", "queries", "k", "name", "threshold"])


def threshold(found: pd.DataFrame, model: str, queries: str, k: int, name: str) -> float:
    """One of `calibrated`. Raises ValueError where there is none."""
    rows = found[(found["model"] == model) & (found["queries"] == queries) & (found["k"] == k)]
    rows = rows[rows["name"] == name]
    if len(rows) != 1:
        raise ValueError(f"There is no {name} threshold of {model} for {queries} and K = {k}.")
    return float(rows["threshold"].iloc[0])


def outcomes(
    recordings: Iterable[Recording], thresholds: pd.DataFrame, exact_order: bool = False
) -> pd.DataFrame:  # fmt: skip
    """What calibrated thresholds do on test recordings, with 95 % intervals over pools.

    model, queries, k, name, threshold; saved, overlap, change (of Precision@K, a fraction), each with _low and _high.
    """
    kept, rows = {recording.model: recording for recording in recordings}, []
    for row in thresholds.to_dict("records"):
        pools = kept[row["model"]].of(row["queries"])
        found = at(pools, row["k"], ClusterRule(row["threshold"]), exact_order)
        values = {"saved": found.saved, "overlap": found.overlap, "change": found.precision - found.full}
        for column, one in values.items():
            span = interval(one, draws=500)
            row |= {column: span.mean, f"{column}_low": span.low, f"{column}_high": span.high}
        rows.append(row)
    return pd.DataFrame(rows)


# Figure 10


def trade_off(
    recordings: Iterable[Recording], ks: Sequence[int] = (1, 5, 10), points: int = 40, queries: str | None = None
) -> pd.DataFrame:  # fmt: skip
    """Figure 10 by replay: model, k, threshold, computed, precision, full, saved, overlap.

    computed: share of the full model's layer-candidates, what latency would be if it were in proportion.
    queries: one set; None is both. points: thresholds, evenly spread in rank over all at which something changes.
    """
    tables = []
    for recording in recordings:
        pools = recording.pools if queries is None else recording.of(queries)
        for k in ks:
            found = curve(pools, k, ClusterRule(np.inf))
            there = np.flatnonzero(np.isfinite(found.thresholds) & (found.thresholds > 0))
            chosen = there[np.unique(np.linspace(0, len(there) - 1, points).astype(int))] if len(there) else there
            tables.append(pd.DataFrame({
                "model": recording.model, "k": k, "threshold": found.thresholds[chosen],
                "computed": 1 - found.saved[chosen],
                "precision": found.precision[chosen], "full": found.full, "saved": found.saved[chosen],
                "overlap": found.overlap[chosen],
            }))  # fmt: skip
    return pd.concat(tables, ignore_index=True)


def chosen(thresholds: pd.DataFrame, queries: str) -> pd.DataFrame:
    """The calibrated thresholds of one query set as `plots.trade_off` marks them; those that never prune left out."""
    rows = thresholds[(thresholds["queries"] == queries) & np.isfinite(thresholds["threshold"])]
    return rows[["model", "k", "threshold", "name"]].reset_index(drop=True)


# Guarantees


def guarantee(
    pairs: Mapping[str, tuple[Pools, Pools]], ks: Sequence[int] = (5,),
    promised: Sequence[float] = (0.9, 0.95, 0.98, 0.99), confidence: float = 0.95, fitted: float = 0.25,
    every: int = 3, seed: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Recall promised and reached by rule: model, k, rule, promised, reached, low, high, saved, setting.

    pairs: of a model's (validation, test) pools. `MARGIN` is `guarantee`'s rule, `CERTIFIED` the paper's with a
    threshold certified in the same way, `CALIBRATED` the paper's with a threshold that reaches the recall on the
    validation pools and promises nothing. every: how many of `guarantee.CHANCES` make a step of the family, which
    makes it coarser, never wrong. setting: the chance or the threshold; where nothing could be certified 0 or infinity.
    Raises ValueError on too few validation pools to certify the highest promise.
    """
    rows = []
    for name, (valid, test) in pairs.items():
        order = np.random.default_rng(seed).permutation(len(valid))
        first, rest = (valid.take(part) for part in np.split(order, [round(fitted * len(valid))]))
        require(len(rest), max(promised), confidence)
        for k in ks:
            for recall, rule, setting, made in _promises(valid, first, rest, k, promised, confidence, every):
                done = measure(test, k, made) if not isinstance(made, ClusterRule) else at(test, k, made)
                span = interval(done.overlap, draws=500)
                rows.append((name, k, rule, recall, span.mean, span.low, span.high, done.saved.mean(), setting))
    columns = ["model", "k", "rule", "promised", "reached", "low", "high", "saved", "setting"]
    return pd.DataFrame(rows, columns=columns)


def _promises(
    valid: Pools, first: Pools, rest: Pools, k: int, promised: Sequence[float], confidence: float, every: int
) -> Iterator[tuple[float, str, float, Rule | None]]:
    """(recall, name, setting, rule) for each promise and kind of rule; no rule prunes nothing."""
    model = fit(first, k)
    chances = CHANCES[::every]
    margins = [model.rule(chance) for chance in chances]
    taken = curve(first, k, ClusterRule(np.inf)).thresholds
    grid = np.unique(np.quantile(taken[np.isfinite(taken)], np.linspace(0, 1, _GRID)))[::-1].tolist()
    found = curve(valid, k, ClusterRule(np.inf))
    of_margins = _Kept(lambda index: 1 - measure(rest, k, margins[index]).overlap)
    of_grid = _Kept(lambda index: 1 - at(rest, k, ClusterRule(grid[index])).overlap)
    for recall in promised:
        last, _ = last_certified(map(of_margins, range(len(margins))), 1 - recall, confidence, k == 1)
        yield (recall, MARGIN, chances[last], margins[last]) if last >= 0 else (recall, MARGIN, 0.0, None)
        last, _ = last_certified(map(of_grid, range(len(grid))), 1 - recall, confidence, k == 1)
        tau = grid[last] if last >= 0 else np.inf
        yield recall, CERTIFIED, tau, ClusterRule(tau)
        tau = calibrate(found, recall) * _NUDGE
        yield recall, CALIBRATED, tau, ClusterRule(tau)


class _Kept:
    """Losses of one rule after the other, computed once for all promises, and no further than any of them needs."""

    def __init__(self, losses: Callable[[int], Floats]) -> None:
        self._losses, self._kept = losses, dict[int, Floats]()

    def __call__(self, index: int) -> Floats:
        if index not in self._kept:
            self._kept[index] = self._losses(index)
        return self._kept[index]
