"""GRATING's figures. Each function draws tables of the experiments and returns the figure.

Times are in seconds unless a column ends in _ms, memory in MB (10^6 bytes), shares and precision are fractions of 1.
A method is named as in `printed` and has one colour in all figures; others are drawn, too. Parts of a latency have
colours that are no method's. What the paper prints is called quoted, and its marks are hollow; it is of other machines
and models. The corner says the kind of the rest. A table that cannot be drawn is refused with a ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ondevice import plotting, shapes
from ondevice.grating import printed
from ondevice.plotting import COLOURS, facets, groups, legend, lines, look, need, order, panels, percent, plain, quoted

_METHODS = {  # colours
    printed.HF: "grey", printed.OFFLOAD: "orange", printed.QUANT: "green",
    printed.OURS: "blue", printed.OURS_QUANT: "sky", printed.NONE: "black",
}  # fmt: skip
_OTHERS = ("purple", "red", "yellow", "black")
_PARTS: dict[str, dict[str, Any]] = {  # of a latency, in their order
    part: dict(color=COLOURS[colour], hatch=hatch)
    for part, colour, hatch in (
        ("keyword search", "purple", "//////"), ("embedding search", "purple", ""), ("reranker", "red", ""),
        ("answer", "yellow", ""), ("model calls", "yellow", ""),
    )
}  # fmt: skip
_VERDICTS = {  # colour, marker, and the stretch behind the layer in which the marks stand, in layers
    "deferred": ("grey", "o", 0.0, 0.0), "selected": ("green", "^", 0.1, 0.3), "dropped": ("red", "v", 0.4, 0.8),
}  # fmt: skip
_CASES = {  # of Figure 8, by K: the quantity, its name, less than what, marker
    1: ("best case, latency reduction against HF Offload", "best case", "than HF Offload", "o"),
    10: ("hardest case, latency reduction", "hardest case", "(as we read it, than HF Offload)", "^"),
}
_APPLICATIONS: dict[str, tuple[str, dict[str, str], str]] = {
    # of Figures 11 to 15: what is judged; the saving of HF's latency by setting ("": any), and of its peak memory
    printed.RAG: ("Precision@K", {reranker: f"RAG, latency reduction, {machine}" for reranker, machine in
                                  zip(printed.STANDS_FOR.values(), ("NVIDIA", "Apple"), strict=True)},
                  "RAG, peak memory reduction at most"),
    printed.AGENT: ("tasks done", {name: f"agent memory, latency reduction, {name}" for name in ("video", "community")},
                    "agent memory, peak memory reduction"),
    printed.CONTEXT: ("right answers", {"": "long context, latency reduction against HF Reranker"}, ""),
}  # fmt: skip


# Figures 1, 2 and 4


def pipeline(stages: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 1: latency and peak memory of each stage of a file search, with the reranker's share.

    stages: columns stage (`reranker`, and other parts of a latency), latency_ms, peak_mb. Quoted: the reranker's
    shares, as what they would be of ours: at the same time and memory of the other stages.
    """
    need(stages, "stage", "latency_ms peak_mb", least=0, unique="stage")
    figure, axes = panels(1, 2, width=4.2, height=2.6, sharey=True)
    names, shares = list(stages["stage"]), [printed.number(f"file search: reranker share of {name}") / 100
                                            for name in ("latency", "memory")]  # fmt: skip
    label = "quoted, {:.3g} % of latency and {:.3g} % of memory in the reranker, with our other stages"
    place, styles = names.index("reranker"), [_PARTS[name] for name in names]
    for axis, column, unit, share in zip(axes[0], ("latency_ms", "peak_mb"), ("ms", "MB"), shares, strict=True):
        values = stages[column]
        bars = axis.barh(range(len(stages)), values, 0.6, color=[style["color"] for style in styles],
                         hatch=[style["hatch"] for style in styles])  # fmt: skip
        texts = [f"{value:.3g} {unit}, {100 * value / values.sum():.1f} %" for value in values]
        axis.bar_label(bars, texts, fontsize=8, padding=4)
        mark = (values.sum() - values.iloc[place]) * share / (1 - share)
        quoted(axis, mark, place + 0.4, label.format(*(100 * share for share in shares)), marker="^")
        plotting.categories(axis, names, flat=True)
        axis.set(xlim=(0, 1.5 * max(mark, values.max())))
    axes[0, 0].set_xlabel("latency (ms)")
    axes[0, 1].set_xlabel("peak memory (MB)")
    legend(figure, kind, columns=1)
    return figure


def score_evolution(scores: pd.DataFrame, agreement: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 2: above, the scores of one query's candidates after each layer; below, when their order is settled.

    scores: columns model, layer (1 is the first), candidate, probability, top (whether in the full model's top K).
    agreement: model, layer, kendall, low, high (95 %): Kendall's tau with the last layer's order, mean over queries.
    Quoted: layers that the paper calls stable, 7 and 13 of a model that it does not name: as shares of the depth, which
    is between those of the shallowest and the deepest model of its Table 1.
    """
    need(scores, "model top", "layer candidate probability", least=0, unique="model layer candidate")
    models = order(scores["model"])
    depths = [shapes.shape(name.lower()).values["num_hidden_layers"] for name in printed.models()["model"]]
    stable = "quoted, layers " + " and ".join(map(str, printed.STABLE_LAYERS))
    stable += f", of {min(depths)} to {max(depths)}, of a model not named"
    figure, axes = panels(2, len(models), width=8.7 / max(1.4, len(models)), height=2.1, sharey="row", sharex="col")
    for (above, below), (model, rows) in zip(axes.T, groups(scores, "model"), strict=True):
        for (_, top), path in rows.sort_values("layer").groupby(["candidate", "top"]):
            colour, name = ("blue", "in the full model's top K") if top else ("grey", "the other candidates")
            above.plot(path["layer"], path["probability"], color=COLOURS[colour], lw=0.9, alpha=0.8, label=name)
        lines(below, agreement[agreement["model"] == model], "layer", "kendall", color=COLOURS["black"],
              label="agreement, mean and 95 %")  # fmt: skip
        for axis in (above, below):
            for layer in printed.STABLE_LAYERS:
                ends = [layer / depth * rows["layer"].max() for depth in (max(depths), min(depths))]
                quoted(axis, ends, label=stable, fc=COLOURS["red"], alpha=0.13)
                if axis is above:
                    axis.annotate(f"{layer}", (np.mean(ends), 0.96), xycoords=("data", "axes fraction"), va="top",
                                  ha="center", fontsize=7, color=COLOURS["red"])  # fmt: skip
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        above.set_title(model, fontsize=9)
        below.set_xlabel(f"layer, of {rows['layer'].max()}")
    axes[0, 0].set(ylabel="score, sigmoid(z)", ylim=(-0.03, 1.03))
    axes[1, 0].set_ylabel("Kendall's tau with\nthe last layer")
    legend(figure, kind, columns=2)
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
    last = int(max(scores["layer"].max(), rounds["layer"].max()))
    figure, axes = panels(2, 1, width=7.4, height=2.4, sharex=True, height_ratios=[2, 1])
    above, below = axes[:, 0]
    thin: dict[str, Any] = dict(color=COLOURS["grey"], lw=0.6, alpha=0.6)
    for _, path in scores.sort_values("layer").groupby("candidate"):
        above.plot(path["layer"], path["probability"], **thin)
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
    plotting.ticks_at(below.xaxis, range(1, (layers or last) + 1))
    legend(figure, kind, columns=5)
    return figure


# Figures 8, 9 and 10


def latency_and_precision(table: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 8, one query set: Precision@K (points) above latency (bars, 95 %); two rows a model, a column a K.

    table: columns model, queries, k, method, threshold (low, high, or empty), seconds, low, high (of the seconds),
    precision. Under a bar is HF Offload's latency over it. Quoted: the paper's best case (K = 1) and its hardest
    (K = 10), of HF Offload's latency.
    """
    need(table, "model queries method threshold", "k seconds low high precision", least=0,
         unique="queries model k method threshold")  # fmt: skip
    which = table["threshold"].fillna("")
    table = table.assign(bar=table["method"] + (" (" + which + ")").where(which != "", ""))
    models, sizes, names = order(table["model"]), sorted(table["k"].unique()), order(table["bar"])
    figure, axes = panels(2 * len(models), len(sizes), width=8.9 / len(sizes), height=1.4, sharey="row",
                          height_ratios=[0.8, 2] * len(models))  # fmt: skip
    for (above, below), (model, of_model) in zip(axes.reshape(-1, 2, len(sizes)), groups(table, "model"), strict=True):
        for upper, lower, k in zip(above, below, sizes, strict=True):
            rows = of_model[of_model["k"] == k].set_index("bar").reindex(names)
            upper.plot(range(len(names)), rows["precision"], "D", ms=4, color=COLOURS["black"],
                       label="Precision@K of all test pools, replayed")  # fmt: skip
            upper.set_title(f"{model}, K = {k:g}", fontsize=8)
            upper.set(ylim=(np.floor(10 * table["precision"].min()) / 10 - 0.05, 1.05), xticks=[])
            upper.set_xlim(-0.6, len(names) - 0.4)
            _latency_bars(lower, rows, names, k)
        above[0].set_ylabel("Precision@K", fontsize=8)
        below[0].set_ylabel("latency (s a query)", fontsize=8)
        below[0].set_ylim(0, 1.1 * of_model["high"].max())
    figure.supxlabel(f"under a bar: {printed.OFFLOAD}'s latency over it", fontsize=9)
    swatches = [Patch(label=name, **_style(name, names)) for name in names]
    legend(figure, f"{', '.join(order(table['queries']))}, {kind}", columns=3, first=swatches)
    return figure


def memory_over_time(samples: pd.DataFrame, peaks: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 9: memory while 20 candidates are ranked, by method, over the process after its imports; and the latency.

    samples: columns method, seconds (since the load began), rss_mb, anon_mb (anonymous and shared). peaks: method,
    rss_mb, anon_mb, mean_rss_mb, cached_mb (of the model's file, left in the page cache), first_s (of the first query),
    seconds (of the next ones). Quoted: where GRATING's peak would be by the paper's ratios to each baseline's.
    """
    need(peaks, "method", "rss_mb anon_mb mean_rss_mb cached_mb first_s seconds", unique="method")
    names, figure = order(peaks["method"]), plt.figure(figsize=(9.0, 5.4))
    axes = figure.subplot_mosaic("AAABBB;CCDDEE")
    looks = {name: dict(color=_colour(name, names), marker="", lw=1.3, ls="--" if name == printed.OURS_QUANT else "-")
             for name in names}  # fmt: skip  (dashed: it is where GRATING is)
    for key, column, title in (("A", "rss_mb", "resident"), ("B", "anon_mb", "anonymous and shared")):
        lines(axes[key], samples, "seconds", column, "method", looks=looks)
        axes[key].set(xlabel="time (s)", ylabel="growth (MB)")
        axes[key].set_title(f"{title}, over time", fontsize=8)
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
    legend(figure, kind, axes=[axes["A"], axes["C"]])
    return figure


def trade_off(curve: pd.DataFrame, chosen: pd.DataFrame | None = None, kind: str = "replayed") -> Figure:
    """Figure 10: work and change of Precision@K against the dispersion threshold, a line a K; a column a model.

    curve: columns model, k, threshold (finite, above 0), computed (share of the full model's layer-candidates, which
    stands for the paper's latency), precision, full (precision without pruning). chosen: model, k, threshold, name
    (such as low, high): calibrated ones. The paper prints no numbers here.
    """
    need(curve, "model", "k threshold computed precision full", least=0, unique="model k threshold")
    curve = curve.assign(series=curve["k"].map("K = {:g}".format), change=100 * (curve["precision"] - curve["full"]))
    curve, models = curve.sort_values("k", kind="stable"), order(curve["model"])
    series, kinds = order(curve["series"]), [] if chosen is None else order(chosen["name"])
    figure, axes = panels(2, len(models), width=8.9 / max(1.4, len(models)), height=2.2, sharey="row", sharex="col")
    for (above, below), model in zip(axes.T, models, strict=True):
        rows = curve[curve["model"] == model]
        for axis, column in ((above, "computed"), (below, "change")):
            lines(axis, rows, "threshold", column, "series", marker="", lw=1.3)
            marked = curve.head(0) if chosen is None else chosen[chosen["model"] == model]
            marked = marked[marked["k"].isin(rows["k"])]
            for k, threshold, name in zip(*(marked.get(key, ()) for key in ("k", "threshold", "name")), strict=True):
                of_k, number = rows[rows["k"] == k].sort_values("threshold"), kinds.index(name)
                # Where two are one, the first is seen behind.
                marker: dict[str, Any] = dict(marker="osD^vP*"[number], ls="", ms=4 + 1.8 * (len(kinds) - 1 - number))
                colour = look(series.index(f"K = {k:g}"))["color"]
                axis.plot(threshold, np.interp(threshold, of_k["threshold"], of_k[column]), color=colour, mec="black",
                          zorder=4, **marker)  # fmt: skip
                axis.plot([], [], color="white", mec="black", label=f"{name} threshold", **marker)
        below.axhline(0, color=COLOURS["black"], lw=0.8, ls="--")
        above.set_title(model, fontsize=9)
        below.set(xlabel="dispersion threshold", xscale="log")
        below.set_xlim(0.9 * max(rows["threshold"].min(), rows["threshold"].max() / 1e3), 1.1 * rows["threshold"].max())
        plain(below.xaxis)
    axes[0, 0].set_ylabel("layer-candidates,\nof the full model's (%)")
    percent(axes[0, 0].yaxis)
    axes[0, 0].set_ylim(bottom=0)
    axes[1, 0].set_ylabel("change of Precision@K\n(points)")
    legend(figure, kind, columns=6)
    return figure


# Figures 11 to 15


def application(
    name: str, times: pd.DataFrame, quality: pd.DataFrame, memory: pd.DataFrame | None = None, kind: str = "measured"
) -> Figure:
    """Figures 11, 12 and 14: latency, quality and perhaps memory of an application, a column a setting.

    name: of the application, one of `printed`'s three. times: columns setting (the reranker or workload), method, part
    (of the latency), seconds. quality: setting, method, precision (or share of tasks or answers), low, high (95 %).
    memory: setting, method, seconds, mb (of all processes). Quoted: the paper's savings, of ours with HF.
    """
    need(times, "setting method part", "seconds", least=0, unique="setting method part")
    need(quality, "setting method", "precision low high", least=0, unique="setting method")
    what, savings, _ = _APPLICATIONS[name]
    settings, heights = order(times["setting"]), [1, 0.7, 1.1][: 2 if memory is None else 3]
    figure, axes = panels(len(heights), len(settings), width=8.9 / max(1.4, len(settings)), height=1.9,
                          height_ratios=heights)  # fmt: skip
    for column, (setting, rows) in zip(axes.T, groups(times, "setting"), strict=True):
        above, below, methods = column[0], column[1], order(rows["method"])
        wide = rows.pivot(index="method", columns="part", values="seconds").reindex(methods)
        totals = plotting.stacked(above, wide, _PARTS)
        for place, total in enumerate(totals):
            above.text(total, place, f" {total:.3g} s", va="center", fontsize=8)
        quantity = savings.get(setting, savings.get("", ""))
        if quantity and {printed.HF, printed.OURS} <= set(methods):
            left = totals[methods.index(printed.HF)] * (1 - printed.number(quantity) / 100)
            quoted(above, left, methods.index(printed.OURS) + 0.42, "quoted saving, of our HF", marker="^")
        above.set_title(setting, fontsize=9)
        above.set(xlabel="latency (s)", xlim=(0, 1.25 * totals.max()))
        judged = quality[quality["setting"] == setting].set_index("method").reindex(methods)
        below.errorbar(judged["precision"], range(len(methods)), xerr=plotting.spread(judged, "precision"), fmt="D",
                       ms=5, color=COLOURS["black"], elinewidth=1, capsize=2, label=f"{what}, 95 %")  # fmt: skip
        plotting.categories(below, methods, flat=True)
        below.set(xlabel=f"{what} (%)", xlim=(0, 1.04))
        percent(below.xaxis)
        if memory is not None:
            _footprint(column[2], memory[memory["setting"] == setting], name)
    legend(figure, kind, columns=3)
    return figure


def footprint(name: str, memory: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figures 13 and 15: an application's memory over time. name, memory: as in `application`."""
    width = 8.9 / max(1.4, memory["setting"].nunique())
    figure, _, parts = facets(memory, across="setting", width=width, height=2.5)
    for axis, rows in parts:
        _footprint(axis, rows, name)
    legend(figure, kind, columns=3)
    return figure


# Figure 16


def ablation(table: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 16: peak memory and latency as each technique is added, over the baseline's, beside the paper's.

    table: columns step (of `printed.STEPS`), peak_mb, first_s (of the first query), seconds, low, high (of the next
    ones, the least and the greatest). Where no step has seconds of its own, there was one query a step: the first. The
    baseline's colour is HF's.
    """
    need(table, "step", "peak_mb first_s seconds low high", least=0, unique="step")
    rows = table.set_index("step").reindex([step for step in printed.STEPS if step in set(table["step"])])
    paper = printed.ablation().set_index("step").reindex(rows.index)
    figure, axes = panels(1, 2, width=4.4, height=3.4, sharey=True)
    _steps(axes[0, 0], rows["peak_mb"], "{:.0f} MB", shift=-0.1, height=0.5, alpha=1.0)
    once = bool((rows["seconds"] == rows["first_s"]).all())
    if not once:
        ends = rows[["low", "high"]]
        _steps(axes[0, 1], rows["seconds"], "{:.2f} s", shift=-0.22, height=0.3, alpha=1.0, spread=ends)
    _steps(axes[0, 1], rows["first_s"], "{:.2f} s", shift=-0.1 if once else 0.1, height=0.3, alpha=0.45)
    for axis, name in zip(axes[0], ("peak", "latency"), strict=True):
        label = "quoted, 60 candidates of 500 tokens on a GPU"
        quoted(axis, paper[name], np.arange(len(rows)) + 0.36, label, marker="^")
        axis.axvline(1, color=COLOURS["black"], lw=0.8, ls="--")
        percent(axis.xaxis)
        plotting.categories(axis, ["baseline (HF)", *(f"+ {step}" for step in rows.index[1:])], flat=True)
        axis.set_xlim(0, 1.2 * axis.get_xlim()[1])  # for the numbers beside the bars
    axes[0, 0].set_xlabel("peak memory, of the baseline's (%)")
    axes[0, 1].set_xlabel("latency, of the baseline's same query (%);\nwhere pruning decides is given, not found")
    swatches = [Patch(color=COLOURS["blue"], label="next query"),
                Patch(color=COLOURS["blue"], alpha=0.45, label="first query")]  # fmt: skip
    legend(figure, kind, columns=3, first=swatches[once:])
    return figure


# Beyond the paper


def guarantee(table: pd.DataFrame, kind: str = "replayed") -> Figure:
    """A rule with a promise against a calibrated threshold: recall promised and reached, and the work that is saved.

    table: columns model, k, rule, promised, reached, low, high (of what is reached on test pools, 95 %), saved (share
    of the layer-candidates).
    """
    need(table, "model rule", "k promised reached low high saved", least=0, unique="model k rule promised")
    figure, axes = panels(1, 2, width=4.4, height=3.2)
    (left, right), low = axes[0], min(table["promised"].min(), table["low"].min())
    left.plot([low, 1], [low, 1], "--", color=COLOURS["black"], lw=1, label="as promised")
    pairs = [(rule, model) for rule in order(table["rule"]) for model in order(table["model"])]
    for number, (rule, model) in enumerate(pairs):
        rows = table[(table["rule"] == rule) & (table["model"] == model)]
        colour, marker = order(table["rule"]).index(rule), order(table["model"]).index(model)
        style: dict[str, Any] = dict(color=look(colour)["color"], marker=look(marker)["marker"], ls="", ms=5)
        shift = rows["promised"] + (number - (len(pairs) - 1) / 2) * 0.01 * (1 - low)  # so that none hides another
        left.errorbar(shift, rows["reached"], plotting.spread(rows, "reached"), elinewidth=0.8, label=rule, **style)
        right.plot(rows["reached"], rows["saved"], **style)
        right.plot([], [], label=model, **style | {"color": COLOURS["grey"]})
    left.set(xlabel="recall of the top K, promised", ylabel="recall, reached on test pools")
    right.set(xlabel="recall, reached on test pools", ylabel="layer-candidates saved (%)", ylim=(0, None))
    percent(right.yaxis)
    legend(figure, kind)
    return figure


def saved_work(table: pd.DataFrame, target: float = 0.98, bar: float = 0.35, kind: str = "replayed") -> Figure:
    """Linear probes: work that is saved against the overlap with the full model's top K; a panel a model.

    table: columns model, scores, rule, target (overlap asked for), saved (share of the layer-candidates), overlap,
    low, high (what is reached on test pools, 95 %). target, bar: marked, the overlap and the saving to reach.
    """
    need(table, "model scores rule", "target saved overlap low high", least=0, unique="model scores rule target")
    scores, rules = order(table["scores"]), order(table["rule"])
    figure, axes, parts = facets(table, across="model", width=8.7 / max(1.4, table["model"].nunique()), height=2.9,
                                 sharey=True)  # fmt: skip
    for axis, of_model in parts:
        quoted(axis, target, label=f"overlap {target:g}, {bar:.0%} saved")
        quoted(axis, y=bar, label="_")
        for (said, rule), rows in of_model.sort_values("target").groupby(["scores", "rule"], sort=False):
            number = rules.index(rule)
            style = look(number, color=look(scores.index(said))["color"], ls=("-", ":", "--")[number], ms=4.5)
            axis.errorbar(rows["overlap"], rows["saved"], xerr=plotting.spread(rows, "overlap"), elinewidth=0.7,
                          label=f"{said}, {rule}", **style)  # fmt: skip
        axis.set_xlabel("overlap with the full model's top K")
        percent(axis.yaxis)
    axes[0, 0].set(ylabel="layer-candidates saved (%)", ylim=(0, None))
    legend(figure, kind, columns=3)
    return figure


def hidden_reads(points: pd.DataFrame, crossover: Mapping[str, float] | None = None, kind: str = "measured") -> Figure:
    """Share of the layers' read time that computation hides, against the tokens that a layer computes.

    points: columns disk (such as `O_DIRECT`, or `throttled to 200 MB/s`), tokens, hidden. crossover: disk -> tokens
    from which all of it should be hidden: GFLOP/s over GB/s for weights of two bytes, as a layer of P of them takes 2 P
    floating-point operations a token and 2 P bytes; its kind is analytic, from the two measured speeds.
    """
    need(points, "disk", "tokens hidden", unique="disk tokens")
    figure, axes = panels(1, 1, width=6.8, height=3.0)
    axis = axes[0, 0]
    lines(axis, points, "tokens", "hidden", "disk")
    for disk, tokens in (crossover or {}).items():
        colour = look(order(points["disk"]).index(disk))["color"]
        axis.axvline(tokens, color=colour, ls="--", lw=1, label=f"{disk}: all, from {tokens:.0f} tokens on, analytic")
    axis.axhline(0.9, color=COLOURS["black"], lw=0.8, ls=":", label="90 %")
    axis.set(xlabel="tokens a layer computes", ylabel="read time hidden (%)", xscale="log",
             ylim=(min(0, 1.05 * points["hidden"].min()), 1.05))  # fmt: skip
    plotting.ticks_at(axis.xaxis, points["tokens"])
    percent(axis.yaxis)
    legend(figure, kind, columns=2)
    return figure


def clustering(table: pd.DataFrame, kind: str = "measured") -> Figure:
    """Exact 1-D k-means against Lloyd's iterations: how often they miss the optimum, change a decision, and their time.

    table: columns method, n (candidates), missed (share of pools above the least sum of squares), changed (share of
    pools in which a candidate is decided otherwise than by the exact clusters), time_us (a call).
    """
    need(table, "method", "n missed changed time_us", least=0, unique="method n")
    figure, axes = panels(1, 3, width=3.0, height=2.6)
    labels = ("optimum missed\n(% of pools)", "decisions changed\n(% of pools)", "time a call (µs)")
    for axis, column, text in zip(axes[0], ("missed", "changed", "time_us"), labels, strict=True):
        lines(axis, table, "n", column, "method")
        axis.set(xlabel="candidates", xscale="log", ylabel=text, yscale="log" if column == "time_us" else "linear")
        plotting.ticks_at(axis.xaxis, table["n"])
    for axis in axes[0, :2]:
        percent(axis.yaxis)
        axis.set_ylim(bottom=-0.01)
    legend(figure, kind)
    return figure


def embedding_cache(table: pd.DataFrame, kind: str = "measured") -> Figure:
    """Section 4.4: hit rate and added latency of the embedding cache, query by query.

    table: columns stream (such as `Zipf`, or a query set), query (1 is cold), hit_rate (of distinct rows), added_ms.
    Quoted: 4 ms added, of Figure 16.
    """
    need(table, "stream", "query hit_rate added_ms", least=0, unique="stream query")
    figure, axes = panels(1, 2, width=4.2, height=2.6)
    for axis, column in zip(axes[0], ("hit_rate", "added_ms"), strict=True):
        lines(axis, table, "query", column, "stream")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    quoted(axes[0, 1], y=printed.ablation().set_index("step")["added_ms"]["embedding cache"], label="quoted, 4 ms")
    axes[0, 0].set(xlabel="query", ylabel="rows in the cache (%)", ylim=(0, 1.03))
    percent(axes[0, 0].yaxis)
    axes[0, 1].set(xlabel="query", ylabel="added latency (ms)", ylim=(0, None))
    legend(figure, kind)
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
    styles = [_style(name, names) for name in names]
    axis.bar(range(len(names)), rows["seconds"], 0.7, color=[style["facecolor"] for style in styles], edgecolor="white",
             hatch=[style["hatch"] for style in styles], yerr=plotting.spread(rows, "seconds"),
             error_kw=dict(lw=0.8, capsize=1.5))  # fmt: skip
    base = rows["seconds"].get(printed.OFFLOAD, np.nan)
    plotting.categories(axis, [f"{ratio:.1f}x" if np.isfinite(ratio) else "" for ratio in base / rows["seconds"]])
    axis.tick_params(axis="x", length=0, labelsize=7)
    axis.set_xlim(-0.6, len(names) - 0.4)
    if k in _CASES and np.isfinite(base):
        quantity, name, what, marker = _CASES[int(k)]
        less = printed.number(quantity)
        ours = [number for number, bar in enumerate(names) if bar.split(" (")[0] == printed.OURS]
        label = f"quoted, {name} (K = {k:g}): {less:g} % less {what}"
        quoted(axis, ours, [base * (1 - less / 100)] * len(ours), label, marker=marker)


def _quoted_ratios(axis: Axes, peak: pd.Series, names: Sequence[str]) -> None:
    """GRATING's peak by the paper's ranges, a line for each baseline, in a row of its own below the others."""
    for number, (base, (least, greatest)) in enumerate(printed.memory_ratios().items()):
        if base in peak.index:
            ends, y = [peak[base] / greatest, peak[base] / least], len(names) + 0.25 * (number - 1)
            style = dict(ls="-", lw=1, color=_colour(base, names), mec=_colour(base, names), ms=4)
            quoted(axis, ends, [y, y], f"quoted, by its ratio to {base}'s", **style)


def _footprint(axis: Axes, rows: pd.DataFrame, name: str) -> None:
    """Memory over time in one setting, with the paper's saving of HF's peak."""
    names, peaks, saving = order(rows["method"]), rows.groupby("method")["mb"].max(), _APPLICATIONS[name][2]
    looks = {method: dict(color=_colour(method, names), marker="", lw=1.3) for method in names}
    lines(axis, rows, "seconds", "mb", "method", looks=looks)
    for number, method in enumerate(names):
        axis.annotate(f"{method}: peak {peaks[method]:.0f} MB", (0, 1), (4, -8 - 10 * number), xycoords="axes fraction",
                      textcoords="offset points", fontsize=7, color=_colour(method, names))  # fmt: skip
    if saving and printed.HF in peaks:
        label = f"quoted, GRATING's peak of our HF's{', at most' if saving.endswith('at most') else ''}"
        quoted(axis, y=peaks[printed.HF] * (1 - printed.number(saving) / 100), label=label)
    axis.set(xlabel="time (s)", ylabel="memory (MB)")
    axis.set_ylim(0, 1.4 * peaks.max())  # the peaks are written above all curves


def _barh(axis: Axes, place: np.ndarray, values: pd.Series, names: Sequence[str], *, alpha: float) -> None:
    """Bars in the methods' colours, with their values."""
    bars = axis.barh(place, values, 0.38, color=[_colour(name, names) for name in names], alpha=alpha)
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


def _colour(name: str, names: Sequence[str]) -> str:
    """Of a method, which a threshold in brackets may follow."""
    base, others = name.split(" (")[0], order(other.split(" (")[0] for other in names)
    others = [other for other in others if other not in _METHODS]
    return COLOURS[_METHODS[base] if base in _METHODS else _OTHERS[others.index(base) % len(_OTHERS)]]


def _style(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Of a method's bar: its colour, and hatched at the low threshold."""
    return dict(facecolor=_colour(name, names), edgecolor="white", hatch="////" if name.endswith("(low)") else "")
