"""The value of each claim, from records, replays and formulas; `rules` judges them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from ondevice.evidence import Estimate, Value, derived, exact, kind_of, mean, ratio, resampled
from ondevice.evidence.estimates import DRAWS
from ondevice_papers.grating.clustering import Floats
from ondevice_papers.grating.pools import kendall
from ondevice_studies.grating import full_size, printed, study
from ondevice_studies.grating.full_size import (
    BASELINE,
    CACHE,
    CHUNKS,
    HF,
    OFFLOAD,
    ONE_BATCH,
    OURS,
    WHOLE_LAYERS,
    WINDOW,
)
from ondevice_studies.grating.study import HIGH, LOW

Values = dict[str, Value]
PAPERS = (LOW, HIGH)  # rules of the paper
_LOSSLESS = 1.0  # points


@dataclass(frozen=True)
class Cell:
    """One model, query set, K and rule: draws [1 + DRAWS] of means over pools, the first of the recorded ones.

    saved: percent of each method's latency. loss: of Precision@K, in points. said: makes an estimate of draws.
    """

    key: tuple[str, str, int, str]
    saved: Mapping[str, Floats]
    loss: Floats
    said: Any

    def pair(self, against: str) -> tuple[Estimate, Estimate]:
        """(saved, loss)."""
        return self.said(self.saved[against]), self.lost

    @property
    def lost(self) -> Estimate:
        """The loss. Where no pool lost anything, its interval ends where 95 of 100 draws of so many would show some."""
        found: Estimate = self.said(self.loss)
        return found if self.loss.any() or not found.n else replace(found, high=100 * (1 - 0.05 ** (1 / found.n)))


def cells(found: pd.DataFrame, against: Sequence[str] = (HF, OFFLOAD), seed: int = 0) -> list[Cell]:
    """found: of `study.timed`, with a column of seconds for each method."""
    made = []
    for key, rows in found.groupby(["model", "set", "k", "rule"], sort=False):
        columns = {name: name for name in ("precision", "full", OURS, *against)}
        means = study.means(derived(rows, found), columns, seed)
        of = {name: means[name][:, 0] for name in columns}
        saved = {method: 100 * (1 - of[OURS] / of[method]) for method in against}
        made.append(Cell(cast(Any, key), saved, 100 * (of["full"] - of["precision"]), means.estimate))
    return made


def micro(every: Sequence[Cell], settings: pd.DataFrame) -> Values:
    """c01, c03, c12 to c16: Figure 8. every: of all models, sets and K, with `low` and `high`. settings: of these."""
    paper = [cell for cell in every if cell.key[3] in PAPERS]
    worst = max(paper, key=lambda cell: cell.loss[0])
    first = [cell for cell in paper if cell.key[2] == 1]
    tenth = [best(group, OFFLOAD) for group in grouped(cell for cell in paper if cell.key[2] == 10)]
    both = list(grouped(paper))
    fastest = [max(group, key=lambda cell: cell.saved[HF][0]) for group in both]
    lowest = sum(bool(min(cell.saved[HF][0], cell.saved[OFFLOAD][0]) > 0) for cell in fastest)
    at = settings.set_index(["model", "set", "k", "rule"])["setting"]
    ordered = [sorted(group, key=lambda cell: at[cell.key]) for group in both]
    two = [(low, high) for low, high in ordered if at[low.key] < at[high.key]]
    precise = sum(bool(high.loss[0] <= low.loss[0] + 1e-9) for low, high in two)
    slower = sum(bool(high.saved[HF][0] < low.saved[HF][0]) for low, high in two)
    kind = worst.said(worst.loss).kind
    return {
        "grating-c01": best(paper, OFFLOAD).pair(OFFLOAD),
        "grating-c03": worst.lost,
        "grating-c12": best(first, HF).pair(HF),
        "grating-c13": best(first, OFFLOAD).pair(OFFLOAD),
        "grating-c14": min(tenth, key=lambda cell: cell.saved[OFFLOAD][0]).pair(OFFLOAD),
        "grating-c15": exact(lowest / len(fastest), kind),
        "grating-c16": tuple(exact(count / max(1, len(two)), kind) for count in (precise, slower)),
    }


def best(some: Sequence[Cell], against: str) -> Cell:
    """The one that saves most of those that lose at most a point; of all where none does."""
    lossless = [cell for cell in some if cell.loss[0] <= _LOSSLESS]
    return max(lossless or some, key=lambda cell: cell.saved[against][0])


def grouped(some: Sequence[Cell] | Iterator[Cell]) -> Iterator[list[Cell]]:
    """Those of one model, query set and K together."""
    by_key = dict[Any, list[Cell]]()
    for cell in some:
        by_key.setdefault(cell.key[:3], []).append(cell)
    yield from by_key.values()


def trade_off(curves: pd.DataFrame, seed: int = 0) -> Values:
    """c19: Figure 10. curves: model, k, threshold, pool, saved, precision; thresholds that never prune left out.

    A curve that is constant has no order, and is left out.
    """
    pools = curves["pool"].nunique()
    drawn = np.random.default_rng(seed).multinomial(pools, np.full(pools, 1 / pools), DRAWS)
    weights = np.concatenate([np.ones((1, pools)), drawn]) / pools
    least = []
    for column in ("saved", "precision"):
        every = []
        for _, rows in curves.groupby(["model", "k"], sort=False):
            means = rows.pivot(index="threshold", columns="pool", values=column).to_numpy() @ weights.T
            means = means.round(9)  # equal means are ties, whatever a processor's order of adding makes of them
            if np.ptp(means[:, 0]):
                every.append(spearman(np.arange(len(means)), -means if column == "saved" else means))
        least.append(np.min(every, axis=0))
    ends = [np.quantile(row[1:], [0.025, 0.975]) for row in least]
    return {"grating-c19": tuple(Estimate(row[0], min(low, row[0]), max(high, row[0]), pools, kind_of(curves))
                                 for row, (low, high) in zip(least, ends, strict=True))}  # fmt: skip


def spearman(x: NDArray[Any], columns: Floats) -> Floats:
    """[n] rank correlations of x [m] with columns [m, n]; 0 where one is constant."""
    first, second = (rankdata(of, axis=0) - (len(x) + 1) / 2 for of in (x, columns))
    size = np.sqrt((first**2).sum() * (second**2).sum(0))
    return np.asarray(first @ second / np.maximum(size, 1e-12), np.float64)


def agreement(scores: pd.DataFrame, models: Sequence[str], sets: Sequence[str]) -> pd.DataFrame:
    """Figure 2: model, layer, kendall, low, high: tau-b of a layer's order with the last one's, means over pools."""
    rows = []
    for model in models:
        pools = np.stack([pool.scores for set_ in sets for pool in study.pools_of(scores, model, set_)])
        for layer in range(pools.shape[1]):
            tau = kendall(pools[:, layer], pools[:, -1])
            found = resampled(lambda drawn, tau=tau: float(tau[drawn].mean()), len(tau), scores)  # type: ignore[misc]
            rows.append((model, layer + 1, found.value, found.low, found.high, pools.shape[1]))
    return derived(pd.DataFrame(rows, columns=["model", "layer", "kendall", "low", "high", "layers"]), scores)


def settled(table: pd.DataFrame, at: float = 0.8) -> Values:
    """c11. table: of `agreement`."""
    ends = []
    for column in ("kendall", "high", "low"):
        depths = []
        for _, rows in table.groupby("model", sort=False):
            below = rows.loc[rows[column] < at, "layer"].max()
            depths.append((0 if pd.isna(below) else below) + 1)
            depths[-1] /= rows["layers"].iloc[0]
        ends.append(float(np.mean(depths)))
    return {"grating-c11": Estimate(ends[0], min(ends), max(ends), None, kind_of(table))}


def over_embedder(scores: pd.DataFrame, firsts: pd.DataFrame, sets: Sequence[str]) -> Values:
    """c10. firsts: set, pool, relevant (the embedder's first candidate of a pool)."""
    gains = []
    for set_ in sets:
        embedder = firsts.loc[firsts["set"] == set_].sort_values("pool")["relevant"].to_numpy(float)
        ours = np.mean([[pool.relevant[pool.scores[-1].argmax()] for pool in study.pools_of(scores, model, set_)]
                        for model in study.MODELS], axis=0)  # fmt: skip

        def gain(drawn: NDArray[np.int64], ours: Floats = ours, embedder: Floats = embedder) -> float:
            return float(100 * (ours[drawn].mean() / embedder[drawn].mean() - 1))

        gains.append(resampled(gain, len(embedder), scores))
    return {"grating-c10": tuple(gains)}


# Applications


def applications(every: Mapping[str, Sequence[Cell]]) -> Values:
    """c04, c24, c25, c28, c33, c34. every: cells of RAG and long context, their seconds end to end, `high`, by set."""
    rag = {cell.key[0]: cell for cell in every[study.RAG]}
    context = {cell.key[0]: cell for cell in every[study.CONTEXT]}
    savings = [rag[study.DEEP].pair(HF)[0], rag[study.BASE].pair(HF)[0], context[study.BASE].pair(HF)[0]]
    ordered = sorted(savings, key=lambda one: one.value)
    return {
        "grating-c04": (ordered[0], ordered[-1]),
        "grating-c24": rag[study.DEEP].pair(HF),
        "grating-c25": rag[study.BASE].pair(HF),
        "grating-c28": max((rag[model].lost for model in study.DECODERS), key=lambda one: one.value),
        "grating-c33": context[study.BASE].pair(HF),
        "grating-c34": context[study.BASE].pair(study.NO_RERANKER)[0],
    }


def answers(said: pd.DataFrame, rule: str = HIGH) -> Values:
    """c35. said: the record `answers`: pool, model, way, right."""
    wide = said.assign(way=said["model"] + " " + said["way"]).pivot_table(index="pool", columns="way", values="right")
    without = [way for way in map(str, wide) if way.startswith(" ")]

    def gain(drawn: NDArray[np.int64], way: str) -> float:
        means = wide.iloc[drawn].mean()
        return float(100 * (np.mean([means[f"{model} {way}"] for model in study.DECODERS]) - means[without].max()))

    return {"grating-c35": tuple(resampled(lambda drawn, way=way: gain(drawn, way), len(wide), said)  # type: ignore[misc]
                                 for way in ("full", rule))}  # fmt: skip


# Seconds and memory at full size


def memory(record: pd.DataFrame) -> Values:
    """c21, c27, c32, c36, c38 to c41, c43, c45, c48. record: method, documents, tokens, rss_mb, mean_mb."""

    def of(method: str, documents: int, tokens: int, column: str = "rss_mb") -> Floats:
        """(median, least, greatest) of the runs."""
        rows = record[(record["method"] == method) & (record["documents"] == documents) & (record["tokens"] == tokens)]
        return np.asarray(rows[column].quantile([0.5, 0, 1]), np.float64)

    runs = int(record.groupby(["method", "documents", "tokens"]).size().min())

    def said(values: Floats) -> Estimate:
        return Estimate(float(values[0]), float(values.min()), float(values.max()), runs, kind_of(record))

    ours, hf, offload = (of(method, 20, 500) for method in (OURS, HF, OFFLOAD))
    short = 100 * (1 - of(OURS, 20, 128) / of(HF, 20, 128)[[0, 2, 1]])
    steps = {step: of(step, 60, 500) for step in (ONE_BATCH, CHUNKS, WINDOW, CACHE)}
    added = {step: 100 * (values / hf[[0, 2, 1]] - 1) for step, values in steps.items()}
    return {
        "grating-c21": said(offload / ours[[0, 2, 1]]),
        "grating-c27": said(100 * (1 - of(OURS, 20, 500, "mean_mb") / of(HF, 20, 500, "mean_mb")[[0, 2, 1]])),
        "grating-c32": said(short), "grating-c36": said((hf - ours[[0, 2, 1]]) * 1e6 / 2**30),
        "grating-c38": said(added[ONE_BATCH]), "grating-c39": said(steps[ONE_BATCH] - hf[[0, 2, 1]]),
        "grating-c40": (said(added[ONE_BATCH]), said(added[CHUNKS])), "grating-c41": said(-added[WINDOW]),
        "grating-c43": said(steps[CACHE] * 1e6 / 2**20), "grating-c45": said(-added[CACHE]),
        "grating-c48": said(hf / ours[[0, 2, 1]]),
    }  # fmt: skip


def latency(record: pd.DataFrame, memory: pd.DataFrame, cells: Mapping[str, Cell]) -> Values:
    """c23, c37, c42, c44, c46, c47. record: one machine's whole runs. cells: by rule, of the pools that drove them."""

    def of(method: str, documents: int, rule: str = "") -> list[float]:
        """Seconds by round."""
        rows = record[(record["documents"] == documents) & (record["tokens"] == 128) & (record["rule"] == rule)]
        return rows[rows["method"] == method].sort_values("round")["seconds"].astype(float).tolist()

    def saved(method: str) -> Estimate:
        """Percent of the baseline's seconds."""
        found = ratio(of(method, 60, LOW), of(BASELINE, 60), record)
        value, high, low = (100 * (1 - end) for end in (found.value, found.low, found.high))
        return Estimate(value, low, high, found.n, found.kind)

    def added(method: str, before: str, base: str, documents: int, rule: str) -> Estimate:
        """Percent of the base's seconds by which a method takes longer than another."""
        rounds = zip(*(of(*one) for one in (
            (method, documents, rule), (before, documents, rule), (base, documents, rule if base == before else ""),
        )), strict=True)  # fmt: skip
        return mean([100 * (after - first) / whole for after, first, whole in rounds], record)

    peak = {
        method: memory.query("method == @method and tokens == 500 and documents == 20")["rss_mb"].median()
        for method in (OURS, HF, OFFLOAD)
    }
    high = cells[HIGH].pair(HF)[0]
    in_memory = full_size.IN_MEMORY
    return {
        "grating-c23": (
            exact(peak[OURS] / min(peak[HF], peak[OFFLOAD]), memory),
            Estimate(1 - high.value / 100, 1 - high.high / 100, 1 - high.low / 100, high.n, high.kind),
            ratio(of(OFFLOAD, 20), of(HF, 20), record),
        ),
        "grating-c37": (saved(ONE_BATCH), cells[LOW].lost),
        "grating-c46": (saved(CACHE), cells[LOW].lost),
        "grating-c42": added(WINDOW, CHUNKS, BASELINE, 60, LOW),
        "grating-c44": added(CACHE, WINDOW, BASELINE, 60, LOW),
        "grating-c47": tuple(added(WHOLE_LAYERS, in_memory, in_memory, 20, rule) for rule in ("", LOW)),
    }


def pipeline(stages: pd.DataFrame) -> Values:
    """c08, c09: Figure 1. stages: stage, latency_ms, peak_mb, the reranker last."""
    shares = {column: 100 * stages[column].iloc[-1] / stages[column].sum() for column in ("latency_ms", "peak_mb")}
    return {"grating-c08": exact(shares["latency_ms"], stages), "grating-c09": exact(shares["peak_mb"], stages)}


def sizes() -> Values:
    """c49, c50: from the published shape."""
    return {
        "grating-c49": exact(printed.embedding_share(), "analytic"),
        "grating-c50": exact(printed.vocabulary_share(), "analytic"),
    }
