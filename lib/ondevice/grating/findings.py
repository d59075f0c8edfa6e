"""The value of each claim, from the tables of the experiments; `rules` judges them.

Tables have the columns that the figures need (`plots`): seconds, MB, fractions of 1. Methods are named as in `printed`.
Precision@K is out of min(K, relevant candidates), as section 6.1 has it. The paper states no thresholds: in the tables
`high` is calibrated for an overlap of 0.98 with the full model's top K on validation pools, `low` for Precision@K
within 1 point of it.
All functions raise ValueError where a method, step or application that a claim is about is not in the table.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from ondevice.grating import printed
from ondevice.grating.printed import AGENT, CONTEXT, HF, NONE, OFFLOAD, OURS, OURS_QUANT, QUANT, RAG, STEPS

Values = dict[str, float | tuple[float, ...]]
_LOSS = 0.01 + 1e-9  # of Precision@K, up to which a saving counts as one without loss
_SETTLED = 0.8  # Kendall's tau with the last layer's order


# Figures 1 and 2


def pipeline(stages: pd.DataFrame) -> Values:
    """c08, c09. stages: of `plots.pipeline`, with transformers in memory as the reranker."""
    _has(stages["stage"], ["reranker"], "stage")
    found = ("grating-c08", "latency_ms"), ("grating-c09", "peak_mb")
    return {claim: float(100 * _by(stages, "stage", name)["reranker"] / stages[name].sum()) for claim, name in found}


def over_embedder(precision: pd.DataFrame) -> Values:
    """c10. precision: queries, ranker (one is `embedder`), precision (@1, of the same pools); see `first_places`."""
    gains = []
    for _, rows in precision.groupby("queries"):
        _has(rows["ranker"], ["embedder"], "ranker")
        values = _by(rows, "ranker", "precision")
        gains.append(100 * (values.drop("embedder") / values["embedder"] - 1).mean())
    return {"grating-c10": (float(min(gains)), float(max(gains)))}


def agreement(table: pd.DataFrame) -> Values:
    """c11. table: of `plots.score_evolution`, with all layers of each model."""
    shares = [_settled(rows["kendall"]) for _, rows in table.sort_values("layer").groupby("model")]
    return {"grating-c11": float(np.mean(shares))}


# Figures 8 and 10


def micro(table: pd.DataFrame) -> Values:
    """c01, c03, c12 to c15. table: of `plots.latency_and_precision`, of all query sets; K has 1 and 10."""
    _has(table["method"], printed.METHODS, "method")
    names = table["method"] + (" " + table["threshold"].fillna("")).str.rstrip()
    _has(names, [f"{OURS} low", f"{OURS} high"], "method")
    cells = table.assign(method=names)
    seconds, precision = (
        cells.pivot(index=["queries", "model", "k"], columns="method", values=column)
        for column in ("seconds", "precision")
    )
    ours = [f"{OURS} low", f"{OURS} high"]
    lost = precision[ours].rsub(precision[HF], axis=0)
    lossless = seconds[ours].where(lost <= _LOSS).min(axis=1)
    saved = {base: (100 * (1 - lossless / seconds[base])).fillna(0.0) for base in (HF, OFFLOAD)}
    k = seconds.index.get_level_values("k")
    method = seconds.columns.str.replace(" (low|high)$", "", regex=True)
    place = seconds.T.groupby(method).min().loc[list(printed.METHODS)].rank().T
    return {
        "grating-c01": float(saved[OFFLOAD].max()), "grating-c03": float(100 * lost.max().max()),
        "grating-c12": float(saved[HF][k == 1].max()), "grating-c13": float(saved[OFFLOAD][k == 1].max()),
        "grating-c14": float(saved[OFFLOAD][k == 10].min()),
        "grating-c15": (float((place[OURS] == 1).mean()), float((place[OURS_QUANT] == 2).mean())),
    }  # fmt: skip


def thresholds(outcomes: pd.DataFrame) -> Values:
    """c16. outcomes: of `trade_offs.outcomes`.

    The thresholds of a model, query set and K are ordered by value, as `low` and `high` name what they are calibrated
    for; where both are one, there is nothing to compare. Raises ValueError where all are.
    """
    _has(outcomes["name"], ["low", "high"], "threshold")
    cells = outcomes.sort_values("threshold").groupby(["model", "queries", "k"])
    lower, higher = cells.first(), cells.last()
    apart = lower["threshold"] < higher["threshold"]
    if not apart.any():
        raise ValueError("The two thresholds are the same everywhere, so that neither is the higher one.")
    gained, saved = ((higher[name] - lower[name])[apart] for name in ("change", "saved"))
    return {"grating-c16": (float((gained >= -1e-9).mean()), float((saved < 0).mean()))}


def trade_off(curve: pd.DataFrame) -> Values:
    """c19. curve: of `trade_offs.trade_off`."""
    groups = [rows for _, rows in curve.groupby(["model", "k"])]
    found = [[_correlation(rows["threshold"], rows[name]) for rows in groups] for name in ("computed", "precision")]
    return {"grating-c19": (min(found[0]), min(found[1]))}


# Figure 9


def memory(peaks: pd.DataFrame) -> Values:
    """c02, c20, c21, c23, c48, c52. peaks: length (tokens a candidate), method, peak_mb, seconds; 20 candidates.

    c20, c21, c23 and c52 are of the longest, nearest to the paper's 500 tokens. Nothing is pruned in these runs, as
    random weights rank nothing: of GRATING's latency, c23 judges no more than the streaming.
    """
    _has(peaks["method"], printed.METHODS, "method")
    ratios = []
    for _, rows in peaks.groupby("length"):
        peak = _by(rows, "method", "peak_mb")
        ratios.append(float(peak[HF] / peak[OURS]))
    rows = peaks[peaks["length"] == peaks["length"].max()]
    _has(rows["method"], printed.METHODS, "method at the greatest length")
    peak, seconds = _by(rows, "method", "peak_mb"), _by(rows, "method", "seconds")
    others = [HF, OFFLOAD, QUANT]
    return {
        "grating-c02": 100 * (1 - 1 / max(ratios)), "grating-c48": max(ratios),
        "grating-c20": float(peak[HF] / peak[OURS]), "grating-c21": float(peak[OFFLOAD] / peak[OURS]),
        "grating-c23": (float(peak[OURS] / peak[others].min()), float(seconds[OURS] / seconds[others].min()),
                        float(seconds[OFFLOAD] / seconds[HF]), float(seconds[QUANT] / seconds[HF])),
        "grating-c52": (float(seconds[OURS_QUANT] / seconds[QUANT]), float(peak[OURS_QUANT] / peak[QUANT])),
    }  # fmt: skip


# Figures 11 to 15


def applications(times: pd.DataFrame, quality: pd.DataFrame, footprints: pd.DataFrame, weights_mb: float) -> Values:
    """c04, c05, c24 to c27, c29 to c36. All three tables have the column application, `printed.RAG`, `AGENT` or
    `CONTEXT`.

    times: setting, method, part, seconds. quality: setting, method, precision. footprints: setting, method, seconds,
    mb. Settings are the rerankers of `printed.STANDS_FOR` for RAG and long context, `video` and `community` for the
    agent. weights_mb: of the one that stands for the 0.6B, which c36 is about, as it is loaded.
    """
    for table in (times, quality, footprints):
        _has(table["application"], [RAG, AGENT, CONTEXT], "application")
    keys = ["application", "setting", "method"]
    latency = times.groupby(keys)["seconds"].sum().unstack()
    peak = footprints.groupby(keys)["mb"].max().unstack()
    mean = footprints.groupby(keys)[["seconds", "mb"]].apply(_mean_over_time).unstack()
    right = 100 * quality.set_index(keys)["precision"].unstack()
    for table, needed in ((latency, [HF, OURS, NONE]), (right, [HF, OURS, NONE]), (peak, [HF, OURS])):
        _has(table.columns, needed, "method")
    faster, smaller, leaner = (100 * (1 - table[OURS] / table[HF]) for table in (latency, peak, mean))
    lost = right[HF] - right[OURS]
    text = latency.xs(CONTEXT)
    answers = {str(name): float(values.mean()) for name, values in right.xs(CONTEXT).items() if values.notna().any()}
    without = max(value for name, value in answers.items() if name not in (HF, OURS))
    cells = [(RAG, model) for model in printed.STANDS_FOR.values()] + [(AGENT, "video"), (AGENT, "community")]
    small = CONTEXT, printed.STANDS_FOR["Qwen3-Reranker-0.6B"]
    _has(latency.index, cells, "setting")
    _has(peak.index, [small], "setting")
    return {
        "grating-c04": _ends(faster), "grating-c05": _ends(smaller),
        **{f"grating-c{number}": float(faster[cell])
           for number, cell in zip((24, 25, 29, 30), cells, strict=True)},
        "grating-c26": float(smaller[RAG].max()), "grating-c27": float(leaner[RAG].max()),
        "grating-c31": float(lost[AGENT].abs().max()),
        "grating-c32": float(smaller[AGENT].max()), "grating-c33": float(faster[CONTEXT].mean()),
        "grating-c34": float((100 * (1 - text[OURS] / text[NONE])).mean()),
        "grating-c35": (answers[HF] - without, answers[OURS] - without),
        "grating-c36": float((peak[HF] - peak[OURS])[small] / weights_mb),
    }  # fmt: skip


def rag_precision(replayed: pd.DataFrame) -> Values:
    """c28. replayed: of `rag.replayed`."""
    _has(replayed["setting"], printed.STANDS_FOR.values(), "setting")
    return {"grating-c28": float(100 * replayed["change"].abs().max())}


# Figure 16


def ablation(table: pd.DataFrame) -> Values:
    """c38 to c45. table: of `plots.ablation`, all steps, 60 candidates of 500 tokens on the 0.6B shape, cache warm."""
    _has(table["step"], STEPS, "step")
    peak, seconds = _by(table, "step", "peak_mb"), _by(table, "step", "seconds")
    base, pruned, chunked, window, cached = STEPS
    more, time = 100 * (peak / peak[base] - 1), 100 * seconds / seconds[base]
    return {
        "grating-c38": float(more[pruned]), "grating-c39": float(peak[pruned] - peak[base]),
        "grating-c40": (float(more[pruned]), float(more[chunked])), "grating-c41": float(-more[window]),
        "grating-c42": float(time[window] - time[chunked]), "grating-c43": float(peak[cached] * 1e6 / 2**20),
        "grating-c44": float(time[cached] - time[window]), "grating-c45": float(-more[cached]),
    }  # fmt: skip


def window_penalty(table: pd.DataFrame) -> Values:
    """c47. table: pruned (bool), weights (`memory` or `window`), seconds: medians of the same engine."""
    wide = table.pivot(index="pruned", columns="weights", values="seconds")
    _has(wide.columns, ["memory", "window"], "place of weights")
    _has(wide.index, [False, True], "setting of pruning")
    added = 100 * (wide["window"] / wide["memory"] - 1)
    return {"grating-c47": (float(added[False]), float(added[True]))}


def embedding() -> Values:
    """c49, c50: analytic, from the shape of Qwen3-Reranker-0.6B."""
    return {"grating-c49": printed.embedding_share(), "grating-c50": printed.vocabulary_share()}


# Parts


def _settled(kendall: pd.Series) -> float:
    """The first layer from which on none is below `_SETTLED`, over the layers; the last agrees with itself."""
    below = np.flatnonzero(kendall.to_numpy() < _SETTLED)
    return float((below[-1] + 2 if len(below) else 1) / len(kendall))


def _correlation(threshold: pd.Series, values: pd.Series) -> float:
    """Spearman's; 0 where the values do not change."""
    return 0.0 if np.ptp(values) == 0 else float(spearmanr(threshold, values).statistic)


def _mean_over_time(rows: pd.DataFrame) -> float:
    """Mean of the samples' memory, each for the time until the next."""
    rows = rows.sort_values("seconds")
    return float(np.trapezoid(rows["mb"], rows["seconds"]) / np.ptp(rows["seconds"]))


def _by(table: pd.DataFrame, index: str, column: str) -> pd.Series:
    """One column by another. Raises ValueError where two rows are of the same."""
    if table[index].duplicated().any():
        raise ValueError(f"There are two rows for {index} {table[index][table[index].duplicated()].iloc[0]!r}.")
    return table.set_index(index)[column]


def _ends(values: pd.Series) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _has(found: Iterable[object], needed: Iterable[object], what: str) -> bool:
    missing = [one for one in needed if one not in set(found)]
    if missing:
        raise ValueError(f"The table has no {what} {missing[0]!r}, which a claim is about.")
    return True
