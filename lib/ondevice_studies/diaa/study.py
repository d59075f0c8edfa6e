"""What the notebook's exhibits share: recorded answers of public models, their speed by regime, and what is judged.

Answers and passes are those of `spec_bench.load`. A pass is one forward of the model that verifies a draft. Speeds are
tokens per time of a plain pass (`regimes.timed`). Means are taken over a task's prompts, averages over the tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ondevice import evidence, prompts
from ondevice.evidence import Estimate, exact, kind_of
from ondevice.evidence.resampling import DRAWS, Resampled, rank_correlation, resample
from ondevice.speculation.mixture import LONGEST_READ
from ondevice_studies.diaa import regimes
from ondevice_studies.diaa.regimes import Regime
from ondevice_studies.speculation.nested import OfPrompts, distinct, resample_models

__all__ = ["resample"]

VANILLA = "vanilla"
OURS = "DIAA"
LOOKUP = "PLD, transformers' rules"
SKIPPING = "layer skipping"  # SWIFT without its search
PAPERS = (VANILLA, "SAM-D", "TR")  # the paper's baselines that are recorded on all requests
MAIN = (VANILLA, OURS, "DIAA, prompt read", "TR", "SAM-D", "PLD", LOOKUP, "mixture 8", "mixture 32")
SIZES = ("3B", "1B")  # the paper's models whose regimes are judged, the larger one first
STALE = "one step stale"  # DIAA with overlap: its tables are updated beside the next forward
STATIC = ("static 8", "static 16", "static 32", "static 64")
DYNAMIC = ("dynamic 8", OURS, "DIAA 32", "dynamic 64")  # trees by the nodes of their budget
NODES = (8, 16, 32, 64)  # of both
READERS = ("RACER", "DIAA, prompt read")  # so begin the names of what reads the logits of any prompt
PAPER_TASKS = prompts.DIAA_NAMES | {"average": "average"}
WARMED = (OURS, "tables: documents", "tables: bigrams")
_Pairs = Sequence[tuple[str, str]]  # methods of which the first is compared with the second
AHEAD: _Pairs = tuple(zip(DYNAMIC[1:], STATIC[1:], strict=True))
HALVED: _Pairs = tuple(pairwise(STATIC))


# Estimates


def in_regimes(
    answers: pd.DataFrame, passes: pd.DataFrame, labelled: Mapping[str, Regime], update: float = 0.0
) -> pd.DataFrame:
    """The answers as `regimes.timed` has them in each regime, whose label is the column `model`.

    update: the share of DIAA's time that its tables' update takes, which overlap hides (`STALE`).
    """
    parts = [regimes.timed(answers, passes, regime).assign(model=label) for label, regime in labelled.items()]
    table = pd.concat(parts, ignore_index=True)
    shown = np.where(table["method"] == STALE, 1 - update, 1.0)
    columns = {"spent": table["spent"] * shown, "speed": table["speed"] / shown, "latency": table["latency"] * shown}
    return evidence.derived(table.assign(**columns), *parts)


def by_regime(table: pd.DataFrame, column: str, methods: Collection[str] = (), seed: int = 0) -> list[OfPrompts]:
    """A sample of `column` per regime of `in_regimes`, as `nested` draws them. methods: all of the table's."""
    return list(resample_models(table, column, seed, methods).values())


def prompt_read(answers: pd.DataFrame) -> pd.Series:
    """How many tokens of its prompt each answer's drafter reads the logits of: all of them, or none."""
    method, tokens = answers["method"].str, answers["prompt_tokens"]
    return tokens.where(method.startswith(READERS) | (method.startswith("mixture") & (tokens <= LONGEST_READ)), 0)


def head_share(model: Any) -> float:
    """The output layer's share of a model's weights, which is that of the multiplications for a token."""
    head = model.get_output_embeddings().weight
    return float(head.numel() / sum(parameter.numel() for parameter in model.parameters()))


def pooled(samples: Sequence[OfPrompts], draws: NDArray[np.float64]) -> Estimate:
    """The estimate of `draws` [1 + DRAWS], which are made of all samples; n counts a prompt of two regimes once."""
    return replace(samples[0], n=distinct([labels for s in samples for labels in s.prompts])).estimate(draws)


# Values of claims
#
# goodput, latency: of `by_regime`, the sample of the paper's larger model first. A null is the same value with another
# method in a place: `ours`, `searcher` and the like are its parameters.


def _average(sample: Resampled, names: Collection[str]) -> NDArray[np.float64]:
    """[names, 1 + DRAWS] means over the tasks, of the names that the sample has."""
    return np.stack([sample[name].mean(axis=1) for name in names if name in sample.names])


def goodput_lead(goodput: Sequence[Resampled], size: int, ours: str = OURS) -> Estimate:
    """Average goodput over the best baseline's. size: its index in `goodput`."""
    sample = goodput[size]
    return sample.estimate(sample[ours].mean(axis=1) / _average(sample, PAPERS).max(axis=0))


def latency_lead(latency: Sequence[Resampled], size: int, ours: str = OURS) -> Estimate:
    """The best baseline's average latency over ours. size: its index in `latency`."""
    sample = latency[size]
    return sample.estimate(_average(sample, PAPERS).min(axis=0) / sample[ours].mean(axis=1))


def average_speedup(latency: Sequence[Resampled], size: int, ours: str = OURS) -> Estimate:
    """Speed-up over plain decoding, the mean over the tasks. size: its index in `latency`."""
    sample = latency[size]
    return sample.estimate((sample[VANILLA] / sample[ours]).mean(axis=1))


def first_or_second(goodput: Sequence[OfPrompts], ours: str = OURS) -> Estimate:
    """Share of cells (regime, task) in which at most one baseline has more goodput."""
    ahead = [np.sum([s[name] > s[ours] for name in PAPERS if name in s.names], axis=0) for s in goodput]
    return pooled(goodput, np.mean([(number <= 1).mean(axis=1) for number in ahead], axis=0))


def lead_on_rag(goodput: Sequence[OfPrompts], searcher: str = "SAM-D") -> tuple[Estimate, ...]:
    """Of each regime a searching drafter's goodput over DIAA's on rag."""
    rag = [sample.only([list(sample.tasks).index("rag")]) for sample in goodput]
    return tuple(sample.estimate((sample[searcher] / sample[OURS])[:, 0]) for sample in rag)


def relative_spread(goodput: Sequence[Resampled], ours: str = OURS) -> tuple[Estimate, ...]:
    """Of each regime the goodput's standard deviation over the tasks, as a part of its mean, over SAM-D's; then of each
    the goodput over plain decoding's, mean over the tasks: a method that never drafts has no spread, and no gain."""

    def spread(sample: Resampled, name: str) -> NDArray[np.float64]:
        return sample[name].std(axis=1, ddof=1) / sample[name].mean(axis=1)

    spreads = [sample.estimate(spread(sample, ours) / spread(sample, "SAM-D")) for sample in goodput]
    gains = [sample.estimate((sample[ours] / sample[VANILLA]).mean(axis=1)) for sample in goodput]
    return *spreads, *gains


def extreme_speedups(latency: Sequence[OfPrompts], methods: Sequence[str]) -> tuple[Estimate, Estimate]:
    """(least, greatest) average speed-up over plain decoding of methods in all regimes."""
    speedups = [(s[VANILLA] / s[name]).mean(axis=1) for s in latency for name in methods if name in s.names]
    return pooled(latency, np.min(speedups, axis=0)), pooled(latency, np.max(speedups, axis=0))


def skipping_speedups(part_latency: Sequence[OfPrompts], methods: Sequence[str] = (SKIPPING,)) -> tuple[Estimate, ...]:
    """`extreme_speedups` of what is recorded on a part of the requests."""
    return extreme_speedups(part_latency, methods)


def least_and_mean(speed: Resampled, pairs: _Pairs) -> tuple[Estimate, Estimate]:
    """(least, mean) over the tasks and pairs of the first one's mean over the second one's."""
    ratios = speed.ratios({f"{over} over {under}": (over, under) for over, under in pairs}).values
    return speed.estimate(ratios.min(axis=(1, 2))), speed.estimate(ratios.mean(axis=(1, 2)))


def sizes_ahead(trees: Sequence[Resampled], pairs: _Pairs = AHEAD) -> tuple[Estimate, ...]:
    """Of each sample the share of pairs of trees in which the first has more, on average over the tasks.

    trees: of goodput, tokens per pass, acceptance.
    """
    ahead = [np.stack([(s[a] - s[b]).mean(axis=1) for a, b in pairs], axis=1) > 0 for s in trees]
    return tuple(sample.estimate(sizes.mean(axis=1)) for sample, sizes in zip(trees, ahead, strict=True))


def cells_ahead(trees: Sequence[Resampled], pairs: _Pairs = AHEAD) -> tuple[Estimate, ...]:
    """Share of cells (task, pair of trees) in which the first tree has more (acceptance, tokens per pass)."""
    samples = trees[:0:-1]
    ahead = [np.stack([s[a] - s[b] for a, b in pairs], axis=2) > 0 for s in samples]  # [1 + DRAWS, tasks, pairs]
    return tuple(sample.estimate(cells.mean(axis=(1, 2))) for sample, cells in zip(samples, ahead, strict=True))


def best_size(speed: Resampled, names: Sequence[str] = DYNAMIC) -> tuple[Estimate, Estimate]:
    """(index of the best, its average over the last one's). names: by rising size."""
    means = _average(speed, names)
    return speed.estimate(means.argmax(axis=0).astype(float)), speed.estimate(means.max(axis=0) / means[-1])


def relative_range(first_tables: Sequence[OfPrompts], names: Sequence[str] = WARMED) -> Estimate:
    """Largest over smallest average of the names, less 1, the greatest of the samples."""
    means = [_average(sample, names) for sample in first_tables]
    return pooled(first_tables, np.max([mean.max(axis=0) / mean.min(axis=0) - 1 for mean in means], axis=0))


def percent_of_time(whole: pd.DataFrame, parts: Sequence[str], method: str = OURS) -> Estimate:
    """Percent of the decoding time that parts of whole answers take, sums over sums. parts: columns of seconds.

    whole: of the record `parts`; of its models the one whose answers take longest is judged, which is the largest.
    """
    largest = whole.groupby("model")["decode_s"].sum().idxmax()
    runs = whole[(whole["model"] == largest) & (whole["method"] == method)]
    part = runs[list(parts)].sum(axis=1).to_numpy()
    decode = runs["decode_s"].to_numpy()
    return evidence.resampled(
        lambda rows: float(100 * part[rows].sum() / decode[rows].sum()),
        len(runs),
        kind_of(whole),
        runs["task"].tolist(),
        drawn="prompts",
    )


def table_sizes(
    mebibytes: Mapping[int, tuple[float, float]], vocabulary: int, id_bytes: int = 8
) -> tuple[float, float]:
    """(t-LUT, p-LUT) in MiB. mebibytes: by the size of the vocabulary, with ids of 8 bytes."""
    tokens, probabilities = mebibytes[vocabulary]
    return tokens * id_bytes / 8, probabilities


def draft_model_gb(counted: pd.DataFrame, column: str = "weights_gb") -> float:
    """Of the last model counted, the paper's draft model. column: its weights, or its tables."""
    return float(counted[column].iloc[-1])


def greatest_percent(counted: pd.DataFrame, column: str = "tables_percent") -> float:
    """Of the models counted, less the draft model. column: or what the draft model takes."""
    return float(counted[column].iloc[:-1].max())


def differing(answers: pd.DataFrame, identity: pd.DataFrame, weights: str = "") -> tuple[Estimate, Estimate]:
    """(DIAA's answers that are not plain decoding's, in percent; answers). All recorded ones, so without an interval.

    identity: of the record `identity`. weights: a format whose plain answers are compared with float32's instead.
    """
    kind = kind_of(answers)
    differ = ~answers.loc[answers["method"] == OURS, "identical"].astype(bool)
    if weights:
        plain = identity.drop_duplicates(["weights", "request"])
        shas = plain.pivot(index="request", columns="weights", values="answer_sha")
        differ = shas[weights] != shas["float32"]
    return exact(100 * float(differ.mean()), kind), exact(len(differ), kind)


def confidence_rank_correlation(nodes: pd.DataFrame, by: str = "chance", bins: int = 10) -> Estimate:
    """Rank correlation of the bins' order and the share accepted in them.

    nodes: answer, chance (the product of the tables' probabilities down to a drafted node), depth, accepted. Bins hold
    equally many nodes. by depth: a bin each, deepest first. Draws are of answers.
    """
    order = pd.qcut(nodes["chance"].rank(method="first"), bins, labels=False) if by == "chance" else -nodes[by]
    counts = nodes.assign(bin=order).pivot_table("accepted", "answer", "bin", ["size", "sum"], fill_value=0)
    each = len(counts)
    drawn = np.random.default_rng(0).multinomial(each, np.full(each, 1 / each), DRAWS)
    drawn = np.concatenate([np.ones((1, each)), drawn])
    shares = (drawn @ counts["sum"].to_numpy()) / np.maximum(drawn @ counts["size"].to_numpy(), 1)
    draws = rank_correlation(shares, np.broadcast_to(np.arange(shares.shape[1]), shares.shape))
    return Resampled((), (), draws, each, kind_of(nodes)).estimate(draws)
