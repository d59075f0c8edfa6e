"""GRATING's figures. Each function draws tables of the experiments and returns the figure.

Times are in seconds unless a column ends in _ms, memory in MB (10^6 bytes), shares and precision are fractions of 1.
A method is named as in `printed` and has one colour in all figures; others are drawn, too. Parts of a latency have
colours that are no method's. What the paper prints is called quoted, and its marks are hollow; it is of other machines
and models. A legend's title says the kind of the rest.
All functions raise ValueError where a table lacks a column, has no row, two rows for one bar, or a value that cannot be
drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter

from ondevice import shapes
from ondevice.grating import printed
from ondevice.plotting import COLOURS, need, panels

_METHODS = {  # colours
    printed.HF: "grey", printed.OFFLOAD: "orange", printed.QUANT: "green",
    printed.OURS: "blue", printed.OURS_QUANT: "sky", printed.NONE: "black",
}  # fmt: skip
_OTHERS = ("purple", "red", "yellow", "black")
_PARTS = {  # of a latency, in their order: colour, hatch
    "keyword search": ("purple", "//////"), "embedding search": ("purple", ""), "reranker": ("red", ""),
    "answer": ("yellow", ""), "model calls": ("yellow", ""),
}  # fmt: skip
_VERDICTS = {  # colour, marker, and the stretch behind the layer in which the marks stand, in layers
    "deferred": ("grey", "o", 0.0, 0.0), "selected": ("green", "^", 0.1, 0.3), "dropped": ("red", "v", 0.4, 0.8),
}  # fmt: skip
_LINES, _MARKERS = ("blue", "orange", "green", "red", "purple", "sky", "black"), "osD^vP*"
_HOLLOW: dict[str, Any] = dict(marker="o", mfc="white", mec=COLOURS["black"], ls="", ms=6, zorder=5)
_BELOW = _HOLLOW | {"marker": "^"}  # under a bar, clear of its label
_CASES = {  # of Figure 8, by K: the quantity, its name, less than what, marker
    1: ("best case, latency reduction against HF Offload", "best case", "than HF Offload", "o"),
    10: ("hardest case, latency reduction", "hardest case", "(as we read it, than HF Offload)", "^"),
}
_PLAIN = StrMethodFormatter("{x:g}")
_PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.4g}")


# Figures 1, 2 and 4


def pipeline(stages: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 1: latency and peak memory of each stage of a file search, with the reranker's share.

    stages: columns stage (`reranker`, and other parts of a latency), latency_ms, peak_mb. Quoted: the reranker's
    shares, as what they would be of ours: at the same time and memory of the other stages.
    """
    need(stages, "stage", "latency_ms peak_mb", least=0, unique="stage")
    _known(["reranker"], stages["stage"], "stage")
    _known(stages["stage"], _PARTS, "stage")
    figure, axes = panels(1, 2, width=4.2, height=2.6, sharey=True)
    shares = [printed.number(f"file search: reranker share of {name}") / 100 for name in ("latency", "memory")]
    label = "quoted, {:.3g} % of latency and {:.3g} % of memory in the reranker, with our other stages"
    place = stages["stage"].tolist().index("reranker")
    for axis, column, unit, share in zip(axes[0], ("latency_ms", "peak_mb"), ("ms", "MB"), shares, strict=True):
        values = stages[column]
        others = values.sum() - values.iloc[place]
        colours, hatches = zip(*(_PARTS[stage] for stage in stages["stage"]), strict=True)
        bars = axis.barh(range(len(stages)), values, 0.6, color=[COLOURS[one] for one in colours], hatch=hatches)
        texts = [f"{value:.3g} {unit}, {100 * value / values.sum():.1f} %" for value in values]
        axis.bar_label(bars, texts, fontsize=8, padding=4)
        mark = others * share / (1 - share)
        axis.plot(mark, place + 0.4, label=label.format(*(100 * one for one in shares)), **_BELOW)
        axis.set(xlim=(0, 1.5 * max(mark, values.max())), ylim=(len(stages) - 0.4, -0.5))
        axis.grid(axis="y", visible=False)
    axes[0, 0].set_yticks(range(len(stages)), stages["stage"])
    axes[0, 0].set_xlabel("latency (ms)")
    axes[0, 1].set_xlabel("peak memory (MB)")
    _legend(figure, axes[0], columns=1, kind=kind)
    return figure


def score_evolution(scores: pd.DataFrame, agreement: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 2: above, the scores of one query's candidates after each layer; below, when their order is settled.

    scores: columns model, layer (1 is the first), candidate, probability, top (whether in the full model's top K).
    agreement: model, layer, kendall, low, high (95 %): Kendall's tau with the last layer's order, mean over queries.
    Quoted: layers that the paper calls stable, 7 and 13 of a model that it does not name: as shares of the depth, which
    is between those of the shallowest and the deepest model of its Table 1.
    """
    need(scores, "model top", "layer candidate", least=0, unique="model layer candidate")
    need(scores, "", "probability", least=0, most=1)
    need(agreement, "model", "layer kendall low high", least=-1, unique="model layer")
    models = _order(scores["model"])
    _known(models, agreement["model"], "model in the agreement")
    depths = [shapes.shape(name.lower()).values["num_hidden_layers"] for name in printed.models()["model"]]
    stable = "quoted, layers " + " and ".join(map(str, printed.STABLE_LAYERS))
    stable += f", of {min(depths)} to {max(depths)}, of a model not named"
    figure, axes = panels(2, len(models), width=8.7 / max(1.4, len(models)), height=2.1, sharey="row", sharex="col")
    for (above, below), model in zip(axes.T, models, strict=True):
        rows = scores[scores["model"] == model]
        for (_, top), one in rows.sort_values("layer").groupby(["candidate", "top"]):
            colour, name = ("blue", "in the full model's top K") if top else ("grey", "the other candidates")
            above.plot(one["layer"], one["probability"], color=COLOURS[colour], lw=0.9, alpha=0.8, label=name)
        mean = agreement[agreement["model"] == model].sort_values("layer")
        below.plot(mean["layer"], mean["kendall"], "-o", ms=3, color=COLOURS["black"], label="agreement, mean")
        below.fill_between(mean["layer"], mean["low"], mean["high"], color=COLOURS["black"], alpha=0.3, lw=0,
                           label="its 95 % interval")  # fmt: skip
        for axis in (above, below):
            for layer in printed.STABLE_LAYERS:
                ends = [layer / depth * rows["layer"].max() for depth in (max(depths), min(depths))]
                axis.axvspan(*ends, color=COLOURS["red"], alpha=0.13, lw=0, zorder=0, label=stable)
                if axis is above:
                    axis.annotate(f"{layer}", (np.mean(ends), 0.96), xycoords=("data", "axes fraction"), va="top",
                                  ha="center", fontsize=7, color=COLOURS["red"])  # fmt: skip
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        above.set_title(model, fontsize=9)
        below.set_xlabel(f"layer, of {rows['layer'].max()}")
    axes[0, 0].set(ylabel="score, sigmoid(z)", ylim=(-0.03, 1.03))
    axes[1, 0].set_ylabel("Kendall's tau with\nthe last layer")
    _legend(figure, axes.ravel(), columns=2, kind=kind)
    return figure


def pruning(
    scores: pd.DataFrame, rounds: pd.DataFrame, *, title: str = "", layers: int | None = None, kind: str = "measured"
) -> Figure:
    """Figure 4, and the worked example of section 4.5: who is decided after which layer; below, why.

    scores: columns layer, candidate, probability, verdict (deferred, selected, dropped), a row for each candidate that
    was active in a layer. rounds: layer, statistic (of the active scores, such as CV), threshold. title: the model, K
    and pool. layers: of the model; None is the last that there is. Who is decided leaves to the right of the layer, the
    selected before the dropped, so that equal scores do not hide each other.
    """
    need(scores, "verdict", "layer candidate", least=0, unique="layer candidate")
    need(scores, "", "probability", least=0, most=1)
    need(rounds, "", "layer statistic threshold", unique="layer")
    _known(scores["verdict"], _VERDICTS, "verdict")
    last = int(max(scores["layer"].max(), rounds["layer"].max()))
    if layers is not None and layers < last:
        raise ValueError(f"A model of {layers} layers decides nothing after layer {last}.")
    figure, axes = panels(2, 1, width=7.4, height=2.4, sharex=True, height_ratios=[2, 1])
    above, below = axes[:, 0]
    thin: dict[str, Any] = dict(color=COLOURS["grey"], lw=0.6, alpha=0.6)
    for _, one in scores.sort_values("layer").groupby("candidate"):
        above.plot(one["layer"], one["probability"], **thin)
    for verdict, (colour, marker, start, end) in _VERDICTS.items():
        rows = scores[scores["verdict"] == verdict].sort_values(["layer", "probability"], ascending=[True, False])
        group = rows.groupby("layer")["layer"]
        place = rows["layer"] + start + (end - start) * group.cumcount() / group.transform("size")
        above.hlines(rows["probability"], rows["layer"], place, **thin)
        above.plot(place, rows["probability"], marker, ms=5 if start else 2.5, color=COLOURS[colour], label=verdict)
    _counts(above, scores)
    above.set(ylabel="score, sigmoid(z)", ylim=(-0.05, 1.05))
    above.set_title(title, fontsize=9, pad=40)
    rounds = rounds.sort_values("layer")
    below.plot(rounds["layer"], rounds["statistic"], "-o", ms=4, color=COLOURS["blue"], label="dispersion")
    below.plot(rounds["layer"], rounds["threshold"], "--", color=COLOURS["red"], label="threshold")
    below.set(xlabel=f"after layer, of {layers or last}", ylabel="dispersion", xlim=(0.4, (layers or last) + 0.9))
    _ticks_at(below, range(1, (layers or last) + 1))
    _legend(figure, axes[:, 0], columns=5, kind=kind)
    return figure


# Figures 8, 9 and 10


def latency_and_precision(table: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 8, one query set: Precision@K (points) above latency (bars, 95 %); two rows a model, a column a K.

    table: columns model, queries, k, method, threshold (low, high, or empty), seconds, low, high (of the seconds),
    precision. Under a bar is HF Offload's latency over it. Quoted: the paper's best case (K = 1) and its hardest
    (K = 10), of HF Offload's latency. Raises ValueError where there are several query sets.
    """
    need(table, "model queries method threshold", "k seconds low high", least=0, unique="model k method threshold")
    need(table, "", "precision", least=0, most=1)
    sets = _order(table["queries"])
    if len(sets) > 1:
        raise ValueError(f"A figure is of one query set, not of {', '.join(sets)}.")
    which = table["threshold"].fillna("")
    table = table.assign(bar=table["method"] + (" (" + which + ")").where(which != "", ""))
    models, sizes, names = _order(table["model"]), sorted(table["k"].unique()), _order(table["bar"])
    figure, axes = panels(2 * len(models), len(sizes), width=8.9 / len(sizes), height=1.4, sharey="row",
                          height_ratios=[0.8, 2] * len(models))  # fmt: skip
    for row, model in enumerate(models):
        for column, k in enumerate(sizes):
            rows = table[(table["model"] == model) & (table["k"] == k)].set_index("bar").reindex(names)
            above, below = axes[2 * row : 2 * row + 2, column]
            above.plot(range(len(names)), rows["precision"], "D", ms=4, color=COLOURS["black"],
                       label="Precision@K of all test pools, replayed")  # fmt: skip
            above.set_title(f"{model}, K = {k:g}", fontsize=8)
            above.set(ylim=(np.floor(10 * table["precision"].min()) / 10 - 0.05, 1.05), xticks=[])
            above.set_xlim(-0.6, len(names) - 0.4)
            _latency_bars(below, rows, names, k)
        axes[2 * row, 0].set_ylabel("Precision@K", fontsize=8)
        axes[2 * row + 1, 0].set_ylabel("latency (s a query)", fontsize=8)
        axes[2 * row + 1, 0].set_ylim(0, 1.1 * table.loc[table["model"] == model, "high"].max())
    figure.supxlabel(f"under a bar: {printed.OFFLOAD}'s latency over it", fontsize=9)
    swatches = [Patch(label=name, **_style(name, names)) for name in names]
    _legend(figure, axes.ravel(), columns=3, kind=f"{sets[0]}, {kind}", first=swatches)
    return figure


def memory_over_time(samples: pd.DataFrame, peaks: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 9: memory while 20 candidates are ranked, by method, over the process after its imports; and the latency.

    samples: columns method, seconds (since the load began), rss_mb, anon_mb (anonymous and shared). peaks: method,
    rss_mb, anon_mb, mean_rss_mb, cached_mb (of the model's file, left in the page cache), first_s (of the first query),
    seconds (of the next ones). Quoted: where GRATING's peak would be by the paper's ratios to each baseline's.
    """
    need(samples, "method", "seconds rss_mb anon_mb")
    need(peaks, "method", "rss_mb anon_mb mean_rss_mb cached_mb first_s seconds", unique="method")
    names = _order(peaks["method"])
    _known(samples["method"], names, "method in the peaks")
    figure = plt.figure(figsize=(9.0, 5.4))
    axes = figure.subplot_mosaic("AAABBB;CCDDEE")
    for axis, column, title in zip((axes["A"], axes["B"]), ("rss_mb", "anon_mb"), ("resident", "anonymous and shared"),
                                   strict=True):  # fmt: skip
        for name in names:
            rows = samples[samples["method"] == name].sort_values("seconds")
            dashed = "--" if name == printed.OURS_QUANT else "-"  # it is where GRATING is
            axis.plot(rows["seconds"], rows[column], dashed, color=_colour(name, names), label=name, lw=1.3)
        axis.set(xlabel="time (s)", ylabel="growth (MB)")
        axis.set_title(f"{title}, over time", fontsize=8)
    wide = peaks.set_index("method").reindex(names)
    place = np.arange(len(names))
    for key, strong, faint, what, title in (
        ("C", "rss_mb", "mean_rss_mb", "memory (MB)", "resident: peak; faint: mean"),
        ("D", "anon_mb", "cached_mb", "memory (MB)", "anonymous: peak; faint: file in page cache"),
        ("E", "seconds", "first_s", "latency (s)", "next query; faint: first query"),
    ):
        _barh(axes[key], place - 0.2, wide[strong], names, alpha=1.0)
        _barh(axes[key], place + 0.2, wide[faint], names, alpha=0.45)
        axes[key].set(xlabel=what, yticks=place, yticklabels=[], ylim=(len(names) + 0.5, -0.6))
        axes[key].set_xlim(0, 1.25 * wide[[strong, faint]].to_numpy().max())
        axes[key].set_title(title, fontsize=8)
        axes[key].grid(axis="y", visible=False)
    axes["C"].set_yticks([*place, len(names)], [*names, "GRATING, quoted"], fontsize=8)
    _quoted_ratios(axes["C"], wide["rss_mb"], names)
    _legend(figure, [axes["A"], axes["C"]], columns=4, kind=kind)
    return figure


def trade_off(curve: pd.DataFrame, chosen: pd.DataFrame | None = None, kind: str = "replayed") -> Figure:
    """Figure 10: work and change of Precision@K against the dispersion threshold, a line a K; a column a model.

    curve: columns model, k, threshold (finite, above 0), computed (share of the full model's layer-candidates, which
    stands for the paper's latency), precision, full (precision without pruning). chosen: model, k, threshold, name
    (such as low, high): calibrated ones. The paper prints no numbers here.
    """
    need(curve, "model", "k threshold", positive=True, unique="model k threshold")
    need(curve, "", "k computed precision full", least=0)
    if chosen is not None:
        need(chosen, "model name", "k threshold", unique="model k name")
    models, sizes = _order(curve["model"]), sorted(curve["k"].unique())
    figure, axes = panels(2, len(models), width=8.9 / max(1.4, len(models)), height=2.2, sharey="row", sharex="col")
    for (above, below), model in zip(axes.T, models, strict=True):
        for number, k in enumerate(sizes):
            rows = curve[(curve["model"] == model) & (curve["k"] == k)].sort_values("threshold")
            style = dict(color=COLOURS[_LINES[number]], label=f"K = {k:g}", lw=1.3)
            change = 100 * (rows["precision"] - rows["full"])
            above.plot(rows["threshold"], rows["computed"], **style)
            below.plot(rows["threshold"], change, **style)
            if chosen is None:
                continue
            for one in chosen[(chosen["model"] == model) & (chosen["k"] == k)].itertuples():
                kinds = _order(chosen["name"])
                size = 4 + 1.8 * (len(kinds) - 1 - kinds.index(one.name))  # where two are one, the first is seen behind
                marker = dict(marker=_MARKERS[kinds.index(one.name)], ls="", ms=size, zorder=4)
                for axis, values in ((above, rows["computed"]), (below, change)):
                    height = np.interp(float(str(one.threshold)), rows["threshold"], values)
                    axis.plot(one.threshold, height, color=COLOURS[_LINES[number]], mec="black", **marker)
                below.plot([], [], color="white", mec="black", label=f"{one.name} threshold", **marker)
        below.axhline(0, color=COLOURS["black"], lw=0.8, ls="--")
        above.set_title(model, fontsize=9)
        below.set_xlabel("dispersion threshold")
        found = curve.loc[curve["model"] == model, "threshold"]
        below.set_xscale("log")
        below.set_xlim(0.9 * max(found.min(), found.max() / 1e3), 1.1 * found.max())
        below.xaxis.set_major_formatter(_PLAIN)
        below.xaxis.set_minor_formatter(NullFormatter())
    axes[0, 0].set_ylabel("layer-candidates,\nof the full model's (%)")
    axes[0, 0].yaxis.set_major_formatter(_PERCENT)
    axes[0, 0].set_ylim(bottom=0)
    axes[1, 0].set_ylabel("change of Precision@K\n(points)")
    _legend(figure, axes.ravel(), columns=6, kind=kind)
    return figure


# Figures 11 to 15


def rag(times: pd.DataFrame, quality: pd.DataFrame, memory: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 11: retrieval-augmented answering with HF and GRATING: latency, precision and memory, a column a reranker.

    times: columns setting (the reranker), method, part (of the latency), seconds. quality: setting, method, precision,
    low, high (95 %). memory: setting, method, seconds, mb (of all processes). Quoted: the paper's savings, of ours with
    HF.
    """
    savings = {
        ours: printed.number(f"RAG, latency reduction, {machine}")
        for ours, machine in zip(printed.STANDS_FOR.values(), ("NVIDIA", "Apple"), strict=True)
    }
    settings = _order(times["setting"]) if "setting" in times else []
    figure, axes = panels(3, max(1, len(settings)), width=8.9 / max(1.4, len(settings)), height=1.9,
                          height_ratios=[1, 0.7, 1.1])  # fmt: skip
    _application(axes[:2], times, quality, "Precision@K", {(name, printed.OURS): cut for name, cut in savings.items()})
    peak = printed.number("RAG, peak memory reduction at most")
    _footprints(axes[2], memory, settings, dict.fromkeys(settings, peak), "at most")
    _legend(figure, axes.ravel(), columns=3, kind=kind)
    return figure


def agent_memory(times: pd.DataFrame, quality: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 12: latency and success of an agent's tasks, a column a workload (`video`, `community`).

    times, quality: as in `rag`; precision is the share of tasks done.
    """
    savings = {(name, printed.OURS): printed.number(f"agent memory, latency reduction, {name}")
               for name in ("video", "community")}  # fmt: skip
    return _whole(times, quality, "tasks done", savings, kind)


def agent_memory_footprint(memory: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 13: memory during one action of the agent. memory: as in `rag`, the setting is the workload."""
    return _footprint_figure(memory, printed.number("agent memory, peak memory reduction"), kind)


def long_context(times: pd.DataFrame, quality: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 14: latency and precision of answers from a long text, with HF, GRATING and no reranker.

    times, quality: as in `rag`. Quoted: GRATING's saving, of our HF.
    """
    cut = printed.number("long context, latency reduction against HF Reranker")
    savings = {(name, printed.OURS): cut for name in _order(times["setting"])} if "setting" in times else {}
    return _whole(times, quality, "right answers", savings, kind)


def long_context_footprint(memory: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 15: memory while one question is answered. memory: as in `rag`. The paper's 1 GiB is of other models."""
    return _footprint_figure(memory, None, kind)


# Figure 16


def ablation(table: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 16: peak memory and latency as each technique is added, over the baseline's, beside the paper's.

    table: columns step (of `printed.STEPS`), peak_mb, first_s (of the first query), seconds, low, high (of the next
    ones, the least and the greatest). Where no step has seconds of its own, there was one query a step: the first. The
    baseline's colour is HF's.
    """
    need(table, "step", "peak_mb first_s seconds low high", positive=True, unique="step")
    _known(table["step"], printed.STEPS, "step")
    _known(printed.STEPS[:1], table["step"], "step in the table")
    rows = table.set_index("step").reindex([step for step in printed.STEPS if step in set(table["step"])])
    quoted = printed.ablation().set_index("step").reindex(rows.index)
    figure, axes = panels(1, 2, width=4.4, height=3.4, sharey=True)
    _steps(axes[0, 0], rows["peak_mb"], "{:.0f} MB", shift=-0.1, height=0.5, alpha=1.0)
    once = bool((rows["seconds"] == rows["first_s"]).all())
    if not once:
        next_ = rows[["low", "high"]]
        _steps(axes[0, 1], rows["seconds"], "{:.2f} s", shift=-0.22, height=0.3, alpha=1.0, spread=next_)
    _steps(axes[0, 1], rows["first_s"], "{:.2f} s", shift=-0.1 if once else 0.1, height=0.3, alpha=0.45)
    for axis, name in zip(axes[0], ("peak", "latency"), strict=True):
        axis.plot(quoted[name], np.arange(len(rows)) + 0.36, label="quoted, 60 candidates of 500 tokens on a GPU",
                  **_BELOW)  # fmt: skip
        axis.axvline(1, color=COLOURS["black"], lw=0.8, ls="--")
        axis.xaxis.set_major_formatter(_PERCENT)
        axis.grid(axis="y", visible=False)
        axis.set_xlim(0, 1.2 * axis.get_xlim()[1])  # for the numbers beside the bars
    texts = ["baseline (HF)", *(f"+ {step}" for step in rows.index[1:])]
    axes[0, 0].set(yticks=range(len(rows)), yticklabels=texts, ylim=(len(rows) - 0.4, -0.5))
    axes[0, 0].set_xlabel("peak memory, of the baseline's (%)")
    axes[0, 1].set_xlabel("latency, of the baseline's same query (%);\nwhere pruning decides is given, not found")
    swatches = [Patch(color=COLOURS["blue"], label="next query"),
                Patch(color=COLOURS["blue"], alpha=0.45, label="first query")]  # fmt: skip
    _legend(figure, axes[0], columns=3, kind=kind, first=swatches[once:])
    return figure


# Beyond the paper


def guarantee(table: pd.DataFrame, kind: str = "replayed") -> Figure:
    """A rule with a promise against a calibrated threshold: recall promised and reached, and the work that is saved.

    table: columns model, k, rule, promised, reached, low, high (of what is reached on test pools, 95 %), saved (share
    of the layer-candidates).
    """
    need(table, "model rule", "k promised", unique="model k rule promised")
    need(table, "", "promised reached low high saved", least=0, most=1)
    rules, cells = _order(table["rule"]), _order(table["model"])
    figure, axes = panels(1, 2, width=4.4, height=3.2)
    left, right = axes[0]
    low = min(table["promised"].min(), table["low"].min())
    left.plot([low, 1], [low, 1], "--", color=COLOURS["black"], lw=1, label="as promised")
    for number, rule in enumerate(rules):
        for place, model in enumerate(cells):
            rows = table[(table["rule"] == rule) & (table["model"] == model)]
            style: dict[str, Any] = dict(color=COLOURS[_LINES[number % 7]], marker=_MARKERS[place % 7], ls="", ms=5)
            aside = number * len(cells) + place - (len(rules) * len(cells) - 1) / 2  # so that none hides another
            shift = rows["promised"] + aside * 0.01 * (1 - low)
            error = np.abs(rows[["low", "high"]].to_numpy() - rows[["reached"]].to_numpy()).T
            left.errorbar(shift, rows["reached"], error, elinewidth=0.8, label=rule if not place else None, **style)
            right.plot(rows["reached"], rows["saved"], **style)
            if not number:
                right.plot([], [], label=model, **style | {"color": COLOURS["grey"]})
    left.set(xlabel="recall of the top K, promised", ylabel="recall, reached on test pools")
    right.set(xlabel="recall, reached on test pools", ylabel="layer-candidates saved (%)", ylim=(0, None))
    right.yaxis.set_major_formatter(_PERCENT)
    _legend(figure, axes[0], columns=4, kind=kind)
    return figure


def hidden_reads(points: pd.DataFrame, crossover: Mapping[str, float] | None = None, kind: str = "measured") -> Figure:
    """Share of the layers' read time that computation hides, against the tokens that a layer computes.

    points: columns disk (such as `O_DIRECT`, or `throttled to 200 MB/s`), tokens, hidden. crossover: disk -> tokens
    from which all of it should be hidden: GFLOP/s over GB/s for weights of two bytes, as a layer of P of them takes 2 P
    floating-point operations a token and 2 P bytes; its kind is analytic, from the two measured speeds.
    """
    need(points, "disk", "tokens", positive=True, unique="disk tokens")
    need(points, "", "hidden", most=1)
    disks = _order(points["disk"])
    _known(crossover or {}, disks, "disk")
    figure, axes = panels(1, 1, width=6.8, height=3.0)
    axis = axes[0, 0]
    for number, disk in enumerate(disks):
        rows = points[points["disk"] == disk].sort_values("tokens")
        colour = COLOURS[_LINES[number % 7]]
        axis.plot(rows["tokens"], rows["hidden"], "-", marker=_MARKERS[number % 7], ms=4, color=colour, label=disk)
        if crossover and disk in crossover:
            label = f"{disk}: all, from {crossover[disk]:.0f} tokens on, analytic"
            axis.axvline(crossover[disk], color=colour, ls="--", lw=1, label=label)
    axis.axhline(0.9, color=COLOURS["black"], lw=0.8, ls=":", label="90 %")
    axis.set(xlabel="tokens a layer computes", ylabel="read time hidden (%)", xscale="log", ylim=(min(0, 1.05 *
             points["hidden"].min()), 1.05))  # fmt: skip
    _ticks_at(axis, points["tokens"])
    axis.yaxis.set_major_formatter(_PERCENT)
    _legend(figure, [axis], columns=2, kind=kind)
    return figure


def clustering(table: pd.DataFrame, kind: str = "measured") -> Figure:
    """Exact 1-D k-means against Lloyd's iterations: how often they miss the optimum, change a decision, and their time.

    table: columns method, n (candidates), missed (share of pools above the least sum of squares), changed (share of
    pools in which a candidate is decided otherwise than by the exact clusters), time_us (a call).
    """
    need(table, "method", "n time_us", positive=True, unique="method n")
    need(table, "", "missed changed", least=0, most=1)
    figure, axes = panels(1, 3, width=3.0, height=2.6)
    labels = ("optimum missed\n(% of pools)", "decisions changed\n(% of pools)", "time a call (µs)")
    for axis, column, text in zip(axes[0], ("missed", "changed", "time_us"), labels, strict=True):
        for number, method in enumerate(_order(table["method"])):
            rows = table[table["method"] == method].sort_values("n")
            axis.plot(rows["n"], rows[column], "-", ms=4, label=method, **_line(number))
        axis.set(xlabel="candidates", xscale="log", ylabel=text)
        _ticks_at(axis, table["n"])
        if column == "time_us":
            axis.set_yscale("log")
        else:
            axis.yaxis.set_major_formatter(_PERCENT)
            axis.set_ylim(bottom=-0.01)
    _legend(figure, axes[0], columns=4, kind=kind)
    return figure


def embedding_cache(table: pd.DataFrame, kind: str = "measured") -> Figure:
    """Section 4.4: hit rate and added latency of the embedding cache, query by query.

    table: columns stream (such as `Zipf`, or a query set), query (1 is cold), hit_rate (of distinct rows), added_ms.
    Quoted: 4 ms added, of Figure 16.
    """
    need(table, "stream", "query added_ms", least=0, unique="stream query")
    need(table, "", "hit_rate", least=0, most=1)
    figure, axes = panels(1, 2, width=4.2, height=2.6)
    for number, stream in enumerate(_order(table["stream"])):
        rows = table[table["stream"] == stream].sort_values("query")
        for axis, column in zip(axes[0], ("hit_rate", "added_ms"), strict=True):
            axis.plot(rows["query"], rows[column], "-", label=stream, **_line(number))
    added = printed.ablation().set_index("step")["added_ms"]["embedding cache"]
    axes[0, 1].axhline(added, color=COLOURS["black"], lw=1, ls="--", label="quoted, 4 ms")
    for axis in axes[0]:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0, 0].set(xlabel="query", ylabel="rows found in the cache (%)", ylim=(0, 1.03))
    axes[0, 0].yaxis.set_major_formatter(_PERCENT)
    axes[0, 1].set(xlabel="query", ylabel="added latency (ms)", ylim=(0, None))
    _legend(figure, axes[0], columns=4, kind=kind)
    return figure


# Parts of figures


def _counts(axis: Axes, scores: pd.DataFrame) -> None:
    """Above Figure 4: how many candidates are active, selected and dropped after each layer."""
    table = scores.groupby(["layer", "verdict"]).size().unstack(fill_value=0)
    lines = {"active": (table.sum(axis=1), "black")}
    lines |= {name: (table[name], _VERDICTS[name][0]) for name in ("selected", "dropped") if name in table}
    for number, (name, (counts, colour)) in enumerate(lines.items()):
        style: dict[str, Any] = dict(color=COLOURS[colour], fontsize=7, textcoords="offset points")
        height = 26 - 10 * number  # points above the axes
        axis.annotate(name, (0, 1), (-4, height), xycoords="axes fraction", ha="right", **style)
        for layer, count in counts[counts > 0].items():
            where = (float(str(layer)), 1.0)
            axis.annotate(f"{count}", where, (0, height), xycoords=("data", "axes fraction"), ha="center", **style)


def _latency_bars(axis: Axes, rows: pd.DataFrame, names: list[str], k: float) -> None:
    """One panel of Figure 8. rows: by the name of the bar, in the order of names."""
    place, error = np.arange(len(names)), np.abs(rows[["low", "high"]].to_numpy() - rows[["seconds"]].to_numpy()).T
    styles = [_style(name, names) for name in names]
    axis.bar(place, rows["seconds"], 0.7, color=[style["facecolor"] for style in styles], edgecolor="white",
             hatch=[style["hatch"] for style in styles], yerr=error, error_kw=dict(lw=0.8, capsize=1.5))  # fmt: skip
    base = rows["seconds"].get(printed.OFFLOAD, np.nan)
    ratios = base / rows["seconds"]
    axis.set_xticks(place, [f"{ratio:.1f}x" if np.isfinite(ratio) else "" for ratio in ratios], fontsize=7)
    axis.tick_params(axis="x", length=0)
    axis.grid(axis="x", visible=False)
    axis.set_xlim(-0.6, len(names) - 0.4)
    ours = [number for number, name in enumerate(names) if name.split(" (")[0] == printed.OURS]
    if k in _CASES and np.isfinite(base):
        quantity, name, what, marker = _CASES[int(k)]
        cut = printed.number(quantity)
        label = f"quoted, {name} (K = {k:g}): {cut:g} % less {what}"
        axis.plot(ours, [base * (1 - cut / 100)] * len(ours), label=label, **_HOLLOW | {"marker": marker})


def _quoted_ratios(axis: Axes, peak: pd.Series, names: Sequence[str]) -> None:
    """GRATING's peak by the paper's ranges, a line for each baseline, in a row of its own below the others."""
    for number, (base, (least, greatest)) in enumerate(printed.memory_ratios().items()):
        if base in peak.index:
            style = _HOLLOW | dict(ls="-", lw=1, color=_colour(base, names), mec=_colour(base, names), ms=4)
            ends, y = [peak[base] / greatest, peak[base] / least], len(names) + 0.25 * (number - 1)
            axis.plot(ends, [y, y], label=f"quoted, by its ratio to {base}'s", **style)


def _application(
    axes: np.ndarray, times: pd.DataFrame, quality: pd.DataFrame, what: str, savings: Mapping[tuple[str, str], float]
) -> None:
    """Stacked latency above, quality below, a column a setting. savings: (setting, method) -> percent of HF's."""
    need(times, "setting method part", "seconds", least=0, unique="setting method part")
    need(quality, "setting method", "precision low high", least=0, most=1, unique="setting method")
    _known(times["part"], _PARTS, "part")
    parts = [part for part in _PARTS if part in set(times["part"])]
    for (above, below), setting in zip(axes.T, _order(times["setting"]), strict=True):
        rows = times[times["setting"] == setting]
        wide = rows.pivot(index="method", columns="part", values="seconds").reindex(_order(rows["method"]))
        names, left = list(wide.index), np.zeros(len(wide))
        for part in parts:
            values = wide[part].fillna(0).to_numpy() if part in wide else np.zeros(len(wide))
            colour, hatch = _PARTS[part]
            above.barh(names, values, 0.6, left=left, color=COLOURS[colour], hatch=hatch, label=part)
            left += values
        for name, total in zip(names, left, strict=True):
            above.text(total, names.index(name), f" {total:.3g} s", va="center", fontsize=8)
        for (where, method), percent in savings.items():
            if where == setting and {printed.HF, method} <= set(names):
                quoted = left[names.index(printed.HF)] * (1 - percent / 100)
                above.plot(quoted, names.index(method) + 0.42, label="quoted saving, of our HF", **_BELOW)
        found = quality[quality["setting"] == setting].set_index("method").reindex(names)
        error = np.abs(found[["low", "high"]].to_numpy() - found[["precision"]].to_numpy()).T
        below.errorbar(found["precision"], range(len(names)), xerr=error, fmt="D", ms=5, color=COLOURS["black"],
                       elinewidth=1, capsize=2, label=f"{what}, 95 %")  # fmt: skip
        below.set_yticks(range(len(names)), names)
        below.set(xlabel=f"{what} (%)", xlim=(0, 1.04), ylim=(len(names) - 0.4, -0.6))
        below.xaxis.set_major_formatter(_PERCENT)
        above.set_title(setting, fontsize=9)
        above.set_xlabel("latency (s)")
        above.set(xlim=(0, 1.25 * left.max()), ylim=(len(names) - 0.4, -0.5))
        above.grid(axis="y", visible=False)


def _footprints(
    axes: Sequence[Axes], memory: pd.DataFrame, settings: Sequence[str], savings: Mapping[str, float], most: str = ""
) -> None:
    """Memory over time, a column a setting. savings: setting -> percent of HF's peak."""
    need(memory, "setting method", "seconds mb")
    _known(settings, memory["setting"], "setting in the memory table")
    for axis, setting in zip(axes, settings, strict=True):
        rows = memory[memory["setting"] == setting]
        names = _order(rows["method"])
        peaks = rows.groupby("method")["mb"].max()
        for number, name in enumerate(names):
            one = rows[rows["method"] == name].sort_values("seconds")
            axis.plot(one["seconds"], one["mb"], color=_colour(name, names), lw=1.3, label=name)
            axis.annotate(f"{name}: peak {peaks[name]:.0f} MB", (0, 1), (4, -8 - 10 * number), xycoords="axes fraction",
                          textcoords="offset points", fontsize=7, color=_colour(name, names))  # fmt: skip
        if setting in savings and printed.HF in peaks:
            label = f"quoted, GRATING's peak of our HF's{', ' + most if most else ''}"
            axis.axhline(peaks[printed.HF] * (1 - savings[setting] / 100), color=COLOURS["black"], ls="--", lw=1,
                         label=label)  # fmt: skip
        axis.set(xlabel="time (s)", ylabel="memory (MB)")
        axis.set_ylim(0, 1.4 * peaks.max())  # the peaks are written above all curves


def _whole(
    times: pd.DataFrame, quality: pd.DataFrame, what: str, savings: Mapping[tuple[str, str], float], kind: str
) -> Figure:
    """Figures 12 and 14."""
    count = max(1, len(_order(times["setting"]))) if "setting" in times else 1
    figure, axes = panels(2, count, width=8.9 / max(1.4, count), height=1.9)
    _application(axes, times, quality, what, savings)
    _legend(figure, axes.ravel(), columns=5, kind=kind)
    return figure


def _footprint_figure(memory: pd.DataFrame, percent: float | None, kind: str) -> Figure:
    """Figures 13 and 15. percent: of HF's peak that is saved, by the paper."""
    settings = _order(memory["setting"]) if "setting" in memory else []
    figure, axes = panels(1, max(1, len(settings)), width=8.9 / max(1.4, len(settings)), height=2.5)
    _footprints(axes[0], memory, settings, {} if percent is None else dict.fromkeys(settings, percent))
    for axis, setting in zip(axes[0], settings, strict=True):
        axis.set_title(setting, fontsize=9)
    _legend(figure, axes[0], columns=3, kind=kind)
    return figure


def _barh(axis: Axes, place: np.ndarray, values: pd.Series, names: Sequence[str], *, alpha: float) -> None:
    """Bars in the methods' colours, with their values."""
    bars = axis.barh(place, values, 0.38, color=[_colour(one, names) for one in names], alpha=alpha)
    texts = [f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values]
    axis.bar_label(bars, texts, fontsize=7, padding=2)


def _steps(
    axis: Axes, values: pd.Series, text: str, *, shift: float, height: float, alpha: float,
    spread: pd.DataFrame | None = None,
) -> None:  # fmt: skip
    """Bars of Figure 16, over the first, each with its value. spread: low and high; equal ones have no interval."""
    shares, first = (values / values.iloc[0]).to_numpy(), values.iloc[0]
    place = np.arange(len(values)) + shift
    colours = [COLOURS["blue" if number else "grey"] for number in range(len(values))]
    axis.barh(place, shares, height, color=colours, alpha=alpha)
    ends = shares if spread is None else spread["high"].to_numpy() / first
    for y, share, end, value in zip(place, shares, ends, values, strict=True):
        axis.annotate(text.format(value), (max(share, end), y), (4, 0), textcoords="offset points", va="center",
                      fontsize=7)  # fmt: skip
    if spread is not None:
        wide = (spread["high"] > spread["low"]).to_numpy()
        error = np.abs(spread.to_numpy() / first - shares[:, None])[wide].T
        axis.errorbar(shares[wide], place[wide], xerr=error, fmt="none", ecolor=COLOURS["black"], elinewidth=1,
                      capsize=2)  # fmt: skip


# Tables, places and styles


def _known(found: Iterable[str], names: Iterable[str], what: str) -> None:
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise ValueError(f"There is no {what} {', '.join(unknown)}; there are {', '.join(_order(names))}.")


def _order(values: Iterable[str]) -> list[str]:
    """Distinct values in the order of their first appearance."""
    return list(dict.fromkeys(values))


def _colour(name: str, names: Sequence[str]) -> str:
    """Of a method, which a threshold in brackets may follow."""
    base = name.split(" (")[0]
    if base in _METHODS:
        return COLOURS[_METHODS[base]]
    others = _order(one.split(" (")[0] for one in names if one.split(" (")[0] not in _METHODS)
    return COLOURS[_OTHERS[others.index(base) % len(_OTHERS)]]


def _style(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Of a method's bar: its colour, and hatched at the low threshold."""
    return dict(facecolor=_colour(name, names), edgecolor="white", hatch="////" if name.endswith("(low)") else "")


def _line(number: int) -> dict[str, Any]:
    """Colour and marker of the number-th of several lines."""
    return dict(color=COLOURS[_LINES[number % len(_LINES)]], marker=_MARKERS[number % len(_MARKERS)])


def _ticks_at(axis: Axes, values: Iterable[float]) -> None:
    """Ticks at these places of the x-axis only, as plain numbers."""
    axis.set_xticks(sorted(set(values)))
    axis.xaxis.set_major_formatter(_PLAIN)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axes: Iterable[Axes], *, columns: int, kind: str, first: Sequence[Patch] = ()) -> None:
    """One legend above all panels: `first`, then each entry that any panel has, the quoted last; the kind its title."""
    found: dict[str, Any] = {str(one.get_label()): one for one in first}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = sorted(found, key=lambda label: label.startswith("quoted"))
    figure.legend([found[label] for label in labels], labels, title=kind, loc="outside upper center", ncols=columns,
                  fontsize=8, title_fontsize=8)  # fmt: skip
