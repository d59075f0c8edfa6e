"""DRAGON's figures. Each function draws tables of `analysis`, `replays` or the live experiments and returns the figure.

Legends say the kind of each series; what the paper prints is hollow or has panels of its own, and is called quoted.
All functions raise ValueError where a table lacks a column, has no row, or holds a value that cannot be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ondevice.plotting import COLOURS, need, panels

_STYLES: dict[str, tuple[str, str, str]] = {  # colour, line, marker
    "DRAGON": ("blue", "-", "o"), "DRDG/TW": ("orange", "-", "s"), "DRDG/SW": ("green", "-", "D"),
    "RAG-Sequence": ("purple", "-", "v"), "DRCG": ("red", "-", "^"), "DRCG/Text": ("red", "-", "^"),
    "DRCG/KV": ("purple", "-", "v"), "CRCG/Device": ("grey", "--", "<"), "CRCG/Cloud": ("sky", "--", ">"),
    "no retrieval": ("black", ":", ""),
}  # fmt: skip
_STRATEGIES = {  # of Figure 9: name, colour, line, marker
    "Cloud": ("Cloud", "orange", "-", "s"), "Device": ("Device", "green", "-", "^"),
    "Random": ("Random", "grey", "-", "v"), "DRAGON": ("DRAGON, the paper's rule", "red", "-", "o"),
    "Lagging": ("DRAGON, our rule", "blue", "-", "D"), "Oracle": ("oracle, lower bound", "black", "--", ""),
}  # fmt: skip
_OUTCOMES = {"accepted": "sky", "rejected": "red", "void": "yellow", "stopped": "grey", "": "black"}
_MESSAGES = {"draft": ("purple", "-", 0.7), "target": ("black", "-", 0.9), "switch": ("green", "--", 2.2)}
_LANES = {"cloud": 1.0, "device": 0.0}
_PAIR_COLOURS = ("blue", "orange", "green", "red", "purple", "sky", "black")
_BAR = 0.26  # height of a lane
_LONG = 0.018  # of the time axis, from which a bar has room for its position
_PLAIN = StrMethodFormatter("{x:g}")


# Figures 3, 4 and 5, Table 1


def difference(table: pd.DataFrame, decode_remote: float = 0.5, rtt: float = 0.3) -> Figure:
    """Figure 3: ΔZ against the local side's decode latency, a colour a pair of acceptance rates.

    table: of `analysis.difference_curves`, with these two parameters (seconds).
    """
    need(table, "kind", "decode_local alpha_l alpha_r delta_z")
    figure, axes = panels(1, 1, width=7.4, height=3.6)
    axis = axes[0, 0]
    for number, ((local, remote), rows) in enumerate(table.groupby(["alpha_l", "alpha_r"], sort=False)):
        colour = COLOURS[_PAIR_COLOURS[number % len(_PAIR_COLOURS)]]
        for kind, part in rows.sort_values("decode_local").groupby("kind"):
            style = dict(ls="-", marker="") if kind == "analytic" else dict(ls="", marker="o", ms=3.5)
            name = f"$\\alpha^l$ = {local:g}, $\\alpha^r$ = {remote:g}, {kind}"
            axis.plot(part["decode_local"], part["delta_z"], color=colour, label=name, **style)
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
    return figure


def pipelines(bars: pd.DataFrame, tokens: pd.DataFrame, kind: str = "simulated") -> Figure:
    """Figure 4: both sides' decodes and the messages between them, a panel a case.

    bars: of `analysis.timeline` with `case`. tokens: columns case, decided_s, per_token_s, formula_s; a dotted line is
    an aggregation, with the time since the one before.
    """
    need(bars, "case what side to outcome", "position begin_s end_s")
    need(tokens, "case", "decided_s per_token_s formula_s")
    cases = list(dict.fromkeys(bars["case"]))
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
    for table in (surface, points):
        need(table, "kind", "decode_local rtt alpha_r speedup")
    rtts = list(dict.fromkeys(surface["rtt"]))
    missing = sorted(set(points["rtt"]) - set(rtts))
    if missing:
        raise ValueError(f"There are points at rtt {missing[0]:g}, where there is no surface.")
    figure, axes = panels(2, len(rtts), width=8.6 / len(rtts), height=2.6, sharex=True, sharey="row")
    top = max(surface["speedup"].max(), points["speedup"].max())
    image: Any = None
    for column, rtt in enumerate(rtts):
        above, below = axes[:, column]
        rows, found = surface[surface["rtt"] == rtt], points[points["rtt"] == rtt]
        wide = rows.pivot(index="alpha_r", columns="decode_local", values="speedup")
        levels = np.geomspace(1, top, 15)
        image = above.contourf(wide.columns, wide.index, wide, levels=levels, norm="log", cmap="viridis")
        above.set_title(f"rtt = {rtt:g} $c^r$", fontsize=9)
        above.grid(visible=False)
        for number, alpha in enumerate(sorted(found["alpha_r"].unique())):
            colour = COLOURS[_PAIR_COLOURS[number % len(_PAIR_COLOURS)]]
            near = np.unique(rows["alpha_r"])
            line = rows[rows["alpha_r"] == near[np.abs(near - alpha).argmin()]]
            dots, name = found[found["alpha_r"] == alpha], "$\\alpha^r$ = "
            curve = f"{name}{line['alpha_r'].iloc[0]:g}, analytic"
            below.plot(line["decode_local"], line["speedup"], color=colour, label=curve)
            below.plot(
                dots["decode_local"], dots["speedup"], "o", ms=4, color=colour, label=f"{name}{alpha:g}, simulated"
            )
        below.set_xlabel("$c^l / c^r$")
    axes[0, 0].set_ylabel(r"acceptance $\alpha^r$")
    axes[1, 0].set_ylabel("speed-up")
    figure.colorbar(image, ax=list(axes[0]), label="speed-up (analytic)", format="%.1f", ticks=np.geomspace(1, top, 8))
    _legend(figure, axes[1], columns=3)
    return figure


def waiting(table: pd.DataFrame) -> Figure:
    """Table 1: seconds from an aggregation to the next pair of drafts, by case: formula and simulated, side by side.

    table: of `analysis.waiting_times`.
    """
    need(table, "local remote formula steady_form", "steady_s simulated_steady_s formula_s simulated_s", least=0)
    figure, axes = panels(1, 2, width=4.0, height=4.0, sharey=True)
    place = np.arange(len(table))
    sides = (("steady_s", "simulated_steady_s", "the case again and again"),
             ("formula_s", "simulated_s", "among others, mean"))  # fmt: skip
    for axis, (formula, found, title) in zip(axes[0], sides, strict=True):
        axis.barh(place, table[found], 0.5, color=COLOURS["sky"], label="simulated")
        axis.plot(table[formula], place, "D", mfc="white", mec=COLOURS["black"], ms=6, label="formula, analytic")
        for y, seconds in zip(place, table[found], strict=True):
            axis.text(seconds / 2, y, f"{seconds:.2f} s", ha="center", va="center", fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.set(xlabel="waiting time (s)", ylim=(len(table) - 0.5, -0.5))
        axis.grid(axis="y", visible=False)
    forms = table["formula"].map(_symbols) + "\nsteady: " + table["steady_form"].map(_symbols)
    names = "$x^l$ " + table["local"] + ", $x^r$ " + table["remote"] + "\n" + forms
    axes[0, 0].set_yticks(place, names, fontsize=8)
    _legend(figure, axes[0], columns=2)
    return figure


# Figures 6, 7 and 8


def perplexity(table: pd.DataFrame, quoted: pd.DataFrame | None = None, kind: str = "measured") -> Figure:
    """Figure 6: perplexity against the documents of both sides; bands and bars are 95 % intervals.

    table: columns method, documents, perplexity, low, high, model, corpus. quoted: the same without the interval
    (`printed.perplexity`), in panels of its own. A method with one row, at 0 documents, is a line.
    """
    figure = _by_method(table, quoted, "documents", "perplexity", ["model", "corpus"], kind)
    figure.supxlabel("documents (both sides)", fontsize=9)
    figure.supylabel("perplexity", fontsize=9)
    return figure


def per_token(table: pd.DataFrame, quoted: pd.DataFrame | None = None, kind: str = "measured") -> Figure:
    """Figure 7: latency per token against the added delay; bands are 95 % intervals, bars of the quoted +-1.96 standard
    errors of the authors' runs (the paper draws none).

    table: columns method, delay_ms, per_token_ms, low, high, model, pace (such as "unpaced"). quoted: the same without
    pace (`printed.per_token`), its interval may be NaN. A method with one delay is a line.
    """
    figure = _by_method(table, quoted, "delay_ms", "per_token_ms", ["model", "pace"], kind)
    figure.supxlabel("added network delay (ms)", fontsize=9)
    figure.supylabel("latency (ms a token)", fontsize=9)
    for axis in figure.axes:
        axis.set_ylim(bottom=0)
    return figure


def ttft(table: pd.DataFrame, quoted: pd.DataFrame | None = None, kind: str = "measured") -> Figure:
    """Figure 8: time to first token against the added delay, on a logarithmic axis.

    Bands are from low to high: of `first_token.summary` the least and the greatest of the questions.
    table: columns method, delay_ms, ttft_ms, low, high, model. quoted: the same without the interval (`printed.ttft`).
    """
    figure = _by_method(table, quoted, "delay_ms", "ttft_ms", ["model"], kind, log=True)
    figure.supxlabel("added network delay (ms)", fontsize=9)
    figure.supylabel("time to first token (ms)", fontsize=9)
    for axis in figure.axes:  # a panel of one level shows that it is one
        low, high = axis.get_ylim()
        if high < 4 * low:
            axis.set_ylim(low / 3, high * 3)
    return figure


def _by_method(
    table: pd.DataFrame, quoted: pd.DataFrame | None, x: str, y: str, by: list[str], kind: str, *, log: bool = False
) -> Figure:
    """A panel a setting, ours first, then a panel a model of the paper; a line a method."""
    need(table, " ".join(["method", *by]), f"{x} {y} low high", least=0, unique=" ".join(["method", x, *by]))
    parts = [(", ".join(_words(name)), kind, rows) for name, rows in table.groupby(by, sort=False)]
    ours = len(parts)
    if quoted is not None:
        known = [name for name in by if name == "model" or name in quoted]
        need(quoted, " ".join(["method", *known]), f"{x} {y}", least=0, unique=" ".join(["method", x, *known]))
        parts += [(", ".join(_words(name)), "quoted", rows) for name, rows in quoted.groupby(known, sort=False)]
    figure, axes = _grid(ours, len(parts))
    colours = _method_styles([*table["method"], *([] if quoted is None else quoted["method"])])
    for axis, (name, of, rows) in zip(axes, parts, strict=True):
        ends = table[x].min(), table[x].max()
        for method, found in rows.groupby("method", sort=False):
            _method_line(axis, found.sort_values(x), x, y, ends, str(method), colours[str(method)])
        axis.set_title(f"{name}{chr(10) if len(name) > 18 else ' '}({of})", fontsize=9)
        if log:
            _log_axis(axis)
    _legend(figure, axes, columns=5)
    return figure


def _grid(ours: int, count: int) -> tuple[Figure, list[Axes]]:
    """Panels for ours, then the paper's: in one row of at most four, else the paper's begin another row."""
    columns = count if count <= 4 else min(ours, 4)
    first = -(-ours // columns) * columns if count > 4 else ours
    lines = -(-(first + count - ours) // columns)
    figure, axes = panels(lines, columns, width=max(2.7, 7.6 / columns), height=2.6, sharex=True)
    used = [*range(ours), *range(first, first + count - ours)]
    for number, axis in enumerate(axes.ravel()):
        axis.set_visible(number in used)
    for number in used:
        axes.ravel()[number].tick_params(labelbottom=number + columns not in used)
    return figure, [axes.ravel()[number] for number in used]


def _method_line(
    axis: Axes, rows: pd.DataFrame, x: str, y: str, ends: tuple[float, float], label: str, style: tuple[str, str, str]
) -> None:
    colour, line, marker = style
    look: dict[str, Any] = dict(color=colour, ls=line, lw=1.2, label=label, zorder=3 if line != "-" else 2)
    alone, known = len(rows) == 1, {"low", "high"} <= set(rows.columns)
    if alone:
        axis.plot(ends, [rows[y].iloc[0]] * 2, **look)
    else:
        axis.plot(rows[x], rows[y], marker=marker, ms=4, **look)
    if known and not alone and rows[["low", "high"]].notna().to_numpy().all():
        axis.fill_between(rows[x], rows["low"], rows["high"], color=colour, alpha=0.18, lw=0)
    elif known:
        spread = np.maximum(0, [rows[y] - rows["low"], rows["high"] - rows[y]])
        at = [ends[1]] if alone else rows[x]
        axis.errorbar(at, rows[y], yerr=spread, ls="", color=colour, elinewidth=0.8, capsize=2)


# Figures 9 and 10


def scheduling(table: pd.DataFrame, quoted: pd.DataFrame | None = None) -> Figure:
    """Figure 9: above, the total time by strategy and added delay; below, over the oracle's. A column a setting.

    table: of `replays.figure_9`; bars are 95 % intervals. quoted: of `printed.scheduling`, on settings named after the
    figure's acceptance and model ("drawn, OPT-1.3B").
    """
    need(table, "setting strategy", "delay_ms total_s low high over_oracle", least=0,
          unique="setting strategy delay_ms")  # fmt: skip
    _known(table["strategy"], _STRATEGIES, "strategy")
    settings = list(dict.fromkeys(table["setting"]))
    figure, axes = panels(2, len(settings), width=max(2.3, 6.9 / len(settings)), height=2.5, sharex=True)
    for column, setting in enumerate(settings):
        totals, ratios = axes[:, column]
        for strategy, (name, colour, line, marker) in _STRATEGIES.items():
            rows = table[(table["setting"] == setting) & (table["strategy"] == strategy)].sort_values("delay_ms")
            style: dict[str, Any] = dict(color=COLOURS[colour], ls=line, marker=marker, ms=4, lw=1.2, label=name)
            spread = [rows["total_s"] - rows["low"], rows["high"] - rows["total_s"]]
            totals.errorbar(rows["delay_ms"], rows["total_s"], yerr=spread, capsize=2, elinewidth=0.7, **style)
            ratios.plot(rows["delay_ms"], rows["over_oracle"], **style)
        if quoted is not None:
            _quoted_totals(totals, quoted[[setting == f"drawn, {model}" for model in quoted["model"]]])
        totals.set_title(setting, fontsize=9)
        totals.set_ylim(bottom=0)
        ratios.set(ylim=(0.98, None), xlabel="added delay (ms, one way)")
    axes[0, 0].set_ylabel("total time (s)")
    axes[1, 0].set_ylabel("total over the oracle's")
    _legend(figure, axes.ravel(), columns=4, title="simulated with the authors' paces unless given; acceptance "
            "drawn as in the paper, recorded by the authors (replayed), or changing in regimes")  # fmt: skip
    return figure


def _quoted_totals(axis: Axes, rows: pd.DataFrame) -> None:
    for strategy, part in rows.groupby("strategy", sort=False):
        _, colour, _, marker = _STRATEGIES[str(strategy)]
        axis.plot(part["delay_ms"], part["total_s"], ls="", marker=marker, ms=9, mfc="none", mew=0.9,
                  mec=COLOURS[colour])  # fmt: skip
    if len(rows):
        axis.plot([], [], "o", ms=9, mfc="none", mec=COLOURS["black"], label="quoted, in the shape of each")


def case_study(
    events: pd.DataFrame, decisions: pd.DataFrame, delays: pd.DataFrame, quoted_events: pd.DataFrame | None = None,
    quoted_decisions: pd.DataFrame | None = None, kind: str = "replayed",
) -> Figure:  # fmt: skip
    """Figure 10, a column a case: pipeline, one-way delay, ΔZ with the moves, running acceptance.

    events, decisions, delays: of `replays.case_study`. quoted_*: of `printed`, in a column of their own, where the
    delay is of the messages. A square is a decision, larger where the aggregator moved.
    """
    need(events, "case what side to outcome", "position begin_s end_s")
    need(decisions, "case side", "position time_s delta_z_s device cloud")
    need(delays, "case", "time_s one_way_s", least=0)
    cases = [(f"{case} ({kind})", *(t[t["case"] == case] for t in (events, decisions, delays)))
             for case in dict.fromkeys(events["case"])]  # fmt: skip
    if quoted_events is not None and quoted_decisions is not None:
        sent = quoted_events[quoted_events["what"] != "decode"].sort_values("begin_s")
        delay = pd.DataFrame({"time_s": sent["begin_s"], "one_way_s": sent["end_s"] - sent["begin_s"]})
        cases.append(("the paper's (quoted)", quoted_events.assign(outcome=""), quoted_decisions, delay))
    options: dict[str, Any] = dict(sharex=True, sharey="row", height_ratios=(2.4, 1, 1.2, 1))
    figure, axes = panels(4, len(cases), width=10.5 / len(cases), height=1.75, gridspec_kw=None, **options)
    for column, (title, bars, rows, delay) in zip(axes.T, cases, strict=True):
        _space_time(column[0], bars)
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
    _event_legend(figure, pd.concat([bars for _, bars, _, _ in cases]))
    return figure


# The simulator against the live system


def validation(table: pd.DataFrame, tolerance: float = 0.1) -> Figure:
    """Simulated against measured latency per token: left, one over the other by delay; right, the two.

    table: columns method, pace, delay_ms, measured_ms, low, high (of measured), simulated_ms.
    """
    need(table, "method pace", "delay_ms low high", least=0, unique="method pace delay_ms")
    need(table, "", "measured_ms simulated_ms", least=1e-9)
    figure, axes = panels(1, 2, width=4.3, height=3.3)
    left, right = axes[0]
    paces = list(dict.fromkeys(table["pace"]))
    for method, style in _method_styles(table["method"]).items():
        for pace, rows in table[table["method"] == method].groupby("pace", sort=False):
            marker = "os^vD"[paces.index(pace) % 5]
            look: dict[str, Any] = dict(color=style[0], marker=marker, ms=4.5, label=f"{method}, {pace}")
            rows = rows.sort_values("delay_ms")
            left.plot(rows["delay_ms"], rows["simulated_ms"] / rows["measured_ms"], lw=1, **look)
            spread = np.maximum(0, [rows["measured_ms"] - rows["low"], rows["high"] - rows["measured_ms"]])
            right.errorbar(rows["measured_ms"], rows["simulated_ms"], xerr=spread, ls="", elinewidth=0.8, **look)
    left.axhspan(1 - tolerance, 1 + tolerance, fc=COLOURS["grey"], alpha=0.2, lw=0, label=f"within {tolerance:.0%}")
    left.axhline(1, color=COLOURS["black"], lw=0.8)
    both = table[["measured_ms", "simulated_ms"]].to_numpy()
    ends = np.array([0.9 * both.min(), 1.1 * both.max()])
    right.fill_between(ends, (1 - tolerance) * ends, (1 + tolerance) * ends, fc=COLOURS["grey"], alpha=0.2, lw=0)
    right.plot(ends, ends, color=COLOURS["black"], lw=0.8)
    left.set(xlabel="added network delay (ms)", ylabel="simulated over measured")
    right.set(xlabel="measured (ms a token), 95 % interval", ylabel="simulated (ms a token)", xscale="log",
              yscale="log")  # fmt: skip
    for values in (right.xaxis, right.yaxis):
        values.set_major_locator(LogLocator(subs=(1, 2, 5)))
        values.set_major_formatter(_PLAIN)
        values.set_minor_formatter(NullFormatter())
    _legend(figure, [left], columns=3)
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


def _event_legend(figure: Figure, bars: pd.DataFrame, kind: str = "") -> None:
    found = set(bars.loc[bars["what"] == "decode", "outcome"])
    handles: list[Any] = [
        Patch(color=COLOURS[colour], alpha=0.9 if outcome else 0.25, label=f"decode, {outcome or 'outcome not given'}")
        for outcome, colour in _OUTCOMES.items()
        if outcome in found
    ]
    for what, (colour, line, width) in _MESSAGES.items():
        if what in set(bars["what"]):
            (sent,) = figure.axes[0].plot([], [], color=COLOURS[colour], ls=line, lw=width, label=f"{what} sent")
            handles.append(sent)
    columns = 4 if len(handles) > 6 else 6
    place: dict[str, Any] = dict(loc="outside upper center", ncols=columns, fontsize=8, title_fontsize=8)
    figure.legend(handles=handles, title=kind or None, **place)


def _symbols(formula: str) -> str:
    """A formula of the file in the paper's symbols."""
    for plain, symbol in (("c_dec_", "c^"), ("c_trans_", "t^"), ("phi", r"\varphi"), ("max", r"\max")):
        formula = formula.replace(plain, symbol)
    return f"${formula}$"


def _method_styles(methods: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """Colour, line and marker by method; those that the paper does not have take what is left, each its own."""
    others = _other_styles()
    known = {name: (COLOURS[colour], line, marker) for name, (colour, line, marker) in _STYLES.items()}
    return {name: known[name] if name in known else next(others) for name in dict.fromkeys(methods)}


def _other_styles() -> Iterator[tuple[str, str, str]]:
    for line in ("-.", "--", ":"):
        for colour, marker in (("black", "P"), ("sky", "X"), ("yellow", "*"), ("purple", "h"), ("red", "p")):
            yield COLOURS[colour], line, marker


def _log_axis(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(_PLAIN)
    axis.yaxis.set_minor_formatter(NullFormatter())


def _words(name: Any) -> list[str]:
    return [str(part) for part in (name if isinstance(name, tuple) else (name,))]


def _legend(figure: Figure, axes: Iterable[Axes], *, columns: int, title: str = "") -> None:
    """One legend above all panels, with every entry that any of them has, the quoted last."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = sorted(found, key=lambda label: label.startswith("quoted"))
    figure.legend([found[label] for label in labels], labels, loc="outside upper center", ncols=columns, fontsize=8,
                  title=title or None, title_fontsize=8)  # fmt: skip


def _known(found: pd.Series, names: Iterable[str], what: str) -> None:
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise ValueError(f"There is no {what} {', '.join(map(str, unknown))}; there are {', '.join(names)}.")
