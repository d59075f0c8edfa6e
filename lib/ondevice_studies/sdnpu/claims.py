"""The value of each claim, from recorded and simulated tables; `rules` judges them.

What stands in sd.npu's place is an argument, so that a null is the same function with another name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata, spearmanr

from ondevice import evidence
from ondevice.evidence import Estimate, Value, exact, kind_of
from ondevice.evidence.resampling import DRAWS, Resampled, resample
from ondevice_papers.sdnpu import npu
from ondevice_studies.sdnpu import printed
from ondevice_studies.sdnpu.study import interval, medians

Values = dict[str, Value]
NPU = ("NPU vanilla",)
CPU = ("CPU vanilla",)
SAM = ("NPU-SAM", "CPU-SAM")
EAGLE = ("NPU-EAGLE", "CPU-EAGLE")


# Simulated requests


def latency(simulated: pd.DataFrame, column: str = "total") -> Resampled:
    """ms a token by arm, sums over sums; its tasks are pairs `model task`. column: total, or decode."""
    table = simulated.assign(
        task=simulated["model"] + " " + simulated["task"], counted=simulated["tokens"] - (column == "decode")
    )
    table = evidence.derived(table.rename(columns={"arm": "method"}), simulated)
    return resample(table, column).over(resample(table, "counted"))


def spans(sample: Resampled, others: Sequence[str], ours: str, task: str = "") -> tuple[Estimate, Estimate]:
    """(least, greatest) speed-up of `ours` over the others, tasks and models. task: of this one alone."""
    kept = [place for place, name in enumerate(sample.tasks) if name.endswith(task)]
    over = np.stack([sample[other] / sample[ours] for other in others if other != ours], axis=2)[:, kept]
    return sample.estimate(over.min(axis=(1, 2))), sample.estimate(over.max(axis=(1, 2)))


def faster(total: Resampled, decode: Resampled, ours: str = npu.OURS) -> Values:
    """c01 to c12 and c34, of whole requests but for the last."""
    both = [*NPU, *CPU, *SAM, *EAGLE]
    return {
        "sdnpu-c01": spans(total, both, ours)[1], "sdnpu-c03": spans(total, [*NPU, *CPU], ours),
        "sdnpu-c04": spans(total, [*SAM, *EAGLE], ours), "sdnpu-c07": spans(total, NPU, ours),
        "sdnpu-c08": spans(total, CPU, ours), "sdnpu-c09": spans(total, NPU, ours, "summary"),
        "sdnpu-c10": spans(total, CPU, ours, "summary"), "sdnpu-c11": spans(total, SAM, ours),
        "sdnpu-c12": spans(total, EAGLE, ours), "sdnpu-c34": spans(decode, NPU, ours, "summary"),
    }  # fmt: skip


def by_similarity(total: Resampled, copied: pd.DataFrame, ours: str = npu.OURS) -> tuple[Estimate, Estimate]:
    """c16: (summary's place by gain over NPU vanilla, Spearman's r of gain and copied share), means over the models."""
    gain = total[NPU[0]] / total[ours]
    places = []
    r = []
    for model, mine in copied.groupby("model", sort=False):
        kept = [total.tasks.index(f"{model} {task}") for task in mine["task"]]
        places.append((gain[:, kept] >= gain[:, [total.tasks.index(f"{model} summary")]]).sum(axis=1))
        r.append(_rank_correlation(gain[:, kept], mine["copied"].to_numpy()[None]))
    return total.estimate(np.mean(places, axis=0)), total.estimate(np.mean(r, axis=0))


def decoding_shares(simulated: pd.DataFrame) -> Values:
    """c33, c44 to c46: percent of the simulated time that is decoding."""
    table = evidence.derived(simulated.assign(task=simulated["model"] + " " + simulated["task"]), simulated)
    table = table.rename(columns={"arm": "method"})
    share = resample(table, "decode").over(resample(table, "total"))

    def percent(arm: str, task: str) -> NDArray[np.float64]:
        return 100 * share[arm][:, [place for place, name in enumerate(share.tasks) if name.endswith(task)]]

    on_npu = percent(NPU[0], "summary")
    means = {
        claim: share.estimate(percent(CPU[0], task).mean(axis=1))
        for claim, task in {"sdnpu-c44": "", "sdnpu-c45": "rag", "sdnpu-c46": "summary"}.items()
    }
    return {"sdnpu-c33": (share.estimate(on_npu.min(axis=1)), share.estimate(on_npu.max(axis=1))), **means}


def eagle_on_cpu(
    rows: Sequence[int], seconds: Sequence[float], model: str = "qwen2.5-0.5b"
) -> tuple[Estimate, Estimate]:
    """c14: (least, greatest) speed-up of EAGLE over vanilla, verifying 60 rows or 32, on an engine with these times."""
    engine = npu.Cpu(npu.fit(rows, seconds))
    plain = float(engine.forward_ms(1))
    over = [
        plain * one.accepted / sum(one.step_ms(engine))
        for one in (npu.Eagle(npu.draft_share(model), rows=count) for count in (60, 32))
    ]
    return exact(min(over), "simulated"), exact(max(over), "simulated")


# Recorded requests on this machine


def measured(total: Resampled, ours: str = "printed", greedy: str = "+G") -> Values:
    """c13, c38 to c40: ratios of whole requests. total: `study.whole_requests`. greedy: or "+G naive"."""
    plain = total["NPU vanilla"] / total[f"NPU {greedy}"]
    sam = total["NPU-SAM"] / total[f"NPU-SAM {greedy}"]
    on_cpu = total["CPU vanilla"] / total["CPU-SAM"]
    summary = _summary(total)
    return {
        "sdnpu-c13": (total.estimate(on_cpu.min(axis=1)), total.estimate(on_cpu.max(axis=1))),
        "sdnpu-c38": (total.estimate(plain.mean(axis=1)), total.estimate(sam.mean(axis=1))),
        "sdnpu-c39": total.estimate(plain[:, summary] - 1),
        "sdnpu-c40": total.estimate((total[f"NPU-SAM {greedy}"] / total[ours])[:, summary]),
    }


def first_token(prefill: Resampled, ours: str = "printed") -> Estimate:
    """c35: time to the first token over synchronous switching's without calibration, summary, larger model."""
    return prefill.estimate((prefill[ours] / prefill["NPU vanilla"])[:, _summary(prefill)])


def exposed(switching: pd.DataFrame, rest_s: Estimate, way: str = "synchronous") -> Estimate:
    """c49: what a way of switching adds to a prefill, in percent of the rest of a request; of one comparison."""
    of = medians(switching)
    added = 100 * (of[way] - of["keep both"]) / rest_s.value
    found = interval(added, switching["round"].nunique(), "recorded")
    ends = [end * rest_s.value / rest for end in (found.low, found.high) for rest in (rest_s.low, rest_s.high)]
    return replace(found, low=min(ends), high=max(ends))


def _summary(sample: Resampled) -> int:
    """The place of the larger model's summaries, which come first."""
    return next(place for place, name in enumerate(sample.tasks) if name.endswith("base summary"))


def memory(peaks: pd.DataFrame, ours: str = "printed") -> Values:
    """c28, c29. peaks: model, arm, context, peak_mb."""
    wide = peaks.pivot_table(index=["model", "context"], columns="arm", values="peak_mb")
    kind = kind_of(peaks)
    added = wide[ours] - wide["NPU vanilla"]
    percent = 100 * added / wide["NPU vanilla"]
    return {
        "sdnpu-c28": (exact(added.max(), kind), exact(percent.max(), kind)),
        "sdnpu-c29": exact((wide[ours] / wide["NPU vanilla"]).max(), kind),
    }


def costs(calibration: pd.DataFrame, whole: pd.DataFrame, rule: str = "printed", arm: str = "printed") -> Values:
    """c36, c37, c63: ms of calibration a prompt token; of drafting and reuse, and of SAM's drafting alone, a pass."""
    mine = calibration[calibration["rule"] == rule].sort_values("vocabulary")
    kind = kind_of(calibration)
    rows = mine[["seconds", "low", "high", "n"]].to_numpy(float).tolist()
    of = [Estimate(value, low, high, int(n), kind) for value, low, high, n in rows]
    known = whole.assign(both=whole["draft_s"] + whole["observe_s"])

    def step(name: str, column: str) -> Estimate:
        table = known[(known["arm"] == name) & (known["passes"] > 0)]
        spent = (1e3 * table[column] / table["passes"]).tolist()
        return evidence.mean(spent, kind_of(whole), (table["model"] + table["task"]).tolist())

    return {"sdnpu-c36": tuple(of), "sdnpu-c37": step(arm, "both"), "sdnpu-c63": step("NPU-SAM", "draft_s")}


# Tokens a pass, ids, drafts


def table_4(rates: Resampled, suffix: str = "+both, printed") -> Values:
    """c41, c42: (least, mean) gain of both parts over each base, over models and tasks."""
    found: Values = {}
    for claim, base in (("sdnpu-c41", "PLD"), ("sdnpu-c42", "SAM")):
        gain = rates[base + suffix] / rates[base]
        found[claim] = rates.estimate(gain.min(axis=1)), rates.estimate(gain.mean(axis=1))
    return found


def identical(answers: pd.DataFrame) -> tuple[Estimate, Estimate]:
    """c43: (share of the recorded answers that are vanilla's, their number): all there are, so without an interval."""
    others = answers.loc[answers["method"] != "vanilla", "identical"]
    return exact(others.mean(), kind_of(answers)), exact(len(others), kind_of(answers))


def shorter(passes: pd.DataFrame, method: str, limit: int) -> Estimate:
    """c59, c61: share of the passes with fewer tokens drafted, of one model's summaries; draws are of requests."""
    mine = passes[passes["method"] == method]
    mine = mine.assign(short=mine["drafted"] < limit).groupby("request")["short"].agg(["sum", "size"])
    short, size = mine.to_numpy().T
    return evidence.resampled(lambda rows: float(short[rows].sum() / size[rows].sum()), len(mine), kind_of(passes))


def reusable(rejections: pd.DataFrame, method: str = "SAM") -> Estimate:
    """c62: percent of the rejections that are missing or synonym; draws are of requests."""
    mine = rejections[rejections["method"] == method]
    mine = mine.assign(kept=mine["case"] != "redundant")
    counts = mine.groupby(["model", "set", "task", "request"])["kept"].agg(["sum", "size"])
    kept, size = counts.to_numpy().T
    return evidence.resampled(lambda rows: float(100 * kept[rows].sum() / size[rows].sum()), len(counts), kind_of(mine))


def similarity(cosines: pd.DataFrame, summaries: pd.DataFrame) -> Values:
    """c50 to c54, of one model. cosines: pair (task, group, across), cosine; summaries: cosine, overlap."""
    kind = kind_of(cosines)
    pairs = ("task", "group", "across")
    three = tuple(mean_of_pairs(cosines[cosines["pair"] == pair]) for pair in pairs)
    far = summaries["overlap"].to_numpy()
    close = evidence.share((summaries["cosine"] > 0.76).sum(), len(summaries), kind)
    median = evidence.resampled(lambda rows: float(np.median(far[rows])), len(far), kind)
    overlap = evidence.share((far > 0.11).sum(), len(far), kind), median
    return {"sdnpu-c50": three, "sdnpu-c51": three, "sdnpu-c52": three, "sdnpu-c53": close, "sdnpu-c54": overlap}


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


def graph_sizes(curve: pd.DataFrame, accepted: float = 4.2) -> Values:
    """c57, c58. curve: rows, seconds of static graphs."""
    rows = curve["rows"].to_numpy(float)
    seconds = curve["seconds"].to_numpy()
    r = (spearmanr(rows, times).statistic for times in (seconds / rows, seconds / accepted))
    at = dict(zip(rows, seconds, strict=True))
    kind = kind_of(curve)
    return {"sdnpu-c57": tuple(exact(one, kind) for one in r), "sdnpu-c58": exact(at[1] / (at[32] / 32), kind)}


def analytic() -> Values:
    """c30 to c32 (bits of 16), c55, c56, c60: of the paper's numbers alone."""
    table = printed.weights().set_index("model")
    curve = printed.npu_curve()
    draft = table["draft_gb"]
    larger = "qwen2.5-1.5b"
    values: Mapping[str, float | tuple[float, ...]] = {
        "sdnpu-c30": table["weights_gb"][larger], "sdnpu-c31": table["twice_gb"][larger],
        "sdnpu-c32": (draft.min(), draft.max()), "sdnpu-c55": float(curve(32)) / 32,
        "sdnpu-c56": float(curve(32)) / 4.2, "sdnpu-c60": printed.throughput_loss(curve),
    }  # fmt: skip
    found: Values = {}
    for claim, value in values.items():
        several = [exact(x, "analytic") for x in np.atleast_1d(value)]
        found[claim] = several if len(several) > 1 else several[0]
    return found


def _rank_correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spearman's, of each row; 0 where all values of one side are equal."""
    x, y = (rankdata(side, axis=1) - (side.shape[1] + 1) / 2 for side in (a, b))
    return (x * y).sum(axis=1) / np.sqrt(np.maximum((x**2).sum(axis=1) * (y**2).sum(axis=1), 1e-9))
