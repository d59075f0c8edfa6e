"""DiSCo's figures. Each function draws one table of `experiments` and returns the figure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter, ScalarFormatter

from ondevice.disco.distributions import Device, Latency, Lengths
from ondevice.disco.policy import DispatchPolicy
from ondevice.plotting import COLOURS, mark_kind, panels, shared_legend

POLICY_STYLE = {
    "server only": (COLOURS["grey"], "--"),
    "device only": (COLOURS["grey"], ":"),
    "Stoch": (COLOURS["orange"], "-"),
    "race": (COLOURS["sky"], "-"),
    "DiSCo": (COLOURS["blue"], "-"),
    "mean-optimal": (COLOURS["green"], "-."),
}


def waits(policies: Mapping[str, DispatchPolicy], longest: int, cap: float) -> Figure:
    """Device wait against prompt length (Algorithm 2, Eq. 1); dots are a coin's other side. Never is drawn at `cap`."""
    figure, axes = panels(1, 1, width=5.4, height=2.8)
    axis = axes[0, 0]
    length = np.arange(1, longest + 1)
    for (label, policy), colour in zip(policies.items(), COLOURS.values(), strict=False):
        at = np.minimum(length, len(policy.chance) - 1)
        first, second = np.minimum(policy.wait_device[:, at], cap)
        axis.step(length, first, where="mid", label=label, color=colour)
        tossed = (policy.chance[at] > 0) & (first != second)
        axis.plot(length[tossed], second[tossed], ".", color=colour)
    ticks = [tick for tick in axis.get_yticks() if 0 <= tick < 0.9 * cap]
    axis.set_yticks([*ticks, cap], [*(f"{tick:g}" for tick in ticks), "never"])
    axis.set(xlabel="prompt length (tokens)", ylabel="device waits (s)", ylim=(-0.03 * cap, 1.05 * cap))
    axis.legend(loc="center right", bbox_to_anchor=(1, 0.62))
    mark_kind(figure, "simulated; LLaMA inferred")
    return figure


def ttft_over_time(series: Mapping[str, np.ndarray], kind: str) -> Figure:
    """Figure 2: TTFT in the order of the requests, one panel per service or device."""
    figure, axes = panels(1, len(series), width=2.4, height=2.2)
    for axis, (name, seconds) in zip(axes[0], series.items(), strict=True):
        axis.plot(np.arange(len(seconds)), seconds, lw=0.8, color=COLOURS["blue"])
        axis.axhline(
            Latency.of(seconds).quantile(0.5),
            color=COLOURS["orange"],
            lw=1,
            label=f"median {Latency.of(seconds).quantile(0.5):.2g} s",
        )
        axis.axhline(
            Latency.of(seconds).quantile(0.99),
            color=COLOURS["red"],
            lw=1,
            ls="--",
            label=f"P99 {Latency.of(seconds).quantile(0.99):.2g} s",
        )
        wide = max(seconds) > 20 * min(seconds)
        axis.set(title=name, xlabel="request", yscale="log" if wide else "linear")
        axis.set_ylim(0.5 * min(seconds) if wide else 0, max(seconds) * (8 if wide else 1.45))
        axis.legend(fontsize=7, loc="upper left")
    axes[0, 0].set_ylabel("TTFT (s)")
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 0.95))  # room for the kind
    mark_kind(figure, kind)
    return figure


def distributions(series: Mapping[str, np.ndarray], xlabel: str, kind: str, *, reading_rate: float) -> Figure:
    """Figure 3: cumulative distributions of a request's mean time between tokens, and the reader's."""
    figure, axes = panels(1, 1, width=5.6, height=3.0)
    axis = axes[0, 0]
    colours = list(COLOURS.values())
    for number, (name, seconds) in enumerate(series.items()):
        style = ("-", "--", ":")[number // len(colours)]
        axis.step(
            np.sort(seconds),
            np.arange(1, len(seconds) + 1) / len(seconds),
            label=name,
            lw=1.2,
            ls=style,
            color=colours[number % len(colours)],
        )
    axis.axvline(1 / reading_rate, color=COLOURS["black"], lw=1, ls="--")
    axis.text(1 / reading_rate * 0.93, 0.03, "the reader", rotation=90, ha="right", va="bottom", fontsize=8)
    axis.set(xlabel=xlabel, ylabel="share of requests", xscale="log", xlim=(1e-3, 0.4))
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    mark_kind(figure, kind)
    return figure


def token_gaps(timings: Mapping[str, pd.DataFrame], kind: str) -> Figure:
    """Figure 3 for devices: every gap between tokens against its place in the answer. timings: device_probe.measure."""
    figure, axes = panels(1, len(timings), width=4.0, height=2.6)
    for axis, (name, table) in zip(axes[0], timings.items(), strict=True):
        gaps = table[table["token"] > 0]
        levels = gaps.groupby("token")["seconds"].quantile(np.array([0.1, 0.5, 0.9])).unstack() * 1e3
        axis.plot(gaps["token"], gaps["seconds"] * 1e3, ".", ms=2, color=COLOURS["grey"], alpha=0.4, label="a gap")
        axis.fill_between(levels.index, levels[0.1], levels[0.9], color=COLOURS["sky"], alpha=0.5, label="P10 to P90")
        axis.plot(levels.index, levels[0.5], color=COLOURS["blue"], label="median")
        axis.set(title=name, xlabel="token of the answer", yscale="log")
        _plain_log_ticks(axis)
        axis.legend(fontsize=7, loc="upper right")
    axes[0, 0].set_ylabel("time since the token before (ms)")
    mark_kind(figure, kind)
    return figure


def ttft_by_length(requests: Mapping[str, pd.DataFrame], lines: Mapping[str, Mapping[str, float]], kind: str) -> Figure:
    """Table 1 as a picture: TTFT against prompt length. requests: device_probe.requests; lines: device_probe.line."""
    figure, axes = panels(1, len(requests), width=4.0, height=2.6)
    for axis, (name, table) in zip(axes[0], requests.items(), strict=True):
        fit, at = lines[name], np.array([0, table["length"].max()])
        axis.plot(table["length"], 1e3 * table["ttft_s"], ".", color=COLOURS["blue"], alpha=0.5, label="a request")
        axis.plot(
            at,
            1e3 * (at / fit["tokens_per_s"] + fit["overhead_s"]),
            color=COLOURS["orange"],
            label=f"{fit['tokens_per_s']:.0f} tokens/s, $R^2$ of medians {fit['r2']:.2f}",
        )
        axis.set(title=f"{name}, r = {fit['pearson_r']:.2f}", xlabel="prompt length (tokens)")
        axis.legend(fontsize=7)
    axes[0, 0].set_ylabel("TTFT (ms)")
    mark_kind(figure, kind)
    return figure


def cold_start(table: pd.DataFrame, paper: pd.DataFrame, kind: str) -> Figure:
    """Table 4 as a picture: load time and TTFT against size. table: of `cold_start`; paper: Table 4 as quoted."""
    figure, axes = panels(1, 2, width=4.2, height=2.9, sharex=True, sharey=True)
    for axis, column, title in ((axes[0, 0], "load_s", "load time"), (axes[0, 1], "ttft_s", "TTFT after loading")):
        for cache, colour in (("cold", "blue"), ("warm", "orange")):
            rows = table[table["page_cache"] == cache].sort_values("parameters")
            label = f"here, {'file read from disk' if cache == 'cold' else 'file in the page cache'}"
            axis.plot(rows["parameters"] / 1e9, rows[column], "o-", color=COLOURS[colour], label=label)
        for (gpu, rows), marker in zip(paper.groupby("gpu"), "xv", strict=False):
            label = f"paper, {str(gpu).removeprefix('NVIDIA ')}"
            axis.plot(rows["model_size_billion_params"], rows[column.replace("load_s", "load_time_s")],
                      ls=":", marker=marker, color=COLOURS["grey"], label=label)  # fmt: skip
        axis.set(title=title, xlabel="parameters (billion)", xscale="log", yscale="log")
    axes[0, 0].set_ylabel("seconds")
    shared_legend(figure, axes[0, 0], columns=4)
    mark_kind(figure, kind)
    return figure


def handover_quality(
    means: pd.DataFrame, labels: Mapping[str, str], kind: str, quoted: Mapping[str, tuple[float, float]] | None = None
) -> Figure:
    """Figures 8 and 10: scores against the hand-over; a row a metric, a column a direction. Bands are 95 % intervals.

    means: quality.means. labels: metric -> axis label. quoted: metric -> the paper's range.
    """
    directions = list(dict.fromkeys(means["direction"]))
    metrics = list(dict.fromkeys(means["metric"]))
    figure, axes = panels(len(metrics), len(directions), width=4.2, height=2.3, sharex=True, sharey="row")
    for i, metric in enumerate(metrics):
        for j, direction in enumerate(directions):
            axis = axes[i, j]
            rows = means[(means["metric"] == metric) & (means["direction"] == direction)].sort_values("handover")
            place = np.arange(len(rows))
            axis.fill_between(place, rows["low"], rows["high"], color=COLOURS["blue"], alpha=0.2, label="95 % interval")
            axis.plot(place, rows["mean"], "o-", color=COLOURS["blue"], label="answers that change hands")
            axis.axhspan(
                *rows["mean"].iloc[[0, -1]], color=COLOURS["orange"], alpha=0.25, lw=0, label="between the two (Eq. 6)"
            )
            if quoted and metric in quoted:
                axis.axhspan(*quoted[metric], color=COLOURS["grey"], alpha=0.4, lw=0, label="paper, other task")
            axis.set_xticks(place, rows["handover"])
            if not i:
                axis.set_title(direction, fontsize=9)
        axes[i, 0].set_ylabel(labels[metric], fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("tokens of the first model before the hand-over")
    shared_legend(figure, axes[0, 0], columns=4)
    mark_kind(figure, kind)
    return figure


def budget_curves(sweep: pd.DataFrame, metric: str, device: Device, kind: str, ylabel: str) -> Figure:
    """Figure 6: mean (or P99) TTFT against the budget; a row per constraint, a column per service.

    sweep: budget_sweep with the budgets 0 and 1 among others.
    """
    rows = sweep[sweep["device"] == device.name]
    services = list(dict.fromkeys(rows["service"]))
    figure, axes = panels(2, len(services), width=2.4, height=2.2, sharex=True)
    for i, constrained in enumerate(("device", "server")):
        for j, service in enumerate(services):
            axis = axes[i, j]
            part = rows[(rows["service"] == service) & (rows["constrained"] == constrained)]
            stoch = part[part["policy"] == "Stoch"].set_index("budget")[metric]
            other = "device" if constrained == "server" else "server"
            for name, budget in ((f"{other} only", 0.0), (f"{constrained} only", 1.0)):
                colour, style = POLICY_STYLE[name]
                axis.axhline(stoch[budget], color=colour, ls=style, lw=1, label=name)
            for name in ("Stoch", "race", "mean-optimal", "DiSCo"):
                line = part[part["policy"] == name].sort_values("budget")
                colour, style = POLICY_STYLE[name]
                axis.plot(line["budget"], line[metric], color=colour, ls=style, label=name)
            axis.set_title(f"{service}, {constrained}-constrained", fontsize=9)
            if i:
                axis.set_xlabel("budget b")
            if not j:
                axis.set_ylabel(ylabel)
            axis.set_ylim(bottom=0)
    shared_legend(figure, axes[0, 0], columns=6)
    mark_kind(figure, kind)
    return figure


def tail_bars(table: pd.DataFrame, kind: str) -> Figure:
    """Table 2 as a picture: our P99 reductions (tail_table) beside the paper's (column paper_percent)."""
    figure, axes = panels(2, 1, width=9.0, height=2.3)
    for axis, constrained in zip(axes[:, 0], ("device", "server"), strict=True):
        rows = table[table["constrained"] == constrained]
        x = np.arange(len(rows))
        axis.bar(x - 0.27, rows["paper_percent"], 0.27, color=COLOURS["grey"], label="paper (quoted)")
        axis.bar(x, rows["against_stoch_percent"], 0.27, color=COLOURS["blue"], label="ours, against Stoch")
        axis.bar(x + 0.27, rows["against_race_percent"], 0.27, color=COLOURS["sky"], label="ours, against race")
        models = rows["device"].str.split(", ").str[1].str.replace("Bloom", "B").str.replace("Qwen1.5", "Q")
        names = [f"{s}\n{m}" for s, m in zip(rows["service"], models, strict=True)]
        axis.set_xticks(x, names, fontsize=7)
        axis.set(ylabel="P99 TTFT reduction (%)", title=f"{constrained}-constrained")
        axis.grid(axis="x", visible=False)
    shared_legend(figure, axes[0, 0], columns=3)
    mark_kind(figure, kind)
    return figure


def user_points(table: pd.DataFrame, kind: str) -> Figure:
    """Figure 5: reduction of mean TTFT against Stoch per user, with a queue on the device. table: gain_over_stoch."""
    figure, axes = panels(1, 2, width=4.4, height=2.7)
    for axis, constrained in zip(axes[0], ("device", "server"), strict=True):
        part = table[table["constrained"] == constrained].sort_values("user")
        for policy, marker, colour in (("race", "^", "sky"), ("DiSCo", "o", "blue")):
            rows = part[part["policy"] == policy]
            axis.plot(np.arange(len(rows)), rows["gain_percent"], marker, color=COLOURS[colour], label=policy)
        gaps = part.drop_duplicates("user")["mean_gap_s"]
        axis.axhline(0, color=COLOURS["orange"], lw=1, label="Stoch")
        axis.set_xticks(np.arange(len(gaps)), [f"{gap:.0f}" for gap in gaps], fontsize=8)
        axis.set(
            xlabel="user's mean gap between requests (s)",
            ylabel="mean TTFT reduction (%)",
            title=f"{constrained}-constrained",
        )
        axis.legend(fontsize=8)
    mark_kind(figure, kind)
    return figure


def cost_curves(table: pd.DataFrame, device: Device, kind: str) -> Figure:
    """Figure 7: cost a request with and without migration, USD per million requests."""
    rows = table[table["device"] == device.name]
    services = list(dict.fromkeys(rows["service"]))
    figure, axes = panels(2, len(services), width=2.4, height=2.1, sharex=True)
    for i, constrained in enumerate(("device", "server")):
        for j, service in enumerate(services):
            axis = axes[i, j]
            part = rows[(rows["service"] == service) & (rows["constrained"] == constrained)].sort_values("budget")
            axis.plot(part["budget"], 1e6 * part["cost_without"], color=COLOURS["orange"], label="without migration")
            axis.plot(part["budget"], 1e6 * part["cost"], color=COLOURS["blue"], label="with migration")
            saved = 100 * (1 - part["cost"] / part["cost_without"]).max()
            axis.set_title(f"{service}, {constrained}: up to {saved:.0f} %", fontsize=9)
            axis.set_ylim(bottom=0)
            if i:
                axis.set_xlabel("budget b")
    figure.supylabel("USD per million requests", fontsize=10)
    shared_legend(figure, axes[0, 0], columns=2)
    mark_kind(figure, kind)
    return figure


def policy_time(table: pd.DataFrame, paper: pd.DataFrame, kind: str) -> Figure:
    """Figure 9: time to compute a policy against the number of samples. paper: columns n, policy, ms."""
    figure, axes = panels(1, 1, width=5.4, height=3.2)
    axis = axes[0, 0]
    colours = {"DiSCo-S": COLOURS["blue"], "DiSCo-D": COLOURS["green"], "mean-optimal": COLOURS["purple"]}
    for policy, colour in colours.items():
        ours = table[table["policy"] == policy]
        for what, style in (("from raw lists", "-"), ("from kept histogram", "--")):
            line = ours[ours["what"] == what]
            if len(line):
                axis.plot(line["n"], line["ms"], color=colour, ls=style, marker="o", ms=4, label=f"{policy}, {what}")
        quoted = paper[paper["policy"] == policy]
        if len(quoted):
            axis.plot(quoted["n"], quoted["ms"], color=colour, ls=":", marker="x", label=f"{policy}, paper (Apple M1)")
    axis.set(xscale="log", yscale="log", xlabel="samples of length and TTFT", ylabel="time for one policy (ms)")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    mark_kind(figure, kind)
    return figure


def mean_tail_plane(tables: Mapping[str, pd.DataFrame], kind: str) -> Figure:
    """Beyond the paper: mean against P99 TTFT of every policy at one budget, one panel per service."""
    markers = {
        "server only": ("s", "grey"),
        "Stoch-D": ("v", "orange"),
        "race-D": ("^", "sky"),
        "DiSCo-D": ("o", "blue"),
        "P99-optimal": ("D", "red"),
        "combined frontier": (".", "purple"),
        "mean-optimal": ("*", "green"),
        "online": ("P", "black"),
    }
    figure, axes = panels(1, len(tables), width=3.6, height=3.2)
    for axis, (service, table) in zip(axes[0], tables.items(), strict=True):
        for policy, (marker, colour) in markers.items():
            rows = table[table["policy"] == policy].sort_values("mean_s")
            line = "-" if policy in ("DiSCo-D", "combined frontier") else ""
            axis.plot(
                rows["mean_s"],
                rows["p99_s"],
                ls=line,
                marker=marker,
                color=COLOURS[colour],
                label=policy,
                lw=1,
                ms=9 if marker == "*" else 6,
            )
            for at in {0, len(rows) - 1} if policy == "DiSCo-D" else ():
                label, x, y = rows.iloc[at][["label", "mean_s", "p99_s"]]
                axis.annotate(f"α={label}", (x, y), fontsize=7, xytext=(4, 4), textcoords="offset points")
        bound = table.loc[table["policy"] == "clairvoyant", "mean_s"].iloc[0]
        axis.axvline(bound, color=COLOURS["grey"], ls=":", label="clairvoyant (mean)")
        axis.set(xlabel="mean TTFT (s)", title=service)
        if table["p99_s"].max() > 10 * table["p99_s"].min():
            axis.set_yscale("log")
    axes[0, 0].set_ylabel("P99 TTFT (s)")
    shared_legend(figure, axes[0, 0], columns=5)
    mark_kind(figure, kind)
    return figure


def drift(table: pd.DataFrame, budget: float, kind: str) -> Figure:
    """Beyond the paper: budget use and TTFT when the service changes half-way."""
    figure, axes = panels(1, 2, width=4.2, height=2.7)
    colours = (COLOURS["blue"], COLOURS["green"], COLOURS["black"], COLOURS["purple"])
    for (name, rows), colour in zip(table.groupby("policy", sort=False), colours, strict=True):
        axes[0, 0].plot(rows["request"], rows["used"], color=colour, label=name)
        smooth = rows["ttft_s"].rolling(200, min_periods=50).mean()
        axes[0, 1].plot(rows["request"], smooth, color=colour, label=name)
    axes[0, 0].axhline(budget, color=COLOURS["red"], ls="--", lw=1, label="budget")
    axes[0, 0].yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[0, 0].set(xlabel="request", ylabel="tokens on the device so far", ylim=(0, None))
    axes[0, 1].set(xlabel="request", ylabel="mean TTFT of the last 200 (s)", yscale="log")
    _plain_log_ticks(axes[0, 1])
    axes[0, 0].legend(fontsize=7)
    mark_kind(figure, kind)
    return figure


def delivery(times: Mapping[str, np.ndarray], due: np.ndarray, kind: str) -> Figure:
    """Figure 4 at work: tokens shown against time for one stream. times: name -> [N] seconds."""
    figure, axes = panels(1, 1, width=5.4, height=2.8)
    axis = axes[0, 0]
    axis.plot(due, np.arange(1, len(due) + 1), color=COLOURS["grey"], lw=4, alpha=0.4, label="reader's pace")
    for (name, seconds), colour in zip(times.items(), ("orange", "blue", "red"), strict=False):
        axis.step(seconds, np.arange(1, len(seconds) + 1), where="post", label=name, color=COLOURS[colour], lw=1.2)
    axis.set(xlabel="time since the request (s)", ylabel="tokens")
    axis.legend()
    mark_kind(figure, kind)
    return figure


def length_histogram(lengths: Lengths, policy: DispatchPolicy, longest: int) -> Figure:
    """Algorithm 3 at work: prompts on either side of the threshold, and the length on it, which a coin decides."""
    figure, axes = panels(1, 1, width=5.4, height=2.5)
    axis = axes[0, 0]
    raced = raced_share(lengths, policy)
    parts = (
        (raced == 0, "blue", "device only"),
        ((raced > 0) & (raced < 1), "purple", "a coin decides"),
        (raced == 1, "orange", "device and server"),
    )
    for part, colour, label in parts:
        share = 100 * lengths.mass[part].sum()
        axis.bar(
            lengths.support[part],
            lengths.mass[part],
            color=COLOURS[colour],
            width=1.0,
            label=f"{label}: {share:.0f} % of tokens",
        )
    beyond = 100 * lengths.mass[lengths.support > longest].sum()
    axis.set(
        xlabel=f"prompt length l (tokens); {beyond:.0f} % of tokens lie beyond",
        ylabel="share of all tokens",
        xlim=(0, longest),
    )
    axis.legend()
    mark_kind(figure, "analytic")
    return figure


def raced_share(lengths: Lengths, policy: DispatchPolicy) -> np.ndarray:
    """Chance that the server starts at once, per length of the support: [U]."""
    first, second = policy.wait_server[:, lengths.support] == 0
    chance = policy.chance[lengths.support]
    return (1 - chance) * first + chance * second


def _plain_log_ticks(axis: Axes) -> None:
    """Ticks at 1, 2 and 5 on a logarithmic y-axis, as plain numbers."""
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_minor_formatter(NullFormatter())
