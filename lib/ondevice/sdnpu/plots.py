"""sd.npu's figures. Each function draws tables of the experiments and returns the figure.

Shares, rates and ratios are fractions of 1, times are in milliseconds unless a column says otherwise. What the paper
prints is hollow, or a line or band, and called quoted. The corner says the kind of the rest; a text in a column
`source` names its kind, as "fit, simulated" does. A table that cannot be drawn is refused with a ValueError.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ondevice import plotting
from ondevice.evidence import KINDS
from ondevice.plotting import COLOURS, bars, facets, groups, legend, lines, look, need, order, panels, plain, quoted
from ondevice.sdnpu import printed
from ondevice.sdnpu.npu import OURS

# Quoted: ranges of sd.npu over each arm of Figures 10 and 11, section 4.2
SPEEDUPS = {
    "NPU vanilla": (1.14, 3.81), "CPU vanilla": (1.06, 1.78), "NPU-SAM": printed.OVER_SAM, "CPU-SAM": printed.OVER_SAM,
    "NPU-EAGLE": printed.OVER_EAGLE, "CPU-EAGLE": printed.OVER_EAGLE,
}  # fmt: skip
ENERGY = {
    "NPU vanilla": (1.35, 4.18), "CPU vanilla": (1.11, 2.50), "NPU-SAM": (1.07, 3.07), "CPU-SAM": (1.07, 3.07),
    "NPU-EAGLE": (1.77, 4.71), "CPU-EAGLE": (1.77, 4.71),
}  # fmt: skip
MEMORY = {  # GB; the draft model's range is over all models
    OURS: (3.14, 3.14), "NPU vanilla": (3.05, 3.12), "CPU vanilla": (6.0, np.inf), "EAGLE's draft model": (0.84, 1.22),
}  # fmt: skip
DECODE_SHARE = {"summary": printed.DECODE_SHARE_CPU[0], "rag": printed.DECODE_SHARE_CPU[1]}  # by our tasks, section 2.1
DECODE_SHARE_OF_ALL = 0.735  # section 1
COSINES = {"task": 0.72, "group": 0.61, "across": 0.38}  # section 2.2
LEAST_COSINE, LEAST_OVERLAP = 0.76, 0.11  # of 90 % of the summaries, section 2.2
SHORT_DRAFTS = {8: 0.75, 32: 0.90}  # share of drafts below a length, sections 1 and 2.3
SWITCH_DELAY = 0.949  # of the rest of a request, section 1
GAINS = {"PLD": (1.05, 1.25), "SAM": (1.06, 1.24)}  # section 4.5

_ARMS: dict[str, dict[str, Any]] = {
    arm: dict(color=COLOURS[colour], alpha=alpha)
    for arm, colour, alpha in (
        ("NPU vanilla", "grey", 1), ("CPU vanilla", "grey", 0.5), ("NPU-SAM", "green", 1), ("CPU-SAM", "green", 0.5),
        ("NPU-EAGLE", "orange", 1), ("CPU-EAGLE", "orange", 0.5), (OURS, "blue", 1),
    )
}  # fmt: skip
_PAIRS = {"task": "within\na task", "group": "within\na group", "across": "across\ngroups"}
_PARTS: dict[str, dict[str, Any]] = {
    part: dict(color=COLOURS[colour])
    for part, colour in (("prefill", "sky"), ("calibration", "green"), ("switch", "red"), ("drafting", "purple"),
                         ("forward", "blue"))
}  # fmt: skip
_ADDED = {"calibration": ("calibration alone", "sky"), "reuse": ("reuse alone", "orange"), "Ours": ("both", "blue")}


def prefill_and_decode(table: pd.DataFrame, paper: Mapping[str, float] = DECODE_SHARE) -> Figure:
    """Figure 2: shares of prefill and decoding of CPU vanilla, a bar a task and source, one panel a model.

    table: columns model, task, source, prefill_ms, decode_ms, decode_share; the mean time stands beside each bar.
    paper: task -> the paper's share of decoding.
    """
    need(table, "model task source", "prefill_ms decode_ms decode_share", least=0, unique="model task source")
    rows = table.assign(bar=table["task"] + ": " + table["source"], prefill=1 - table["decode_share"],
                        decode=table["decode_share"])  # fmt: skip
    width, height = max(4.4, 8.4 / table["model"].nunique()), 1.0 + 0.25 * rows["bar"].nunique()
    figure, _, parts = facets(rows, across="model", sharey=True, width=width, height=height)
    looks = {"prefill": dict(color=COLOURS["orange"]), "decode": dict(color=COLOURS["blue"])}
    names = sorted(order(rows["bar"]), key=lambda bar: order(rows["task"]).index(bar.split(":")[0]))
    for axis, part in parts:
        wide = part.set_index("bar").reindex(names)
        plotting.stacked(axis, wide, looks, height=0.8)
        for place, seconds in enumerate((wide["prefill_ms"] + wide["decode_ms"]) / 1e3):
            axis.text(1.02, place, f"{seconds:.2g} s" if np.isfinite(seconds) else "", va="center", fontsize=7)
        theirs = [1 - paper.get(name.split(":")[0], np.nan) for name in names]
        quoted(axis, theirs, range(len(names)), "quoted, decoding begins")
        quoted(axis, 1 - DECODE_SHARE_OF_ALL, label="quoted, of all tasks")
        axis.set(xlim=(0, 1.15), xticks=np.linspace(0, 1, 6), xlabel="share of prefill and decoding (%)")
        plotting.percent(axis.xaxis)
    legend(figure, _kinds(table["source"]))
    return figure


def similarity(pairs: pd.DataFrame, summaries: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 3: cosine similarity of answers; and of a summary and its context, against the overlap of their words.

    pairs: columns pair (task, group or across), cosine. summaries: prompt, cosine, overlap, distance, one row a prompt;
    overlap is 1 - distance, which is Levenshtein's, normalised.
    """
    need(pairs, "pair", "cosine", least=-1)
    need(summaries, "prompt", "cosine overlap distance", least=-1, unique="prompt")
    figure, axes = panels(1, 2, width=4.2, height=3.3)
    _violins(axes[0, 0], pairs)
    axis = axes[0, 1]
    axis.plot(summaries["overlap"], summaries["cosine"], "o", ms=3.5, alpha=0.6, color=COLOURS["blue"],
              label="a summary")  # fmt: skip
    quoted(axis, y=LEAST_COSINE, label=f"quoted, cosine > {LEAST_COSINE}")
    quoted(axis, LEAST_OVERLAP, label=f"quoted, overlap > {LEAST_OVERLAP}", ls=":")
    axis.set(xlabel="overlap of context and summary", ylabel="cosine")
    axis.set_xlim(0, max(0.2, 1.05 * summaries["overlap"].max()))
    above = axis.secondary_xaxis("top", functions=(lambda share: 1 - share, lambda share: 1 - share))
    above.set_xlabel("normalised Levenshtein distance", fontsize=8)
    legend(figure, kind, columns=5)
    return figure


def graph_sizes(table: pd.DataFrame) -> Figure:
    """Figure 5: ms a token of prefill and of decoding against the rows of a static graph.

    table: columns source, shape (rows), forward_ms, prefill_ms, decode_ms (both a token). The paper's 160 ms a token is
    drawn as printed, and crossed what it would make of the prefill on that graph (`printed.figure_5`).
    """
    need(table, "source", "shape forward_ms prefill_ms decode_ms", least=0, unique="source shape")
    figure, axes = panels(1, 1, width=7.6, height=3.3)
    axis = axes[0, 0]
    for part, colour in (("prefill", COLOURS["orange"]), ("decode", COLOURS["blue"])):
        lines(axis, table.assign(series=f"{part}: " + table["source"]), "shape", f"{part}_ms", "series", color=colour)
    quoted(axis, 32, printed.FIG_5["prefill"], "prefill: quoted, at most", marker="v", mec=COLOURS["orange"], ms=7)
    quoted(axis, 32, printed.FIG_5["decode"], "decode: quoted", mec=COLOURS["blue"], ms=7)
    wrong = dict(marker="x", mew=2, ms=7, mec=COLOURS["red"])
    quoted(axis, 32, printed.figure_5()["prefill_as_printed"], "prefill that the quoted\ndecode implies", **wrong)
    axis.set(xlabel="rows of the graph", ylabel="ms a token", xscale="log", yscale="log")
    plotting.ticks_at(axis.xaxis, {*table["shape"], 32})
    plain(axis.yaxis)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    plotting.mark_kind(figure, _kinds(table["source"]))
    return figure


def draft_lengths(costs: pd.DataFrame, lengths: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 6: left, ms a token of a forward over n rows; right, the share of steps that draft fewer than n tokens.

    costs: columns source, rows, per_row_ms. lengths: method, drafted (tokens of a step, 0 for none), share (of the
    method's steps). kind: of the lengths. The paper's third datum, a throughput at 8 of half that at 64, is drawn on
    the fit's time at 64.
    """
    need(costs, "source", "rows per_row_ms", least=0, unique="source rows")
    need(lengths, "method", "drafted share", least=0, unique="method drafted")
    figure, axes = panels(1, 2, width=4.4, height=3.6)
    left, right = axes[0]
    lines(left, costs, "rows", "per_row_ms", "source")
    quoted(left, list(printed.FIG_6), list(printed.FIG_6.values()), ms=7)
    half = float(printed.npu_curve()(64)) / 64 / (1 - printed.THROUGHPUT_LOSS / 100)
    quoted(left, 8, half, "quoted, 8 against 64", marker="s", ms=7)
    left.set(xlabel="rows of a forward", ylabel="ms a token", xscale="log", yscale="log")
    plotting.ticks_at(left.xaxis, [2**power for power in range(0, 1 + int(np.log2(costs["rows"].max())), 2)])
    plain(left.yaxis)
    ends = np.arange(lengths["drafted"].max() + 2)
    for number, (method, rows) in enumerate(groups(lengths, "method")):
        share = [rows.loc[rows["drafted"] < end, "share"].sum() for end in ends]
        right.step(ends, share, where="mid", color=look(number)["color"], label=f"{method}, {kind}")
    quoted(right, list(SHORT_DRAFTS), list(SHORT_DRAFTS.values()), "quoted, more than", marker="^", ms=7)
    right.set(xlabel="length n (tokens)", ylabel="steps that draft fewer than n (%)", ylim=(0, 1.03))
    plotting.percent(right.yaxis)
    for axis in axes[0]:
        axis.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    plotting.mark_kind(figure, _kinds([*costs["source"], kind]))
    return figure


def per_token(
    cells: pd.DataFrame, paper: pd.DataFrame | None = None, implied: pd.DataFrame | None = None,
    *, value: str = "decode_per_token_ms", kind: str = "simulated",
) -> Figure:  # fmt: skip
    """Figure 10: above, ms a token by task and arm; below, by how much sd.npu is faster. One column a model.

    cells: `npu.by_task`, of which model, arm, task and `value` are drawn. paper: columns model, arm, task,
    per_token_ms; the paper's, end to end. implied: columns model, arm, task, speedup; from Table 4 and the fit
    (`printed.implied_speedups`). The bands are the paper's ranges over all its tasks, models and phones.
    """
    need(cells, "model arm task", value, least=0, unique="model arm task")
    arms, tasks, models = order(cells["arm"]), order(cells["task"]), order(cells["model"])
    ours = cells[cells["arm"] == OURS].set_index(["model", "task"])[value].rename("ours")
    others = cells[cells["arm"] != OURS].join(ours, on=["model", "task"])
    others = others.assign(ratio=others[value] / others["ours"])
    figure, axes = panels(2, len(models), width=max(4.4, 7.6 / len(models)), height=2.7, sharey="row")
    for model, times, ratios in zip(models, axes[0], axes[1], strict=True):
        bars(times, cells[cells["model"] == model], "task", value, "arm", looks=_ARMS, width=0.86)
        for number, arm in enumerate(arms):
            if paper is not None:
                theirs = paper[(paper["model"] == model) & (paper["arm"] == arm)].set_index("task").reindex(tasks)
                place = plotting.places(len(tasks), number, len(arms), 0.86)
                quoted(times, place, theirs["per_token_ms"], "quoted, end to end", ms=4.5)
        times.set_title(model, fontsize=9)
        of_model = None if implied is None else implied[implied["model"] == model]
        _ratios(ratios, others[others["model"] == model], tasks, SPEEDUPS, of_model)
    axes[0, 0].set_ylabel(f"ms a token, {'decoding' if value.startswith('decode') else 'end to end'}", fontsize=9)
    axes[1, 0].set_ylabel(f"speed-up of {OURS}", fontsize=9)
    legend(figure, kind, columns=5)
    return figure


def energy(table: pd.DataFrame, kind: str = "simulated") -> Figure:
    """Figure 11: energy over sd.npu's by arm, a mark a task; a row a model, a column an assumption of the powers.

    table: columns model, arm, task, joules_over_ours, assumption. The bands are the paper's ranges.
    """
    need(table, "model arm task assumption", "joules_over_ours", least=0, unique="model arm task assumption")
    width = max(3.9, 5.6 / table["assumption"].nunique())
    figure, axes, parts = facets(table, "model", "assumption", width=width, height=2.5, sharex="col", sharey=True)
    for axis, rows in parts:
        _ratios(axis, rows[rows["arm"] != OURS].assign(ratio=rows["joules_over_ours"]), order(table["task"]), ENERGY)
    for axis in axes[:, 0]:
        axis.set_ylabel(f"energy over {OURS}'s", fontsize=9)
    legend(figure, kind, columns=6)
    return figure


def memory(
    table: pd.DataFrame, paper: Mapping[str, tuple[float, float]] = MEMORY, paper_model: str = "Qwen2.5-1.5B"
) -> Figure:
    """Figure 12: peak memory by arm, a bar a source, one panel a model.

    table: columns model, arm, peak_mb, source. paper: arm -> the paper's (least, greatest) GB, of `paper_model`, which
    has a panel in any case; an infinite greatest is "over".
    """
    need(table, "model arm source", "peak_mb", least=0, unique="model arm source")
    models = order([*table["model"], paper_model])
    arms = {model: order([*table[table["model"] == model]["arm"], *(paper if model == paper_model else ())])
            for model in models}  # fmt: skip
    height = 1.4 + 0.3 * max(map(len, arms.values()))
    figure, axes = panels(1, len(models), width=9.0 / max(2, len(models)), height=height)
    for axis, (model, names) in zip(axes[0], arms.items(), strict=True):
        if model in set(table["model"]):
            rows = table[table["model"] == model]
            bars(axis, rows, "arm", "peak_mb", "source", flat=True, width=0.7, names=names)
        plotting.categories(axis, names, flat=True)
        axis.set_title(model, fontsize=9)
        axis.set(xlabel="memory (MB)")
    axis, style = axes[0, models.index(paper_model)], dict(ls="-", color=COLOURS["black"], lw=1.5)
    for arm, (low, high) in paper.items():
        ends, place = [1e3 * low, 1e3 * (high if np.isfinite(high) else low)], [arms[paper_model].index(arm)] * 2
        quoted(axis, ends, place, "quoted; triangle: more than", marker="o" if np.isfinite(high) else ">", **style)
    legend(figure, _kinds(table["source"]))
    return figure


def breakdown(table: pd.DataFrame) -> Figure:
    """Figure 13: where the time of a request goes, by arm; a row a model, a column a source, each on its own axis.

    table: columns model, arm, source, part (prefill, calibration, switch, drafting, forward), ms; a part that is not
    there took no time. Quoted, on the arms of the NPU: where decoding begins in vanilla's time, and where sd.npu would
    end by the paper's gain of decoding.
    """
    need(table, "model arm source part", "ms", least=0, unique="model arm source part")
    size = dict(width=max(4.3, 5.4 / table["source"].nunique()), height=1.0 + 0.28 * table["arm"].nunique())
    figure, axes, parts = facets(table, "model", "source", **size)
    for axis, rows in parts:
        wide = rows.pivot(index="arm", columns="part", values="ms")
        _broken_down(axis, wide.reindex(index=order(rows["arm"]), columns=list(_PARTS)).fillna(0.0))
    for axis in axes[-1]:
        axis.set_xlabel("ms a request")
    legend(figure, _kinds(table["source"]))
    return figure


def rejections(table: pd.DataFrame, paper: pd.DataFrame | None = None, kind: str = "measured") -> Figure:
    """Table 2 as a picture: the share of each cause of rejection, with intervals; a row a model, a column a cause.

    table: columns model, task, cause, share, low, high (of the share), count (rejections of the cause).
    paper: columns cause, share; by default `printed.rejections`, which are of `printed.least_sample` cases.
    """
    need(table, "model task cause", "share low high", least=0, unique="model task cause")
    paper = printed.rejections() if paper is None else paper
    sample, tasks = printed.least_sample((100 * paper["share"]).tolist()), order(table["task"])
    size = dict(width=8.6 / table["cause"].nunique(), height=1.0 + 0.26 * len(tasks))
    figure, axes, parts = facets(table, "model", "cause", sharex=True, sharey="row", **size)
    for axis, rows in parts:
        ours = rows.set_index("task").reindex(tasks)
        axis.errorbar(ours["share"], range(len(tasks)), xerr=plotting.spread(ours, "share"), fmt="D", ms=4,
                      color=COLOURS["blue"], ecolor=COLOURS["black"], elinewidth=0.8, capsize=2,
                      label="share, 95 % interval")  # fmt: skip
        for share in paper.loc[paper["cause"] == rows["cause"].iloc[0], "share"]:
            quoted(axis, share, label=f"quoted, of at least {sample} rejections")
        axis.set(xlim=(-0.02, 1.02))
        plotting.percent(axis.xaxis)
    for axis, (_, rows) in zip(axes[:, 0], groups(table, "model"), strict=True):
        counts = rows.groupby("task")["count"].sum().reindex(tasks, fill_value=0)
        plotting.categories(axis, [f"{task}, {count:.0f}" for task, count in counts.items()], flat=True)
        axis.set_ylabel("task, rejections", fontsize=8)
    figure.supxlabel("share of the rejections (%)", fontsize=9)
    legend(figure, kind)
    return figure


def gains(table: pd.DataFrame, paper: pd.DataFrame | None = None, kind: str = "measured") -> Figure:
    """Table 4 as a picture: tokens a verification above the drafter's own, by each part alone and both, by task.

    table, paper: columns model, method, task, gain (over the drafter's own); methods are PLD and SAM with +calibration,
    +reuse and +Ours (both), others are not drawn. A row a model, a column a drafter. paper: `printed.acceptance`.
    """
    need(table, "model method task", "gain", least=0, unique="model method task")
    table = table.assign(base=table["method"].str.partition("+")[0], added=table["method"].str.partition("+")[2])
    drawn = table[table["base"].isin(list(GAINS)) & table["added"].isin(list(_ADDED))]
    tasks, looks = order(table["task"]), {label: dict(color=COLOURS[colour]) for label, colour in _ADDED.values()}
    drawn = drawn.assign(percent=100 * (drawn["gain"] - 1), part=[_ADDED[added][0] for added in drawn["added"]],
                         over="over " + drawn["base"])  # fmt: skip
    drawn = drawn.sort_values(["added", "base"], key=lambda names: names.map([*_ADDED, *GAINS].index), kind="stable")
    figure, axes, parts = facets(drawn, "model", "over", width=4.4, height=2.3, sharey=True, sharex=True)
    for axis, rows in parts:
        bars(axis, rows, "task", "percent", "part", looks=looks, names=tasks)
        model, base = rows[["model", "base"]].iloc[0]
        if paper is not None:
            theirs = paper[(paper["model"] == model) & (paper["method"] == f"{base}+Ours")].set_index("task")["gain"]
            place = plotting.places(len(tasks), len(_ADDED) - 1, len(_ADDED))
            quoted(axis, place, 100 * (theirs.reindex(tasks) - 1), "quoted, both")
        quoted(axis, y=[100 * (gain - 1) for gain in GAINS[base]], label="quoted, range of both")
        axis.axhline(0, color=COLOURS["black"], lw=1)
    for axis in axes[:, 0]:
        axis.set_ylabel("more tokens\na verification (%)", fontsize=9)
    legend(figure, kind, columns=5)
    return figure


def scheduling_ratios(table: pd.DataFrame, kind: str = "simulated") -> Figure:
    """Beyond the paper: latency over the exact optimum's by rule and family of instances; boxes, whiskers to the ends.

    table: columns family, rule, ratio, a row an instance. Diamonds are means. Where both graphs are kept no graph is
    switched, so that a ratio may be below 1.
    """
    need(table, "family rule", "ratio", least=0)
    families, rules = order(table["family"]), order(table["rule"])
    figure, axes = panels(1, 1, width=max(5.0, min(9.0, 1.2 + 0.32 * len(families) * len(rules))), height=3.4)
    axis, handles = axes[0, 0], []
    mean = dict(marker="D", ms=3.5, mfc="white", mec=COLOURS["black"], mew=0.8)
    for number, (rule, rows) in enumerate(groups(table, "rule")):
        values = [rows.loc[rows["family"] == family, "ratio"] for family in families]
        place, colour = plotting.places(len(families), number, len(rules), 0.86), look(number)["color"]
        axis.boxplot(values, positions=place, whis=(0, 100), widths=0.75 * 0.86 / len(rules), patch_artist=True,
                     showmeans=True, meanprops=mean, medianprops=dict(color=COLOURS["black"]), manage_ticks=False,
                     boxprops=dict(facecolor=colour, alpha=0.7, linewidth=0.8))  # fmt: skip
        handles.append(Patch(fc=colour, alpha=0.7, ec="black", label=rule))
    axis.axhline(1, color=COLOURS["black"], lw=1, ls="--")
    plotting.categories(axis, [textwrap.fill(family, 16) for family in families])
    axis.set(ylabel="latency over the optimum's")
    legend(figure, kind, axes=[], first=handles)
    return figure


def switching(table: pd.DataFrame) -> Figure:
    """Switching of graphs: the load time that is not hidden, and the whole request's, by method.

    table: columns method, exposed_s, total_s, kind, a row a run; bars are medians, points runs. Quoted, where a method
    is "synchronous": its delay of 94.9 percent, of the median of the rest of our request.
    """
    need(table, "method kind", "exposed_s total_s")
    rows = table.assign(exposed_ms=1e3 * table["exposed_s"], total_ms=1e3 * table["total_s"])
    medians = rows.groupby(["method", "kind"], sort=False)[["exposed_ms", "total_ms"]].median().reset_index()
    methods, kinds = order(table["method"]), order(table["kind"])
    figure, axes = panels(1, 2, width=4.4, height=1.5 + 0.3 * len(methods) * len(kinds), sharey=True)
    titles = {"exposed_ms": "exposed load time (ms)", "total_ms": "prefill and switch (ms)"}
    for axis, (column, title) in zip(axes[0], titles.items(), strict=True):
        bars(axis, medians.assign(series="median, " + medians["kind"]), "method", column, "series", flat=True)
        axis.set(xlabel=title)
    for number, (_, runs) in enumerate(groups(rows, "kind")):
        place = plotting.places(len(methods), number, len(kinds))
        for axis, column in zip(axes[0], titles, strict=True):
            axis.plot(runs[column], place[runs["method"].map(methods.index)], ".", ms=4, color=COLOURS["black"],
                      label="a run")  # fmt: skip
        slow = runs[runs["method"] == "synchronous"]
        if len(slow):
            delay = SWITCH_DELAY * (slow["total_ms"] - slow["exposed_ms"]).median()
            label = f"quoted, {100 * SWITCH_DELAY:.1f} % of the rest"
            quoted(axes[0, 0], delay, place[methods.index("synchronous")], label, ms=7)
    legend(figure, "+".join(kinds))
    return figure


def sensitivity(table: pd.DataFrame, kind: str = "simulated") -> Figure:
    """Beyond the paper: simulated speed-ups over F's slope, above, and what a token costs besides, below.

    table: `sensitivity.table`, a line a shape. Above, at the least constant; below, where there are several constants,
    at the ratio nearest to the fit's, which the line marks. The bands are the paper's ranges.
    """
    need(table, "", "ratio shape constant_ms", least=0, unique="ratio shape constant_ms")
    table, fitted = table.assign(rows=table["shape"].map("{:g} rows".format)), printed.npu_curve().ratio
    nearest = min(table["ratio"].unique(), key=lambda ratio: abs(ratio - fitted))
    least, several = table["constant_ms"].min(), table["constant_ms"].max() > table["constant_ms"].min()
    figure, axes = panels(1 + several, 3, width=3.0, height=2.5, sharey="col")
    columns = (("over_sam", "over SAM", "NPU-SAM"), ("over_vanilla", "over vanilla,\nthe same graph", "NPU vanilla"),
               ("over_one_row", "over vanilla,\na graph of one row", "NPU vanilla"))  # fmt: skip
    for (column, title, arm), line in zip(columns, axes.T, strict=True):
        lines(line[0], table[table["constant_ms"] == least], "ratio", column, "rows")
        line[0].axvline(fitted, color=COLOURS["black"], lw=1, ls=":", label="the fit's slope")
        _slope_axis(line[0], table["ratio"])
        line[0].set_title(title, fontsize=9)
        line[0].set_xlabel("slope / intercept of F", fontsize=9)
        if several:
            lines(line[1], table[table["ratio"] == nearest], "constant_ms", column, "rows")
            line[1].set_xlabel("ms a token besides", fontsize=9)
        for axis in line:
            quoted(axis, y=SPEEDUPS[arm], label="quoted, range")
            axis.axhline(1, color=COLOURS["black"], lw=0.8, ls="--")
    for axis in axes[:, 0]:
        axis.set_ylabel(f"speed-up of {OURS}", fontsize=9)
    legend(figure, kind, columns=6)
    return figure


# Parts of figures


def _violins(axis: Axes, pairs: pd.DataFrame) -> None:
    """Cosines by pair, in the order of `_PAIRS`, with means and the paper's."""
    names = [name for name in _PAIRS if name in set(pairs["pair"])]
    place = range(len(names))
    values = [pairs.loc[pairs["pair"] == name, "cosine"].to_numpy() for name in names]
    shapes: Any = axis.violinplot(values, place, widths=0.8, showextrema=False)
    for body in shapes["bodies"]:
        body.set(facecolor=COLOURS["sky"], edgecolor=COLOURS["blue"], alpha=0.6)
    axis.plot(place, [cosines.mean() for cosines in values], "D", ms=5, color=COLOURS["blue"], label="mean")
    axis.plot(place, [COSINES[name] for name in names], label="quoted", **plotting.HOLLOW | {"ms": 7})
    plotting.categories(axis, [_PAIRS[name] for name in names])
    axis.set(ylabel="cosine")


def _ratios(
    axis: Axes, rows: pd.DataFrame, tasks: Sequence[str], ranges: Mapping[str, tuple[float, float]],
    implied: pd.DataFrame | None = None,
) -> None:  # fmt: skip
    """One mark a task for each arm, on the paper's range. rows: arm, task, ratio. implied: arm, task, speedup."""
    arms = order(rows["arm"])
    for number, arm in enumerate(arms):
        if arm in ranges:
            low, high = ranges[arm]
            axis.bar(number, high - low, 0.86, bottom=low, label="quoted, range", **plotting.BAND)
    for number, task in enumerate(tasks):
        aside = plotting.places(len(arms), number, len(tasks), 0.75)
        ours = rows[rows["task"] == task].set_index("arm")["ratio"].reindex(arms)
        axis.plot(aside, ours, label=task, **look(number, ls="", color=COLOURS["black"]))
        if implied is not None:
            theirs = implied[implied["task"] == task].set_index("arm")["speedup"].reindex(arms)
            quoted(axis, aside, theirs, "implied by Table 4 and the fit, analytic", ms=7.5, zorder=1)
    axis.axhline(1, color=COLOURS["black"], lw=1, ls="--")
    plotting.categories(axis, [arm.replace(" ", "\n").replace("-", "-\n") for arm in arms])
    axis.set_yscale("log", base=2)
    plain(axis.yaxis)


def _broken_down(axis: Axes, wide: pd.DataFrame) -> None:
    """One bar an arm. wide: [arm, part] ms."""
    total, vanilla, arms = pd.Series(plotting.stacked(axis, wide, _PARTS), wide.index), "NPU vanilla", list(wide.index)
    decode, line = wide[["drafting", "forward"]].sum(axis=1), dict(ls="-", lw=1.5, ms=5, color=COLOURS["black"])
    if vanilla in arms:
        begins = [total[vanilla] * (1 - share) for share in printed.DECODE_SHARE_NPU]
        quoted(axis, begins, [arms.index(vanilla)] * 2, "quoted, decoding begins", **line)
        if OURS in arms:
            ends = [total[OURS] - decode[OURS] + decode[vanilla] / gain for gain in printed.DECODE_SPEEDUP]
            quoted(axis, ends, [arms.index(OURS)] * 2, "quoted, decoding ends", marker="s", **line)


def _slope_axis(axis: Axes, ratios: pd.Series) -> None:
    """Logarithmic, with a place for 0 where it is drawn."""
    above = ratios[ratios > 0].min()
    if (ratios > 0).all():
        axis.set_xscale("log")
    elif np.isfinite(above):
        axis.set_xscale("symlog", linthresh=above)
        axis.set_xlim(left=-0.3 * above)
    plain(axis.xaxis)


def _kinds(sources: Iterable[str]) -> str:
    """The kinds that sources name. Raises ValueError where one names none, or several."""
    named = {source: [kind for kind in KINDS if kind in source] for source in sources}
    for source, kinds in named.items():
        if len(kinds) != 1:
            raise ValueError(f"A source names its kind, one of {', '.join(KINDS)}, unlike {source!r}.")
    return "+".join(kind for kind in KINDS if [kind] in named.values())
