"""What GRATING's claims are judged by, from records, replays and formulas; the table of claims is in `claims`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ondevice import shapes
from ondevice.evidence import Estimate, derived, exact, kind_of, mean, ratio, resampled
from ondevice.evidence.estimates import DRAWS
from ondevice.evidence.resampling import Resampled, interval, rank_correlation
from ondevice_papers.grating.clustering import Floats
from ondevice_papers.grating.pools import kendall
from ondevice_studies.grating import study
from ondevice_studies.grating.answers import KEPT
from ondevice_studies.grating.full_size import BASELINE, HF, OFFLOAD, OURS, SHAPE, STEPS
from ondevice_studies.grating.questions import CLOZE, QUESTIONS
from ondevice_studies.grating.study import DECODERS, DEEP, HIGH, LOW

PAPER_RULES = (LOW, HIGH)
Pair = tuple[Estimate, Estimate]
_LOSSLESS = 1.0  # points


@dataclass(frozen=True)
class Cell:
    """One model, query set, K and rule: draws [1 + DRAWS] of means over pools, the first of the recorded ones.

    saved: percent of each method's latency. loss: of Precision@K, in points. means: what both were made from.
    """

    key: tuple[str, str, int, str]
    saved: Mapping[str, Floats]
    loss: Floats
    means: Resampled

    def pair(self, against: str) -> Pair:
        """(saved, loss)."""
        return self.means.estimate(self.saved[against]), self.lost

    @property
    def lost(self) -> Estimate:
        """The loss. Where no pool lost anything, its interval ends where 95 of 100 draws of so many would show some."""
        loss = self.means.estimate(self.loss)
        return loss if self.loss.any() or not loss.n else replace(loss, high=100 * (1 - 0.05 ** (1 / loss.n)))


def cells(outcomes: pd.DataFrame, against: Sequence[str] = (HF, OFFLOAD), seed: int = 0) -> list[Cell]:
    """outcomes: of `study.timed`, with a column of seconds for each method."""
    made = []
    for key, rows in outcomes.groupby(["model", "set", "k", "rule"], sort=False):
        columns = {name: name for name in ("precision", "full", OURS, *against)}
        means = study.means(derived(rows, outcomes), columns, seed)
        draws = {name: means[name][:, 0] for name in columns}
        saved = {method: 100 * (1 - draws[OURS] / draws[method]) for method in against}
        made.append(Cell(cast(Any, key), saved, 100 * (draws["full"] - draws["precision"]), means))
    return made


# Latency and precision of cells (Figure 8)


def of_paper(cells: Sequence[Cell], k: int = 0) -> list[Cell]:
    """Those of the paper's two rules. k: of one K only."""
    return [cell for cell in cells if cell.key[3] in PAPER_RULES and k in (0, cell.key[2])]


def best(cells: Sequence[Cell], against: str) -> Cell:
    """The one that saves most of those that lose at most a point; of all where none does."""
    lossless = [cell for cell in cells if cell.loss[0] <= _LOSSLESS]
    return max(lossless or cells, key=lambda cell: cell.saved[against][0])


def grouped(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Those of one model, query set and K together."""
    by_key = dict[Any, list[Cell]]()
    for cell in cells:
        by_key.setdefault(cell.key[:3], []).append(cell)
    yield from by_key.values()


def greatest_loss(cells: Sequence[Cell]) -> Estimate:
    """Of Precision@K, in points, over the paper's two rules."""
    return max(of_paper(cells), key=lambda cell: cell.loss[0]).lost


def hardest(cells: Sequence[Cell], k: int) -> Pair:
    """(saved, loss) against HF Offload where least is saved by the faster of the rules that lose at most a point."""
    fastest = [best(group, OFFLOAD) for group in grouped(of_paper(cells, k))]
    return min(fastest, key=lambda cell: cell.saved[OFFLOAD][0]).pair(OFFLOAD)


def fastest_share(cells: Sequence[Cell]) -> Estimate:
    """Share of models, query sets and K in which the faster rule has the lowest latency of all methods."""
    fastest = [max(group, key=lambda cell: cell.saved[HF][0]) for group in grouped(of_paper(cells))]
    lowest = sum(bool(min(cell.saved[HF][0], cell.saved[OFFLOAD][0]) > 0) for cell in fastest)
    return exact(lowest / len(fastest), cells[0].means.kind)


def fastest_unpruned(latency: pd.DataFrame) -> Estimate:
    """The same share without pruning: 1 where unpruned ranking is faster than transformers, else 0."""
    whole = latency.query("rule == '' and documents == 20 and tokens == 128").groupby("method")["seconds"].median()
    return exact(float(whole[OURS] < whole[HF]), latency)


def higher_threshold(cells: Sequence[Cell], settings: pd.DataFrame) -> Pair:
    """Shares of cells with two thresholds in which the higher one (is not less precise, saves less latency)."""
    thresholds = settings.set_index(["model", "set", "k", "rule"])["setting"]
    ordered = [sorted(group, key=lambda cell: thresholds[cell.key]) for group in grouped(of_paper(cells))]
    two = [(low, high) for low, high in ordered if thresholds[low.key] < thresholds[high.key]]
    precise = sum(bool(high.loss[0] <= low.loss[0] + 1e-9) for low, high in two)
    slower = sum(bool(high.saved[HF][0] < low.saved[HF][0]) for low, high in two)
    kind = cells[0].means.kind
    return exact(precise / max(1, len(two)), kind), exact(slower / max(1, len(two)), kind)


def driving(cells: Sequence[Cell], rule: str) -> Cell:
    """The cell whose recorded pools drove whole runs."""
    return next(cell for cell in cells if cell.key == (DEEP, QUESTIONS, 10, rule))


# Scores (Figures 2 and 10)


def trade_off(curves: pd.DataFrame, seed: int = 0) -> tuple[Estimate, ...]:
    """Least rank correlation of the threshold with (computed layer-candidates, precision), over models and K.

    curves: model, k, threshold, pool, saved, precision; thresholds that never prune left out. A curve that is constant
    has no order, and is left out.
    """
    pools = curves["pool"].nunique()
    drawn = np.random.default_rng(seed).multinomial(pools, np.full(pools, 1 / pools), DRAWS)
    weights = np.concatenate([np.ones((1, pools)), drawn]) / pools
    least = []
    for column in ("saved", "precision"):
        correlations = []
        for _, rows in curves.groupby(["model", "k"], sort=False):
            means = rows.pivot(index="threshold", columns="pool", values=column).to_numpy() @ weights.T
            means = means.round(9)  # equal means are ties, whatever a processor's order of adding makes of them
            if np.ptp(means[:, 0]):
                order = np.arange(len(means), dtype=np.float64)[None]
                correlations.append(rank_correlation(order, (-means if column == "saved" else means).T))
        least.append(interval(np.min(correlations, axis=0), pools, kind_of(curves)))
    return tuple(least)


def agreement(scores: pd.DataFrame, models: Sequence[str], sets: Sequence[str]) -> pd.DataFrame:
    """Figure 2: model, layer, kendall, low, high: tau-b of a layer's order with the last one's, means over pools."""
    rows = []
    for model in models:
        pools = np.stack([pool.scores for set_ in sets for pool in study.pools_of(scores, model, set_)])
        for layer in range(pools.shape[1]):
            tau = kendall(pools[:, layer], pools[:, -1])
            average = resampled(lambda drawn, tau=tau: float(tau[drawn].mean()), len(tau), scores)  # type: ignore[misc]
            rows.append((model, layer + 1, average.value, *average.interval, pools.shape[1]))
    return derived(pd.DataFrame(rows, columns=["model", "layer", "kendall", "low", "high", "layers"]), scores)


def settled(agreement: pd.DataFrame, level: float = 0.8) -> Estimate:
    """Share of the depth from which on a layer's order agrees with the last one's to this level, mean over models."""
    ends = []
    for column in ("kendall", "high", "low"):
        depths = []
        for _, rows in agreement.groupby("model", sort=False):
            below = rows.loc[rows[column] < level, "layer"].max()
            depths.append((0 if pd.isna(below) else below) + 1)
            depths[-1] /= rows["layers"].iloc[0]
        ends.append(float(np.mean(depths)))
    return Estimate(ends[0], min(ends), max(ends), None, kind_of(agreement))


def over_embedder(scores: pd.DataFrame, firsts: pd.DataFrame) -> tuple[Estimate, ...]:
    """Percent of Precision@1 that rerankers gain on the embedder, mean over rerankers, of each set.

    firsts: set, pool, relevant (the embedder's first candidate of a pool).
    """
    gains = []
    for set_ in (QUESTIONS, CLOZE):
        embedder = firsts.loc[firsts["set"] == set_].sort_values("pool")["relevant"].to_numpy(float)
        ours = np.mean(
            [
                [pool.relevant[pool.scores[-1].argmax()] for pool in study.pools_of(scores, model, set_)]
                for model in study.MODELS
            ],
            axis=0,
        )

        def gain(drawn: NDArray[np.int64], ours: Floats = ours, embedder: Floats = embedder) -> float:
            return float(100 * (ours[drawn].mean() / embedder[drawn].mean() - 1))

        gains.append(resampled(gain, len(embedder), scores))
    return tuple(gains)


# Applications


def high(cells: Sequence[Cell], model: str) -> Cell:
    """An application's cell of the higher threshold."""
    return next(cell for cell in cells if cell.key[0] == model and cell.key[3] == HIGH)


def least_and_greatest(rag: Sequence[Cell], context: Sequence[Cell]) -> Pair:
    """Savings against HF, of RAG with both decoders and of long contexts."""
    savings = [high(rag, DEEP).pair(HF)[0], high(rag, study.BASE).pair(HF)[0], high(context, study.BASE).pair(HF)[0]]
    ordered = sorted(savings, key=lambda saving: saving.value)
    return ordered[0], ordered[-1]


def first_segments(segments: pd.DataFrame) -> Estimate:
    """Percent saved by reading the first K segments, unranked. segments: of `study.outcomes`, of long contexts."""
    return exact(100 * (1 - KEPT / segments["layer"].map(len).mean()), "simulated")


def right_answers(answers: pd.DataFrame) -> tuple[Estimate, ...]:
    """Points gained over the best way without a reranker, by (HF, GRATING). answers: the record."""
    ways = answers["model"] + " " + answers["way"]
    wide = answers.assign(way=ways).pivot_table(index="pool", columns="way", values="right")
    without = [way for way in map(str, wide) if way.startswith(" ")]

    def gain(drawn: NDArray[np.int64], way: str) -> float:
        means = wide.iloc[drawn].mean()
        return float(100 * (np.mean([means[f"{model} {way}"] for model in DECODERS]) - means[without].max()))

    return tuple(
        resampled(lambda drawn, way=way: gain(drawn, way), len(wide), answers)  # type: ignore[misc]
        for way in ("full", HIGH)
    )


def last_share(stages: pd.DataFrame, column: str) -> Estimate:
    """Percent of the pipeline's sum that is the reranker's, its last stage."""
    return exact(100 * stages[column].iloc[-1] / stages[column].sum(), stages)


# Memory at full size: of 20 candidates, the ablation's steps of 60


def of_runs(values: Floats, memory: pd.DataFrame) -> Estimate:
    """values: [3], of the runs' median and of both ends."""
    runs = int(memory.groupby(["method", "documents", "tokens"]).size().min())
    return Estimate(float(values[0]), float(values.min()), float(values.max()), runs, kind_of(memory))


def peak(memory: pd.DataFrame, method: str, tokens: int = 500, column: str = "rss_mb") -> Floats:
    """(median, least, greatest) of the runs, in MB."""
    documents = 60 if method in STEPS else 20
    rows = memory[(memory["method"] == method) & (memory["documents"] == documents) & (memory["tokens"] == tokens)]
    return np.asarray(rows[column].quantile([0.5, 0, 1]), np.float64)


def peak_ratio(memory: pd.DataFrame, over: str, under: str = OURS) -> Estimate:
    """A method's peak memory over another one's."""
    return of_runs(peak(memory, over) / peak(memory, under)[[0, 2, 1]], memory)


def peak_less(memory: pd.DataFrame, method: str, less: str, unit: float = 1e6) -> Estimate:
    """A method's peak memory less another one's. unit: bytes."""
    return of_runs((peak(memory, method) - peak(memory, less)[[0, 2, 1]]) * (1e6 / unit), memory)


def memory_saved(memory: pd.DataFrame, method: str, tokens: int = 500, column: str = "rss_mb") -> Estimate:
    """Percent of transformers' memory that a method saves."""
    whole = peak(memory, HF, tokens, column)
    return of_runs(100 * (1 - peak(memory, method, tokens, column) / whole[[0, 2, 1]]), memory)


def memory_added(memory: pd.DataFrame, method: str) -> Estimate:
    """Percent of transformers' memory by which a method takes more."""
    return of_runs(100 * (peak(memory, method) / peak(memory, HF)[[0, 2, 1]] - 1), memory)


# Seconds of whole runs


def seconds(latency: pd.DataFrame, method: str, documents: int, rule: str = "") -> list[float]:
    """By round, of rows of 128 tokens. latency: one machine's."""
    rows = latency[(latency["documents"] == documents) & (latency["tokens"] == 128) & (latency["rule"] == rule)]
    return rows[rows["method"] == method].sort_values("round")["seconds"].astype(float).tolist()


def ablation_saved(latency: pd.DataFrame, cells: Sequence[Cell], method: str) -> Pair:
    """(percent of the ablation's baseline that a step saves, loss of precision in points), at the lower threshold."""
    part = ratio(seconds(latency, method, 60, LOW), seconds(latency, BASELINE, 60), latency)
    value, highest, lowest = (100 * (1 - end) for end in (part.value, *part.interval))
    return Estimate(value, lowest, highest, part.n, part.kind), driving(cells, LOW).lost


def latency_added(latency: pd.DataFrame, method: str, before: str, rule: str = LOW) -> Estimate:
    """Percent by which a method takes longer than the one before it: of the ablation's baseline for its steps."""
    documents = 60 if method in STEPS else 20
    base = seconds(latency, BASELINE, 60) if method in STEPS else seconds(latency, before, 20, rule)
    ours = seconds(latency, method, documents, rule)
    rounds = zip(ours, seconds(latency, before, documents, rule), base, strict=True)
    return mean([100 * (after - first) / whole for after, first, whole in rounds], latency)


def lowest_at_once(latency: pd.DataFrame, memory: pd.DataFrame, cells: Sequence[Cell]) -> tuple[Estimate, ...]:
    """(GRATING's peak over the least other one's, its latency over HF's, HF Offload's latency over HF's)."""
    ours, hf, offload = (float(peak(memory, method)[0]) for method in (OURS, HF, OFFLOAD))
    saved = driving(cells, HIGH).pair(HF)[0]
    return (
        exact(ours / min(hf, offload), memory),
        Estimate(1 - saved.value / 100, 1 - saved.high / 100, 1 - saved.low / 100, saved.n, saved.kind),
        ratio(seconds(latency, OFFLOAD, 20), seconds(latency, HF, 20), latency),
    )


# From the published shape (section 4.4)


def embedding_share() -> float:
    """Percent of the memory that is embedding table, once two layers are all the others there are."""
    sizes = {key: parameter.numel() for key, parameter in shapes.shape(SHAPE).empty().named_parameters()}
    layer = sum(size for key, size in sizes.items() if ".layers.0." in key)
    table = sizes["model.embed_tokens.weight"]
    return 100 * table / (table + 2 * layer)


def vocabulary_share() -> float:
    """Percent of the vocabulary that 20 documents of 512 tokens touch at most."""
    return float(100 * 20 * 512 / shapes.shape(SHAPE).values["vocab_size"])
