"""What the notebook's exhibits share: recorded passes, the time that they take on a machine, and what is judged.

Tables are those of data/records/diaa (made by `record` and `timing` beside this file). A pass is one forward of the
model that verifies a draft; an answer's decoding is all of its passes. Means are taken over a task's prompts, averages
over the tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator
from scipy.stats import rankdata

from ondevice import evidence
from ondevice.evidence import Estimate, derived, kind_of
from ondevice.evidence.resampling import DRAWS, Resampled, resample
from ondevice_studies.diaa.methods import BASE, SMALL

VANILLA, OURS, LOOKUP = "vanilla", "DIAA", "PLD, transformers' rules"
PAPERS = ("vanilla", "SpS", "SWIFT", "SAM-D", "TR")  # the paper's baselines
STALE = "one step stale"  # DIAA with overlap: its tables are updated beside the next forward
PARTS = ("draft", "choose", "keep", "observe")  # of a pass, the code's own
TIMES = ["forward", "drafting", *PARTS]
SHAPES = ((BASE, ""), (SMALL, ""), (BASE, "random:qwen2.5-0.5b"), (BASE, "random:qwen2.5-1.5b"))  # passes, T
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
        mine = self.curves[(self.curves["model"] == model) & (self.curves["dtype"] == dtype)]
        if mine.empty:
            known = sorted(set(zip(self.curves["model"], self.curves["dtype"], strict=True)))
            raise ValueError(f"{self.name} has no cost curve of {model!r} in {dtype}; it has {known}.")
        grid = mine.pivot_table(index="cached", columns="rows", values="mean")
        axes = [grid.index.to_numpy(float), grid.columns.to_numpy(float)]
        seconds = grid.to_numpy()
        for place in (0, 1):
            if seconds.shape[place] == 1:  # no slope is known
                axes[place] = axes[place] + [0, 1]
                seconds = seconds.repeat(2, axis=place)
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
        mine = self.whole[self.whole["model"] == model]
        return mine[mine["method"] == (method if method in set(mine["method"]) else instead)]


def machines(answers: pd.DataFrame) -> dict[str, Machine]:
    """The machines with recorded times."""
    lengths = answers[answers["set"] == "tasks"].drop_duplicates(_REQUEST).set_index(_REQUEST)["prompt_tokens"]
    found = {}
    for name in evidence.machines("diaa", "curves"):
        whole = evidence.load("diaa", f"whole.{name}")
        own = whole["model"].where(whole["model"] == SMALL, BASE)  # a shape has BASE's prompts
        whole = whole.assign(own=own).join(lengths, on=["own", *_REQUEST[1:]])
        found[name] = Machine(name, evidence.load("diaa", f"curves.{name}"), derived(whole, "recorded"))
    return found


def timed(
    answers: pd.DataFrame, passes: pd.DataFrame, machine: Machine, dtype: str, drafts: Mapping[str, str],
    shape: str = "",
) -> pd.DataFrame:  # fmt: skip
    """The recorded answers with what they take on a machine, which is predicted, not run.

    drafts: by method the curve of the forwards of one row that draft, {model} in its name. shape: a model whose T
    replaces each one's own.
    Added: decoded (tokens after the first), drafted and accepted over the passes; in seconds the parts forward,
    drafting (a model's forwards), draft, choose, keep, observe (the code's), their sum seconds, and prefill; goodput
    (tokens a second) and latency (ms a token) of decoding; end_to_end (ms a token, the prompt's time with it).
    """
    known = dict(list(passes.groupby(["model", "method"])))
    parts = []
    for names, mine in answers.groupby(["model", "method"]):
        model, method = map(str, names)
        timed_as = shape or model
        rows = known[model, method]
        drafting = drafts.get(method, "").format(model=model)
        one = machine.forward(drafting, dtype, 1, rows["cached"]) if drafting else 0.0
        forward = machine.forward(timed_as, dtype, 1 + rows["drafted"], rows["cached"])
        own = machine.own_work(timed_as, method) | ({"observe": 0.0} if method == STALE else {})  # it is hidden
        spent = rows.assign(forward=forward, drafting=one * rows["drafting_passes"], **own)
        sums = spent.groupby(_ANSWER)[["drafted", "accepted", *TIMES]].sum()
        prefill = machine.prefill(timed_as, method, mine["prompt_tokens"])
        parts.append(mine.join(sums, on=_ANSWER).assign(prefill=prefill))
    table = pd.concat(parts).sort_index().assign(
        decoded=lambda t: t["tokens"] - 1, seconds=lambda t: t[TIMES].sum(axis=1),
        goodput=lambda t: t["decoded"] / t["seconds"], latency=lambda t: 1e3 * t["seconds"] / t["decoded"],
        end_to_end=lambda t: 1e3 * (t["seconds"] + t["prefill"]) / t["tokens"],
    )  # fmt: skip
    return derived(table[table["decoded"] > 0], answers, passes, machine.curves)


def checked(predicted: pd.DataFrame, whole: pd.DataFrame) -> pd.DataFrame:
    """Predicted over measured decoding by model and method: answers, ratio, low, high; sums over sums of the tasks.

    Answers that took other passes there than in the record, as bf16 fell otherwise, are left out.
    """
    runs = whole.groupby([*_REQUEST, "method"], sort=False)[["decode_s", "passes"]].median()
    both = predicted.join(runs, on=[*_REQUEST, "method"], rsuffix="_there", how="inner")
    rows = []
    for (model, method), mine in both[both["passes"] == both["passes_there"]].groupby(["model", "method"], sort=False):
        sides = derived(mine.melt(["task", "request"], ["seconds", "decode_s"], "method"), predicted)
        sample = resample(sides, "value")
        ratio = sample.estimate(np.divide(*(sample[name].mean(axis=1) for name in ("seconds", "decode_s"))))
        rows.append((model, method, len(mine), ratio.value, ratio.low, ratio.high))
    return derived(pd.DataFrame(rows, columns=["model", "method", "answers", "ratio", "low", "high"]), predicted, whole)


# Estimates


def by_model(timed: pd.DataFrame, methods: Collection[str], seed: int = 0) -> list[list[Resampled]]:
    """goodput and latency of the methods, redundancy of plain answers: of each a sample a model, the larger first."""
    parts = [timed[timed["model"] == model] for model in (BASE, SMALL)]
    columns = {"goodput": methods, "latency": methods, "redundancy": [VANILLA]}
    return [[resample(part, column, seed=seed, names=of) for part in parts] for column, of in columns.items()]


def pooled(samples: Sequence[Resampled], *draws: NDArray[np.float64]) -> Any:
    """An Estimate of each of `draws` [1 + DRAWS], made of all samples, whose prompts n counts; of one, it alone."""
    both = replace(samples[0], n=sum(sample.n for sample in samples))
    found = tuple(map(both.estimate, draws))
    return found if len(found) > 1 else found[0]


# Claims: what the rules of `ondevice_studies.diaa.rules` judge, by claim


def tables_1_and_2(
    goodput: Sequence[Resampled], latency: Sequence[Resampled], redundancy: Sequence[Resampled], ours: str = OURS,
    searcher: str = "SAM-D", peers: Sequence[str] = ("TR", "SAM-D"),
) -> dict[str, Any]:  # fmt: skip
    """c02 to c15 of the larger model and the small one. A null is the same with another method in a place."""

    def lead(sample: Resampled, lower: bool = False) -> Estimate:
        mine = sample[ours].mean(axis=1)
        others = [sample[name].mean(axis=1) for name in PAPERS if name in sample.names]
        return sample.estimate(np.min(others, axis=0) / mine if lower else mine / np.max(others, axis=0))

    def spread(sample: Resampled, name: str) -> NDArray[np.float64]:
        return sample[name].std(axis=1, ddof=1) / sample[name].mean(axis=1)

    def extremes(names: Sequence[str]) -> tuple[Estimate, Estimate]:
        found = [(s[VANILLA] / s[name]).mean(axis=1) for s in latency for name in names if name in s.names]
        return pooled(latency, np.min(found, axis=0), np.max(found, axis=0))

    ahead = [np.sum([s[name] > s[ours] for name in PAPERS if name in s.names], axis=0) for s in goodput]
    first_or_second = np.mean([(place <= 1).mean(axis=1) for place in ahead], axis=0)
    rag = goodput[0].tasks.index("rag")
    gains = [s[VANILLA] / s[ours] for s in latency]
    r = [_rank_correlation(gain, known.values[:, :, 0]) for gain, known in zip(gains, redundancy, strict=True)]
    doctest = latency[0].tasks.index("doctest")
    places = [(gain >= gain[:, [doctest]]).sum(axis=1) for gain in gains]
    faster = [s.estimate(gain.mean(axis=1)) for s, gain in zip(latency, gains, strict=True)]
    return {
        "diaa-c02": lead(goodput[0]), "diaa-c03": lead(goodput[1]),
        "diaa-c05": lead(latency[0], lower=True), "diaa-c06": lead(latency[1], lower=True),
        "diaa-c07": pooled(goodput, first_or_second),
        "diaa-c08": tuple(s.estimate((s[searcher] / s[OURS])[:, rag]) for s in goodput),
        "diaa-c09": pooled(latency, np.mean(r, axis=0), np.mean(places, axis=0)),
        "diaa-c10": tuple(s.estimate(spread(s, ours) / spread(s, "SAM-D")) for s in goodput),
        "diaa-c11": extremes(("SpS", "SWIFT")), "diaa-c12": faster[0], "diaa-c14": faster[1],
        "diaa-c15": extremes(peers),
    }  # fmt: skip


def more(samples: Sequence[Resampled], pairs: Sequence[tuple[str, str]], cells: bool = False) -> tuple[Estimate, ...]:
    """c23, c24: of each sample the share of pairs of trees in which the first has more, on average or by cells."""
    leads = [np.stack([s[a] - s[b] for a, b in pairs], axis=2) for s in samples]  # [1 + DRAWS, tasks, pairs]
    ahead = [(lead if cells else lead.mean(axis=1, keepdims=True)) > 0 for lead in leads]
    return tuple(s.estimate(share.mean(axis=(1, 2))) for s, share in zip(samples, ahead, strict=True))


def best_size(sample: Resampled, names: Sequence[str]) -> tuple[Estimate, Estimate]:
    """c25: (place of the best, its average over the last one's). names: by rising size."""
    means = np.stack([sample[name].mean(axis=1) for name in names], axis=1)
    return sample.estimate(means.argmax(axis=1).astype(float)), sample.estimate(means.max(axis=1) / means[:, -1])


def gap(samples: Sequence[Resampled], names: Sequence[str]) -> Estimate:
    """c26: largest over smallest average of the names, less 1, the greater of both models."""
    means = [np.stack([s[name].mean(axis=1) for name in names if name in s.names]) for s in samples]
    return pooled(samples, np.max([m.max(axis=0) / m.min(axis=0) - 1 for m in means], axis=0))


def percent(timed: pd.DataFrame, part: str, method: str = OURS, models: Sequence[str] = (BASE, SMALL)) -> Estimate:
    """c27 to c29: a part's share of a method's decoding time, in percent, the mean of the models that have it."""
    samples = []
    for _, mine in timed[(timed["method"] == method) & timed["model"].isin(models)].groupby("model"):
        samples.append(resample(mine.assign(percent=100 * mine[part]), "percent").over(resample(mine, "seconds")))
    return pooled(samples, np.mean([one.values.mean(axis=(1, 2)) for one in samples], axis=0))


def differing(answers: pd.DataFrame) -> tuple[Estimate, Estimate]:
    """c30: (DIAA's answers that are not plain decoding's, in percent; answers), of all that were recorded."""
    return _unequal(answers.loc[answers["method"] == OURS, "identical"], kind_of(answers))


def of_another_model(answers: pd.DataFrame) -> tuple[Estimate, Estimate]:
    """c30's null: the same of plain answers of one model in another's place, to the same prompts."""
    plain = answers[answers["method"] == VANILLA]
    both = plain.merge(plain, on=["set", "prompt_sha"])
    return _unequal((both["answer_sha_x"] == both["answer_sha_y"])[both["model_x"] < both["model_y"]], kind_of(answers))


def _unequal(same: pd.Series, kind: str) -> tuple[Estimate, Estimate]:
    share = 100 * float(1 - same.mean())
    n = len(same)
    return Estimate(share, share, share, n, kind), Estimate(n, n, n, n, kind)


def follows(nodes: pd.DataFrame, by: str = "said", bins: int = 10) -> Estimate:
    """c32: rank correlation of the bins' order and the share accepted in them, the least of the models.

    nodes: model, answer, said (the product of the tables' probabilities down to a verified node), depth, accepted. Bins
    hold equally many nodes of a model. by depth: a bin each, deepest first. Draws are of answers.
    """
    found = []
    for _, mine in nodes.groupby("model", sort=False):
        place = pd.qcut(mine["said"].rank(method="first"), bins, labels=False) if by == "said" else -mine[by]
        counts = mine.assign(place=place).pivot_table("accepted", "answer", "place", ["size", "sum"], fill_value=0)
        each = len(counts)
        drawn = np.random.default_rng(0).multinomial(each, np.full(each, 1 / each), DRAWS)
        drawn = np.concatenate([np.ones((1, each)), drawn])
        shares = (drawn @ counts["sum"].to_numpy()) / np.maximum(drawn @ counts["size"].to_numpy(), 1)
        found.append(_rank_correlation(shares, np.broadcast_to(np.arange(shares.shape[1]), shares.shape)))
    values = np.min(found, axis=0)
    return Resampled((), (), values, nodes["answer"].nunique(), kind_of(nodes)).estimate(values)


def _rank_correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spearman's, of each row; 0 where all values of one side are equal."""
    x, y = (rankdata(side, axis=1) - (side.shape[1] + 1) / 2 for side in (a, b))
    return (x * y).sum(axis=1) / np.sqrt(np.maximum((x**2).sum(axis=1) * (y**2).sum(axis=1), 1e-9))
