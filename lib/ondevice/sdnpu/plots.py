"""sd.npu's figures. Each function draws tables of the experiments and returns the figure.

Shares, rates and ratios are fractions of 1, times are in milliseconds unless a column says otherwise. What the paper
prints is hollow, or a line or band, and called quoted. A legend says the kind of the rest: in its title where all is of
one kind, else with each source, so that a text in a column `source` names its kind, as "fit, simulated" does.
All functions raise ValueError where a table lacks a column, has no row, two rows for one bar or point, or a value that
cannot be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter, NullLocator, PercentFormatter, StrMethodFormatter

from ondevice.evidence import KINDS
from ondevice.plotting import COLOURS, need, panels
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

_ARM_STYLE = {  # colour and opacity
    "NPU vanilla": (COLOURS["grey"], 1.0),
    "CPU vanilla": (COLOURS["grey"], 0.5),
    "NPU-SAM": (COLOURS["green"], 1.0),
    "CPU-SAM": (COLOURS["green"], 0.5),
    "NPU-EAGLE": (COLOURS["orange"], 1.0),
    "CPU-EAGLE": (COLOURS["orange"], 0.5),
    OURS: (COLOURS["blue"], 1.0),
}
_KIND_STYLE = {"measured": (1.0, "-", ""), "simulated": (0.5, "--", "////"), "analytic": (0.3, ":", "...."),
               "replayed": (0.7, "-.", "xx"), "quoted": (0.2, ":", "++")}  # opacity, line, hatch  # fmt: skip
_PAIRS = {"task": "within\na task", "group": "within\na group", "across": "across\ngroups"}
_PART_COLOURS = {
    "prefill": COLOURS["sky"],
    "calibration": COLOURS["green"],
    "switch": COLOURS["red"],
    "drafting": COLOURS["purple"],
    "forward": COLOURS["blue"],
}
_ADDED = {"calibration": COLOURS["sky"], "reuse": COLOURS["orange"], "Ours": COLOURS["blue"]}
_LINES = [COLOURS[name] for name in ("blue", "orange", "green", "purple", "red", "sky", "grey")]
_MARKERS = "osD^vP*"
_HOLLOW: dict[str, Any] = dict(marker="o", mfc="white", mec=COLOURS["black"], ls="", zorder=4)
_PLAIN = StrMethodFormatter("{x:g}")
_TASK: dict[str, Any] = dict(color=COLOURS["black"])  # colours are the arms'
_BAND: dict[str, Any] = dict(fc=COLOURS["grey"], alpha=0.25, lw=0, zorder=0)


def prefill_and_decode(table: pd.DataFrame, quoted: Mapping[str, float] = DECODE_SHARE) -> Figure:
    """Figure 2: shares of prefill and decoding of CPU vanilla by task, a bar a source, one panel a model.

    table: columns model, task, source, prefill_ms, decode_ms, decode_share; the mean time stands above each bar.
    quoted: task -> the paper's share of decoding.
    """
    need(table, "model task source", "prefill_ms decode_ms", least=0, unique="model task source")
    need(table, "", "decode_share", least=0, most=1)
    models, tasks, sources = (_order(table[name]) for name in ("model", "task", "source"))
    figure, axes = panels(1, len(models), width=max(3.9, 6.4 / len(models)), height=3.3, sharey=True)
    width = 0.8 / len(sources)
    for axis, model in zip(axes[0], models, strict=True):
        for number, source in enumerate(sources):
            rows = _by(table, "task", tasks, model=model, source=source)
            place = _places(len(tasks), number, len(sources), 0.8)
            style = dict(width=0.92 * width, **_bar_style(source, _PART_COLOURS["forward"]))
            axis.bar(place, rows["decode_share"], label=f"decode, {source}", **style)
            style |= _bar_style(source, COLOURS["orange"])
            axis.bar(place, 1 - rows["decode_share"], bottom=rows["decode_share"], label=f"prefill, {source}", **style)
            for x, total in zip(place, rows["prefill_ms"] + rows["decode_ms"], strict=True):
                if np.isfinite(total):
                    axis.text(x, 1.02, f"{total / 1e3:.2g} s", ha="center", va="bottom", fontsize=7, rotation=90)
        known = [task for task in tasks if task in quoted]
        axis.plot([tasks.index(task) for task in known], [quoted[task] for task in known], ms=6, label="quoted, decode",
                  **_HOLLOW)  # fmt: skip
        axis.axhline(DECODE_SHARE_OF_ALL, color=COLOURS["black"], lw=1, ls="--", label="quoted, decode of all tasks")
        axis.set_xticks(range(len(tasks)), tasks, fontsize=8)
        axis.set_title(model, fontsize=9)
        axis.set(ylim=(0, 1.25), yticks=np.linspace(0, 1, 6))
        axis.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel("share of prefill and decoding (%)")
    axes[0, 0].yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    _legend(figure, axes[0], columns=3)
    return figure


def similarity(pairs: pd.DataFrame, summaries: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 3: cosine similarity of answers; and of a summary and its context, against the overlap of their words.

    pairs: columns pair (task, group or across), cosine. summaries: prompt, cosine, overlap, distance, one row a prompt;
    overlap is 1 - distance, which is Levenshtein's, normalised.
    """
    need(pairs, "pair", "cosine", least=-1, most=1)
    need(summaries, "prompt", "cosine", least=-1, most=1, unique="prompt")
    need(summaries, "", "overlap distance", least=0, most=1)
    _known(pairs["pair"], _PAIRS, "pair")
    if (summaries["overlap"] + summaries["distance"] - 1).abs().max() > 1e-6:
        raise ValueError("An overlap is 1 - the distance, but in this table the two do not add up to 1.")
    figure, axes = panels(1, 2, width=4.2, height=3.3)
    _violins(axes[0, 0], pairs)
    axis = axes[0, 1]
    axis.plot(summaries["overlap"], summaries["cosine"], "o", ms=3.5, alpha=0.6, color=COLOURS["blue"],
              label="a summary")  # fmt: skip
    axis.axhline(LEAST_COSINE, color=COLOURS["black"], lw=1, ls="--", label=f"quoted, cosine > {LEAST_COSINE}")
    axis.axvline(LEAST_OVERLAP, color=COLOURS["black"], lw=1, ls=":", label=f"quoted, overlap > {LEAST_OVERLAP}")
    axis.set(xlabel="overlap of context and summary", ylabel="cosine")
    axis.set_xlim(0, max(0.2, 1.05 * summaries["overlap"].max()))
    above = axis.secondary_xaxis("top", functions=(_turned, _turned))
    above.set_xlabel("normalised Levenshtein distance", fontsize=8)
    _legend(figure, axes[0], columns=5, kind=kind)
    return figure


def graph_sizes(table: pd.DataFrame) -> Figure:
    """Figure 5: ms a token of prefill and of decoding against the rows of a static graph.

    table: columns source, shape (rows), forward_ms, prefill_ms, decode_ms (both a token). The paper's 160 ms a token is
    drawn as printed, and crossed what it would make of the prefill on that graph (`printed.figure_5`).
    """
    need(table, "source", "shape forward_ms prefill_ms decode_ms", positive=True, unique="source shape")
    figure, axes = panels(1, 1, width=7.6, height=3.3)
    axis = axes[0, 0]
    for number, source in enumerate(_order(table["source"])):
        rows = table[table["source"] == source].sort_values("shape")
        line = dict(ls=_KIND_STYLE[_kind(source)][1], marker=_MARKERS[number % len(_MARKERS)], ms=4)
        axis.plot(rows["shape"], rows["prefill_ms"], color=COLOURS["orange"], label=f"prefill: {source}", **line)
        axis.plot(rows["shape"], rows["decode_ms"], color=COLOURS["blue"], label=f"decode: {source}", **line)
    bound, decode = _HOLLOW | {"marker": "v", "mec": COLOURS["orange"]}, _HOLLOW | {"mec": COLOURS["blue"]}
    wrong = dict(marker="x", ls="", mew=2, color=COLOURS["red"], zorder=4)
    axis.plot(32, printed.FIG_5["prefill"], ms=7, label="prefill: quoted, at most", **bound)
    axis.plot(32, printed.FIG_5["decode"], ms=7, label="decode: quoted", **decode)
    axis.plot(
        32, printed.figure_5()["prefill_as_printed"], ms=7, label="prefill that the quoted\ndecode implies", **wrong
    )
    axis.set(xlabel="rows of the graph", ylabel="ms a token", xscale="log", yscale="log")
    _ticks_at(axis, {*table["shape"], 32})
    axis.yaxis.set_major_formatter(_PLAIN)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def draft_lengths(costs: pd.DataFrame, lengths: pd.DataFrame, kind: str = "measured") -> Figure:
    """Figure 6: left, ms a token of a forward over n rows; right, the share of steps that draft fewer than n tokens.

    costs: columns source, rows, per_row_ms. lengths: method, drafted (tokens of a step, 0 for none), share (of the
    method's steps). kind: of the lengths. The paper's third datum, a throughput at 8 of half that at 64, is drawn on
    the fit's time at 64.
    """
    need(costs, "source", "rows per_row_ms", positive=True, unique="source rows")
    need(lengths, "method", "drafted", least=0, unique="method drafted")
    need(lengths, "", "share", least=0, most=1)
    sums = lengths.groupby("method")["share"].sum()
    if (sums - 1).abs().max() > 1e-6:
        raise ValueError(f"The shares of {sums.sub(1).abs().idxmax()} do not add up to 1.")
    figure, axes = panels(1, 2, width=4.4, height=3.6)
    left, right = axes[0]
    for number, source in enumerate(_order(costs["source"])):
        rows = costs[costs["source"] == source].sort_values("rows")
        line = _KIND_STYLE[_kind(source)][1]
        left.plot(rows["rows"], rows["per_row_ms"], ls=line, label=source, **_line(number))
    left.plot(list(printed.FIG_6), list(printed.FIG_6.values()), ms=7, label="quoted", **_HOLLOW)
    half = float(printed.npu_curve()(64)) / 64 / (1 - printed.THROUGHPUT_LOSS / 100)
    left.plot(8, half, ms=7, label="quoted, 8 against 64", **_HOLLOW | {"marker": "s"})
    left.set(xlabel="rows of a forward", ylabel="ms a token", xscale="log", yscale="log")
    _ticks_at(left, [2**power for power in range(0, 1 + int(np.log2(costs["rows"].max())), 2)])
    left.yaxis.set_major_formatter(_PLAIN)
    ends = range(int(lengths["drafted"].max()) + 2)
    for number, method in enumerate(_order(lengths["method"])):
        share = _share_below(lengths[lengths["method"] == method], ends)
        right.step(ends, share, where="mid", color=_LINES[number % len(_LINES)], label=f"{method}, {kind}")
    right.plot(
        list(SHORT_DRAFTS), list(SHORT_DRAFTS.values()), ms=7, label="quoted, more than", **_HOLLOW | {"marker": "^"}
    )
    right.set(xlabel="length n (tokens)", ylabel="steps that draft fewer than n (%)", ylim=(0, 1.03))
    right.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    for axis in axes[0]:
        axis.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def per_token(
    cells: pd.DataFrame, quoted: pd.DataFrame | None = None, implied: pd.DataFrame | None = None,
    *, value: str = "decode_per_token_ms", kind: str = "simulated",
) -> Figure:  # fmt: skip
    """Figure 10: above, ms a token by task and arm; below, by how much sd.npu is faster. One column a model.

    cells: `npu.by_task`, of which model, arm, task and `value` are drawn. quoted: columns model, arm, task,
    per_token_ms; the paper's, end to end. implied: columns model, arm, task, speedup; from Table 4 and the fit
    (`printed.implied_speedups`). The bands are the paper's ranges over all its tasks, models and phones.
    """
    need(cells, "model arm task", value, positive=True, unique="model arm task")
    if OURS not in set(cells["arm"]):
        raise ValueError(f"A speed-up is of {OURS}, which is none of the arms {', '.join(_order(cells['arm']))}.")
    if quoted is not None:
        need(quoted, "model arm task", "per_token_ms", positive=True, unique="model arm task")
    if implied is not None:
        need(implied, "model arm task", "speedup", positive=True, unique="model arm task")
    models, tasks, arms = (_order(cells[name]) for name in ("model", "task", "arm"))
    figure, axes = panels(2, len(models), width=max(4.4, 7.6 / len(models)), height=2.7, sharey="row")
    ours = cells[cells["arm"] == OURS].set_index(["model", "task"])[value].rename("ours")
    others = cells[cells["arm"] != OURS].join(ours, on=["model", "task"])
    others = others.assign(ratio=others[value] / others["ours"])
    for model, bars, ratios in zip(models, axes[0], axes[1], strict=True):
        for number, arm in enumerate(arms):
            place, rows = _places(len(tasks), number, len(arms), 0.86), _by(cells, "task", tasks, model=model, arm=arm)
            colour, opacity = _ARM_STYLE.get(arm, (COLOURS["sky"], 1.0))
            bars.bar(place, rows[value], 0.86 / len(arms), color=colour, alpha=opacity, label=arm)
            if quoted is not None:
                paper = _by(quoted, "task", tasks, model=model, arm=arm)["per_token_ms"]
                bars.plot(place, paper, ms=4.5, label="_" if number else "quoted, end to end", **_HOLLOW)
        bars.set_title(model, fontsize=9)
        bars.set_xticks(range(len(tasks)), tasks, fontsize=8)
        bars.grid(axis="x", visible=False)
        of_model = None if implied is None else implied[implied["model"] == model]
        _ratios(ratios, others[others["model"] == model], tasks, SPEEDUPS, of_model)
    of = "decoding" if value.startswith("decode") else "end to end"
    axes[0, 0].set_ylabel(f"ms a token, {of}", fontsize=9)
    axes[1, 0].set_ylabel(f"speed-up of {OURS}", fontsize=9)
    _legend(figure, axes.ravel(), columns=5, kind=kind)
    return figure


def energy(table: pd.DataFrame, kind: str = "simulated") -> Figure:
    """Figure 11: energy over sd.npu's by arm, a mark a task; a row a model, a column an assumption of the powers.

    table: columns model, arm, task, joules_over_ours, assumption. The bands are the paper's ranges.
    """
    need(table, "model arm task assumption", "joules_over_ours", positive=True, unique="model arm task assumption")
    models, assumptions, tasks = (_order(table[name]) for name in ("model", "assumption", "task"))
    size = dict(width=max(3.9, 5.6 / len(assumptions)), height=2.5)
    figure, axes = panels(len(models), len(assumptions), **size, sharex="col", sharey=True)
    for model, line in zip(models, axes, strict=True):
        for assumption, axis in zip(assumptions, line, strict=True):
            rows = table[(table["model"] == model) & (table["assumption"] == assumption) & (table["arm"] != OURS)]
            _ratios(axis, rows.assign(ratio=rows["joules_over_ours"]), tasks, ENERGY)
            axis.set_title(f"{model}, {assumption}", fontsize=9)
        line[0].set_ylabel(f"energy over {OURS}'s", fontsize=9)
    _legend(figure, axes.ravel(), columns=6, kind=kind)
    return figure


def memory(
    table: pd.DataFrame, quoted: Mapping[str, tuple[float, float]] = MEMORY, paper_model: str = "Qwen2.5-1.5B"
) -> Figure:
    """Figure 12: peak memory by arm, a bar a source, one panel a model.

    table: columns model, arm, peak_mb, source. quoted: arm -> the paper's (least, greatest) GB, of `paper_model`, which
    has a panel in any case; an infinite greatest is "over".
    """
    need(table, "model arm source", "peak_mb", positive=True, unique="model arm source")
    models, sources = _order(table["model"]), _order(table["source"])
    models += [paper_model] * (paper_model not in models)
    arms = {model: _order(table[table["model"] == model]["arm"]) for model in models}
    arms[paper_model] = _order([*arms[paper_model], *quoted])
    rows = max(map(len, arms.values()))
    figure, axes = panels(1, len(models), width=9.0 / max(2, len(models)), height=1.4 + 0.3 * rows)
    for axis, model in zip(axes[0], models, strict=True):
        for number, source in enumerate(sources):
            found = _by(table, "arm", arms[model], model=model, source=source)["peak_mb"]
            place = _places(len(found), number, len(sources), 0.7)
            style = _bar_style(source, COLOURS["blue"])
            axis.barh(place, found, 0.7 / len(sources), label=source, **style)
        axis.set_yticks(range(len(arms[model])), arms[model], fontsize=8)
        axis.set_title(model, fontsize=9)
        axis.set(xlabel="memory (MB)", ylim=(len(arms[model]) - 0.5, -0.5))
        axis.grid(axis="y", visible=False)
    for number, (arm, (low, high)) in enumerate(quoted.items()):
        axis, ends = axes[0, models.index(paper_model)], [1e3 * low, 1e3 * (high if np.isfinite(high) else low)]
        style = _HOLLOW | {"ls": "-", "color": COLOURS["black"], "marker": "o" if np.isfinite(high) else ">"}
        label = "quoted; triangle: more than" if not number else "_"
        axis.plot(ends, [arms[paper_model].index(arm)] * 2, ms=6, lw=1.5, label=label, **style)
    _legend(figure, axes[0], columns=4)
    return figure


def breakdown(table: pd.DataFrame) -> Figure:
    """Figure 13: where the time of a request goes, by arm; a row a model, a column a source, each on its own axis.

    table: columns model, arm, source, part (prefill, calibration, switch, drafting, forward), ms; a part that is not
    there took no time. Quoted, on the arms of the NPU: where decoding begins in vanilla's time, and where sd.npu would
    end by the paper's gain of decoding.
    """
    need(table, "model arm source part", "ms", least=0, unique="model arm source part")
    _known(table["part"], _PART_COLOURS, "part")
    models, sources = _order(table["model"]), _order(table["source"])
    kinds = _order(_kind(source) for source in sources)
    size = dict(width=max(4.3, 5.4 / len(sources)), height=0.8 + 0.28 * table["arm"].nunique() + 0.7 / len(models))
    figure, axes = panels(len(models), len(sources), **size)
    for model, line in zip(models, axes, strict=True):
        for source, axis in zip(sources, line, strict=True):
            part = table[(table["model"] == model) & (table["source"] == source)]
            wide = part.pivot(index="arm", columns="part", values="ms")
            wide = wide.reindex(index=_order(part["arm"]), columns=list(_PART_COLOURS))
            _stacked(axis, wide.fillna(0.0))
            axis.set_title(f"{model}: {source}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("ms a request")
    _legend(figure, axes.ravel(), columns=4, kind=" and ".join(kinds))
    return figure


def rejections(table: pd.DataFrame, quoted: pd.DataFrame | None = None, kind: str = "measured") -> Figure:
    """Table 2 as a picture: the share of each cause of rejection, with intervals; a row a model, a column a cause.

    table: columns model, task, cause, share, low, high (of the share), count (rejections of the cause).
    quoted: columns cause, share; by default `printed.rejections`, which are of `printed.least_sample` cases.
    """
    need(table, "model task cause", "share low high", least=0, most=1, unique="model task cause")
    need(table, "", "count", least=0)
    paper = printed.rejections() if quoted is None else quoted
    need(paper, "cause", "share", least=0, most=1, unique="cause")
    sample = printed.least_sample((100 * paper["share"]).tolist())
    models, causes, tasks = (_order(table[name]) for name in ("model", "cause", "task"))
    size = dict(width=8.6 / len(causes), height=0.7 + 0.26 * len(tasks) + 0.7 / len(models))
    figure, axes = panels(len(models), len(causes), **size, sharex=True, sharey="row")
    for model, line in zip(models, axes, strict=True):
        counts = table[table["model"] == model].groupby("task")["count"].sum().reindex(tasks, fill_value=0)
        for cause, axis in zip(causes, line, strict=True):
            rows = _by(table, "task", tasks, model=model, cause=cause)
            lengths = np.maximum(0, [rows["share"] - rows["low"], rows["high"] - rows["share"]])
            axis.errorbar(rows["share"], range(len(tasks)), xerr=lengths, fmt="D", ms=4, color=COLOURS["blue"],
                          ecolor=COLOURS["black"], elinewidth=0.8, capsize=2, label="share, 95 % interval")  # fmt: skip
            for share in paper.loc[paper["cause"] == cause, "share"]:
                axis.axvline(
                    share, color=COLOURS["black"], ls="--", lw=1, label=f"quoted, of at least {sample} rejections"
                )
            axis.set_title(f"{model}: {cause}", fontsize=9)
            axis.set(xlim=(-0.02, 1.02), ylim=(len(tasks) - 0.5, -0.5))
            axis.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        names = [f"{task}, {count:.0f}" for task, count in counts.items()]
        line[0].set_yticks(range(len(tasks)), names, fontsize=8)
        line[0].set_ylabel("task, rejections", fontsize=8)
    figure.supxlabel("share of the rejections (%)", fontsize=9)
    _legend(figure, axes[0], columns=2, kind=kind)
    return figure


def gains(table: pd.DataFrame, quoted: pd.DataFrame | None = None, kind: str = "measured") -> Figure:
    """Table 4 as a picture: tokens a verification over the drafter's own, by each part alone and both, by task.

    table, quoted: columns model, method, task, accepted, gain; methods are PLD and SAM with +calibration, +reuse and
    +Ours (both), others are not drawn. A row a model, a column a drafter. quoted: `printed.acceptance`.
    """
    need(table, "model method task", "accepted gain", positive=True, unique="model method task")
    drawn = [f"{base}+{added}" for base in GAINS for added in _ADDED]
    if not set(drawn) & set(table["method"]):
        raise ValueError(f"None of the methods is {', '.join(drawn)}: {', '.join(_order(table['method']))}.")
    if quoted is not None:
        need(quoted, "model method task", "accepted gain", positive=True, unique="model method task")
    models, tasks = _order(table["model"]), _order(table["task"])
    figure, axes = panels(len(models), len(GAINS), width=4.4, height=2.3, sharey=True, sharex=True)
    for model, line in zip(models, axes, strict=True):
        for (base, limits), axis in zip(GAINS.items(), line, strict=True):
            for number, (added, colour) in enumerate(_ADDED.items()):
                rows = _by(table, "task", tasks, model=model, method=f"{base}+{added}")
                place = _places(len(tasks), number, len(_ADDED), 0.8)
                label = "both" if added == "Ours" else f"{added} alone"
                axis.bar(place, rows["gain"] - 1, 0.8 / len(_ADDED), bottom=1, color=colour, label=label)
            if quoted is not None:
                paper = _by(quoted, "task", tasks, model=model, method=f"{base}+Ours")["gain"]
                axis.plot(place, paper, ms=6, label="quoted, both", **_HOLLOW)
            axis.axhspan(*limits, label="quoted, range of both", **_BAND)
            axis.axhline(1, color=COLOURS["black"], lw=1)
            axis.set_title(f"{model}: over {base}", fontsize=9)
            axis.set_xticks(range(len(tasks)), tasks, fontsize=8)
            axis.grid(axis="x", visible=False)
        line[0].set_ylabel("gain in tokens\na verification", fontsize=9)
    _legend(figure, axes.ravel(), columns=5, kind=kind)
    return figure


def scheduling_ratios(table: pd.DataFrame, kind: str = "simulated") -> Figure:
    """Beyond the paper: latency over the exact optimum's by rule and family of instances; boxes, whiskers to the ends.

    table: columns family, rule, ratio, a row an instance. Diamonds are means. Where both graphs are kept no graph is
    switched, so that a ratio may be below 1.
    """
    need(table, "family rule", "ratio", positive=True)
    families, rules = _order(table["family"]), _order(table["rule"])
    figure, axes = panels(1, 1, width=max(5.0, min(9.0, 1.2 + 0.32 * len(families) * len(rules))), height=3.4)
    axis = axes[0, 0]
    colours = [*COLOURS.values()]
    mean = dict(marker="D", ms=3.5, mfc="white", mec=COLOURS["black"], mew=0.8)
    for number, rule in enumerate(rules):
        values = [table.loc[(table["family"] == one) & (table["rule"] == rule), "ratio"] for one in families]
        boxes = axis.boxplot(values, positions=_places(len(families), number, len(rules), 0.86), whis=(0, 100),
                             widths=0.75 * 0.86 / len(rules), patch_artist=True, showmeans=True, meanprops=mean,
                             medianprops=dict(color=COLOURS["black"]), manage_ticks=False)  # fmt: skip
        for box in boxes["boxes"]:
            box.set(facecolor=colours[number % len(colours)], alpha=0.7, linewidth=0.8)
    axis.axhline(1, color=COLOURS["black"], lw=1, ls="--")
    axis.set_xticks(range(len(families)), [_wrapped(family) for family in families], fontsize=8)
    axis.set(ylabel="latency over the optimum's", xlim=(-0.5, len(families) - 0.5))
    axis.grid(axis="x", visible=False)
    handles = [Patch(fc=colours[n % len(colours)], alpha=0.7, ec="black", label=rule) for n, rule in enumerate(rules)]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=8, title=kind, title_fontsize=8)
    return figure


def switching(table: pd.DataFrame) -> Figure:
    """Switching of graphs: the load time that is not hidden, and the whole request's, by method.

    table: columns method, exposed_s, total_s, kind, a row a run; bars are medians, points runs. Quoted, where a method
    is "synchronous": its delay of 94.9 percent, of the median of the rest of our request.
    """
    need(table, "method kind", "exposed_s", least=-np.inf)
    need(table, "", "total_s", positive=True)
    methods, kinds = _order(table["method"]), _order(table["kind"])
    figure, axes = panels(1, 2, width=4.4, height=1.5 + 0.3 * len(methods) * len(kinds), sharey=True)
    titles = {"exposed_s": "exposed load time (ms)", "total_s": "prefill and switch (ms)"}
    for axis, (column, title) in zip(axes[0], titles.items(), strict=True):
        for number, kind in enumerate(kinds):
            place = _places(len(methods), number, len(kinds), 0.76)
            rows = table[table["kind"] == kind]
            medians = 1e3 * rows.groupby("method")[column].median().reindex(methods)
            axis.barh(place, medians, 0.7 / len(kinds), label=f"median, {kind}", **_bar_style(kind, COLOURS["blue"]))
            at = [place[methods.index(method)] for method in rows["method"]]
            axis.plot(1e3 * rows[column], at, ".", ms=4, color=COLOURS["black"], label="a run" if not number else "_")
        axis.set(xlabel=title)
        axis.grid(axis="y", visible=False)
    for number, kind in enumerate(kinds):
        slow = table[(table["method"] == "synchronous") & (table["kind"] == kind)]
        if len(slow):
            delay = SWITCH_DELAY * 1e3 * (slow["total_s"] - slow["exposed_s"]).median()
            place = _places(len(methods), number, len(kinds), 0.76)[methods.index("synchronous")]
            axes[0, 0].plot(delay, place, ms=7, label=f"quoted, {100 * SWITCH_DELAY:.1f} % of the rest", **_HOLLOW)
    axes[0, 0].set_yticks(range(len(methods)), methods)
    axes[0, 0].set_ylim(len(methods) - 0.5, -0.5)
    _legend(figure, axes[0], columns=4)
    return figure


def sensitivity(table: pd.DataFrame, kind: str = "simulated") -> Figure:
    """Beyond the paper: simulated speed-ups over F's slope, above, and what a token costs besides, below.

    table: `sensitivity.table`, a line a shape. Above, at the least constant; below, where there are several constants,
    at the ratio nearest to the fit's, which the line marks. The bands are the paper's ranges.
    """
    ranges = {"over_sam": SPEEDUPS["NPU-SAM"], "over_vanilla": SPEEDUPS["NPU vanilla"],
              "over_one_row": SPEEDUPS["NPU vanilla"]}  # fmt: skip
    need(table, "", "ratio shape constant_ms", least=0, unique="ratio shape constant_ms")
    need(table, "", " ".join(ranges), positive=True)
    fitted = printed.npu_curve().ratio
    nearest = min(table["ratio"].unique(), key=lambda ratio: abs(ratio - fitted))
    least, several = table["constant_ms"].min(), table["constant_ms"].max() > table["constant_ms"].min()
    figure, axes = panels(1 + several, 3, width=3.0, height=2.5, sharey="col")
    titles = ("over SAM", "over vanilla,\nthe same graph", "over vanilla,\na graph of one row")
    for (column, limits), title, line in zip(ranges.items(), titles, axes.T, strict=True):
        _by_shape(line[0], table[table["constant_ms"] == least], "ratio", column)
        line[0].axvline(fitted, color=COLOURS["black"], lw=1, ls=":", label="the fit's slope")
        _slope_axis(line[0], table["ratio"])
        line[0].set_title(title, fontsize=9)
        line[0].set_xlabel("slope / intercept of F", fontsize=9)
        if several:
            _by_shape(line[1], table[table["ratio"] == nearest], "constant_ms", column)
            line[1].set_xlabel("ms a token besides", fontsize=9)
        for axis in line:
            axis.axhspan(*limits, label="quoted, range", **_BAND)
            axis.axhline(1, color=COLOURS["black"], lw=0.8, ls="--")
    for axis in axes[:, 0]:
        axis.set_ylabel(f"speed-up of {OURS}", fontsize=9)
    _legend(figure, axes.ravel(), columns=6, kind=kind)
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
    axis.plot(place, [one.mean() for one in values], "D", ms=5, color=COLOURS["blue"], label="mean")
    axis.plot(place, [COSINES[name] for name in names], ms=7, label="quoted", **_HOLLOW)
    axis.set_xticks(place, [_PAIRS[name] for name in names])
    axis.set(ylabel="cosine")
    axis.grid(axis="x", visible=False)


def _share_below(lengths: pd.DataFrame, ends: Iterable[int]) -> list[float]:
    """Of the steps of one method, below each length."""
    return [float(lengths.loc[lengths["drafted"] < end, "share"].sum()) for end in ends]


def _ratios(
    axis: Axes, rows: pd.DataFrame, tasks: Sequence[str], ranges: Mapping[str, tuple[float, float]],
    implied: pd.DataFrame | None = None,
) -> None:  # fmt: skip
    """One mark a task for each arm, on the paper's range. rows: arm, task, ratio. implied: arm, task, speedup."""
    arms = _order(rows["arm"])
    for number, arm in enumerate(arms):
        if arm in ranges:
            low, high = ranges[arm]
            axis.bar(number, high - low, 0.86, bottom=low, label="_" if number else "quoted, range", **_BAND)
        for place, (task, x) in enumerate(zip(tasks, number + _spread(len(tasks)), strict=True)):
            found = rows.loc[(rows["arm"] == arm) & (rows["task"] == task), "ratio"]
            axis.plot([x] * len(found), found, ls="", label="_" if number else task, **_line(place, ms=4.5) | _TASK)
            if implied is not None:
                paper = implied.loc[(implied["arm"] == arm) & (implied["task"] == task), "speedup"]
                label = "_" if number or place else "implied by Table 4 and the fit, analytic"
                axis.plot([x] * len(paper), paper, ms=7.5, label=label, **_HOLLOW | {"zorder": 1})
    axis.axhline(1, color=COLOURS["black"], lw=1, ls="--")
    axis.set_xticks(range(len(arms)), [arm.replace(" ", "\n").replace("-", "-\n") for arm in arms], fontsize=8)
    axis.set_xlim(-0.5, len(arms) - 0.5)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(_PLAIN)
    axis.grid(axis="x", visible=False)


def _stacked(axis: Axes, wide: pd.DataFrame) -> None:
    """One bar an arm. wide: [arm, part] ms."""
    left = np.zeros(len(wide))
    for part, colour in _PART_COLOURS.items():
        axis.barh(wide.index, wide[part], 0.62, left=left, color=colour, label=part)
        left += wide[part].to_numpy()
    line: dict[str, Any] = dict(ls="-", lw=1.5, ms=5, color=COLOURS["black"])
    decode = wide[["drafting", "forward"]].sum(axis=1)
    total, vanilla = wide.sum(axis=1), "NPU vanilla"
    if vanilla in wide.index:
        begins = [total[vanilla] * (1 - share) for share in printed.DECODE_SHARE_NPU]
        axis.plot(begins, [vanilla] * 2, label="quoted, decoding begins", **_HOLLOW | line)
        if OURS in wide.index:
            before = total[OURS] - decode[OURS]
            ends = [before + decode[vanilla] / gain for gain in printed.DECODE_SPEEDUP]
            axis.plot(ends, [OURS] * 2, label="quoted, decoding ends", **_HOLLOW | line | {"marker": "s"})
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(axis="y", visible=False)


def _by_shape(axis: Axes, table: pd.DataFrame, across: str, column: str) -> None:
    for number, (shape, rows) in enumerate(table.sort_values(across).groupby("shape")):
        axis.plot(rows[across], rows[column], label=f"{shape:g} rows", **_line(number))


def _slope_axis(axis: Axes, ratios: pd.Series) -> None:
    """Logarithmic, with a place for 0 where it is drawn."""
    above = ratios[ratios > 0].min()
    if (ratios > 0).all():
        axis.set_xscale("log")
    elif np.isfinite(above):
        axis.set_xscale("symlog", linthresh=above)
        axis.set_xlim(left=-0.3 * above)
    axis.xaxis.set_major_formatter(_PLAIN)
    axis.xaxis.set_minor_formatter(NullFormatter())


# Tables, places and styles


def _known(found: pd.Series, names: Iterable[str], what: str) -> None:
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise ValueError(f"There is no {what} {', '.join(map(str, unknown))}; there are {', '.join(names)}.")


def _order(values: Iterable[str]) -> list[str]:
    """Distinct values in the order of their first appearance, `average` last."""
    return sorted(dict.fromkeys(values), key=lambda value: value == "average")


def _by(table: pd.DataFrame, column: str, names: list[str], **where: str) -> pd.DataFrame:
    """The rows in which other columns have these values, one a name of `column`, NaN where there is none."""
    for other, value in where.items():
        table = table[table[other] == value]
    return table.set_index(column).reindex(names)


def _places(groups: int, number: int, count: int, width: float) -> np.ndarray:
    """[groups] middle of bar `number` of `count` in each group, which together are `width` wide."""
    return np.arange(groups) + (number - (count - 1) / 2) * width / count


def _spread(count: int, width: float = 0.66) -> np.ndarray:
    return np.linspace(-width / 2, width / 2, count) if count > 1 else np.zeros(1)


def _turned(share: Any) -> Any:
    return 1 - share


def _kind(source: str) -> str:
    """The kind that a source names. Raises ValueError where it names none, or several."""
    named = [kind for kind in KINDS if kind in source]
    if len(named) != 1:
        raise ValueError(f"A source names its kind, one of {', '.join(KINDS)}, unlike {source!r}.")
    return named[0]


def _bar_style(source: str, colour: str) -> dict[str, Any]:
    """Of a bar, by the kind of its source."""
    opacity, _, hatch = _KIND_STYLE[_kind(source)]
    return dict(color=colour, alpha=opacity, hatch=hatch, edgecolor="white", linewidth=0)


def _line(number: int, ms: float = 3.5) -> dict[str, Any]:
    """Colour and marker of the number-th of several lines."""
    return dict(color=_LINES[number % len(_LINES)], marker=_MARKERS[number % len(_MARKERS)], ms=ms)


def _ticks_at(axis: Axes, values: Iterable[float]) -> None:
    """Ticks at these places of the x-axis only, as plain numbers."""
    axis.set_xticks(sorted(set(values)))
    axis.xaxis.set_major_formatter(_PLAIN)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())


def _wrapped(words: str) -> str:
    """On two lines, broken at the space nearest to the middle."""
    breaks = [place for place, letter in enumerate(words) if letter == " "]
    if len(words) < 14 or not breaks:
        return words
    middle = min(breaks, key=lambda place: abs(place - len(words) / 2))
    return f"{words[:middle]}\n{words[middle + 1 :]}"


def _legend(figure: Figure, axes: Iterable[Axes], *, columns: int, kind: str = "") -> None:
    """One legend above all panels, with every entry that any of them has, the quoted last, the kind its title."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    place: dict[str, Any] = dict(loc="outside upper center", ncols=columns, fontsize=8, title_fontsize=8)
    labels = sorted(found, key=lambda label: label.startswith("quoted"))
    figure.legend([found[label] for label in labels], labels, title=kind or None, **place)
