"""DIAA's figures. Each function draws tables of the experiments and returns the figure.

Shares, rates and ratios are fractions of 1. `quoted` holds what the paper prints, under our names of models, methods
and tasks; it is drawn hollow or hatched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator, PercentFormatter, ScalarFormatter

from ondevice.diaa.tree import Growth, Tree
from ondevice.plotting import COLOURS, mark_kind, panels, shared_legend

# Colour and line of each method; variants of one method share its colour.
METHOD_STYLE = {
    "vanilla": (COLOURS["grey"], "-"),
    "generate": (COLOURS["grey"], "--"),
    "PLD": (COLOURS["purple"], "-"),
    "PLD, transformers' rules": (COLOURS["purple"], "--"),
    "generate, prompt lookup": (COLOURS["purple"], ":"),
    "SpS": (COLOURS["orange"], "-"),
    "generate, assistant": (COLOURS["orange"], "--"),
    "SWIFT": (COLOURS["yellow"], "-"),
    "SAM-D": (COLOURS["green"], "-"),
    "SAM[TR]": (COLOURS["green"], "--"),
    "TR": (COLOURS["sky"], "-"),
    "DIAA": (COLOURS["blue"], "-"),
    "DIAA, extended": (COLOURS["red"], "-"),
}
_OPACITY = {"-": 1.0, "--": 0.55, ":": 0.25}  # of a bar, by its method's line
_TREE_STYLE = {"static": (COLOURS["orange"], "s"), "dynamic": (COLOURS["blue"], "o")}
_PART_COLOURS = {
    "forward": COLOURS["blue"],
    "tree": COLOURS["orange"],
    "tables": COLOURS["green"],
    "choose": COLOURS["purple"],
    "keep": COLOURS["sky"],
    "rest": COLOURS["grey"],
}
_NODE_STYLE = {
    "drafted": (COLOURS["blue"], "-"),
    "left out, s below τ": (COLOURS["red"], "--"),
    "left out, beyond the budget": (COLOURS["grey"], ":"),
}
_MARKERS = "osD^v"
_HOLLOW: dict[str, Any] = dict(marker="o", mfc="white", mec=COLOURS["black"], ls="", zorder=4)
_CAPS: dict[str, Any] = dict(ecolor=COLOURS["black"], elinewidth=0.8, capsize=1.5, capthick=0.8)
_HATCHED: dict[str, Any] = dict(fc="white", ec=COLOURS["grey"], hatch="////", lw=0.5)


def memory_by_context(
    table: pd.DataFrame, analytic: pd.DataFrame | None = None, extra: Mapping[str, float] | None = None
) -> Figure:
    """Figure 2: memory against the tokens in the cache, one panel a model, whose title says the kind.

    table, analytic: columns method, model, context (tokens), megabytes, kind; `analytic` adds the paper's models.
    extra: model -> MB that the paper's draft model adds.
    """
    both = pd.concat([table, *([] if analytic is None else [analytic])], ignore_index=True)
    models = _order(both["model"])
    figure, axes = panels(1, len(models), width=max(2.7, 5.4 / len(models)), height=2.8)
    for axis, model in zip(axes[0], models, strict=True):
        part = both[both["model"] == model]
        for method in _order(part["method"]):
            rows = part[part["method"] == method].sort_values("context")
            colour, line = METHOD_STYLE[method]
            style = dict(color=colour, ls=line, lw=4.5 if method == "vanilla" else 1.5)  # others may lie on vanilla's
            axis.plot(rows["context"], rows["megabytes"], marker="o", ms=3, label=method, **style)
        if extra and model in extra:
            last = part[part["method"] == "vanilla"].sort_values("context").iloc[-1]
            label = f"paper: vanilla + {extra[model]:g} MB"
            axis.plot(last["context"], last["megabytes"] + extra[model], ms=7, label=label, **_HOLLOW)
        axis.set_title(f"{model}\n{' + '.join(_order(part['kind']))}", fontsize=9)
        axis.set(xlabel="context (tokens)")
        axis.margins(y=0.12)
        axis.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("memory (MB)")
    _legend_of_all(figure, axes[0], columns=4)
    return figure


def static_and_dynamic(table: pd.DataFrame, kind: str) -> Figure:
    """Figure 3: the static and the dynamic tree against their size, in three measures.

    table: columns tree (static, dynamic), size (nodes), goodput_tokens_per_s, tokens_per_step, acceptance_rate.
    """
    figure, axes = panels(1, 3, width=2.8, height=2.6)
    measures = ("goodput_tokens_per_s", "tokens_per_step", "acceptance_rate")
    titles = ("goodput (tokens/s)", "tokens a step", "acceptance rate")
    for axis, column, title in zip(axes[0], measures, titles, strict=True):
        for tree, (colour, marker) in _TREE_STYLE.items():
            rows = table[table["tree"] == tree].sort_values("size")
            axis.plot(rows["size"], rows[column], color=colour, marker=marker, ms=4, label=f"{tree} tree")
        axis.set_title(title, fontsize=9)
        axis.set(xlabel="tree size (nodes)", xscale="log")
        _ticks_at(axis, table["size"])
    axes[0, 2].yaxis.set_major_formatter(PercentFormatter(1.0))
    shared_legend(figure, axes[0, 0], columns=2)
    mark_kind(figure, kind)
    return figure


def acceptance_heatmap(table: pd.DataFrame, kind: str) -> Figure:
    """Figure 4: acceptance rate in percent by task and tree size, both trees on one colour scale.

    table: columns tree (static, dynamic), task, size (nodes), acceptance_rate.
    """
    tasks, sizes = _order(table["task"]), sorted(table["size"].unique())
    figure, axes = panels(1, 2, width=1.5 + 0.45 * len(sizes), height=1.0 + 0.3 * len(tasks), sharey=True)
    top = 100 * table["acceptance_rate"].max()
    for axis, tree in zip(axes[0], _TREE_STYLE, strict=True):
        wide = table[table["tree"] == tree].pivot_table(index="task", columns="size", values="acceptance_rate")
        percent = 100 * wide.reindex(index=tasks, columns=sizes).to_numpy()
        image = axis.imshow(percent, cmap="cividis", vmin=0, vmax=top, aspect="auto")
        for (row, column), value in np.ndenumerate(percent):
            colour = "white" if value < 0.55 * top else "black"
            axis.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(range(len(sizes)), [f"{size:g}" for size in sizes])
        axis.set_yticks(range(len(tasks)), tasks)
        axis.set_title(f"{tree} tree", fontsize=9)
        axis.set(xlabel="tree size (nodes)")
        axis.grid(visible=False)
    figure.colorbar(image, ax=axes[0].tolist(), label="acceptance rate (%)")
    mark_kind(figure, kind)
    return figure


def growth_example(
    tree: Tree, names: Mapping[int, str], title: str, *, whole: Tree | None = None, tau: float = Growth.tau
) -> Figure:
    """Figure 7: a grown tree; nodes with name and score s (Eq. 2), edges with the tables' probability.

    names: token -> name. whole: the tree that would grow with tau = 0 and a larger budget; its nodes that hang on
    `tree` without being in it are drawn as left out.
    """
    nodes = _nodes(tree, names, whole, tau)
    across, down, root = _places([node.parent for node in nodes])
    size = dict(width=max(4.0, 1.0 + 0.95 * max(across, default=0)), height=0.9 + 1.0 * max(down, default=0))
    figure, axes = panels(1, 1, **size)
    axis = axes[0, 0]
    for node, x, y in zip(nodes, across, down, strict=True):
        colour, line = _NODE_STYLE[node.state]
        above, up = (root, 0) if node.parent < 0 else (across[node.parent], down[node.parent])
        axis.plot([above, x], [-up, -y], color=colour, ls=line, lw=1)
        _boxed(axis, (above + x) / 2, -(up + y) / 2, f"{node.probability:.2g}", fc="white", ec="none", pad=1)
        _boxed(axis, x, -y, f"{node.name}\n{node.score:.2g}", fc="white", ec=colour, ls=line, boxstyle="round")
    _boxed(axis, root, 0, "root", fc=COLOURS["sky"], ec=COLOURS["blue"], boxstyle="round")
    axis.set(xlim=(min(across, default=0) - 0.5, max(across, default=0) + 0.5), ylim=(-max(down, default=0) - 0.3, 0.3))
    axis.axis("off")
    figure.suptitle(f"{title}\nbox: score s; edge: probability", fontsize=9)
    states = [state for state in _NODE_STYLE if any(node.state == state for node in nodes)]
    lines = [Line2D([], [], color=_NODE_STYLE[state][0], ls=_NODE_STYLE[state][1], label=state) for state in states]
    figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize=8)
    mark_kind(figure, "analytic")
    return figure


def size_and_interval(table: pd.DataFrame, kind: str) -> Figure:
    """Figure 8: goodput and latency against the tree's size, a line for each update interval N.

    table: columns size (nodes), interval (steps), goodput_tokens_per_s, latency_ms_per_token.
    """
    figure, axes = panels(1, 2, width=3.6, height=2.7)
    measures = ("goodput_tokens_per_s", "latency_ms_per_token")
    intervals = sorted(table["interval"].unique())
    colours = [COLOURS[name] for name in ("blue", "orange", "green", "red", "purple", "black")]
    for axis, column, label in zip(axes[0], measures, ("goodput (tokens/s)", "latency (ms per token)"), strict=True):
        for number, interval in enumerate(intervals):
            rows = table[table["interval"] == interval].sort_values("size")
            style = dict(color=colours[number % len(colours)], marker=_MARKERS[number % len(_MARKERS)], ms=4)
            axis.plot(rows["size"], rows[column], label=f"N = {interval:g}", **style)
        axis.set(xlabel="tree size (nodes)", ylabel=label, xscale="log")
        _ticks_at(axis, table["size"])
    shared_legend(figure, axes[0, 0], columns=6)
    mark_kind(figure, kind)
    return figure


def initial_tables(table: pd.DataFrame, kind: str) -> Figure:
    """Figure 9: goodput by what the tables began with, one panel a model, with intervals.

    table: columns tables (what they were warmed up with), model, goodput_tokens_per_s, low, high (of the goodput).
    """
    models, names = _order(table["model"]), _order(table["tables"])
    figure, axes = panels(1, len(models), width=3.6, height=0.9 + 0.32 * len(names), sharey=True)
    for axis, model in zip(axes[0], models, strict=True):
        rows = table[table["model"] == model].set_index("tables").reindex(names)
        value = rows["goodput_tokens_per_s"]
        axis.barh(names, value, height=0.6, color=COLOURS["blue"], alpha=0.8, xerr=_errors(rows, value), error_kw=_CAPS)
        axis.set_title(model, fontsize=9)
        axis.set(xlabel="goodput (tokens/s)")
        axis.grid(axis="y", visible=False)
    axes[0, 0].invert_yaxis()
    mark_kind(figure, kind)
    return figure


def time_breakdown(table: pd.DataFrame, quoted: Mapping[str, float], kind: str) -> Figure:
    """Figure 10: where the decoding time goes; on the right all but the forward pass, on a logarithmic scale.

    table: columns model, part (forward, tree, tables, choose, keep, rest), share. quoted: part -> the paper's share.
    """
    wide = table.pivot_table(index="model", columns="part", values="share", sort=False)
    figure, axes = panels(1, 2, width=4.2, height=1.4 + 0.35 * len(wide))
    stack, small = axes[0]
    left = np.zeros(len(wide))
    for part in [part for part in _PART_COLOURS if part in wide]:
        stack.barh(wide.index, wide[part], left=left, height=0.6, color=_PART_COLOURS[part], label=part)
        left += wide[part].to_numpy()
    printed = 0.0
    for part in [part for part in _PART_COLOURS if part in quoted]:
        style = _HATCHED | {"ec": _PART_COLOURS[part]}
        stack.barh("paper", quoted[part], left=printed, height=0.6, **style)
        printed += quoted[part]
    stack.invert_yaxis()
    stack.set(xlabel="share of decoding time", xlim=(0, 1.02))
    parts = [part for part in _PART_COLOURS if part in wide and part != "forward"]
    for number, (model, rows) in enumerate(wide.iterrows()):
        small.plot(rows[parts], parts, _MARKERS[number % len(_MARKERS)], ms=5, label=str(model), color=COLOURS["black"])
    both = [part for part in parts if part in quoted]
    small.plot([quoted[part] for part in both], both, ms=8, label="paper", **_HOLLOW | {"zorder": 1})
    small.invert_yaxis()
    small.set(xlabel="share of decoding time", xscale="log")
    small.margins(y=0.15)
    for axis in axes[0]:
        axis.xaxis.set_major_formatter(PercentFormatter(1.0))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(axis="y", visible=False)
    _legend_of_all(figure, axes[0], columns=5)
    mark_kind(figure, kind)
    return figure


def speedups(table: pd.DataFrame, quoted: pd.DataFrame | None, kind: str) -> Figure:
    """Tables 1 and 2 as a picture: speed-up over vanilla by method and task, with 95 % intervals, one panel a model.

    table: columns model, method, task ("average" among them), speedup, low, high; rows of vanilla are not drawn.
    quoted: columns model, method, task, speedup; the paper's.
    """
    table = table[table["method"] != "vanilla"]
    models, tasks = _order(table["model"]), _order(table["task"])
    methods = [method for method in METHOD_STYLE if method in set(table["method"])]
    figure, axes = panels(len(models), 1, width=8.6, height=2.1, sharex=True)
    width = 0.84 / len(methods)
    for axis, model in zip(axes[:, 0], models, strict=True):
        for number, method in enumerate(methods):
            place = np.arange(len(tasks)) + (number - (len(methods) - 1) / 2) * width
            rows = _by_task(table, tasks, model=model, method=method)
            colour, line = METHOD_STYLE[method]
            axis.bar(place, rows["speedup"], width, color=colour, alpha=_OPACITY[line], label=method)
            axis.errorbar(place, rows["speedup"], _errors(rows, rows["speedup"]), fmt="none", **_CAPS | {"capsize": 0})
            if quoted is not None:
                printed = _by_task(quoted, tasks, model=model, method=method)["speedup"]
                axis.plot(place, printed, ms=4.5, label="_" if number else "paper", **_HOLLOW)
        axis.axhline(1, color=METHOD_STYLE["vanilla"][0], lw=1, ls="--")
        axis.set_title(model, fontsize=9)
        axis.set(ylabel="speed-up", xlim=(-0.55, len(tasks) - 0.45))
        axis.grid(axis="x", visible=False)
    axes[-1, 0].set_xticks(range(len(tasks)), tasks)
    _legend_of_all(figure, axes[:, 0], columns=4)
    mark_kind(figure, kind)
    return figure


def ablation(table: pd.DataFrame, quoted: pd.DataFrame, kind: str) -> Figure:
    """Table 3 as a picture: goodput without a part over full DIAA's, one panel a part left out, beside the paper's.

    table: columns task, variant, ratio, low, high. quoted: columns task, variant, ratio.
    """
    variants, tasks = _order(table["variant"]), _order(table["task"])
    size = dict(width=9.4 / len(variants), height=1.3 + 0.22 * len(tasks))
    figure, axes = panels(1, len(variants), **size, sharex=True, sharey=True)
    place = np.arange(len(tasks))
    for axis, variant in zip(axes[0], variants, strict=True):
        rows = _by_task(table, tasks, variant=variant)
        style = dict(fmt="D", ms=4, color=COLOURS["blue"]) | _CAPS
        printed = _by_task(quoted, tasks, variant=variant)["ratio"]
        axis.plot(printed, place, ms=6, label="paper", **_HOLLOW | {"zorder": 1})
        axis.errorbar(rows["ratio"], place, xerr=_errors(rows, rows["ratio"]), label="ours, 95 % interval", **style)
        axis.axvline(1, color=COLOURS["black"], lw=1)
        axis.set_title(variant, fontsize=9)
        axis.margins(y=0.1)
    axes[0, 0].set_yticks(place, tasks)
    axes[0, 0].invert_yaxis()
    figure.supxlabel("goodput over full DIAA's", fontsize=9)
    shared_legend(figure, axes[0, 0], columns=2)
    mark_kind(figure, kind)
    return figure


def verify_cost(table: pd.DataFrame, kind: str) -> Figure:
    """Beyond the paper: what a forward over n rows costs, against that over one.

    table: columns model, rows (the root and n - 1 nodes), seconds, ratio (T(n) / T(1)).
    """
    figure, axes = panels(1, 1, width=6.4, height=2.7)
    axis = axes[0, 0]
    for number, model in enumerate(_order(table["model"])):
        rows = table[table["model"] == model].sort_values("rows")
        label = f"{model}\nT(1) = {1e3 * rows['seconds'].iloc[0]:.3g} ms"
        colour = (COLOURS["blue"], COLOURS["orange"], COLOURS["green"], COLOURS["purple"])[number % 4]
        axis.plot(rows["rows"], rows["ratio"], color=colour, marker=_MARKERS[number % len(_MARKERS)], ms=4, label=label)
    top = 1.08 * table["ratio"].max()
    rising = np.geomspace(1, max(top, 1.01), 50)
    axis.plot(rising, rising, color=COLOURS["grey"], ls=":", label="n single steps")
    axis.set(xlabel="rows n of a verification (root and nodes)", ylabel="T(n) / T(1)", xscale="log", ylim=(0, top))
    _ticks_at(axis, table["rows"])
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    mark_kind(figure, kind)
    return figure


def calibration(table: pd.DataFrame, kind: str) -> Figure:
    """Beyond the paper: how often nodes are accepted against what is said of them; below, how many they are.

    table: columns model, probability (`tables` or `calibrated`), low, high (of the bin), nodes, said (their mean
    probability), accepted (their share); one panel a model.
    """
    models = _order(table["model"])
    shared: dict[str, Any] = dict(sharex=True, sharey="row", height_ratios=(3, 1))
    figure, axes = panels(2, len(models), width=max(3.6, 5.4 / len(models)), height=2.1, **shared)
    styles = (("tables", "the tables'", "orange", "s", 0.3), ("calibrated", "calibrated", "blue", "o", 0.7))
    for model, rates, counts in zip(models, axes[0], axes[1], strict=True):
        rates.plot([0, 1], [0, 1], color=COLOURS["grey"], ls="--", lw=1, label="accepted as often as said")
        for name, label, colour, marker, side in styles:
            rows = table[(table["model"] == model) & (table["probability"] == name)].sort_values("said")
            wide = rows["high"] - rows["low"]
            rates.plot(rows["said"], rows["accepted"], color=COLOURS[colour], marker=marker, ms=4, label=label)
            counts.bar(rows["low"] + side * wide, rows["nodes"], 0.4 * wide, color=COLOURS[colour])
        rates.set_title(model, fontsize=9)
        rates.set(ylim=(0, 1))
        counts.set(xlabel="probability said", yscale="log", xlim=(0, 1))
    axes[0, 0].set_ylabel("share accepted")
    axes[1, 0].set_ylabel("nodes")
    _legend_of_all(figure, axes[0], columns=3)
    mark_kind(figure, kind)
    return figure


def bound(table: pd.DataFrame, kind: str) -> Figure:
    """Beyond the paper: the speed-up reached against that which drafts and verification allow.

    table: columns model, method, task, reached, possible, share. Rows of the task "average" are drawn larger.
    """
    models = _order(table["model"])
    figure, axes = panels(1, len(models), width=3.6, height=3.4, sharex=True, sharey=True)
    top = 1.06 * max(table["reached"].max(), table["possible"].max(), 1)
    small, large = dict(marker="o", ms=4, ls=""), dict(marker="D", ms=8, ls="", mec="white")
    for axis, model in zip(axes[0], models, strict=True):
        axis.plot([0, top], [0, top], color=COLOURS["grey"], ls="--", lw=1, label="all of it")
        axis.plot([], [], color=COLOURS["black"], label="a task (large: average)", **small)
        for method in [method for method in METHOD_STYLE if method in set(table["method"])]:
            rows = table[(table["model"] == model) & (table["method"] == method)]
            colour, of_all = METHOD_STYLE[method][0], rows["task"] == "average"
            axis.plot(rows["possible"][~of_all], rows["reached"][~of_all], color=colour, alpha=0.6, **small)
            axis.plot(rows["possible"][of_all], rows["reached"][of_all], color=colour, label=method, **large)
        axis.set_title(model, fontsize=9)
        axis.set(xlabel="possible: tokens a step × T(1) / T(rows)", xlim=(0, top), ylim=(0, top))
    axes[0, 0].set_ylabel("speed-up reached")
    _legend_of_all(figure, axes[0], columns=4)
    mark_kind(figure, kind)
    return figure


def _order(values: pd.Series) -> list[str]:
    """Distinct values in the order of their first appearance, `average` last."""
    found = list(dict.fromkeys(values))
    return sorted(found, key=lambda value: value == "average")


def _by_task(table: pd.DataFrame, tasks: list[str], **where: str) -> pd.DataFrame:
    """The rows in which columns have these values, one a task, NaN where there is none."""
    for column, value in where.items():
        table = table[table[column] == value]
    return table.set_index("task").reindex(tasks)


def _errors(rows: pd.DataFrame, value: pd.Series) -> np.ndarray:
    """[2, n] lengths of the intervals `low` to `high` below and above a value."""
    return np.maximum(0, np.stack([value - rows["low"], rows["high"] - value]))


def _ticks_at(axis: Axes, values: Iterable[float]) -> None:
    """Ticks at these places of the x-axis only, as plain numbers."""
    axis.set_xticks(sorted(set(values)))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())


def _legend_of_all(figure: Figure, axes: Iterable[Axes], *, columns: int) -> None:
    """One legend above all panels, with every entry that any of them has."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=columns, fontsize=8)


@dataclass(frozen=True)
class _Node:
    """A node to be drawn. parent: its place, -1 the root. probability: the tables', given its parent."""

    name: str
    parent: int
    score: float
    probability: float
    state: str


def _nodes(tree: Tree, names: Mapping[int, str], whole: Tree | None, tau: float) -> list[_Node]:
    """The nodes of `tree` in its order, then those of `whole` that hang on them."""

    def node(of: Tree, number: int, parent: int, state: str) -> _Node:
        token, above = of.tokens[number], of.parents[number]
        probability = of.paths[number] / (of.paths[above] if above >= 0 else 1.0)
        return _Node(names.get(token, str(token)), parent, of.scores[number], probability, state)

    found = [node(tree, number, parent, "drafted") for number, parent in enumerate(tree.parents)]
    if whole is None:
        return found
    drafted = {pair: number for number, pair in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    places = {-1: -1}
    for number, (parent, token) in enumerate(zip(whole.parents, whole.tokens, strict=True)):
        if parent in places and (places[parent], token) in drafted:
            places[number] = drafted[places[parent], token]
        elif parent in places:
            low = parent >= 0 and whole.scores[number] < tau  # the first level is exempt
            found.append(node(whole, number, places[parent], list(_NODE_STYLE)[1 if low else 2]))
    return found


def _places(parents: Sequence[int]) -> tuple[list[float], list[int], float]:
    """Where to draw nodes: across, leaves one apart and the others above theirs; down, the depth; the root's across."""
    below = defaultdict(list)
    for node, parent in enumerate(parents):
        below[parent].append(node)
    across, down = [0.0] * len(parents), [0] * len(parents)
    leaves = 0

    def place(node: int, depth: int) -> float:
        nonlocal leaves
        under = [place(child, depth + 1) for child in below[node]]
        x = (under[0] + under[-1]) / 2 if under else float(leaves)
        leaves += not under
        if node >= 0:
            across[node], down[node] = x, depth
        return x

    root = place(-1, 0)
    return across, down, root


def _boxed(axis: Axes, x: float, y: float, text: str, **box: Any) -> None:
    axis.text(x, y, text, fontsize=7 if box["ec"] == "none" else 8, ha="center", va="center", zorder=3, bbox=box)
