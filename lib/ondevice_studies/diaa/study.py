"""What the notebook's exhibits share: recorded passes, the time that they take on a machine, and what is judged.

Tables are those of data/records/diaa (made by `record` and `timing` beside this file). A pass is one forward of the
model that verifies a draft; an answer's decoding is all of its passes. Means are taken over a task's prompts, averages
over the tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from ondevice import evidence
from ondevice.evidence import Estimate, derived, exact, kind_of
from ondevice.evidence.resampling import DRAWS, Resampled, rank_correlation, resample
from ondevice_studies.diaa.methods import BASE, SMALL
from ondevice_studies.speculation.nested import OfPrompts, distinct, resample_models

VANILLA = "vanilla"
OURS = "DIAA"
LOOKUP = "PLD, transformers' rules"
PAPERS = ("vanilla", "SpS", "SWIFT", "SAM-D", "TR")  # the paper's baselines
STALE = "one step stale"  # DIAA with overlap: its tables are updated beside the next forward
PARTS = ("draft", "choose", "keep", "observe")  # of a pass, the code's own
TIMES = ["forward", "drafting", *PARTS]
LARGEST = "random:qwen2.5-0.5b"  # the largest shape whose whole answers were run
SHAPES = ((BASE, ""), (SMALL, ""), (BASE, LARGEST), (BASE, "random:qwen2.5-1.5b"))  # passes, T
STATIC = tuple(f"static {nodes}" for nodes in (8, 16, 32, 64))
DYNAMIC = ("dynamic 8", "dynamic 16", OURS, "dynamic 64")  # trees by the nodes of their budget
WARMED = (OURS, "tables: documents", "tables: other model", "tables: bigrams")
_Pairs = Sequence[tuple[str, str]]  # methods of which the first is compared with the second
AHEAD: _Pairs = tuple(zip(DYNAMIC[1:], STATIC[1:], strict=True))
HALVED: _Pairs = tuple(pairwise(STATIC))
_ANSWER = ["model", "set", "task", "request", "method"]
_REQUEST = ["model", "task", "request"]


# Time


@dataclass(frozen=True)
class Machine:
    """What was timed on a machine. curves: seconds of T(rows, cached); whole: runs of answers, by their parts."""

    name: str
    curves: pd.DataFrame
    whole: pd.DataFrame

    def forward(self, model: str, dtype: str, rows: Any, cached: Any) -> NDArray[np.float64]:
        """Mean T(rows, cached), as sums follow from means: linear between what was measured, and on along its slope."""
        times = self.curves[(self.curves["model"] == model) & (self.curves["dtype"] == dtype)]
        if times.empty:
            measured = sorted(set(zip(self.curves["model"], self.curves["dtype"], strict=True)))
            raise ValueError(f"{self.name} has no cost curve of {model!r} in {dtype}; it has {measured}.")
        grid = times.pivot_table(index="cached", columns="rows", values="mean")
        axes = [grid.index.to_numpy(float), grid.columns.to_numpy(float)]
        seconds = grid.to_numpy()
        for axis in (0, 1):
            if seconds.shape[axis] == 1:  # no slope is known
                axes[axis] = axes[axis] + [0, 1]
                seconds = seconds.repeat(2, axis=axis)
        curve = RegularGridInterpolator(axes, seconds, bounds_error=False, fill_value=None)
        return np.asarray(curve(np.stack(np.broadcast_arrays(cached, rows), axis=-1)))

    def own_work(self, model: str, method: str) -> dict[str, float]:
        """Seconds a pass of each of PARTS; a variant that was not run has DIAA's, a model that was not, none."""
        runs = self._runs(model, method, OURS)
        return {part: runs[f"{part}_s"].sum() / max(1, runs["passes"].sum()) for part in PARTS}

    def prefill(self, model: str, method: str, tokens: pd.Series) -> NDArray[np.float64]:
        """Seconds of prompts, linear in their tokens; a method that was not run has plain decoding's."""
        runs = self._runs(model, method, VANILLA)
        line = np.polyfit(runs["prompt_tokens"], runs["prefill_s"], 1) if len(runs) else [np.nan]
        return np.polyval(line, tokens)

    def _runs(self, model: str, method: str, instead: str) -> pd.DataFrame:
        runs = self.whole[self.whole["model"] == model]
        return runs[runs["method"] == (method if method in set(runs["method"]) else instead)]


def machines(answers: pd.DataFrame) -> dict[str, Machine]:
    """The machines with recorded times."""
    prompts = answers[answers["set"] == "tasks"].drop_duplicates(_REQUEST)
    prompts = prompts.set_index(_REQUEST)[["prompt_tokens", "prompt_sha"]]
    timed_machines = {}
    for name in evidence.machines("diaa", "curves"):
        whole = evidence.load("diaa", f"whole.{name}")
        own = whole["model"].where(whole["model"] == SMALL, BASE)  # a shape has BASE's prompts
        whole = whole.assign(own=own).join(prompts, on=["own", *_REQUEST[1:]])
        timed_machines[name] = Machine(name, evidence.load("diaa", f"curves.{name}"), derived(whole, "recorded"))
    return timed_machines


def timed(
    answers: pd.DataFrame,
    passes: pd.DataFrame,
    machine: Machine,
    dtype: str,
    drafts: Mapping[str, str],
    shape: str = "",
) -> pd.DataFrame:
    """The recorded answers with what they take on a machine, which is predicted, not run.

    drafts: by method the curve of the forwards of one row that draft, {model} in its name. shape: a model whose T
    replaces each one's own.
    Added: decoded (tokens after the first), drafted and accepted over the passes; in seconds the parts forward,
    drafting (a model's forwards), draft, choose, keep, observe (the code's), their sum seconds, and prefill; goodput
    (tokens a second) and latency (ms a token) of decoding; end_to_end (ms a token, the prompt's time with it).
    """
    passes_of = dict(list(passes.groupby(["model", "method"])))
    parts = []
    for names, group in answers.groupby(["model", "method"]):
        model, method = map(str, names)
        timed_as = shape or model
        rows = passes_of[model, method]
        drafting = drafts.get(method, "").format(model=model)
        draft_forward = machine.forward(drafting, dtype, 1, rows["cached"]) if drafting else 0.0
        forward = machine.forward(timed_as, dtype, 1 + rows["drafted"], rows["cached"])
        own = machine.own_work(timed_as, method) | ({"observe": 0.0} if method == STALE else {})  # it is hidden
        spent = rows.assign(forward=forward, drafting=draft_forward * rows["drafting_passes"], **own)
        sums = spent.groupby(_ANSWER)[["drafted", "accepted", *TIMES]].sum()
        prefill = machine.prefill(timed_as, method, group["prompt_tokens"])
        parts.append(group.join(sums, on=_ANSWER).assign(prefill=prefill))
    table = (
        pd.concat(parts)
        .sort_index()
        .assign(
            decoded=lambda t: t["tokens"] - 1,
            seconds=lambda t: t[TIMES].sum(axis=1),
            goodput=lambda t: t["decoded"] / t["seconds"],
            latency=lambda t: 1e3 * t["seconds"] / t["decoded"],
            end_to_end=lambda t: 1e3 * (t["seconds"] + t["prefill"]) / t["tokens"],
        )
    )
    return derived(table[table["decoded"] > 0], answers, passes, machine.curves)


def checked(predicted: pd.DataFrame, whole: pd.DataFrame) -> pd.DataFrame:
    """Predicted over measured decoding by model and method: answers, ratio, low, high; sums over sums of the tasks.

    Answers that took other passes there than in the record, as bf16 fell otherwise, are left out.
    """
    runs = whole.groupby([*_REQUEST, "method"], sort=False)[["decode_s", "passes"]].median()
    both = predicted.join(runs, on=[*_REQUEST, "method"], rsuffix="_there", how="inner")
    rows = []
    both = both[both["passes"] == both["passes_there"]]
    for (model, method), group in both.groupby(["model", "method"], sort=False):
        sides = derived(group.melt(["task", "request"], ["seconds", "decode_s"], "method"), predicted)
        sample = resample(sides, "value")
        ratio = sample.estimate(np.divide(*(sample[name].mean(axis=1) for name in ("seconds", "decode_s"))))
        rows.append((model, method, len(group), ratio.value, ratio.low, ratio.high))
    return derived(pd.DataFrame(rows, columns=["model", "method", "answers", "ratio", "low", "high"]), predicted, whole)


# Estimates


def by_model(table: pd.DataFrame, column: str, methods: Collection[str] = (), seed: int = 0) -> list[OfPrompts]:
    """A sample of `column` per model, the larger one first, as `nested` draws them. methods: all of the table's."""
    samples = resample_models(table, column, seed, methods, "prompt_sha")
    return [samples[model] for model in (BASE, SMALL)]


def ran(whole: pd.DataFrame, seed: int = 0) -> list[OfPrompts]:
    """ms per token of decoding, of whole answers that were run on a machine, as `by_model`; of rounds the median."""
    keys = ["model", "task", "prompt_sha", "method"]
    runs = whole[whole["model"].isin([BASE, SMALL]) & (whole["tokens"] > 1)]
    runs = runs.assign(latency=1e3 * runs["decode_s"] / (runs["tokens"] - 1))
    runs = runs.groupby(keys, sort=False)["latency"].median().reset_index()
    return by_model(derived(runs, whole), "latency", (VANILLA, OURS, LOOKUP), seed)


def pooled(samples: Sequence[OfPrompts], draws: NDArray[np.float64]) -> Estimate:
    """The estimate of `draws` [1 + DRAWS], which are made of all samples; n counts a prompt of two models once."""
    return replace(samples[0], n=distinct([labels for s in samples for labels in s.prompts])).estimate(draws)


# Values of claims
#
# goodput, latency, whole_runs: of `by_model` and `ran`, the larger model's sample first. A null is the same value with
# another method in a place: `ours`, `searcher` and the like are its parameters.


def _average(sample: Resampled, names: Collection[str]) -> NDArray[np.float64]:
    """[names, 1 + DRAWS] means over the tasks, of the names that the sample has."""
    return np.stack([sample[name].mean(axis=1) for name in names if name in sample.names])


def goodput_lead(goodput: Sequence[Resampled], model: int, ours: str = OURS) -> Estimate:
    """Average goodput over the best baseline's. model: its index in `goodput`."""
    sample = goodput[model]
    return sample.estimate(sample[ours].mean(axis=1) / _average(sample, PAPERS).max(axis=0))


def latency_lead(latency: Sequence[Resampled], model: int, ours: str = OURS) -> Estimate:
    """The best baseline's average latency over ours. model: its index in `latency`."""
    sample = latency[model]
    return sample.estimate(_average(sample, PAPERS).min(axis=0) / sample[ours].mean(axis=1))


def average_speedup(whole_runs: Sequence[Resampled], model: int, ours: str = OURS) -> Estimate:
    """Speed-up over plain decoding, the mean over the tasks. model: its index in `whole_runs`."""
    sample = whole_runs[model]
    return sample.estimate((sample[VANILLA] / sample[ours]).mean(axis=1))


def first_or_second(goodput: Sequence[OfPrompts], ours: str = OURS) -> Estimate:
    """Share of cells (model, task) in which at most one baseline has more goodput."""
    ahead = [np.sum([s[name] > s[ours] for name in PAPERS if name in s.names], axis=0) for s in goodput]
    return pooled(goodput, np.mean([(number <= 1).mean(axis=1) for number in ahead], axis=0))


def lead_on_rag(goodput: Sequence[OfPrompts], searcher: str = "SAM-D") -> tuple[Estimate, ...]:
    """Of each model a searching drafter's goodput over DIAA's on rag."""
    rag = [sample.only([list(sample.tasks).index("rag")]) for sample in goodput]
    return tuple(sample.estimate((sample[searcher] / sample[OURS])[:, 0]) for sample in rag)


def relative_spread(goodput: Sequence[Resampled], ours: str = OURS) -> tuple[Estimate, ...]:
    """Of each model the goodput's standard deviation over the tasks, as a part of its mean, over SAM-D's."""

    def spread(sample: Resampled, name: str) -> NDArray[np.float64]:
        return sample[name].std(axis=1, ddof=1) / sample[name].mean(axis=1)

    return tuple(sample.estimate(spread(sample, ours) / spread(sample, "SAM-D")) for sample in goodput)


def extreme_speedups(latency: Sequence[OfPrompts], methods: Sequence[str]) -> tuple[Estimate, Estimate]:
    """(least, greatest) average speed-up over plain decoding of methods on all models that have them."""
    speedups = [(s[VANILLA] / s[name]).mean(axis=1) for s in latency for name in methods if name in s.names]
    return pooled(latency, np.min(speedups, axis=0)), pooled(latency, np.max(speedups, axis=0))


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
    """Largest over smallest average of the names, less 1, the greater of both models' samples."""
    means = [_average(sample, names) for sample in first_tables]
    return pooled(first_tables, np.max([mean.max(axis=0) / mean.min(axis=0) - 1 for mean in means], axis=0))


def percent_of_time(whole: pd.DataFrame, parts: Sequence[str], method: str = OURS, model: str = LARGEST) -> Estimate:
    """Percent of the decoding time that parts of whole answers take, sums over sums. parts: columns of seconds."""
    runs = whole[(whole["model"] == model) & (whole["method"] == method)]
    part = runs[list(parts)].sum(axis=1).to_numpy()
    decode = runs["decode_s"].to_numpy()
    return evidence.resampled(
        lambda rows: float(100 * part[rows].sum() / decode[rows].sum()),
        len(runs),
        kind_of(whole),
        runs["task"].tolist(),
        drawn="prompts",
        clusters=runs["prompt_sha"].tolist(),
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


def differing(answers: pd.DataFrame, method: str = OURS, by_itself: bool = True) -> tuple[Estimate, Estimate]:
    """(The method's answers that are not plain decoding's to the same prompts, in percent; answers).

    by_itself: whether the same model decodes plainly, or the other one. All that were recorded, so without an interval.
    """
    plain = answers[answers["method"] == VANILLA]
    both = answers[answers["method"] == method].merge(plain, on=["set", "task", "prompt_sha"], suffixes=("", "_plain"))
    both = both[(both["model"] == both["model_plain"]) == by_itself]
    kind = kind_of(answers)
    return exact(100 * (both["answer_sha"] != both["answer_sha_plain"]).mean(), kind), exact(len(both), kind)


def confidence_rank_correlation(nodes: pd.DataFrame, by: str = "said", bins: int = 10) -> Estimate:
    """Rank correlation of the bins' order and the share accepted in them, the least of the models.

    nodes: model, answer, said (the product of the tables' probabilities down to a verified node), depth, accepted. Bins
    hold equally many nodes of a model. by depth: a bin each, deepest first. Draws are of answers.
    """
    correlations = []
    for _, group in nodes.groupby("model", sort=False):
        order = pd.qcut(group["said"].rank(method="first"), bins, labels=False) if by == "said" else -group[by]
        counts = group.assign(bin=order).pivot_table("accepted", "answer", "bin", ["size", "sum"], fill_value=0)
        each = len(counts)
        drawn = np.random.default_rng(0).multinomial(each, np.full(each, 1 / each), DRAWS)
        drawn = np.concatenate([np.ones((1, each)), drawn])
        shares = (drawn @ counts["sum"].to_numpy()) / np.maximum(drawn @ counts["size"].to_numpy(), 1)
        correlations.append(rank_correlation(shares, np.broadcast_to(np.arange(shares.shape[1]), shares.shape)))
    draws = np.min(correlations, axis=0)
    return Resampled((), (), draws, nodes["answer"].nunique(), kind_of(nodes)).estimate(draws)
