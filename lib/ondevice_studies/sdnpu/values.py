"""The value of each claim, a function of recorded and simulated tables; `claims` names the function beside its rule.

What stands in sd.npu's place is an option (`ours`, `greedy`, `way`), so that a null is the same function with another
name. Parameters are named as the notebook's tables:

simulated, total, decode: requests on the fitted NPU (`npu.simulate`), and `latency` of them, whole and decoding alone.
requests, prefill: whole requests and first tokens on this machine (`study.whole_requests`, `study.prefills`).
rates: tokens per pass (`study.accepted`). static: rows, seconds of one model's static graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from ondevice import evidence
from ondevice.evidence import Estimate, exact, kind_of
from ondevice.evidence.resampling import DRAWS, Resampled, interval, rank_correlation, resample
from ondevice_papers.sdnpu import npu
from ondevice_studies.sdnpu.study import medians

Pair = tuple[Estimate, Estimate]
NPU = ("NPU vanilla",)
CPU = ("CPU vanilla",)
SAM = ("NPU-SAM", "CPU-SAM")
EAGLE = ("NPU-EAGLE", "CPU-EAGLE")


# Simulated requests


def latency(simulated: pd.DataFrame, column: str = "total") -> Resampled:
    """ms per token by arm, sums over sums; its tasks are pairs `model task`. column: total, or decode."""
    table = simulated.assign(
        task=simulated["model"] + " " + simulated["task"], counted=simulated["tokens"] - (column == "decode")
    )
    table = evidence.derived(table.rename(columns={"arm": "method"}), simulated)
    return resample(table, column).over(resample(table, "counted"))


def speedups(total: Resampled, others: Sequence[str], ours: str = npu.OURS, task: str = "") -> Pair:
    """(least, greatest) speed-up of `ours` over the others, tasks and models. task: of this one alone."""
    columns = _columns(total, task)
    over = np.stack([total[other] / total[ours] for other in others if other != ours], axis=2)[:, columns]
    return total.estimate(over.min(axis=(1, 2))), total.estimate(over.max(axis=(1, 2)))


def greatest_speedup(total: Resampled, ours: str = npu.OURS) -> Estimate:
    """Over any of the paper's six baselines."""
    return speedups(total, [*NPU, *CPU, *SAM, *EAGLE], ours)[1]


def decoding_speedups(decode: Resampled, ours: str = npu.OURS) -> Pair:
    """(least, greatest) over NPU vanilla, of decoding summaries."""
    return speedups(decode, NPU, ours, "summary")


def by_similarity(total: Resampled, copied: pd.DataFrame, ours: str = npu.OURS) -> Pair:
    """(rank of summary by gain over NPU vanilla, Spearman's r of gain and copied share), means over the models."""
    gain = total[NPU[0]] / total[ours]
    ranks = []
    correlations = []
    for model, shares in copied.groupby("model", sort=False):
        columns = [total.tasks.index(f"{model} {task}") for task in shares["task"]]
        summary = total.tasks.index(f"{model} summary")
        ranks.append((gain[:, columns] >= gain[:, [summary]]).sum(axis=1))
        correlations.append(rank_correlation(gain[:, columns], shares["copied"].to_numpy()[None]))
    return total.estimate(np.mean(ranks, axis=0)), total.estimate(np.mean(correlations, axis=0))


def decoding_range(simulated: pd.DataFrame) -> Pair:
    """(least, greatest) percent of NPU vanilla's time that is decoding, of summaries."""
    shares = _decoding_shares(simulated)
    percent = 100 * shares[NPU[0]][:, _columns(shares, "summary")]
    return shares.estimate(percent.min(axis=1)), shares.estimate(percent.max(axis=1))


def decoding_mean(simulated: pd.DataFrame, task: str = "") -> Estimate:
    """Percent of CPU vanilla's time that is decoding, the mean over models and tasks. task: of this one alone."""
    shares = _decoding_shares(simulated)
    return shares.estimate((100 * shares[CPU[0]][:, _columns(shares, task)]).mean(axis=1))


def _decoding_shares(simulated: pd.DataFrame) -> Resampled:
    table = evidence.derived(simulated.assign(task=simulated["model"] + " " + simulated["task"]), simulated)
    table = table.rename(columns={"arm": "method"})
    return resample(table, "decode").over(resample(table, "total"))


def _columns(sample: Resampled, task: str) -> list[int]:
    """Of a task, both models; of all tasks where it is empty."""
    return [column for column, name in enumerate(sample.tasks) if name.endswith(task)]


def eagle_on_cpu(forwards: pd.DataFrame, model: str = "qwen2.5-0.5b") -> Pair:
    """(least, greatest) speed-up of EAGLE over vanilla, verifying 60 rows or 32, on an engine with these times.

    forwards: rows, seconds.
    """
    engine = npu.Cpu(npu.fit(forwards["rows"], 1e3 * forwards["seconds"]))
    plain = float(engine.forward_ms(1))
    eagles = [npu.Eagle(npu.draft_share(model), rows=rows) for rows in (60, 32)]
    over = [plain * eagle.accepted / sum(eagle.step_ms(engine)) for eagle in eagles]
    return exact(min(over), "simulated"), exact(max(over), "simulated")


# Recorded requests on this machine


def sam_on_cpu(requests: Resampled) -> Pair:
    """(least, greatest) speed-up of SAM over vanilla on this CPU."""
    over = requests["CPU vanilla"] / requests["CPU-SAM"]
    return requests.estimate(over.min(axis=1)), requests.estimate(over.max(axis=1))


def switching_gains(requests: Resampled, greedy: str = "+G") -> Pair:
    """(plain, with SAM) synchronous over greedy switching, whole requests. greedy: or "+G naive"."""
    plain = requests["NPU vanilla"] / requests[f"NPU {greedy}"]
    sam = requests["NPU-SAM"] / requests[f"NPU-SAM {greedy}"]
    return requests.estimate(plain.mean(axis=1)), requests.estimate(sam.mean(axis=1))


def switching_saved(requests: Resampled, greedy: str = "+G") -> Estimate:
    """Gain of greedy over synchronous switching, plain summaries by the larger model."""
    plain = requests["NPU vanilla"] / requests[f"NPU {greedy}"]
    return requests.estimate(plain[:, _summary(requests)] - 1)


def over_sam(requests: Resampled, ours: str = "printed") -> Estimate:
    """Of SAM over sd.npu, both with greedy switching, summaries by the larger model."""
    return requests.estimate((requests["NPU-SAM +G"] / requests[ours])[:, _summary(requests)])


def first_token(prefill: Resampled, ours: str = "printed") -> Estimate:
    """Time to the first token over synchronous switching's without calibration, summaries by the larger model."""
    return prefill.estimate((prefill[ours] / prefill["NPU vanilla"])[:, _summary(prefill)])


def exposed(switching: pd.DataFrame, rest: Estimate, way: str = "synchronous") -> Estimate:
    """What a way of switching adds to a prefill, in percent of the rest of a request.

    switching: of one comparison. rest: seconds (`study.rest_seconds`).
    """
    seconds = medians(switching)
    added = 100 * (seconds[way] - seconds["keep both"]) / rest.value
    estimate = interval(added, switching["round"].nunique(), "recorded")
    ends = [end * rest.value / other for end in estimate.interval for other in rest.interval]
    return replace(estimate, low=min(ends), high=max(ends))


def _summary(sample: Resampled) -> int:
    """The column of the larger model's summaries, which come first."""
    return next(column for column, name in enumerate(sample.tasks) if name.endswith("base summary"))


def memory_added(peaks: pd.DataFrame, ours: str = "printed") -> Pair:
    """(MB, percent of vanilla's) that `ours` adds to NPU vanilla's peak, the greatest. peaks: model, arm, context."""
    wide = peaks.pivot_table(index=["model", "context"], columns="arm", values="peak_mb")
    added = wide[ours] - wide["NPU vanilla"]
    percent = 100 * added / wide["NPU vanilla"]
    return exact(added.max(), kind_of(peaks)), exact(percent.max(), kind_of(peaks))


def memory_ratio(peaks: pd.DataFrame, ours: str = "printed") -> Estimate:
    """Peak of `ours` over NPU vanilla's, the greatest."""
    wide = peaks.pivot_table(index=["model", "context"], columns="arm", values="peak_mb")
    return exact((wide[ours] / wide["NPU vanilla"]).max(), kind_of(peaks))


def calibration_cost(calibration: pd.DataFrame, rule: str = "printed") -> tuple[Estimate, ...]:
    """ms per token of the prompt, at each vocabulary, rising. calibration: rule, vocabulary, seconds, low, high, n."""
    table = calibration[calibration["rule"] == rule].sort_values("vocabulary")
    kind = kind_of(calibration)
    rows = table[["seconds", "low", "high", "n"]].to_numpy(float).tolist()
    return tuple(Estimate(value, low, high, int(n), kind) for value, low, high, n in rows)


def drafting_and_reuse(whole: pd.DataFrame, arm: str = "printed") -> Estimate:
    """ms per pass."""
    return _step_ms(whole, arm, whole["draft_s"] + whole["observe_s"])


def sam_drafting(whole: pd.DataFrame) -> Estimate:
    """ms per pass of SAM's drafting alone."""
    return _step_ms(whole, "NPU-SAM", whole["draft_s"])


def _step_ms(whole: pd.DataFrame, arm: str, seconds: pd.Series) -> Estimate:
    table = whole.assign(spent=seconds)[(whole["arm"] == arm) & (whole["passes"] > 0)]
    spent = (1e3 * table["spent"] / table["passes"]).tolist()
    return evidence.mean(spent, kind_of(whole), (table["model"] + table["task"]).tolist())


# Tokens per pass, ids, drafts


def accepted_gain(rates: Resampled, base: str, suffix: str = "+both, printed") -> Pair:
    """(least, mean) gain of both parts over their base, over models and tasks."""
    gain = rates[base + suffix] / rates[base]
    return rates.estimate(gain.min(axis=1)), rates.estimate(gain.mean(axis=1))


def identical(answers: pd.DataFrame) -> Pair:
    """(share of the recorded answers that are vanilla's, their number): all there are, so without an interval."""
    others = answers.loc[answers["method"] != "vanilla", "identical"]
    return exact(others.mean(), kind_of(answers)), exact(len(others), kind_of(answers))


def shorter_drafts(summaries: pd.DataFrame, method: str, limit: int) -> Estimate:
    """Share of the passes with fewer tokens drafted, of one model's summaries; draws are of requests."""
    passes = summaries[summaries["method"] == method]
    passes = passes.assign(short=passes["drafted"] < limit).groupby("request")["short"].agg(["sum", "size"])
    short, size = passes.to_numpy().T
    return evidence.resampled(lambda rows: float(short[rows].sum() / size[rows].sum()), len(passes), kind_of(summaries))


def reusable(rejections: pd.DataFrame, method: str = "SAM") -> Estimate:
    """Percent of the rejections that are missing or synonym; draws are of requests."""
    table = rejections[rejections["method"] == method]
    kind = kind_of(table)
    table = table.assign(kept=table["case"] != "redundant")
    counts = table.groupby(["model", "set", "task", "request"])["kept"].agg(["sum", "size"])
    kept, size = counts.to_numpy().T
    return evidence.resampled(lambda rows: float(100 * kept[rows].sum() / size[rows].sum()), len(counts), kind)


def similarities(cosines: pd.DataFrame) -> tuple[Estimate, ...]:
    """(within a task, within its group, across groups) mean cosine of one model's answers."""
    return tuple(mean_of_pairs(cosines[cosines["pair"] == pair]) for pair in ("task", "group", "across"))


def close_to_context(contexts: pd.DataFrame) -> Estimate:
    """Share of one model's summaries whose cosine with their context is above 0.76."""
    return evidence.share((contexts["cosine"] > 0.76).sum(), len(contexts), kind_of(contexts))


def overlap_with_context(contexts: pd.DataFrame) -> Pair:
    """(share above 0.11, median) of one model's summaries' lexical overlap with their context."""
    overlap = contexts["overlap"].to_numpy()
    kind = kind_of(contexts)
    median = evidence.resampled(lambda rows: float(np.median(overlap[rows])), len(overlap), kind)
    return evidence.share((overlap > 0.11).sum(), len(overlap), kind), median


def mean_of_pairs(cosines: pd.DataFrame) -> Estimate:
    """Of pairs first, second: their mean cosine. Draws are of answers, as one answer is in many pairs."""
    ends, names = pd.factorize(pd.concat([cosines["first"], cosines["second"]]))
    first, second = ends.reshape(2, -1)
    drawn = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), DRAWS)
    weights = np.vstack([np.ones(len(names)), drawn])
    both = weights[:, first] * weights[:, second]
    means = (both @ cosines["cosine"].to_numpy(float)) / np.maximum(both.sum(axis=1), 1e-9)
    return interval(means, len(names), kind_of(cosines))


# Forwards


def size_correlations(static: pd.DataFrame, accepted: float = 4.2) -> Pair:
    """Spearman's r of a graph's rows and (prefill's ms per token, decoding's at so many tokens per pass)."""
    rows = static["rows"].to_numpy(float)
    seconds = static["seconds"].to_numpy()
    prefill, decode = (spearmanr(rows, times).statistic for times in (seconds / rows, seconds / accepted))
    return exact(prefill, kind_of(static)), exact(decode, kind_of(static))


def row_alone(static: pd.DataFrame) -> Estimate:
    """A forward of one row over a thirty-second of that of 32."""
    seconds = dict(zip(static["rows"], static["seconds"], strict=True))
    return exact(seconds[1] / (seconds[32] / 32), kind_of(static))
