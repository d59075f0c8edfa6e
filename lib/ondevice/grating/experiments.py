"""The experiments behind Figures 2, 4 and 8, points of Figure 10, and the comparison of clusterings.

Each gives a tidy table with the columns that `plots` draws and `findings` reads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from ondevice.grating import baselines, printed
from ondevice.grating.baselines import Model
from ondevice.grating.calibration import interval
from ondevice.grating.clustering import sum_of_squares
from ondevice.grating.engine import Engine
from ondevice.grating.printed import HF, OFFLOAD, OURS, OURS_QUANT, QUANT
from ondevice.grating.pruning import ClusterRule, Rule, Selection, around_boundary, dispersion, ranking
from ondevice.grating.recordings import Asked, Recording, asked, kendall, load, opened, spread, without_bars
from ondevice.grating.replay import Pools
from ondevice.grating.trade_offs import at, threshold
from ondevice.grating.weights import InMemory

Floats = NDArray[np.float64]
EXACT_ORDER = f"{OURS}, exact order"
EXACT, LLOYD, RESTARTED = "exact", "K-means, 1 start", "K-means, 10 starts"
_VERDICTS = {False: "dropped", True: "selected"}


# Figure 2


def score_evolution(recordings: Iterable[Recording], k: int = 5, place: int | None = None) -> pd.DataFrame:
    """Figure 2, above: model, layer, candidate, probability, top, of one pool of each recording.

    place: of the pool; None is the one whose mean agreement with its last layer is the median.
    """
    tables = []
    for recording in recordings:
        agreements = _agreements(recording).mean(1)
        at_ = int(np.argsort(agreements)[len(agreements) // 2]) if place is None else place
        scores = recording.pools.pool(at_)
        layer, candidate = np.indices(scores.shape)
        top = np.isin(np.arange(scores.shape[1]), ranking(scores[-1])[:k])
        tables.append(pd.DataFrame({
            "model": recording.model, "layer": layer.ravel() + 1, "candidate": candidate.ravel(),
            "probability": expit(scores).ravel(), "top": np.tile(top, len(scores)),
        }))  # fmt: skip
    return pd.concat(tables, ignore_index=True)


def agreement(recordings: Iterable[Recording]) -> pd.DataFrame:
    """Figure 2, below: model, layer, kendall, low, high: tau-b with the last layer's order, mean and 95 %."""
    rows = []
    for recording in recordings:
        for layer, values in enumerate(_agreements(recording).T, 1):
            found = interval(values, draws=500)
            rows.append((recording.model, layer, found.mean, found.low, found.high))
    return pd.DataFrame(rows, columns=["model", "layer", "kendall", "low", "high"])


def _agreements(recording: Recording) -> Floats:
    """[pools, layers] Kendall's tau with the last layer."""
    scores = recording.pools.scores
    return np.stack([kendall(scores[:, layer], scores[:, -1]) for layer in range(scores.shape[1])], 1)


# Figure 4


def pruning_rounds(scores: ArrayLike, k: int, rule: ClusterRule, exact_order: bool = False
                   ) -> tuple[pd.DataFrame, pd.DataFrame]:  # fmt: skip
    """Figure 4 of one pool with scores [layers, N]: what `plots.pruning` takes.

    (layer, candidate, probability, verdict), a row for each active candidate of a layer, and (layer, statistic,
    threshold). After the last layer ranks decide, not the threshold.
    """
    given = np.asarray(scores, np.float64)
    selection = Selection(given.shape[1], len(given), k, rule, exact_order)
    rows, rounds = [], []
    for layer, row in enumerate(given, 1):
        active = selection.active
        if not len(active):
            break
        left = selection.step(row[active])
        kept = selection._kept[active]
        verdicts = ["deferred" if on else _VERDICTS[bool(one)]
                    for on, one in zip(np.isin(active, left), kept, strict=True)]  # fmt: skip
        rows += list(zip([layer] * len(active), active.tolist(), expit(row[active]).tolist(), verdicts, strict=True))
        rounds.append((layer, dispersion(row[active], rule.statistic), rule.threshold))
    columns = ["layer", "candidate", "probability", "verdict"]
    return pd.DataFrame(rows, columns=columns), pd.DataFrame(rounds, columns=["layer", "statistic", "threshold"])


def worked_example(tau: float = 0.3) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`pruning_rounds` of the paper's example, section 4.5, on scores that were made up for it."""
    return pruning_rounds(printed.worked_example(), 10, ClusterRule(tau))


def telling_pool(recording: Recording, k: int, rule: ClusterRule) -> int:
    """Place of the pool whose share of saved work is the median of those that `rule` decides in several rounds."""
    found = at(recording.pools, k, rule).saved
    several = [place for place in np.argsort(found, kind="stable").tolist()
               if _rounds(recording.pools.pool(place), k, rule) > 1]  # fmt: skip
    return several[len(several) // 2] if several else int(np.argmax(found))


def _rounds(scores: Floats, k: int, rule: ClusterRule) -> int:
    """After how many layers before the last someone was decided."""
    table, _ = pruning_rounds(scores, k, rule)
    decided = table.loc[(table["verdict"] != "deferred") & (table["layer"] < len(scores)), "layer"]
    return int(decided.nunique())


# Clustering


def clustering(
    recordings: Iterable[Recording], sizes: Sequence[int] = (20, 60, 200), pools: int = 60, k: int = 5, seed: int = 0
) -> pd.DataFrame:  # fmt: skip
    """Exact clusters against K-means with random starts: method, n, missed, changed, time_us.

    Values are recorded probabilities after the middle layer, of several pools together for more than 20 candidates.
    missed: above the least sum of squares. changed: a candidate is decided otherwise. time_us: CPU time, median.
    """
    drawn = np.random.default_rng(seed)
    scores = np.concatenate([one.pools.scores[:, one.pools.layers // 2].ravel() for one in recordings])
    rows = []
    for n in sizes:
        cases = [drawn.permutation(drawn.choice(scores.reshape(-1, 20), -(-n // 20), False).ravel())[:n]
                 for _ in range(pools)]  # fmt: skip
        rows += _compared(cases, k)
    return pd.DataFrame(rows, columns=["method", "n", "missed", "changed", "time_us"])


def _compared(cases: Sequence[Floats], k: int) -> list[tuple[str, int, float, float, float]]:
    from sklearn.cluster import KMeans  # here, as it takes 110 MiB

    def lloyd(starts: int) -> Callable[[Floats], NDArray[np.int64]]:
        def labels(logits: Floats) -> NDArray[np.int64]:
            found = KMeans(3, n_init=starts, random_state=0).fit(expit(logits)[:, None])
            return np.argsort(np.argsort(-found.cluster_centers_[:, 0]))[found.labels_]

        return labels

    rule, rows = ClusterRule(0.0), []
    for method, labels in ((EXACT, rule.partition), (LLOYD, lloyd(1)), (RESTARTED, lloyd(10))):
        missed, changed, seconds = [], [], []
        for logits in cases:
            p, best = expit(logits), rule.partition(logits)
            started = time.thread_time()
            made = labels(logits)
            seconds.append(time.thread_time() - started)
            missed.append(sum_of_squares(p, made) > sum_of_squares(p, best) * (1 + 1e-6) + 1e-12)
            changed.append((around_boundary(made, logits, k) != around_boundary(best, logits, k)).any())
        rows.append((method, len(cases[0]), float(np.mean(missed)), float(np.mean(changed)),
                     1e6 * float(np.median(seconds))))  # fmt: skip
    return rows


# Figure 8


@dataclass(frozen=True)
class Way:
    """One bar of Figure 8: how it ranks a pool, and on which recorded scores its precision is. k: None is any."""

    method: str
    threshold: str
    k: int | None
    run: Callable[[Asked], object]
    rule: ClusterRule | None = None
    int8: bool = False
    exact: bool = False


def latency_and_precision(
    thresholds: pd.DataFrame, models: Sequence[str], ks: Sequence[int] = (1, 5, 10), pools: int = 2,
    rounds: int = 1, queries: Sequence[str] | None = None, batch: int = baselines.BATCH,
) -> pd.DataFrame:  # fmt: skip
    """Figure 8: model, queries, k, method, threshold, seconds, low, high, precision; also saved, and pools timed.

    thresholds: of `trade_offs.calibrated`. Seconds are live, tokens included: mean and 95 % over `pools` pools of each
    query set, of each the median of `rounds`. Every method ranks a pool in turn, so that a slower minute of the machine
    is no method's. Precision and saved work are replays of all recorded test pools; HF Offload's is HF's, int8 has
    recordings of its own.
    GRATING has a row for each threshold; exact order is at the high one, int8 at the low one.
    """
    rows = []
    for name in models:
        recording, small = load(name), load(name, int8=True)
        sets = queries or list(dict.fromkeys(recording.queries.tolist()))
        with _ready(name, batch) as ready:
            for one in sets:
                ways = _ways(ready, thresholds, name, one, ks)
                times = _interleaved(ways, asked(recording, spread(recording, pools, one)), rounds)
                for way, seconds in zip(ways, times, strict=True):
                    rows += _bars(way, ks, seconds, recording.of(one), small.of(one), name, one)
    return pd.DataFrame(rows).sort_values(["model", "queries", "k"], kind="stable", ignore_index=True)


@dataclass(frozen=True)
class _Ready:
    """Everything that ranks, loaded."""

    model: Model
    engine: Engine
    small: Model
    small_engine: Engine
    others: dict[str, baselines.Batched]


@contextlib.contextmanager
def _ready(name: str, batch: int) -> Iterator[_Ready]:
    with opened(name) as (model, engine), opened(name, int8=True) as (small, small_engine):
        with without_bars():
            others = {
                HF: baselines.in_memory(model, batch), OFFLOAD: baselines.offloaded(model, batch),
                QUANT: baselines.quantised(model, batch),
            }  # fmt: skip
        yield _Ready(model, engine, small, small_engine, others)


def _ways(ready: _Ready, thresholds: pd.DataFrame, name: str, queries: str, ks: Sequence[int]) -> list[Way]:
    ways = [Way(method, "", None, _ranker(scorer), int8=method == QUANT) for method, scorer in ready.others.items()]
    for k in ks:
        low, high = (ClusterRule(threshold(thresholds, name, queries, k, which)) for which in ("low", "high"))
        for method, which, rule, int8, exact in (
            (OURS, "low", low, False, False), (OURS, "high", high, False, False),
            (EXACT_ORDER, "high", high, False, True), (OURS_QUANT, "low", low, True, False),
        ):  # fmt: skip
            model, engine = (ready.small, ready.small_engine) if int8 else (ready.model, ready.engine)
            ways.append(Way(method, which, k, pruned(model, engine, k, rule, exact), rule, int8, exact))
    return ways


def _ranker(scorer: baselines.Scorer) -> Callable[[Asked], object]:
    return lambda pool: scorer.scores(pool.query, pool.documents)


def pruned(
    model: Model, engine: Engine, k: int, rule: Rule | None, exact: bool = False
) -> Callable[[Asked], object]:  # fmt: skip
    """Ranks a pool's top K by the engine."""

    def run(pool: Asked) -> object:
        rows = model.rows(pool.query, pool.documents)
        ordered = exact or k >= len(rows)  # else there would be nothing to run
        return engine.score(rows, Selection(len(rows), model.architecture.layers, k, rule, ordered).step)

    return run


def _interleaved(ways: Sequence[Way], pools: Sequence[Asked], rounds: int = 1) -> Floats:
    """[ways, pools] seconds, medians of the rounds. Each way runs once before, on two documents; then all in turn."""
    for way in ways:
        way.run(Asked(-1, pools[0].query, pools[0].documents[:2]))
    seconds = np.zeros((len(ways), len(pools), rounds))
    for number in range(rounds * len(pools)):
        turn, pool = divmod(number, len(pools))
        for place in np.roll(np.arange(len(ways)), -number).tolist():  # each time another one begins
            started = time.perf_counter()
            ways[place].run(pools[pool])
            seconds[place, pool, turn] = time.perf_counter() - started
    return np.asarray(np.median(seconds, axis=2), np.float64)


def _bars(
    way: Way, ks: Sequence[int], seconds: Floats, pools: Pools, small: Pools, name: str, queries: str
) -> list[dict[str, Any]]:
    rows, span = [], interval(seconds, draws=500)
    for k in ks if way.k is None else [way.k]:
        found = at(small if way.int8 else pools, k, way.rule or ClusterRule(np.inf), way.exact)
        rows.append({
            "model": name, "queries": queries, "k": k, "method": way.method, "threshold": way.threshold,
            "seconds": span.mean, "low": span.low, "high": span.high, "precision": float(found.precision.mean()),
            "saved": float(found.saved.mean()), "pools": len(seconds),
        })  # fmt: skip
    return rows


def window_penalty(name: str, tau: float, k: int = 5, pools: int = 3, rounds: int = 3) -> pd.DataFrame:
    """What the sliding window adds to weights in memory: pruned, weights (memory, window), seconds (medians), stalled.

    The same engine ranks the same pools with either, in turn. stalled: seconds of it waited for weights.
    """
    recording = load(name)
    texts = asked(recording, spread(recording, pools))
    with opened(name) as (model, engine):
        with without_bars():
            engines = {"memory": Engine(model.architecture, InMemory(model.network())), "window": engine}
        keys = [(prunes, place) for prunes in (False, True) for place in engines]
        ways = [Way(OURS, "", k, pruned(model, engines[place], k, ClusterRule(tau) if prunes else None))
                for prunes, place in keys]  # fmt: skip
        stalled: dict[int, list[float]] = {number: [] for number in range(len(ways))}

        def noting(number: int, run: Callable[[Asked], Any]) -> Callable[[Asked], object]:
            return lambda pool: stalled[number].append(float(run(pool).stalls.sum()))

        noted = [Way(way.method, "", k, noting(number, way.run)) for number, way in enumerate(ways)]
        seconds = _interleaved(noted, texts, rounds)
    rows = [(prunes, place, float(np.median(seconds[number])), float(np.median(stalled[number][1:])))
            for number, (prunes, place) in enumerate(keys)]  # fmt: skip
    return pd.DataFrame(rows, columns=["pruned", "weights", "seconds", "stalled"])
