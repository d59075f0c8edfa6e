"""The value of each claim, from the tables of the experiments; `rules` judges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from ondevice.sdnpu import npu, printed
from ondevice.sdnpu.experiments import BASES, OURS
from ondevice.sdnpu.measuring import AVERAGE, VANILLA

if TYPE_CHECKING:
    from ondevice.sdnpu.npu import Curve

Values = dict[str, float | tuple[float, ...]]

_NPU, _CPU = "NPU vanilla", "CPU vanilla"
_SPECULATIVE = ("NPU-SAM", "CPU-SAM", "NPU-EAGLE", "CPU-EAGLE")


def faster(speedups: pd.DataFrame) -> Values:
    """c01 to c12 and c34. speedups: `npu.speedups` of decoding time, by model, arm and task."""
    cells = speedups[(speedups["arm"] != npu.OURS) & (speedups["task"] != AVERAGE)]
    summary = cells[cells["task"] == "summary"]

    def span(table: pd.DataFrame, *arms: str) -> tuple[float, float]:
        values = table[table["arm"].isin(arms)]["speedup"]
        return float(values.min()), float(values.max())

    return {
        "sdnpu-c01": float(cells["speedup"].max()), "sdnpu-c03": span(cells, _NPU, _CPU),
        "sdnpu-c04": span(cells, *_SPECULATIVE), "sdnpu-c07": span(cells, _NPU), "sdnpu-c08": span(cells, _CPU),
        "sdnpu-c09": span(summary, _NPU), "sdnpu-c10": span(summary, _CPU),
        "sdnpu-c11": span(cells, "NPU-SAM", "CPU-SAM"), "sdnpu-c12": span(cells, "NPU-EAGLE", "CPU-EAGLE"),
        "sdnpu-c34": span(summary, _NPU),
    }  # fmt: skip


def end_to_end(speedups: pd.DataFrame) -> dict[str, str]:
    """The same spans of whole requests, in words, by arm. speedups: `npu.speedups` of `per_token_ms`."""
    cells = speedups[(speedups["arm"] != npu.OURS) & (speedups["task"] != AVERAGE)]
    spans = cells.groupby("arm", sort=False)["speedup"].agg(["min", "max"])
    return {str(arm): f"{span['min']:.2f} to {span['max']:.2f}" for arm, span in spans.iterrows()}


def by_similarity(speedups: pd.DataFrame, copied: pd.DataFrame) -> Values:
    """c16: (summary's place by gain over NPU vanilla, Spearman's r of gain and copied share), means over the models.

    copied: model, task, copied: the share of the answers' 4-grams that stand in their contexts.
    """
    cells = speedups[(speedups["arm"] == _NPU) & (speedups["task"] != AVERAGE)]
    places, ranks = [], []
    for model, mine in cells.groupby("model", sort=False):
        gain = mine.set_index("task")["speedup"]
        places.append(float(gain.rank(ascending=False)["summary"]))
        share = copied[copied["model"] == model].set_index("task")["copied"].reindex(gain.index)
        ranks.append(float(spearmanr(gain, share).statistic))
    return {"sdnpu-c16": (float(np.mean(places)), float(np.mean(ranks)))}


def decoding_shares(cells: pd.DataFrame) -> Values:
    """c33, c44 to c46: percent of the simulated time that is decoding. cells: `npu.by_task`."""
    tasks = cells[cells["task"] != AVERAGE]
    share = 100 * tasks["decode_ms"] / tasks["total_ms"]
    on_npu = share[(tasks["arm"] == _NPU) & (tasks["task"] == "summary")]
    on_cpu = tasks.assign(share=share)[tasks["arm"] == _CPU]
    mean = on_cpu.groupby("task")["share"].mean()
    return {
        "sdnpu-c33": (float(on_npu.min()), float(on_npu.max())), "sdnpu-c44": float(mean.mean()),
        "sdnpu-c45": float(mean["rag"]), "sdnpu-c46": float(mean["summary"]),
    }  # fmt: skip


def wall_clock(speedups: pd.DataFrame, eagle: Sequence[float]) -> Values:
    """c13: SAM over vanilla on this CPU, by `measuring.speedups`; c14: simulated EAGLE on CPUs, one number a shape."""
    sam = speedups[(speedups["method"] == "SAM") & (speedups["task"] != AVERAGE)]["speedup"]
    return {"sdnpu-c13": (float(sam.min()), float(sam.max())), "sdnpu-c14": (float(min(eagle)), float(max(eagle)))}


def eagle_on_cpu(model: str, cost: Curve) -> float:
    """Speed-up of EAGLE-2's 60 rows over plain decoding on a CPU where n rows take `cost`."""
    engine, eagle = npu.Cpu(cost), npu.Eagle(npu.draft_share(model), rows=60)
    return float(eagle.accepted * engine.forward_ms(1) / sum(eagle.step_ms(engine)))


def memory(peaks: pd.DataFrame) -> Values:
    """c28, c29. peaks: model, arm, context, peak_mb; of sd.npu the arm `SAM+Ours`."""
    wide = peaks.pivot(index=["model", "context"], columns="arm", values="peak_mb")
    added = wide[OURS] - wide[VANILLA]
    percent = 100 * added / wide[VANILLA]
    return {
        "sdnpu-c28": (float(added.max()), float(percent.max())),
        "sdnpu-c29": float((wide[OURS] / wide[VANILLA]).max()),
    }


def weights() -> Values:
    """c30 to c32, counted in bits of 16."""
    table = printed.weights().set_index("model")
    draft = table["draft_gb"]
    return {
        "sdnpu-c30": float(table["weights_gb"]["qwen2.5-1.5b"]), "sdnpu-c31": float(table["twice_gb"]["qwen2.5-1.5b"]),
        "sdnpu-c32": (float(draft.min()), float(draft.max())),
    }  # fmt: skip


def switching(exposed: pd.DataFrame, plain_s: float, drafted_s: float) -> Values:
    """c38, c39, c49: whole requests with real graphs. exposed: `real_switching.exposed`.

    plain_s, drafted_s: seconds of decoding after the prefill, without and with SAM's drafts.
    """
    total = exposed.groupby("method")["total_s"].median()
    late = float(np.median(exposed[exposed["method"] == "synchronous"]["exposed_s"]))
    gains = [float((total["synchronous"] + rest) / (total["progressive"] + rest)) for rest in (plain_s, drafted_s)]
    return {
        "sdnpu-c38": (gains[0], gains[1]), "sdnpu-c39": gains[0],
        "sdnpu-c49": float(100 * late / (total["synchronous"] - late + plain_s)),
    }  # fmt: skip


def first_step(exposed: pd.DataFrame, calibration_s: float) -> Values:
    """c35: time to the first decoding step, progressive and with calibration, over synchronous switching's."""
    total = exposed.groupby("method")["total_s"].median()
    return {"sdnpu-c35": float((total["progressive"] + calibration_s) / total["synchronous"])}


def costs(calibration: pd.DataFrame, drafting: pd.DataFrame) -> Values:
    """c36, c37, c63. calibration: `calibration_cost`; drafting: `drafting_cost`."""
    ours = calibration[calibration["rule"] == "ours"].sort_values("vocabulary")["ms_per_token"]
    mean, draft = (drafting.groupby("method")[column].mean() for column in ("mean_ms", "draft_ms"))
    return {
        "sdnpu-c36": tuple(map(float, ours)), "sdnpu-c37": float(mean[OURS]),
        "sdnpu-c63": float(draft["SAM"]),
    }  # fmt: skip


def table_3(speedups: pd.DataFrame, model: str) -> Values:
    """c40: +G+SD over Ours, summary. speedups: `npu.speedups` of Table 3's arms over Ours."""
    mine = speedups[(speedups["model"] == model) & (speedups["task"] == "summary")].set_index("arm")["speedup"]
    return {"sdnpu-c40": float(mine["+G+SD"])}


def table_4(acceptance: pd.DataFrame) -> Values:
    """c41, c42: (least, mean) gain of both parts over each base, over models and tasks."""
    found: Values = {}
    for claim, base in zip(("sdnpu-c41", "sdnpu-c42"), BASES, strict=True):
        gain = acceptance[(acceptance["method"] == f"{base}+Ours") & (acceptance["task"] != AVERAGE)]["gain"]
        found[claim] = float(gain.min()), float(gain.mean())
    return found


def similarity(cosines: pd.DataFrame, summaries: pd.DataFrame) -> Values:
    """c50 to c54. cosines: pair (task, group, across), cosine; summaries: cosine, overlap."""
    mean = cosines.groupby("pair")["cosine"].mean()
    three = tuple(float(mean[pair]) for pair in ("task", "group", "across"))
    close = float((summaries["cosine"] > 0.76).mean())
    overlap = float((summaries["overlap"] > 0.11).mean()), float(summaries["overlap"].median())
    return {"sdnpu-c50": three, "sdnpu-c51": three, "sdnpu-c52": three, "sdnpu-c53": close, "sdnpu-c54": overlap}


def graph_sizes(real: pd.DataFrame) -> Values:
    """c55 to c57, c60. real: `real_switching.by_shape`; the first two and the last are of the fit."""
    fit = printed.npu_curve()
    ranks = tuple(float(spearmanr(real["shape"], real[name]).statistic) for name in ("prefill_ms", "decode_ms"))
    return {
        "sdnpu-c55": float(fit(32) / 32), "sdnpu-c56": float(fit(32) / 4.2), "sdnpu-c57": ranks,
        "sdnpu-c60": printed.throughput_loss(fit),
    }  # fmt: skip


def draft_lengths(lengths: pd.DataFrame, cost: Mapping[int, float], model: str) -> Values:
    """c58, c59, c61. lengths: `experiments.draft_lengths`; cost: T(n) of this CPU by rows, in any unit."""
    mine = lengths[(lengths["model"] == model) & (lengths["task"] == "summary")]

    def under(method: str, limit: int) -> float:
        drafts = mine[mine["method"] == method]
        return float(drafts[drafts["drafted"] < limit]["share"].sum())

    return {
        "sdnpu-c58": cost[1] / (cost[32] / 32), "sdnpu-c59": under("PLD", 8), "sdnpu-c61": under("SAM", 32),
    }  # fmt: skip


def rejections(causes: pd.DataFrame) -> Values:
    """c62: percent of the rejections with something to reuse, over all models."""
    counts = causes.groupby("cause")["count"].sum()
    return {"sdnpu-c62": float(100 * (counts["missing"] + counts["synonym"]) / counts.sum())}
