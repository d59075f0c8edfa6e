"""The value of each claim, a function of recorded tables; `claims` names the function beside its rule.

What stands in sd.npu's place is an option (`ours`, `greedy`, `way`), so that a null is the same function with another
name. Parameters are named as the notebook's tables:

requests: whole requests on this machine (`study.per_token`). summarized, prefill: those of summaries alone, and their
first tokens (`study.by_prompt`).
rates: tokens per pass (`study.accepted`). static: rows, seconds of one model's static graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ondevice import evidence
from ondevice.evidence import Estimate, exact, kind_of
from ondevice.evidence.resampling import DRAWS, Resampled, interval, rank_correlation
from ondevice_studies.sdnpu.printed import Line
from ondevice_studies.sdnpu.study import by_prompt, medians

Pair = tuple[Estimate, Estimate]


# Recorded requests on this machine


def speedups(requests: Resampled, other: str, ours: str = "sd.npu") -> Pair:
    """(least, greatest) speed-up of `ours` over another arm, by task."""
    over = requests[other] / requests[ours]
    return requests.estimate(over.min(axis=1)), requests.estimate(over.max(axis=1))


def switching_gains(summarized: Resampled, greedy: str = "+G") -> Pair:
    """(plain, with SAM) synchronous over greedy switching, summaries. greedy: or "+G naive"."""
    return _over(summarized, "NPU vanilla", f"NPU {greedy}"), _over(summarized, "NPU-SAM", f"NPU-SAM {greedy}")


def switching_saved(summarized: Resampled, greedy: str = "+G") -> Estimate:
    """Gain of greedy over synchronous switching, plain summaries."""
    return _over(summarized, "NPU vanilla", f"NPU {greedy}", less=1)


def over_sam(summarized: Resampled, ours: str = "sd.npu") -> Estimate:
    """Of SAM over sd.npu, both with greedy switching, summaries."""
    return _over(summarized, "NPU-SAM +G", ours)


def first_token(prefill: Resampled, ours: str = "sd.npu") -> Estimate:
    """Time to the first token over synchronous switching's without calibration, summaries."""
    return _over(prefill, ours, "NPU vanilla")


def exposed(switching: pd.DataFrame, rest: Estimate, way: str = "synchronous") -> Estimate:
    """What a way of switching adds to a prefill, in percent of the rest of a request.

    switching: of one comparison. rest: seconds (`study.rest_seconds`).
    """
    seconds = medians(switching)
    added = 100 * (seconds[way] - seconds["keep both"]) / rest.value
    estimate = interval(added, switching["round"].nunique(), "recorded", "rounds")
    ends = [end * rest.value / other for end in estimate.interval for other in rest.interval]
    return replace(estimate, low=min(ends), high=max(ends))


def memory_added(peaks: pd.DataFrame, ours: str = "sd.npu") -> Pair:
    """(MB, percent of vanilla's) that `ours` adds to NPU vanilla's peak, the greatest. peaks: model, arm, context."""
    wide = peaks.pivot_table(index=["model", "context"], columns="arm", values="peak_mb")
    added = wide[ours] - wide["NPU vanilla"]
    percent = 100 * added / wide["NPU vanilla"]
    return exact(added.max(), kind_of(peaks)), exact(percent.max(), kind_of(peaks))


def memory_ratio(peaks: pd.DataFrame, ours: str = "sd.npu") -> Estimate:
    """Peak of `ours` over NPU vanilla's, the greatest."""
    wide = peaks.pivot_table(index=["model", "context"], columns="arm", values="peak_mb")
    return exact((wide[ours] / wide["NPU vanilla"]).max(), kind_of(peaks))


def calibration_cost(calibration: pd.DataFrame, rule: str = "sd.npu") -> tuple[Estimate, ...]:
    """ms per token of the prompt, at each vocabulary, rising. calibration: rule, vocabulary, seconds, low, high, n."""
    table = calibration[calibration["rule"] == rule].sort_values("vocabulary")
    kind = kind_of(calibration)
    rows = table[["seconds", "low", "high", "n"]].to_numpy(float).tolist()
    return tuple(Estimate(value, low, high, int(n), kind, "chunks") for value, low, high, n in rows)


def step_ms(whole: pd.DataFrame, arm: str, columns: Sequence[str]) -> Estimate:
    """ms per pass of an arm's parts. columns: their seconds, draft_s or observe_s."""
    table = whole.assign(spent=1e3 * whole[[*columns]].sum(axis=1) / whole["passes"])[whole["arm"] == arm]
    sample = by_prompt(evidence.derived(table, whole), "spent")
    return sample.estimate(sample[arm].mean(axis=1))


def _over(sample: Resampled, arm: str, other: str, less: float = 0) -> Estimate:
    """The mean of one arm over that of another one, of one task."""
    return sample.estimate((sample[arm] / sample[other])[:, 0] - less)


# Tokens per pass, ids, drafts


def accepted_gain(rates: Resampled, base: str, part: str = "+both") -> Pair:
    """(least, mean) gain of both parts over their base, over the tasks."""
    gain = rates[base + part] / rates[base]
    return rates.estimate(gain.min(axis=1)), rates.estimate(gain.mean(axis=1))


def identical(answers: pd.DataFrame, plain: bool = False) -> Pair:
    """(share of the live recorded answers that are vanilla's, their number): all there are, so without an interval.

    plain: of vanilla's own answers, or of all others.
    """
    counted = answers.loc[((answers["method"] == "vanilla") == plain) & answers["live"], "identical"]
    return exact(counted.mean(), kind_of(answers)), exact(len(counted), kind_of(answers))


def shorter_drafts(summaries: pd.DataFrame, method: str, limit: int, plain: bool = False) -> Estimate:
    """Share of a method's passes with fewer tokens drafted; draws are of requests. plain: as if nothing was drafted."""
    passes = summaries[summaries["method"] == method]
    drafted = passes["drafted"] * (not plain)
    short, size = (drafted < limit).groupby(passes["request"]).agg(["sum", "size"]).to_numpy().T
    return evidence.resampled(
        lambda rows: float(short[rows].sum() / size[rows].sum()), len(size), kind_of(summaries), drawn="prompts"
    )


def reusable(rejections: pd.DataFrame, column: str = "case", cases: Sequence[str] = ("missing", "synonym")) -> Estimate:
    """Percent of the rejections that are of these cases; a draw takes all of a prompt's.

    column: case, by the output that came instead, or elsewhere, by another request's.
    """
    counts = rejections[column].isin(cases).groupby(rejections["request"]).agg(["sum", "size"])
    kept, size = counts.to_numpy().T
    return evidence.resampled(
        lambda rows: float(100 * kept[rows].sum() / size[rows].sum()), len(counts), kind_of(rejections), drawn="prompts"
    )


def similarities(cosines: pd.DataFrame, shuffled: bool = False) -> tuple[Estimate, ...]:
    """(within a task, within its group, across groups) mean cosine of one model's answers.

    shuffled: whether the pairs are dealt to these three at random.
    """
    if shuffled:
        dealt = np.random.default_rng(0).permutation(cosines["pair"].to_numpy())
        cosines = evidence.derived(cosines.assign(pair=dealt), cosines)
    return tuple(mean_of_pairs(cosines[cosines["pair"] == pair]) for pair in ("task", "group", "across"))


def overlap_with_context(contexts: pd.DataFrame) -> Pair:
    """(share above 0.11, median) of one model's summaries' lexical overlap with their context."""
    overlap = contexts["overlap"].to_numpy()
    kind = kind_of(contexts)
    median = evidence.resampled(lambda rows: float(np.median(overlap[rows])), len(overlap), kind, drawn="prompts")
    return evidence.share((overlap > 0.11).sum(), len(overlap), kind, drawn="prompts"), median


def near_context(contexts: pd.DataFrame, column: str = "cosine") -> Estimate:
    """Share of the summaries whose cosine with a context is above 0.76. column: their own, or other, the next one's."""
    near = contexts[column] > 0.76
    return evidence.share(near.sum(), len(near), kind_of(contexts), drawn="prompts")


def mean_of_pairs(cosines: pd.DataFrame) -> Estimate:
    """Of pairs first, second: their mean cosine. Draws are of answers, as one answer is in many pairs."""
    ends, names = pd.factorize(pd.concat([cosines["first"], cosines["second"]]))
    first, second = ends.reshape(2, -1)
    drawn = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), DRAWS)
    weights = np.vstack([np.ones(len(names)), drawn])
    both = weights[:, first] * weights[:, second]
    means = (both @ cosines["cosine"].to_numpy(float)) / np.maximum(both.sum(axis=1), 1e-9)
    return interval(means, len(names), kind_of(cosines), "answers")


# Forwards, weights, schedules


def size_correlations(static: pd.DataFrame, accepted: float = 4.2, flat: bool = False) -> Pair:
    """Spearman's r of a graph's rows and (prefill's ms per token, decoding's at so many tokens per pass).

    flat: whether each graph takes as long as the smallest.
    """
    rows = static["rows"].to_numpy(float)
    seconds = np.full(len(rows), static["seconds"].min()) if flat else static["seconds"].to_numpy()
    prefill, decode = (rank_correlation(rows[None], times[None])[0] for times in (seconds / rows, seconds / accepted))
    return exact(prefill, kind_of(static)), exact(decode, kind_of(static))


def row_alone(static: pd.DataFrame, flat: bool = False) -> Estimate:
    """A forward of one row over a thirty-second of that of 32; the ends are those of both medians.

    flat: whether both take as long.
    """
    single, full = static.set_index("rows")[["seconds", "low", "high"]].loc[[1, 1 if flat else 32]].to_numpy()
    value, low, high = (32 * single / full[[0, 2, 1]]).tolist()
    return Estimate(value, low, high, int(static["n"].min()), kind_of(static), "turns")


def decoding(line: Line) -> float:
    """ms per token on a graph of 32 rows at 4.2 tokens per pass. line: ms of a forward of so many rows."""
    return float(line(32)) / 4.2


def by_lines(of_line: Callable[[Line], float], lines: Sequence[Line]) -> Estimate:
    """A number that follows from a forward's time by its rows: by the first line, its interval by all of them.

    The paper's figures contradict each other, and which of its lines holds is not known.
    """
    values = [of_line(line) for line in lines]
    return Estimate(values[0], min(values), max(values), len(values), "analytic", "lines")


def weights_gb(weights: pd.DataFrame, column: str = "weights_gb", bits: float = 16) -> float:
    """GB of Qwen2.5-1.5B. weights: of `printed.weights`, in 16 bits. column: or twice_gb, what CPU and NPU hold."""
    return float(weights[column]["qwen2.5-1.5b"]) * bits / 16


def draft_models_gb(weights: pd.DataFrame, bits: float = 16) -> tuple[float, float]:
    """(least, greatest) GB of EAGLE's draft model, over the paper's three models."""
    return weights["draft_gb"].min() * bits / 16, weights["draft_gb"].max() * bits / 16


def agreement(by_schedule: Sequence[bool] | bool, by_partition: Sequence[bool]) -> float:
    """Share of instances with the same answer. by_schedule: an answer each, or one for all."""
    return float(np.equal(by_schedule, by_partition).mean())
