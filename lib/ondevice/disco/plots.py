"""DiSCo's figures. Each function draws one table of `experiments` and returns the figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ondevice.disco.distributions import Device, Latency, Lengths
from ondevice.disco.policy import DispatchPolicy
from ondevice.plotting import BAND, COLOURS, bars, facets, legend, lines, look, mark_kind, order, panels, plain, quoted

POLICY_STYLE: dict[str, dict[str, Any]] = {
    name: dict(color=COLOURS[colour], ls=style, marker="", lw=lw)
    for name, colour, style, lw in (
        ("server only", "grey", "--", 1), ("device only", "grey", ":", 1), ("Stoch", "orange", "-", 1.5),
        ("race", "sky", "-", 1.5), ("mean-optimal", "green", "-.", 1.5), ("DiSCo", "blue", "-", 1.5),
    )
}  # fmt: skip
_ASIDE: dict[str, Any] = dict(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))


def waits(policies: Mapping[str, DispatchPolicy], longest: int, cap: float) -> Figure:
    """Device wait against prompt length (Algorithm 2, Eq. 1); dots are a coin's other side. Never is drawn at `cap`."""
    figure, axes = panels(1, 1, width=5.4, height=2.8)
    axis, length = axes[0, 0], np.arange(1, longest + 1)
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
        for share, text, colour, style in ((0.5, "median", "orange", "-"), (0.99, "P99", "red", "--")):
            level = Latency.of(seconds).quantile(share)
            axis.axhline(level, color=COLOURS[colour], lw=1, ls=style, label=f"{text} {level:.2g} s")
        wide = max(seconds) > 20 * min(seconds)
        axis.set(title=name, xlabel="request", yscale="log" if wide else "linear")
        axis.set_ylim(0.5 * min(seconds) if wide else 0, max(seconds) * (8 if wide else 1.45))
        axis.legend(fontsize=7, loc="upper left")
    axes[0, 0].set_ylabel("TTFT (s)")
    mark_kind(figure, kind)
    return figure


def distributions(series: Mapping[str, np.ndarray], xlabel: str, kind: str, *, reading_rate: float) -> Figure:
    """Figure 3: cumulative distributions of a request's mean time between tokens, and the reader's."""
    figure, axes = panels(1, 1, width=5.6, height=3.0)
    axis, colours = axes[0, 0], list(COLOURS.values())
    for number, (name, seconds) in enumerate(series.items()):
        style = dict(ls=("-", "--", ":")[number // len(colours)], color=colours[number % len(colours)])
        axis.ecdf(seconds, label=name, lw=1.2, **style)
    axis.axvline(1 / reading_rate, color=COLOURS["black"], lw=1, ls="--")
    axis.text(1 / reading_rate * 0.93, 0.03, "the reader", rotation=90, ha="right", va="bottom", fontsize=8)
    axis.set(xlabel=xlabel, ylabel="share of requests", xscale="log", xlim=(1e-3, 0.4))
    axis.legend(**_ASIDE)
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
        plain(axis.yaxis, steps=True)
    axes[0, 0].set_ylabel("gap before a token (ms)")
    legend(figure, kind)
    return figure


def ttft_by_length(requests: Mapping[str, pd.DataFrame], lines: Mapping[str, Mapping[str, float]], kind: str) -> Figure:
    """Table 1 as a picture: TTFT against prompt length. requests: device_probe.requests; lines: device_probe.line."""
    figure, axes = panels(1, len(requests), width=4.0, height=2.6)
    for axis, (name, table) in zip(axes[0], requests.items(), strict=True):
        fit, at = lines[name], np.array([0, table["length"].max()])
        axis.plot(table["length"], 1e3 * table["ttft_s"], ".", color=COLOURS["blue"], alpha=0.5, label="a request")
        axis.plot(at, 1e3 * (at / fit["tokens_per_s"] + fit["overhead_s"]), color=COLOURS["orange"],
                  label=f"{fit['tokens_per_s']:.0f} tokens/s, $R^2$ of medians {fit['r2']:.2f}")  # fmt: skip
        axis.set(title=f"{name}, r = {fit['pearson_r']:.2f}", xlabel="prompt length (tokens)")
        axis.legend(fontsize=7)
    axes[0, 0].set_ylabel("TTFT (ms)")
    mark_kind(figure, kind)
    return figure


def cold_start(table: pd.DataFrame, paper: pd.DataFrame, kind: str) -> Figure:
    """Table 4 as a picture: load time and TTFT against size. table: of `cold_start`; paper: Table 4 as quoted."""
    ours = table.assign(cache=table["page_cache"].map({"cold": "here, file read from disk",
                                                       "warm": "here, file in the page cache"}))  # fmt: skip
    theirs = paper.assign(gpu="paper, " + paper["gpu"].str.removeprefix("NVIDIA "),
                          parameters=1e9 * paper["model_size_billion_params"], load_s=paper["load_time_s"])  # fmt: skip
    figure, axes = panels(1, 2, width=4.2, height=2.9, sharex=True, sharey=True)
    for axis, column, title in zip(axes[0], ("load_s", "ttft_s"), ("load time", "TTFT after loading"), strict=True):
        lines(axis, ours.sort_values("page_cache"), "parameters", column, "cache", marker="o")
        looks = {gpu: dict(marker=marker) for gpu, marker in zip(order(theirs["gpu"]), "xv", strict=False)}
        lines(axis, theirs.dropna(subset=column), "parameters", column, "gpu", looks=looks, ls=":",
              color=COLOURS["grey"])  # fmt: skip
        axis.set(title=title, xlabel="parameters", xscale="log", yscale="log")
    axes[0, 0].set_ylabel("seconds")
    legend(figure, kind)
    return figure


def handover_quality(
    means: pd.DataFrame, labels: Mapping[str, str], kind: str, paper: Mapping[str, tuple[float, float]] | None = None
) -> Figure:
    """Figures 8 and 10: scores against the hand-over; a row a metric, a column a direction. Bands are 95 % intervals.

    means: quality.means. labels: metric -> axis label. paper: metric -> the paper's range.
    """
    figure, axes, parts = facets(means, "metric", "direction", width=4.2, height=2.3, sharex=True, sharey="row")
    for axis, rows in parts:
        metric, rows = rows["metric"].iloc[0], rows.sort_values("handover").assign(place=np.arange(len(rows)))
        lines(axis, rows, "place", "mean", label="answers that change hands, 95 %")
        axis.axhspan(*rows["mean"].iloc[[0, -1]], label="between the two (Eq. 6)", **BAND | {"fc": COLOURS["orange"]})
        if paper and metric in paper:
            quoted(axis, y=paper[metric], label="paper, other task", alpha=0.4)
        axis.set_xticks(rows["place"], rows["handover"])
    for metric, line in zip(order(means["metric"]), axes, strict=True):
        line[0].set_ylabel(labels[metric], fontsize=8)
    figure.supxlabel("tokens of the first model before the hand-over", fontsize=9)
    legend(figure, kind)
    return figure


def budget_curves(sweep: pd.DataFrame, metric: str, device: Device, kind: str, ylabel: str) -> Figure:
    """Figure 6: mean (or P99) TTFT against the budget; a row per constraint, a column per service.

    sweep: budget_sweep with the budgets 0 and 1 among others. A side alone is Stoch with none or all of the budget.
    """
    rows = sweep[sweep["device"] == device.name]
    alone = rows[(rows["policy"] == "Stoch") & rows["budget"].isin([0.0, 1.0])]
    other = alone["constrained"].map({"device": "server", "server": "device"})
    alone = alone.assign(policy=alone["constrained"].where(alone["budget"] == 1, other) + " only")
    ends = pd.concat([alone.assign(budget=0.0), alone.assign(budget=1.0)])
    return _by_budget(pd.concat([ends, rows]), metric, kind, ylabel, POLICY_STYLE)


def cost_curves(table: pd.DataFrame, device: Device, kind: str) -> Figure:
    """Figure 7: cost a request with and without migration, USD per million requests."""
    rows = table[table["device"] == device.name]
    both = [rows.assign(policy=f"{name} migration", usd=1e6 * rows[column], saved=0.0)
            for name, column in (("without", "cost_without"), ("with", "cost"))]  # fmt: skip
    looks = {f"{name} migration": dict(color=COLOURS[colour], marker="")
             for name, colour in (("without", "orange"), ("with", "blue"))}  # fmt: skip
    figure = _by_budget(pd.concat(both), "usd", kind, "USD per million requests", looks)
    saved = 100 * (1 - rows["cost"] / rows["cost_without"])
    for axis in figure.axes:
        constrained, service = axis.get_title().split("-constrained, ")
        most = saved[(rows["constrained"] == constrained) & (rows["service"] == service)].max()
        axis.set_title(f"{service}, {constrained}: up to {most:.0f} %", fontsize=9)
    return figure


def _by_budget(rows: pd.DataFrame, y: str, kind: str, ylabel: str, looks: Mapping[str, dict[str, Any]]) -> Figure:
    rows = rows[rows["policy"].isin(list(looks))].assign(constrained=rows["constrained"] + "-constrained")
    figure, _, parts = facets(rows.sort_values("constrained", kind="stable"), "constrained", "service", width=2.6,
                              height=2.2, sharex=True)  # fmt: skip
    for axis, part in parts:
        lines(axis, part, "budget", y, "policy", looks=looks)
        axis.set_ylim(bottom=0)
    figure.supxlabel("budget b", fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    legend(figure, kind, columns=6)
    return figure


def tail_bars(table: pd.DataFrame, kind: str) -> Figure:
    """Table 2 as a picture: our P99 reductions (tail_table) beside the paper's (column paper_percent)."""
    models = table["device"].str.split(", ").str[1].str.replace("Bloom", "B").str.replace("Qwen1.5", "Q")
    series = {"paper_percent": "paper (quoted)", "against_stoch_percent": "ours, against Stoch",
              "against_race_percent": "ours, against race"}  # fmt: skip
    long = table.assign(cell=table["service"] + "\n" + models, constrained=table["constrained"] + "-constrained").melt(
        ["constrained", "cell"], list(series), "against", "percent").replace({"against": series})  # fmt: skip
    looks = dict(zip(series.values(), (dict(color=COLOURS[name]) for name in ("grey", "blue", "sky")), strict=True))
    figure, _, parts = facets(long.sort_values("constrained", kind="stable"), "constrained", width=9.0, height=2.3)
    for axis, rows in parts:
        bars(axis, rows, "cell", "percent", "against", looks=looks)
    figure.supylabel("P99 TTFT reduction (%)", fontsize=10)
    legend(figure, kind)
    return figure


def user_points(table: pd.DataFrame, kind: str) -> Figure:
    """Figure 5: reduction of mean TTFT against Stoch per user, with a queue on the device. table: gain_over_stoch."""
    table = table.sort_values(["constrained", "user"]).assign(constrained=table["constrained"] + "-constrained")
    looks = {"race": dict(marker="^", color=COLOURS["sky"]), "DiSCo": dict(marker="o", color=COLOURS["blue"])}
    figure, axes, parts = facets(table, across="constrained", width=4.4, height=2.7)
    for axis, rows in parts:
        users, gaps = order(rows["user"]), rows.drop_duplicates("user")["mean_gap_s"]
        drawn = rows[rows["policy"].isin(list(looks))]
        lines(axis, drawn.assign(place=drawn["user"].map(users.index)), "place", "gain_percent", "policy", looks=looks,
              ls="", ms=6)  # fmt: skip
        axis.axhline(0, color=COLOURS["orange"], lw=1, label="Stoch")
        axis.set_xticks(range(len(users)), [f"{gap:.0f}" for gap in gaps], fontsize=8)
        axis.set(xlabel="user's mean gap between requests (s)")
    axes[0, 0].set_ylabel("mean TTFT reduction (%)")
    legend(figure, kind)
    return figure


def policy_time(table: pd.DataFrame, paper: pd.DataFrame, kind: str) -> Figure:
    """Figure 9: time to compute a policy against the number of samples. paper: columns n, policy, ms."""
    rows = pd.concat([table, paper.assign(what="paper (Apple M1)")])
    rows = rows.assign(series=rows["policy"] + ", " + rows["what"])
    colours = {"DiSCo-S": COLOURS["blue"], "DiSCo-D": COLOURS["green"], "mean-optimal": COLOURS["purple"]}
    styles = {"from raw lists": dict(ls="-", marker="o"), "from kept histogram": dict(ls="--", marker="o"),
              "paper (Apple M1)": dict(ls=":", marker="x")}  # fmt: skip
    looks = {f"{policy}, {what}": dict(color=colour) | style
             for policy, colour in colours.items() for what, style in styles.items()}  # fmt: skip
    figure, axes = panels(1, 1, width=5.4, height=3.2)
    axis = axes[0, 0]
    lines(axis, rows[rows["series"].isin(list(looks))], "n", "ms", "series", looks=looks)
    axis.set(xscale="log", yscale="log", xlabel="samples of length and TTFT", ylabel="time for one policy (ms)")
    axis.legend(**_ASIDE)
    mark_kind(figure, kind)
    return figure


def mean_tail_plane(tables: Mapping[str, pd.DataFrame], kind: str) -> Figure:
    """Beyond the paper: mean against P99 TTFT of every policy at one budget, one panel per service."""
    looks = {
        name: dict(marker=marker, color=COLOURS[colour], ls=line, lw=1, ms=9 if marker == "*" else 6)
        for name, marker, colour, line in (
            ("server only", "s", "grey", ""), ("Stoch-D", "v", "orange", ""), ("race-D", "^", "sky", ""),
            ("DiSCo-D", "o", "blue", "-"), ("P99-optimal", "D", "red", ""), ("combined frontier", ".", "purple", "-"),
            ("mean-optimal", "*", "green", ""), ("online", "P", "black", ""),
        )
    }  # fmt: skip
    figure, axes = panels(1, len(tables), width=3.6, height=3.2)
    for axis, (service, table) in zip(axes[0], tables.items(), strict=True):
        lines(axis, table[table["policy"].isin(list(looks))], "mean_s", "p99_s", "policy", looks=looks)
        ours = table[table["policy"] == "DiSCo-D"].sort_values("mean_s")
        for at in {0, len(ours) - 1}:
            label, x, y = ours.iloc[at][["label", "mean_s", "p99_s"]]
            axis.annotate(f"α={label}", (x, y), fontsize=7, xytext=(4, 4), textcoords="offset points")
        bound = table.loc[table["policy"] == "clairvoyant", "mean_s"].iloc[0]
        axis.axvline(bound, color=COLOURS["grey"], ls=":", label="clairvoyant (mean)")
        axis.set(xlabel="mean TTFT (s)", title=service)
        if table["p99_s"].max() > 10 * table["p99_s"].min():
            axis.set_yscale("log")
    axes[0, 0].set_ylabel("P99 TTFT (s)")
    legend(figure, kind, columns=5)
    return figure


def drift(table: pd.DataFrame, budget: float, kind: str) -> Figure:
    """Beyond the paper: budget use and TTFT when the service changes half-way."""
    smooth = table.groupby("policy", sort=False)["ttft_s"].transform(lambda s: s.rolling(200, min_periods=50).mean())
    figure, axes = panels(1, 2, width=4.2, height=2.7)
    for number, (name, rows) in enumerate(table.assign(smooth=smooth).groupby("policy", sort=False)):
        for axis, column in zip(axes[0], ("used", "smooth"), strict=True):
            axis.plot(rows["request"], rows[column], color=look(number)["color"], label=name)
    axes[0, 0].axhline(budget, color=COLOURS["black"], ls="--", lw=1, label="budget")
    axes[0, 0].yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[0, 0].set(xlabel="request", ylabel="tokens on the device", ylim=(0, None))
    axes[0, 1].set(xlabel="request", ylabel="mean TTFT, last 200 (s)", yscale="log")
    plain(axes[0, 1].yaxis, steps=True)
    legend(figure, kind, columns=5)
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
    axis, raced = axes[0, 0], raced_share(lengths, policy)
    parts = {"device only": (raced == 0, "blue"), "a coin decides": ((raced > 0) & (raced < 1), "purple"),
             "device and server": (raced == 1, "orange")}  # fmt: skip
    for label, (part, colour) in parts.items():
        text = f"{label}: {100 * lengths.mass[part].sum():.0f} % of tokens"
        axis.bar(lengths.support[part], lengths.mass[part], color=COLOURS[colour], width=1.0, label=text)
    beyond = 100 * lengths.mass[lengths.support > longest].sum()
    axis.set(xlabel=f"prompt length l (tokens); {beyond:.0f} % of tokens lie beyond", ylabel="share of all tokens",
             xlim=(0, longest))  # fmt: skip
    axis.legend()
    mark_kind(figure, "analytic")
    return figure


def raced_share(lengths: Lengths, policy: DispatchPolicy) -> np.ndarray:
    """Chance that the server starts at once, per length of the support: [U]."""
    first, second = policy.wait_server[:, lengths.support] == 0
    chance = policy.chance[lengths.support]
    return (1 - chance) * first + chance * second
