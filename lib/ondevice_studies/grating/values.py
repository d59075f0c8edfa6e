"""What GRATING's claims are judged by, from records, replays and formulas; the table of claims is in `claims`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
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
from ondevice_papers.grating.pruning import ranking
from ondevice_studies.grating import study
from ondevice_studies.grating.full_size import (
    BASELINE,
    CHUNKS,
    HF,
    HF_8,
    HF_20,
    OFFLOAD,
    ONE_BATCH,
    OURS,
    SHAPE,
    STEPS,
)
from ondevice_studies.grating.scoring import DEEP, MODELS
from ondevice_studies.grating.sets import NOTES, RAG, TEST
from ondevice_studies.grating.study import FIRST, HIGH, LOW, NO_RERANKER, UNPRUNED

PAPER_RULES = (LOW, HIGH)
Pair = tuple[Estimate, Estimate]
_LOSSLESS = 1.0  # points
RESIDENT, ANONYMOUS = "rss_mb", "anon_mb"


@dataclass(frozen=True)
class Cell:
    """One model, query set, K and rule: draws [1 + DRAWS] of means over pools, the first of the recorded ones.

    seconds: of each method, of draws of pools and of the clock's rounds. loss: of Precision@K, in points. means: of the
    precisions. ours: the method that is judged; of another one than GRATING nothing is lost.
    """

    key: tuple[str, str, int, str]
    seconds: Mapping[str, Floats]
    loss: Floats
    means: Resampled
    ours: str = OURS

    def saved(self, against: str) -> Floats:
        """Percent of a method's latency."""
        return (100 * (1 - self.seconds[self.ours] / self.seconds[against])).round(9)  # equal draws are equal

    def pair(self, against: str) -> Pair:
        """(saved, loss)."""
        return self.means.estimate(self.saved(against)), self.lost

    @property
    def lost(self) -> Estimate:
        """The loss. Where no pool lost anything, its interval ends where 95 of 100 draws of so many would show some."""
        loss = self.replayed(self.loss)
        if self.ours != OURS:
            return exact(0, loss.kind)
        return loss if self.loss.any() or not loss.n else replace(loss, high=100 * (1 - 0.05 ** (1 / loss.n)))

    @property
    def work(self) -> Floats:
        """Percent of the layer-candidates that were not computed."""
        return 100 * self.means["saved"][:, 0] * (self.ours == OURS)

    @property
    def missed(self) -> Estimate:
        """Percent of the full model's top K that was not kept."""
        return self.replayed(100 * (1 - self.means["overlap"][:, 0]))

    def replayed(self, draws: Floats) -> Estimate:
        """Of what decisions do to recorded scores, without a clock."""
        return replace(self.means.estimate(draws), kind="replayed")

    def by(self, ours: str) -> Cell:
        """The cell with another method in GRATING's place."""
        return self if ours == OURS else replace(self, ours=ours, loss=0 * self.loss)


def cells(outcomes: pd.DataFrame, seed: int = 0) -> list[Cell]:
    """outcomes: of `study.timed` or `study.end_to_end`, with a column for each method, of seconds by round."""
    methods = [name for name in (OURS, UNPRUNED, HF, OFFLOAD, NO_RERANKER, FIRST) if name in outcomes]
    cells_ = []
    for key, rows in outcomes.groupby(["model", "set", "k", "rule"], sort=False):
        quantities = {name: name for name in ("precision", "full", "overlap", "saved")}
        means = study.means(derived(rows, outcomes), quantities, seed)
        names = pd.factorize(rows["name"])[0]
        seconds = {}
        for method in methods:
            of_rows = np.stack(rows[method].to_list())
            of_pools = np.stack([of_rows[names == number].mean(axis=0) for number in range(names.max() + 1)])
            drawn = study.weights(len(of_pools), seed) @ of_pools
            seconds[method] = (drawn * study.weights(of_pools.shape[1], seed + 1)).sum(axis=1)
        loss = (100 * (means["full"] - means["precision"])[:, 0]).round(9)  # 100 * (0.95 - 0.94) is one point
        cells_.append(Cell(cast(Any, key), seconds, loss, means))
    return cells_


# Latency and precision of cells (Figure 8)


def of_paper(cells: Sequence[Cell], k: int = 0, ours: str = OURS) -> list[Cell]:
    """Those of the paper's two rules. k: of one K only. ours: the method that is judged."""
    return [cell.by(ours) for cell in cells if cell.key[3] in PAPER_RULES and k in (0, cell.key[2])]


def best(cells: Sequence[Cell], against: str) -> Cell:
    """The one that saves most of those that lose at most a point; of all where none does."""
    lossless = [cell for cell in cells if cell.loss[0] <= _LOSSLESS]
    return max(lossless or cells, key=lambda cell: cell.saved(against)[0])


def largest(cells: Sequence[Cell], against: str, k: int = 0, ours: str = OURS) -> Pair:
    """(saved, loss) of the best of the paper's two rules, over models, query sets and K."""
    return best(of_paper(cells, k, ours), against).pair(against)


def grouped(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Those of one model, query set and K together."""
    by_key = dict[Any, list[Cell]]()
    for cell in cells:
        by_key.setdefault(cell.key[:3], []).append(cell)
    yield from by_key.values()


def loss_and_work(cells: Sequence[Cell], fixed: pd.DataFrame | None = None, seed: int = 0) -> Pair:
    """(greatest loss of Precision@K in points, percent of the work that is saved, the cells' mean).

    Who prunes nothing loses nothing; so a small loss counts with what it buys. fixed: of `exits`; then all candidates
    of a cell leave after the last layer that saves at least as much as the rule does.
    """
    losses, works = [cell.loss for cell in cells], [cell.work for cell in cells]
    if fixed is not None:
        after = [_exit(fixed, cell) for cell in cells]
        losses = [study.weights(len(lost), seed) @ lost for lost, _ in after]
        works = [np.full_like(losses[0], saved) for _, saved in after]
    greatest = int(np.argmax([loss[0] for loss in losses]))
    lost = cells[greatest].lost if fixed is None else cells[greatest].replayed(losses[greatest])
    return lost, cells[0].replayed(np.mean(works, axis=0))


def _exit(fixed: pd.DataFrame, cell: Cell) -> tuple[Floats, float]:
    """([pools] points lost, percent saved) where all leave after the last layer that saves as much as a cell does."""
    model, _, k, _ = cell.key
    by_layer = fixed[(fixed["model"] == model) & (fixed["k"] == k)].pivot(index="threshold", columns="pool")
    precision, saved = by_layer["precision"].to_numpy(), 100 * by_layer["saved"].to_numpy()[:, 0]
    layer = max(int((saved >= cell.work[0] - 1e-9).sum()) - 1, 0)
    return 100 * (precision[-1] - precision[layer]), float(saved[layer])


def hardest(cells: Sequence[Cell], k: int, ours: str = OURS) -> Pair:
    """(saved, loss) against HF Offload where least is saved by the faster of the rules that lose at most a point."""
    fastest = [best(group, OFFLOAD) for group in grouped(of_paper(cells, k, ours))]
    return min(fastest, key=lambda cell: cell.saved(OFFLOAD)[0]).pair(OFFLOAD)


def fastest_share(cells: Sequence[Cell], ours: str = OURS) -> Estimate:
    """Share of models, query sets and K in which the faster rule has the lowest latency of all methods."""
    fastest = [max(group, key=lambda cell: cell.saved(HF)[0]) for group in grouped(of_paper(cells, ours=ours))]
    lowest = sum(bool(min(cell.saved(HF)[0], cell.saved(OFFLOAD)[0]) > 0) for cell in fastest)
    return exact(lowest / len(fastest), cells[0].means.kind)


def higher_threshold(cells: Sequence[Cell], settings: pd.DataFrame, ours: str = OURS) -> Pair:
    """Shares of cells with two thresholds in which the higher one (is not less precise, saves less latency)."""
    thresholds = settings.set_index(["model", "set", "k", "rule"])["setting"]
    ordered = [sorted(group, key=lambda cell: thresholds[cell.key]) for group in grouped(of_paper(cells, ours=ours))]
    two = [(low, high) for low, high in ordered if thresholds[low.key] < thresholds[high.key]]
    precise = sum(bool(high.loss[0] <= low.loss[0] + 1e-9) for low, high in two)
    slower = sum(bool(high.saved(HF)[0] < low.saved(HF)[0]) for low, high in two)
    kind = cells[0].means.kind
    return exact(precise / max(1, len(two)), kind), exact(slower / max(1, len(two)), kind)


def driving(cells: Sequence[Cell], rule: str) -> Cell:
    """The cell whose recorded pools drove whole runs."""
    return next(cell for cell in cells if cell.key == (DEEP, NOTES, 10, rule))


# Scores (Figures 2 and 10)


def exits(scores: pd.DataFrame, models: Sequence[str], ks: Sequence[int], set_: str = NOTES) -> pd.DataFrame:
    """What a fixed exit does to test pools of a set: all candidates leave after a layer, whatever their scores.

    The columns of `curves`, the layer in the threshold's place.
    """
    rows = []
    for model, k in product(models, ks):
        for number, pool in enumerate(study.pools_of(scores, model, set_)):
            most = min(k, int(pool.relevant.sum()))
            for layer, values in enumerate(pool.scores, 1):
                precision = pool.relevant[ranking(values)[:k]].sum() / most
                rows.append((model, k, layer, number, 1 - layer / len(pool.scores), precision))
    columns = ["model", "k", "threshold", "pool", "saved", "precision"]
    return derived(pd.DataFrame(rows, columns=columns), scores)


def trade_off(curves: pd.DataFrame, fixed: pd.DataFrame, ours: bool = True, seed: int = 0) -> tuple[Estimate, ...]:
    """Least rank correlation of the threshold with (computed layer-candidates, precision), over models and K.

    curves: model, k, threshold, pool, saved, precision; thresholds that never prune left out. A curve that is constant
    has no order, and is left out. fixed: of `exits`, which are judged where ours is False.
    """
    curves = curves if ours else fixed
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
        least.append(interval(np.min(correlations, axis=0), pools, kind_of(curves), "pools"))
    return tuple(least)


def agreement(scores: pd.DataFrame, models: Sequence[str], sets: Sequence[str]) -> pd.DataFrame:
    """Figure 2: model, layer, kendall, low, high: tau-b of a layer's order with the last one's, means over pools.

    No document has two pools.
    """
    rows = []
    for model in models:
        pools = np.stack([pool.scores for set_ in sets for pool in study.pools_of(scores, model, set_)])
        for layer in range(pools.shape[1]):
            tau = kendall(pools[:, layer], pools[:, -1])
            average = resampled(lambda drawn, tau=tau: float(tau[drawn].mean()), len(tau), scores, drawn="pools")  # type: ignore[misc]
            rows.append((model, layer + 1, average.value, *average.interval, *pools.shape[1::-1]))
    columns = ["model", "layer", "kendall", "low", "high", "layers", "pools"]
    return derived(pd.DataFrame(rows, columns=columns), scores)


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
    return Estimate(ends[0], min(ends), max(ends), int(agreement["pools"].min()), kind_of(agreement), "pools")


def over_embedder(scores: pd.DataFrame) -> tuple[Estimate, ...]:
    """Percent of Precision@1 that rerankers gain on the embedder, mean over rerankers, of `notes and pages` and `RAG`.

    scores: as recorded, with `nearest`: the embedder's first candidate is relevant.
    """
    gains = []
    for set_ in (NOTES, RAG):
        of_set = scores[(scores["set"] == set_) & (scores["split"] == TEST)]
        embedder = of_set.loc[of_set["model"] == MODELS[0], "nearest"].to_numpy(float)
        firsts = [[pool.relevant[pool.scores[-1].argmax()] for pool in study.pools_of(scores, model, set_)]
                  for model in MODELS]  # fmt: skip
        ours = np.mean(firsts, axis=0)

        def gain(drawn: NDArray[np.int64], ours: Floats = ours, embedder: Floats = embedder) -> float:
            return float(100 * (ours[drawn].mean() / embedder[drawn].mean() - 1))

        gains.append(resampled(gain, len(embedder), scores, drawn="pools"))
    return tuple(gains)


# Applications


def of_decoder(cells: Sequence[Cell], ours: str = OURS) -> Cell:
    """Of an application's cells that of `DEEP`, which stands for the paper's decoders. ours: the method judged."""
    return next(cell for cell in cells if cell.key[0] == DEEP).by(ours)


def application(cells: Sequence[Cell], ours: str = OURS) -> Pair:
    """(saved of HF's latency, loss) with the decoder. cells: of one application."""
    return of_decoder(cells, ours).pair(HF)


def least_saved(rag: Sequence[Cell], context: Sequence[Cell], ours: str = OURS) -> Pair:
    """(saved of HF's latency, loss) of the application in which the decoder saves least."""
    return min((application(cells, ours) for cells in (rag, context)), key=lambda pair: pair[0].value)


def read_less(context: Sequence[Cell], ours: str = OURS) -> Estimate:
    """Percent of the end-to-end latency without a reranker that selection saves on long contexts, with the decoder."""
    return of_decoder(context, ours).pair(NO_RERANKER)[0]


def share_of_stage(stages: pd.DataFrame, column: str, index: int = -1) -> Estimate:
    """Percent of the pipeline's sum that is one stage's; the last stage is the reranker."""
    return exact(100 * stages[column].iloc[index] / stages[column].sum(), stages)


# Memory at full size: of 20 candidates, the ablation's steps of 60


def of_runs(values: Floats, memory: pd.DataFrame) -> Estimate:
    """A range, not an interval. values: [3], of the runs' median and of both ends."""
    runs = int(memory.groupby(["method", "documents", "tokens"]).size().min())
    ends = float(values.min()), float(values.max())
    return Estimate(float(values[0]), *ends, runs, kind_of(memory), "runs", "range")


def both(values: Callable[[str], Floats], memory: pd.DataFrame, column: str = RESIDENT) -> Pair:
    """(of resident memory, of anonymous memory). values: [3] by column, as for `of_runs`. column: the first one's."""
    return of_runs(values(column), memory), of_runs(values(ANONYMOUS), memory)


def peak(memory: pd.DataFrame, method: str, tokens: int = 500, column: str = RESIDENT) -> Floats:
    """(median, least, greatest) of the runs, in MB."""
    documents = 60 if method in STEPS else 20
    rows = memory[(memory["method"] == method) & (memory["documents"] == documents) & (memory["tokens"] == tokens)]
    return np.asarray(rows[column].quantile([0.5, 0, 1]), np.float64)


def over(memory: pd.DataFrame, method: str, other: str, tokens: int = 500, column: str = RESIDENT) -> Floats:
    """A method's peak memory over another one's: (of medians, least, greatest)."""
    return peak(memory, method, tokens, column) / peak(memory, other, tokens, column)[[0, 2, 1]]


def peak_ratio(memory: pd.DataFrame, method: str, under: str = OURS) -> Pair:
    """A method's peak memory over another one's, (resident, anonymous)."""
    return both(lambda column: over(memory, method, under, column=column), memory)


def peak_less(memory: pd.DataFrame, method: str, less: str, unit: float = 1e6) -> Pair:
    """A method's peak memory less another one's, (resident, anonymous). unit: bytes."""

    def difference(column: str) -> Floats:
        return (peak(memory, method, column=column) - peak(memory, less, column=column)[[0, 2, 1]]) * (1e6 / unit)

    return both(difference, memory)


def peak_mib(memory: pd.DataFrame, method: str) -> Estimate:
    """A method's peak of resident memory, MiB."""
    return of_runs(peak(memory, method) * 1e6 / 2**20, memory)


def memory_saved(memory: pd.DataFrame, method: str, tokens: int = 500, column: str = RESIDENT) -> Pair:
    """Percent of transformers' memory that a method saves, (of a column, of the peaks of anonymous memory)."""
    return both(lambda name: 100 * (1 - over(memory, method, HF, tokens, name)), memory, column)


def memory_added(memory: pd.DataFrame, method: str, base: str = HF) -> Estimate:
    """Percent of transformers' resident memory by which a method takes more. base: with what batches."""
    return of_runs(100 * (over(memory, method, base) - 1), memory)


def added_to_each(memory: pd.DataFrame, method: str, percent: bool) -> tuple[Estimate, ...]:
    """What a method takes more than transformers with batches of 4, 8 and 20 rows: percent of its memory, or MB.

    The paper does not say how many rows its baseline takes at once, and its temporaries grow with them.
    """
    if percent:
        return tuple(memory_added(memory, method, base) for base in (HF, HF_8, HF_20))
    return tuple(peak_less(memory, method, base)[0] for base in (HF, HF_8, HF_20))


def overheads(memory: pd.DataFrame, chunks: str = CHUNKS) -> Pair:
    """(of one batch, of chunks): percent above the memory of the ablation's baseline."""
    return memory_added(memory, ONE_BATCH), memory_added(memory, chunks)


# Seconds of whole runs


def seconds(latency: pd.DataFrame, method: str, documents: int, rule: str = "") -> list[float]:
    """By round, of rows of 128 tokens. latency: one machine's."""
    rows = latency[(latency["documents"] == documents) & (latency["tokens"] == 128) & (latency["rule"] == rule)]
    return rows[rows["method"] == method].sort_values("round")["seconds"].astype(float).tolist()


def ablation_saved(latency: pd.DataFrame, cells: Sequence[Cell], method: str) -> Pair:
    """(percent of the ablation's baseline that a step saves, loss of precision in points), at the lower threshold."""
    part = ratio(seconds(latency, method, 60, LOW), seconds(latency, BASELINE, 60), latency, drawn="rounds")
    value, highest, lowest = (100 * (1 - end) for end in (part.value, *part.interval))
    return replace(part, value=value, low=lowest, high=highest), driving(cells, LOW).lost


def latency_added(latency: pd.DataFrame, method: str, before: str, rule: str = LOW) -> Estimate:
    """Percent by which a method takes longer than the one before it: of the ablation's baseline for its steps."""
    documents = 60 if method in STEPS else 20
    base = seconds(latency, BASELINE, 60) if method in STEPS else seconds(latency, before, 20, rule)
    ours = seconds(latency, method, documents, rule)
    rounds = zip(ours, seconds(latency, before, documents, rule), base, strict=True)
    return mean([100 * (after - first) / whole for after, first, whole in rounds], latency, drawn="rounds")


def lowest_at_once(
    latency: pd.DataFrame, memory: pd.DataFrame, cells: Sequence[Cell], ours: str = OURS
) -> tuple[Estimate, ...]:
    """(our peak of resident and of anonymous memory over the least other one's, our latency over HF's, HF Offload's).

    ours: GRATING, or another method in its place.
    """

    def over_least(column: str) -> Floats:
        others = {method: peak(memory, method, column=column)[0] for method in (OURS, HF, OFFLOAD) if method != ours}
        return over(memory, ours, min(others, key=lambda method: others[method]), column=column)

    saved = driving(cells, HIGH).by(ours).pair(HF)[0]
    part = replace(saved, value=1 - saved.value / 100, low=1 - saved.high / 100, high=1 - saved.low / 100)
    offload = ratio(seconds(latency, OFFLOAD, 20), seconds(latency, HF, 20), latency, drawn="rounds")
    return *both(over_least, memory), part, offload


# From the published shape (section 4.4)


def embedding_share(layers: int = 2) -> float:
    """Percent of the memory that is embedding table, once so many layers are all the others there are."""
    sizes = {key: parameter.numel() for key, parameter in shapes.shape(SHAPE).empty().named_parameters()}
    layer = sum(size for key, size in sizes.items() if ".layers.0." in key)
    table = sizes["model.embed_tokens.weight"]
    return 100 * table / (table + layers * layer)


def vocabulary_share() -> float:
    """Percent of the vocabulary that 20 documents of 512 tokens touch at most."""
    return float(100 * 20 * 512 / shapes.shape(SHAPE).values["vocab_size"])
