"""DRAGON's figures. Each function draws tables of `analysis`, `replays` or the live experiments and returns the figure.

Legends, panels or the corner say the kind; what the paper prints is hollow or has panels of its own, and is called
quoted. All functions raise ValueError where a table lacks a column or has no row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ondevice import plotting
from ondevice.plotting import BAND, COLOURS, CYCLE, groups, legend, lines, need, order, panels, plain, quoted

_LOOKS: dict[str, dict[str, Any]] = {
    name: dict(color=COLOURS[colour], ls=line, marker=marker, lw=1.2)
    for name, colour, line, marker in (
        ("DRAGON", "blue", "-", "o"), ("DRDG/TW", "orange", "-", "s"), ("DRDG/SW", "green", "-", "D"),
        ("RAG-Sequence", "purple", "-", "v"), ("DRCG", "red", "-", "^"), ("DRCG/Text", "red", "-", "^"),
        ("DRCG/KV", "purple", "-", "v"), ("CRCG/Device", "grey", "--", "<"), ("CRCG/Cloud", "sky", "--", ">"),
        ("no retrieval", "black", ":", ""),
    )
}  # fmt: skip
_STRATEGIES = {  # of Figure 9: name, colour, line, marker
    "Cloud": ("Cloud", "orange", "-", "s"), "Device": ("Device", "green", "-", "^"),
    "Random": ("Random", "grey", "-", "v"), "DRAGON": ("DRAGON, the paper's rule", "red", "-", "o"),
    "Lagging": ("DRAGON, our rule", "blue", "-", "D"), "Oracle": ("oracle, lower bound", "black", "--", ""),
}  # fmt: skip
_OUTCOMES = {"accepted": "sky", "rejected": "red", "void": "yellow", "stopped": "grey", "": "black"}
_MESSAGES = {"draft": ("purple", "-", 0.7), "target": ("black", "-", 0.9), "switch": ("green", "--", 2.2)}
_LANES = {"cloud": 1.0, "device": 0.0}
_BAR = 0.26  # height of a lane
_LONG = 0.018  # of the time axis, from which a bar has room for its position


# Figures 3, 4 and 5, Table 1


def difference(table: pd.DataFrame, decode_remote: float = 0.5, rtt: float = 0.3) -> Figure:
    """Figure 3: ΔZ against the local side's decode latency, a colour a pair of acceptance rates.

    table: of `analysis.difference_curves`, with these two parameters (seconds).
    """
    need(table, "kind", "decode_local alpha_l alpha_r delta_z")
    pairs = [f"$\\alpha^l$ = {local:g}, $\\alpha^r$ = {remote:g}"
             for local, remote in zip(table["alpha_l"], table["alpha_r"], strict=True)]  # fmt: skip
    figure, axes = panels(1, 1, width=7.4, height=3.6)
    axis = axes[0, 0]
    for number, (pair, rows) in enumerate(groups(table.assign(pair=pairs), "pair")):
        looks: plotting.Looks = {f"{pair}, analytic": dict(ls="-", marker=""),
                                 f"{pair}, simulated": dict(ls="", marker="o", ms=3.5)}  # fmt: skip
        lines(axis, rows.assign(series=f"{pair}, " + rows["kind"]), "decode_local", "delta_z", "series", looks=looks,
              color=COLOURS[CYCLE[number % len(CYCLE)]])  # fmt: skip
    axis.axhline(0, color=COLOURS["black"], lw=1)
    for place, name in ((-rtt, "$c^r - rtt$"), (0, "$c^r$"), (rtt, "$c^r + rtt$")):
        axis.axvline(decode_remote + place, color=COLOURS["grey"], lw=0.8, ls=":")
        axis.annotate(name, (decode_remote + place, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom",
                      fontsize=8)  # fmt: skip
    for height, name in ((0.97, "above 0: the remote side should aggregate"), (0.03, "below 0: the local side should")):
        axis.text(0.01, height, name, transform=axis.transAxes, fontsize=8, va="top" if height > 0.5 else "bottom")
    axis.set(xlabel="decode latency of the local side, $c^l$ (s)", ylabel=r"$\Delta Z = Z^l - Z^r$ (s a token)")
    axis.margins(y=0.18)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, title=f"$c^r$ = {decode_remote:g} s, "
                f"rtt = {rtt:g} s", title_fontsize=8)  # fmt: skip
    plotting.mark_kind(figure, "analytic+simulated")
    return figure


def pipelines(bars: pd.DataFrame, tokens: pd.DataFrame, kind: str = "simulated") -> Figure:
    """Figure 4: both sides' decodes and the messages between them, a panel a case.

    bars: of `analysis.timeline` with `case`. tokens: columns case, decided_s, per_token_s, formula_s; a dotted line is
    an aggregation, with the time since the one before.
    """
    need(bars, "case what side to outcome", "position begin_s end_s")
    cases = order(bars["case"])
    figure, axes = panels(len(cases), 1, width=8.4, height=2.2, sharex=True)
    for axis, case in zip(axes[:, 0], cases, strict=True):
        _space_time(axis, bars[bars["case"] == case])
        rows = tokens[tokens["case"] == case]
        for time, since in zip(rows["decided_s"], rows["per_token_s"], strict=True):
            axis.axvline(time, color=COLOURS["grey"], lw=0.8, ls=":", zorder=0)
            axis.annotate(f"{since:.3g} s", (time, 1), xycoords=("data", "axes fraction"), ha="right", va="bottom",
                          fontsize=7)  # fmt: skip
        formula = rows["formula_s"].iloc[-1]
        axis.set_title(f"{case}: Eq. 7 gives {formula:.3g} s a token (analytic)", fontsize=9, loc="left", pad=14)
    axes[-1, 0].set_xlabel("time (s)")
    _event_legend(figure, bars, kind)
    return figure


def speedup(surface: pd.DataFrame, points: pd.DataFrame) -> Figure:
    """Figure 5: speed-up over token-wise aggregation; above as a map, below as curves with simulated points.

    surface, points: of `analysis.speedups`, analytic and simulated, with the same rtts; a curve an alpha_r of points.
    """
    need(surface, "kind", "decode_local rtt alpha_r speedup")
    rtts = order(surface["rtt"])
    figure, axes = panels(2, len(rtts), width=8.6 / len(rtts), height=2.6, sharex=True, sharey="row")
    top = max(surface["speedup"].max(), points["speedup"].max())
    image: Any = None
    for (above, below), (rtt, rows) in zip(axes.T, groups(surface, "rtt"), strict=True):
        wide = rows.pivot(index="alpha_r", columns="decode_local", values="speedup")
        image = above.contourf(wide.columns, wide.index, wide, levels=np.geomspace(1, top, 15), norm="log",
                               cmap="viridis")  # fmt: skip
        above.set_title(f"rtt = {rtt:g} $c^r$", fontsize=9)
        above.grid(visible=False)
        for number, (alpha, dots) in enumerate(points[points["rtt"] == rtt].sort_values("alpha_r").groupby("alpha_r")):
            near, colour = min(wide.index, key=lambda rate: abs(rate - alpha)), COLOURS[CYCLE[number]]
            below.plot(wide.columns, wide.loc[near], color=colour, label=f"$\\alpha^r$ = {near:g}, analytic")
            below.plot(dots["decode_local"], dots["speedup"], "o", ms=4, color=colour,
                       label=f"$\\alpha^r$ = {alpha:g}, simulated")  # fmt: skip
        below.set_xlabel("$c^l / c^r$")
    axes[0, 0].set_ylabel(r"acceptance $\alpha^r$")
    axes[1, 0].set_ylabel("speed-up")
    figure.colorbar(image, ax=list(axes[0]), label="speed-up (analytic)", format="%.1f", ticks=np.geomspace(1, top, 8))
    legend(figure, "analytic+simulated", axes=axes[1])
    return figure


def waiting(table: pd.DataFrame) -> Figure:
    """Table 1: seconds from an aggregation to the next pair of drafts, by case: formula and simulated, side by side.

    table: of `analysis.waiting_times`.
    """
    forms = table["formula"].map(_symbols) + "\nsteady: " + table["steady_form"].map(_symbols)
    names = "$x^l$ " + table["local"] + ", $x^r$ " + table["remote"] + "\n" + forms
    figure, axes = panels(1, 2, width=4.0, height=4.0, sharey=True)
    sides = (("steady_s", "simulated_steady_s", "the case again and again"),
             ("formula_s", "simulated_s", "among others, mean"))  # fmt: skip
    for axis, (formula, simulated, title) in zip(axes[0], sides, strict=True):
        rows = table.assign(case=names, series="simulated")
        looks = {"simulated": dict(color=COLOURS["sky"])}
        plotting.bars(axis, rows, "case", simulated, "series", flat=True, width=0.5, looks=looks)
        for y, seconds in enumerate(table[simulated]):
            axis.text(seconds / 2, y, f"{seconds:.2f} s", ha="center", va="center", fontsize=8)
        quoted(axis, table[formula], range(len(table)), "formula, analytic", marker="D")
        axis.set_title(title, fontsize=9)
        axis.set(xlabel="waiting time (s)")
    legend(figure, "analytic+simulated")
    return figure


# Figures 6, 7 and 8


def perplexity(table: pd.DataFrame, paper: pd.DataFrame | None = None, kind: str = "measured") -> Figure:
    """Figure 6: perplexity against the documents of both sides; bands and bars are 95 % intervals.

    table: columns method, documents, perplexity, low, high, model, corpus. paper: the same without the interval
    (`printed.perplexity`), in panels of its own. A method with one row, at 0 documents, is a line.
    """
    figure = _by_method(table, paper, "documents", "perplexity", ["model", "corpus"], kind)
    figure.supxlabel("documents (both sides)", fontsize=9)
    figure.supylabel("perplexity", fontsize=9)
    return figure


def per_token(table: pd.DataFrame, paper: pd.DataFrame | None = None, kind: str = "measured") -> Figure:
    """Figure 7: latency per token against the added delay; bands are 95 % intervals, bars of the quoted +-1.96 standard
    errors of the authors' runs (the paper draws none).

    table: columns method, delay_ms, per_token_ms, low, high, model, pace (such as "unpaced"). paper: the same without
    pace (`printed.per_token`), its interval may be NaN. A method with one delay is a line.
    """
    figure = _by_method(table, paper, "delay_ms", "per_token_ms", ["model", "pace"], kind)
    figure.supxlabel("added network delay (ms)", fontsize=9)
    figure.supylabel("latency (ms a token)", fontsize=9)
    for axis in figure.axes:
        axis.set_ylim(bottom=0)
    return figure


def ttft(table: pd.DataFrame, paper: pd.DataFrame | None = None, kind: str = "measured") -> Figure:
    """Figure 8: time to first token against the added delay, on a logarithmic axis.

    Bands are from low to high: of `first_token.summary` the least and the greatest of the questions.
    table: columns method, delay_ms, ttft_ms, low, high, model. paper: the same without the interval (`printed.ttft`).
    """
    figure = _by_method(table, paper, "delay_ms", "ttft_ms", ["model"], kind, log=True)
    figure.supxlabel("added network delay (ms)", fontsize=9)
    figure.supylabel("time to first token (ms)", fontsize=9)
    for axis in figure.axes:  # a panel of one level shows that it is one
        low, high = axis.get_ylim()
        if high < 4 * low:
            axis.set_ylim(low / 3, high * 3)
    return figure


def _by_method(
    table: pd.DataFrame, paper: pd.DataFrame | None, x: str, y: str, by: list[str], kind: str, *, log: bool = False
) -> Figure:
    """A panel a setting, then in a row of its own a panel a model of the paper; a line a method.

    A method with one row, whatever x, is a level line.
    """
    need(table, " ".join(["method", *by]), f"{x} {y} low high", least=0, unique=" ".join(["method", x, *by]))
    rows = [(kind, by, table)]
    if paper is not None:
        rows.append(("quoted", [name for name in by if name in paper], paper))
    settings = [[(", ".join(map(str, name)), curves) for name, curves in part.groupby(known, sort=False)]
                for _, known, part in rows]  # fmt: skip
    columns = max(map(len, settings))
    figure, axes = panels(len(rows), columns, width=max(2.7, 7.6 / columns), height=2.6, sharex=True)
    looks = _looks([method for _, _, part in rows for method in part["method"]])
    for line, (of, _, _), parts in zip(axes, rows, settings, strict=True):
        for axis in line[len(parts) :]:
            axis.set_visible(False)
        for axis, (name, curves) in zip(line, parts, strict=False):
            alone = curves[curves.groupby("method")[x].transform("size") == 1]
            level = [alone.assign(**{x: end}, low=np.nan, high=np.nan) for end in (table[x].min(), table[x].max())]
            drawn = pd.concat([curves.drop(alone.index), *level])
            lines(axis, drawn, x, y, "method", looks=looks, whiskers=of == "quoted")
            if "low" in alone:
                colours = [looks[str(method)]["color"] for method in alone["method"]]
                axis.vlines([table[x].max()] * len(alone), alone["low"], alone["high"], colors=colours, lw=0.8)
            axis.set_title(f"{name}{chr(10) if len(name) > 18 else ' '}({of})", fontsize=9)
            if log:
                axis.set_yscale("log")
                plain(axis.yaxis)
    legend(figure, kind if paper is None else f"{kind}+quoted", columns=5)
    return figure


# Figures 9 and 10


def scheduling(table: pd.DataFrame, paper: pd.DataFrame | None = None) -> Figure:
    """Figure 9: above, the total time by strategy and added delay; below, over the oracle's. A column a setting.

    table: of `replays.figure_9`; bars are 95 % intervals. paper: of `printed.scheduling`, on settings named after the
    figure's acceptance and model ("drawn, OPT-1.3B").
    """
    need(table, "setting strategy", "delay_ms total_s low high over_oracle", least=0,
          unique="setting strategy delay_ms")  # fmt: skip
    settings, names = order(table["setting"]), {key: style[0] for key, style in _STRATEGIES.items()}
    looks = {name: dict(color=COLOURS[colour], ls=line, marker=marker, lw=1.2)
             for name, colour, line, marker in _STRATEGIES.values()}  # fmt: skip
    figure, axes = panels(2, len(settings), width=max(2.3, 6.9 / len(settings)), height=2.5, sharex=True)
    for (totals, ratios), (setting, rows) in zip(axes.T, groups(table, "setting"), strict=True):
        rows = rows.assign(strategy=rows["strategy"].map(names))
        lines(totals, rows, "delay_ms", "total_s", "strategy", looks=looks, whiskers=True)
        lines(ratios, rows.drop(columns=["low", "high"]), "delay_ms", "over_oracle", "strategy", looks=looks)
        theirs = table.head(0) if paper is None else paper[("drawn, " + paper["model"]) == setting]
        for strategy, part in groups(theirs, "strategy"):
            look = dict(marker=looks[names[strategy]]["marker"], mec=looks[names[strategy]]["color"], mfc="none")
            quoted(totals, part["delay_ms"], part["total_s"], "_", ms=9, **look)
        totals.set_title(setting, fontsize=9)
        totals.set_ylim(bottom=0)
        ratios.set(ylim=(0.98, None), xlabel="added delay (ms, one way)")
    if paper is not None:
        axes[0, 0].plot([], [], label="quoted, in the shape of each", **plotting.HOLLOW)
    axes[0, 0].set_ylabel("total time (s)")
    axes[1, 0].set_ylabel("total over the oracle's")
    legend(figure, "simulated with the authors' paces unless given; acceptance drawn as in the paper, recorded by the "
           "authors (replayed), or changing in regimes")  # fmt: skip
    return figure


def case_study(
    events: pd.DataFrame, decisions: pd.DataFrame, delays: pd.DataFrame, paper_events: pd.DataFrame | None = None,
    paper_decisions: pd.DataFrame | None = None, kind: str = "replayed",
) -> Figure:  # fmt: skip
    """Figure 10, a column a case: pipeline, one-way delay, ΔZ with the moves, running acceptance.

    events, decisions, delays: of `replays.case_study`. paper_*: of `printed`, in a column of their own, where the
    delay is of the messages. A square is a decision, larger where the aggregator moved.
    """
    need(events, "case what side to outcome", "position begin_s end_s")
    cases = [(f"{case} ({kind})", *(t[t["case"] == case] for t in (events, decisions, delays)))
             for case in order(events["case"])]  # fmt: skip
    if paper_events is not None and paper_decisions is not None:
        sent = paper_events[paper_events["what"] != "decode"].sort_values("begin_s")
        delay = pd.DataFrame({"time_s": sent["begin_s"], "one_way_s": sent["end_s"] - sent["begin_s"]})
        cases.append(("the paper's (quoted)", paper_events.assign(outcome=""), paper_decisions, delay))
    options: dict[str, Any] = dict(sharex=True, sharey="row", height_ratios=(2.4, 1, 1.2, 1))
    figure, axes = panels(4, len(cases), width=10.5 / len(cases), height=1.75, gridspec_kw=None, **options)
    for column, (title, done, rows, delay) in zip(axes.T, cases, strict=True):
        _space_time(column[0], done)
        column[0].set_title(title, fontsize=9)
        column[1].plot(delay["time_s"], delay["one_way_s"], color=COLOURS["grey"])
        column[2].axhline(0, color=COLOURS["black"], lw=0.8)
        for side, colour in (("device", "green"), ("cloud", "orange")):
            here = rows[rows["side"] == side]
            column[2].scatter(here["time_s"], here["delta_z_s"], s=np.where(here["moved"], 60, 14), marker="s",
                              color=COLOURS[colour], label=f"{side} aggregates (large: it moves)")  # fmt: skip
            column[3].plot(rows["time_s"], rows[side], ".-", ms=5, color=COLOURS[colour], label=f"drafts of the {side}")
        column[3].set(xlabel="time (s)", ylim=(-0.05, 1.05))
    labels = ("", "one-way\ndelay (s)", "$\\Delta Z$\n(s a token)", "acceptance\nso far")
    for axis, label in zip(axes[:, 0], labels, strict=True):
        axis.set_ylabel(label, fontsize=8)
    for axis in axes[2:, -1]:
        axis.legend(fontsize=7, loc="best")
    _event_legend(figure, pd.concat([done for _, done, _, _ in cases]), kind)
    return figure


# The simulator against the live system


def validation(table: pd.DataFrame, tolerance: float = 0.1) -> Figure:
    """Simulated against measured latency per token: left, one over the other by delay; right, the two.

    table: columns method, pace, delay_ms, measured_ms, low, high (of measured), simulated_ms.
    """
    need(table, "method pace", "delay_ms low high", least=0, unique="method pace delay_ms")
    paces, methods = order(table["pace"]), _looks(table["method"])
    looks = {f"{method}, {pace}": dict(color=style["color"], marker="os^vD"[number % 5], lw=1, ms=4.5)
             for method, style in methods.items() for number, pace in enumerate(paces)}  # fmt: skip
    ratio = table["simulated_ms"] / table["measured_ms"]
    rows = table.assign(series=table["method"] + ", " + table["pace"], ratio=ratio)
    figure, axes = panels(1, 2, width=4.3, height=3.3)
    left, right = axes[0]
    lines(left, rows.drop(columns=["low", "high"]), "delay_ms", "ratio", "series", looks=looks)
    for series, part in groups(rows, "series"):
        style: dict[str, Any] = looks[series] | {"ls": ""}
        error = plotting.spread(part, "measured_ms")
        right.errorbar(part["measured_ms"], part["simulated_ms"], xerr=error, elinewidth=0.8, **style)
    left.axhspan(1 - tolerance, 1 + tolerance, label=f"within {tolerance:.0%}", **BAND)
    left.axhline(1, color=COLOURS["black"], lw=0.8)
    both = table[["measured_ms", "simulated_ms"]].to_numpy()
    ends = np.array([0.9 * both.min(), 1.1 * both.max()])
    right.fill_between(ends, (1 - tolerance) * ends, (1 + tolerance) * ends, **BAND)
    right.plot(ends, ends, color=COLOURS["black"], lw=0.8)
    left.set(xlabel="added network delay (ms)", ylabel="simulated over measured")
    right.set(xlabel="measured (ms a token), 95 % interval", ylabel="simulated (ms a token)", xscale="log",
              yscale="log")  # fmt: skip
    plain(right.xaxis, steps=True)
    plain(right.yaxis, steps=True)
    legend(figure, "measured+simulated", columns=3)
    return figure


# Parts of figures


def _space_time(axis: Axes, bars: pd.DataFrame) -> None:
    """Decodes as bars in two lanes, messages as lines between them from sending to arrival."""
    length, lane = bars["end_s"] - bars["begin_s"], bars["side"].map(_LANES)
    decode, room = bars["what"] == "decode", length > _LONG * bars["end_s"].max()
    for outcome, colour in _OUTCOMES.items():
        for wide, edge in ((room, dict(edgecolor="white", lw=0.5)), (~room, dict(lw=0))):
            at = decode & wide & (bars["outcome"] == outcome)
            look: dict[str, Any] = dict(color=COLOURS[colour], alpha=0.9 if outcome else 0.25, **edge)
            axis.barh(lane[at], length[at], _BAR, left=bars["begin_s"][at], **look)
    for bar in bars[decode & room].to_dict("records"):
        middle = (bar["begin_s"] + bar["end_s"]) / 2
        axis.text(middle, _LANES[bar["side"]], str(bar["position"]), ha="center", va="center", fontsize=7)
    for what, (colour, line, width) in _MESSAGES.items():
        sent = bars[bars["what"] == what]
        start, stop = (np.array([_LANES[side] for side in sent[end]], float) for end in ("side", "to"))
        inward, apart = (stop - start) * _BAR / 2, np.full(len(sent), np.nan)
        times = np.column_stack([sent["begin_s"], sent["end_s"], apart]).ravel()
        places = np.column_stack([start + inward, stop - inward, apart]).ravel()
        axis.plot(times, places, color=COLOURS[colour], ls=line, lw=width, alpha=0.8)
    axis.set_yticks([*_LANES.values()], [*_LANES])
    axis.set_ylim(-0.3, 1.3)
    axis.grid(axis="y", visible=False)


def _event_legend(figure: Figure, bars: pd.DataFrame, kind: str) -> None:
    outcomes = set(bars.loc[bars["what"] == "decode", "outcome"])
    handles: list[Any] = [
        Patch(color=COLOURS[colour], alpha=0.9 if outcome else 0.25, label=f"decode, {outcome or 'outcome not given'}")
        for outcome, colour in _OUTCOMES.items() if outcome in outcomes
    ]  # fmt: skip
    for what, (colour, line, width) in _MESSAGES.items():
        if what in set(bars["what"]):
            handles += figure.axes[0].plot([], [], color=COLOURS[colour], ls=line, lw=width, label=f"{what} sent")
    legend(figure, kind, columns=4 if len(handles) > 6 else 6, axes=[], first=handles)


def _symbols(formula: str) -> str:
    """A formula of the file in the paper's symbols."""
    for name, symbol in (("c_dec_", "c^"), ("c_trans_", "t^"), ("phi", r"\varphi"), ("max", r"\max")):
        formula = formula.replace(name, symbol)
    return f"${formula}$"


def _looks(methods: Any) -> dict[str, dict[str, Any]]:
    """Colour, line and marker by method; those that the paper does not have take what is left, each its own."""
    left = (("black", "P"), ("sky", "X"), ("yellow", "*"), ("purple", "h"), ("red", "p"))
    others = [dict(color=COLOURS[colour], ls=line, marker=marker, lw=1.2)
              for line in ("-.", "--", ":") for colour, marker in left]  # fmt: skip
    names = order(methods)
    unknown = [name for name in names if name not in _LOOKS]
    return {name: _LOOKS[name] if name in _LOOKS else others[unknown.index(name)] for name in names}
