"""The figure style, and what every figure is made of: panels, bars, lines and points with intervals, the paper's value,
one legend, the kind in the corner.

Tables are long: a row a mark, in the order in which it is drawn (`average` last). `by` is the column that colours tell
apart; columns `low` and `high`, where a table has them, are the ends of an interval. A table that cannot be drawn is
refused with a ValueError (`need`). A name that a notebook's dictionary of looks has (`use_style`) looks the same in
all its figures.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from IPython import get_ipython
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ondevice.evidence import derived, kind_of
from ondevice.evidence.exhibits import compact_png

# Okabe-Ito: told apart by readers with any kind of colour vision.
COLOURS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "red": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
    "black": "#000000",
    "grey": "#7F7F7F",
}
CYCLE = ("blue", "orange", "green", "red", "purple", "sky", "grey", "black")
MARKERS = "osD^vP*X"
HOLLOW: dict[str, Any] = dict(color=COLOURS["black"], marker="o", mfc="white", ls="", ms=6, zorder=5)
BAND: dict[str, Any] = dict(fc=COLOURS["grey"], alpha=0.25, lw=0, zorder=0)
Looks = Mapping[str, Mapping[str, Any]]  # styles by the name of a series
_STRIP = 10.0  # points at the top of a figure, for the kind
_QUOTED = "quoted"  # the id of a mark that is the paper's
_KIND = "kind"  # the id of the text in the corner
_looks: dict[str, Mapping[str, Any]] = {}  # the notebook's
VERDICTS = {"reproduced": "green", "trend": "sky", "undecided": "yellow", "contradicted": "red", "untested": "grey"}


class Origin(NamedTuple):
    """What numbers are of, as a caption says it: models, machines ("any machine"), and n, such as "478 questions"."""

    model: str
    machine: str
    n: str


def use_style(looks: Looks | None = None) -> None:
    """Apply the repository's figure style: called once at the top of each notebook.

    looks: the notebook's dictionary, by the name of a series: colour and marker in every figure (`looks_by_name`).
    """
    _looks.clear()
    _looks.update(looks or {})
    sns.set_theme(context="paper", style="ticks", font_scale=1.05)
    plt.rc("figure", dpi=84)  # in a notebook, which has to stay small; exhibits are finer
    plt.rc("savefig", dpi=84)
    plt.rc("figure.constrained_layout", use=True)
    plt.rc("axes", grid=True, titlesize=9, labelsize=9, prop_cycle=plt.cycler(color=list(COLOURS.values())))
    plt.rc("axes.spines", top=False, right=False)
    plt.rc("grid", alpha=0.25)
    plt.rc("legend", frameon=False)
    shell = get_ipython()
    if shell is not None and "inline" in plt.get_backend():
        plt.switch_backend(plt.get_backend())  # else the first figure sets it up, and a formatter of its own
        shell.display_formatter.formatters["image/png"].for_type(Figure, _picture)


def _picture(figure: Figure) -> bytes:
    """The PNG that a notebook keeps."""
    return compact_png(figure, {}, bbox_inches="tight", dpi=figure.dpi)


# Panels, legend, kind


def panels(
    rows: int, columns: int, *, width: float = 3.2, height: float = 2.5, **options: Any
) -> tuple[Figure, np.ndarray]:
    """A grid of axes, always [rows, columns]; width and height in inches per panel."""
    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, **options)


def facets(
    table: pd.DataFrame, down: str = "", across: str = "", **options: Any
) -> tuple[Figure, np.ndarray, list[tuple[Axes, pd.DataFrame]]]:
    """A panel, titled, for each value of the column `down` and each of `across`: figure, axes, (panel, its rows)."""
    need(table, f"{down} {across}")
    figure, axes = panels(*(len(order(table[name])) if name else 1 for name in (down, across)), **options)
    parts = []
    for line, (row, part) in zip(axes, groups(table, down), strict=True):
        for axis, column in zip(line, order(table[across]) if across else [""], strict=True):
            axis.set_title(", ".join(str(name) for name in (row, column) if name != ""), fontsize=9)
            parts.append((axis, part[part[across] == column] if across else part))
    return figure, axes, parts


def legend(
    figure: Figure, kind: Any, *, columns: int = 4, axes: Iterable[Axes] | None = None, first: Sequence[Any] = ()
) -> None:
    """One legend above all panels: `first`, then every entry that a panel has, the quoted last; the kind in the corner.

    kind: as in `mark_kind`; None leaves the corner empty. columns: at most.
    """
    entries = {str(handle.get_label()): handle for handle in first}
    for axis in figure.axes if axes is None else axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    labels = sorted(entries, key=lambda label: label.startswith(("quoted", "paper")))
    inches = [0.5 + 0.068 * len(label) for label in labels]  # roughly
    ways = range(1, min(columns, len(labels)) + 1)
    fitting = [n for n in ways if sum(map(max, np.array_split(inches, n))) <= figure.get_figwidth()]
    box: dict[str, Any] = dict(loc="outside upper center", ncols=max(fitting, default=1), fontsize=8)
    if kind is not None:
        mark_kind(figure, kind)
        box["borderaxespad"] = _STRIP / 8
    figure.legend([entries[label] for label in labels], labels, **box)


def mark_kind(figure: Figure, kind: Any) -> None:
    """Write the kind of the numbers (measured, simulated, ...) into the upper right corner, above everything else.

    kind: in words, or the table that is drawn, which knows it. Where the paper's values are drawn (`quoted`), before
    or after, the kind has `quoted`, too.
    """
    words, comma, remark = (kind if isinstance(kind, str) else kind_of(kind)).partition(",")
    if figure.findobj(lambda artist: artist.get_gid() == _QUOTED):
        words = kind_of((words, "quoted"))
    for mark in _kind_marks(figure):
        mark.remove()
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - _STRIP / 72 / figure.get_figheight()))
    style: dict[str, Any] = dict(fontsize=7, color=COLOURS["grey"], style="italic", gid=_KIND)
    figure.text(0.998, 0.998, words + comma + remark, ha="right", va="top", **style)


def _kind_marks(figure: Any) -> list[Text]:
    return [text for text in figure.texts if text.get_gid() == _KIND]


def caption(figure: Figure, words: str, origin: Origin | None = None) -> None:
    """A line below all panels: what to see, then of which model, on which machine, from how many prompts.

    words: lines break at spaces, so a formula has none.
    """
    if origin is not None:
        words += f" {origin.model}; {origin.machine}; n = {origin.n}."
    lines = textwrap.wrap(words, int(17 * figure.get_figwidth()), break_on_hyphens=False)
    figure.supxlabel("\n".join(lines), fontsize=7, color="0.35")


def panel(
    table: pd.DataFrame, x: str, y: str, by: str = "", *, labels: tuple[str, str], words: str,
    origin: Origin | None = None, draw: Any = None, top: float | None = None, width: float = 4.2, height: float = 2.6,
    **style: Any,
) -> tuple[Figure, Axes]:  # fmt: skip
    """One panel with its legend, kind and caption: (figure, axes).

    draw: `lines`, `bars` or `points`. labels: of both axes. words, origin: of the caption. A table with the versions of
    an edited notebook is drawn with both of them.
    """
    table, by, looks = versions(table, by)
    if looks:
        style = {name: value for name, value in style.items() if name != "label"} | {"looks": looks}
    figure, axes = panels(1, 1, width=width, height=height)
    axis = axes[0, 0]
    (draw or lines)(axis, table, x, y, by, **style)
    axis.set(xlabel=labels[0], ylabel=labels[1])
    if not style.get("flat"):
        axis.set_ylim(0, top)
    if by:
        legend(figure, table, columns=3)
    else:
        mark_kind(figure, table)
    caption(figure, words, origin)
    return figure, axis


def diagram(
    boxes: Mapping[str, tuple[float, float]], arrows: Iterable[tuple[str, str, str]], *, width: float, height: float
) -> Figure:
    """A drawing of a system. boxes: texts with the middle of their box, in inches; arrows: (from, to, word)."""
    figure, axis = plt.subplots(figsize=(width, height))
    drawn = {}
    for text, (x, y) in boxes.items():
        box = dict(boxstyle="round,pad=0.5", fc="white", ec=COLOURS["blue"])
        drawn[text] = axis.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box, zorder=3)
    for start, end, word in arrows:
        line = dict(arrowstyle="-|>", color="0.4", shrinkA=0, shrinkB=0)
        patches = dict(patchA=drawn[start].get_bbox_patch(), patchB=drawn[end].get_bbox_patch())
        axis.annotate("", boxes[end], boxes[start], arrowprops={**line, **patches})
        middle = np.mean([boxes[start], boxes[end]], axis=0)
        axis.text(middle[0], middle[1], word, ha="center", va="center", fontsize=7, color="0.3", zorder=4,
                  bbox=dict(fc="white", ec="none", pad=1))  # fmt: skip
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    return figure


def tree(labels: Sequence[str], parents: Sequence[int], *, root: str, marked: Iterable[int] = ()) -> Figure:
    """A tree, leaves from left to right in depth-first order. parents: of each node an earlier one, or -1 for the root.

    marked: nodes that are filled.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    across: dict[int, float] = {}
    leaves = count()

    def across_of(node: int) -> float:
        below = [across_of(child) for child in children.get(node, [])]
        across[node] = sum(below) / len(below) if below else float(next(leaves))
        return across[node]

    across_of(-1)
    depth = {-1: 0}
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1
    width = max(3.5, 0.75 * next(leaves))
    figure, axis = plt.subplots(figsize=(width, 0.7 * (1 + max(depth.values()))))
    filled = set(marked)
    for node, text in ((-1, root), *enumerate(labels)):
        if node >= 0:
            parent = parents[node]
            axis.plot([across[parent], across[node]], [-depth[parent], -depth[node]], color="0.6", zorder=1)
        box = dict(boxstyle="round", fc=COLOURS["sky"] if node in filled else "white", ec=COLOURS["blue"])
        axis.text(across[node], -depth[node], text, ha="center", va="center", fontsize=7, bbox=box, zorder=2)
    axis.set(xlim=(-0.6, max(across.values()) + 0.6), ylim=(-max(depth.values()) - 0.5, 0.5))
    axis.axis("off")
    return figure


# Order and looks


def order(values: Iterable[Any]) -> list[Any]:
    """Distinct values in the order of their first appearance, `average` last."""
    return sorted(dict.fromkeys(values), key=lambda value: value == "average")


def groups(table: pd.DataFrame, by: str) -> Iterator[tuple[Any, pd.DataFrame]]:
    """The rows of each value of a column, in `order`; without a column all rows."""
    for value in order(table[by]) if by else [""]:
        yield value, table[table[by] == value] if by else table


def look(number: int, **style: Any) -> dict[str, Any]:
    """Colour and marker of the number-th of several series."""
    marker = MARKERS[(number + number // len(CYCLE)) % len(MARKERS)]
    return dict(color=COLOURS[CYCLE[number % len(CYCLE)]], marker=marker, ms=4) | style


def looks_by_name(*series: str | Sequence[str]) -> dict[str, dict[str, Any]]:
    """A look for each name, or for several that share it; of the first eight no two have the same colour."""
    several = [[names] if isinstance(names, str) else names for names in series]
    return {name: look(number) for number, names in enumerate(several) for name in names}


def looks_of(labels: Sequence[Any], looks: Looks | None = None) -> list[dict[str, Any]]:
    """The look of each label: from `looks`, else from the notebook's dictionary, else the next colour that is free."""
    own = [{**_looks.get(label, {}), **(looks or {}).get(label, {})} for label in labels]
    taken = {style["color"] for style in own if "color" in style}
    free = [number for number, name in enumerate(CYCLE) if COLOURS[name] not in taken] or range(len(CYCLE))
    numbers = count()
    return [look(0) | style if "color" in style else look(free[next(numbers) % len(free)]) | style for style in own]


def versions(table: pd.DataFrame, by: str) -> tuple[pd.DataFrame, str, Looks]:
    """A table with a column `version` as what `lines`, `bars` and `points` draw: (table, by, looks).

    Versions of a series have its colour; all but the last are pale, and broken as lines. Other tables stay.
    """
    if "version" not in table:
        return table, by, {}
    names = order(table[by]) if by else [""]
    looks: dict[str, Mapping[str, Any]] = {}
    for name, style in zip(names, looks_of(names), strict=True):
        for version in order(table["version"]):
            pale = {} if version == table["version"].iloc[-1] else dict(ls="--", alpha=0.45)
            looks[f"{name}, {version}" if by else version] = style | pale
    series = table[by].astype(str) + ", " + table["version"] if by else table["version"]
    return derived(table.assign(series=series), table), "series", looks


def bar_positions(groups: int, number: int, count: int, width: float = 0.8) -> np.ndarray:
    """[groups] middle of bar `number` of `count` in each group, which together are `width` wide."""
    return np.arange(groups) + (number - (count - 1) / 2) * width / count


def spread(rows: pd.DataFrame, value: str) -> np.ndarray | None:
    """[2, n] lengths of the whiskers below and above, None where the table has no interval."""
    if "low" not in rows or "high" not in rows:
        return None
    return np.maximum(0, np.nan_to_num([rows[value] - rows["low"], rows["high"] - rows[value]]))


def plain(axis: Axis, *, steps: bool = False) -> None:
    """Plain numbers on a logarithmic axis; axis: `axes.xaxis` or `axes.yaxis`. steps: at 1, 2 and 5 of every decade."""
    if steps:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def percent(axis: Axis) -> None:
    """Shares of 1 as percent, without the sign."""
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}"))


# Marks


def bars(
    axis: Axes, table: pd.DataFrame, x: str, y: str, by: str = "", *, looks: Looks | None = None, flat: bool = False,
    width: float = 0.8, texts: str = "", names: Sequence[Any] = (),
) -> None:  # fmt: skip
    """Bars of y from 0 by the categories of x, beside each other by `by`, with whiskers; flat: they lie.

    texts: a format for the value at a bar's end. names: the categories, where they are more than the table's.
    """
    names, series = _beside(table, x, y, by, looks, names, width)
    for label, style, rows, position in series:
        error = spread(rows, y)
        style = {name: value for name, value in style.items() if name not in ("marker", "ms", "ls")}
        style |= {"xerr" if flat else "yerr": error, "error_kw": dict(elinewidth=0.8, capsize=1.5)}
        drawn = (axis.barh if flat else axis.bar)(position, rows[y], width / len(series), label=label, **style)
        if texts:
            axis.bar_label(drawn, [texts.format(v) if np.isfinite(v) else "" for v in rows[y]], fontsize=7, padding=2)
    categories(axis, names, flat=flat)


def points(
    axis: Axes,
    table: pd.DataFrame,
    x: str,
    y: str,
    by: str = "",
    *,
    looks: Looks | None = None,
    flat: bool = False,
    width: float = 0.6,
    texts: str = "",
    names: Sequence[Any] = (),
) -> None:
    """As `bars`, with points in their place: for values whose distance from 0 says nothing."""
    names, series = _beside(table, x, y, by, looks, names, width)
    for label, style, rows, position in series:
        across, up = (rows[y], position) if flat else (position, rows[y])
        whiskers = {"xerr" if flat else "yerr": spread(rows, y), "elinewidth": 0.8, "capsize": 1.5}
        axis.errorbar(across, up, label=label, **style | whiskers | dict(ls=""))
        for at, value in zip(position, rows[y], strict=True):
            if texts and np.isfinite(value):
                spot: dict[str, Any] = dict(textcoords="offset points", fontsize=7, va="bottom", ha="center")
                axis.annotate(texts.format(value), (value, at) if flat else (at, value), (0, 2), **spot)
    categories(axis, names, flat=flat)


def _beside(
    table: pd.DataFrame, x: str, y: str, by: str, looks: Looks | None, names: Sequence[Any], width: float
) -> tuple[list[Any], list[tuple[Any, dict[str, Any], pd.DataFrame, np.ndarray]]]:
    """Marks beside each other: the categories, and (label, look, rows by category, positions) of each series."""
    need(table, f"{x} {by}", y, unique=f"{x} {by}")
    names = list(names) or order(table[x])
    parts = list(groups(table, by))
    styles = looks_of([label for label, _ in parts], looks)
    series = []
    for number, ((label, rows), style) in enumerate(zip(parts, styles, strict=True)):
        positions = bar_positions(len(names), number, len(parts), width)
        series.append((label or None, style, rows.set_index(x).reindex(names), positions))
    return names, series


def categories(axis: Axes, names: Sequence[Any], *, flat: bool = False) -> None:
    """Names at 0, 1, ... of the x-axis, or from top to bottom of the y-axis, without grid lines along them."""
    (axis.yaxis if flat else axis.xaxis).set_ticks(range(len(names)), [str(name) for name in names], fontsize=8)
    axis.set(**{"ylim" if flat else "xlim": (len(names) - 0.5, -0.5) if flat else (-0.5, len(names) - 0.5)})
    axis.grid(visible=False, axis="y" if flat else "x")


def stacked(axis: Axes, wide: pd.DataFrame, looks: Looks, *, height: float = 0.6) -> np.ndarray:
    """Lying bars, a row of `wide` each, of its columns one after the other in the order of looks: [rows] the ends."""
    left = np.zeros(len(wide))
    for part, style in looks.items():
        if part in wide:
            axis.barh(range(len(wide)), wide[part].fillna(0), height, left=left, label=part, **style)
            left += wide[part].fillna(0).to_numpy()
    categories(axis, list(wide.index), flat=True)
    return left


def lines(
    axis: Axes,
    table: pd.DataFrame,
    x: str,
    y: str,
    by: str = "",
    *,
    looks: Looks | None = None,
    whiskers: bool = False,
    **style: Any,
) -> None:
    """Lines of y over x, one a value of `by`, with the interval as a band, or as whiskers at the points.

    looks: styles by value of `by`; style: of all (`ls=""` draws points alone).
    """
    need(table, f"{x} {by}", y)
    series = list(groups(table, by))
    for (label, rows), chosen in zip(series, looks_of([label for label, _ in series], looks), strict=True):
        rows = rows.sort_values(x, kind="stable")
        own: dict[str, Any] = dict(label=label or None) | chosen | style
        error = spread(rows, y)
        if error is not None and (whiskers or len(rows) == 1):
            axis.errorbar(rows[x], rows[y], yerr=error, elinewidth=0.8, capsize=2, **own)
            continue
        axis.plot(rows[x], rows[y], **own)
        if error is not None:
            axis.fill_between(rows[x], rows["low"], rows["high"], color=own["color"], alpha=0.18, lw=0)


def quoted(axis: Axes, x: Any = None, y: Any = None, label: str = "quoted", **style: Any) -> None:
    """The paper's value: hollow marks at x and y; of one of them a dashed line across, or a band between two values.

    label: with the word quoted or paper. Without one the mark is no value of the paper but a reference, such as a
    budget, and the kind stays as it is.
    """
    ours = not any(word in label.lower() for word in ("quoted", "paper"))
    style |= dict(label=label, gid=None if ours else _QUOTED)
    if x is not None and y is not None:
        axis.plot(x, y, **HOLLOW | style)
    elif np.ndim(x if y is None else y):
        (axis.axvspan if y is None else axis.axhspan)(*(x if y is None else y), **BAND | style)
    else:
        dashes: dict[str, Any] = dict(color=COLOURS["black"], lw=1, ls="--") | style
        (axis.axvline if y is None else axis.axhline)(x if y is None else y, **dashes)
    figure: Any = axis.figure
    for mark in _kind_marks(figure):
        mark_kind(figure, mark.get_text())


# The thing itself was timed or counted; recorded steps were put through a rule; measured parts were multiplied; a model
# of time with stated parameters; no run at all.
BASES = ("measurement", "replay", "prediction", "simulation", "formula")


def basis_of(kind: str) -> str:
    """What a kind of numbers rests on, one of `BASES`, the weakest of its parts; without a kind it is untested."""
    for word, basis in (("simulated", "simulation"), ("predicted", "prediction"), ("replayed", "replay")):
        if word in kind:
            return basis
    if "measured" in kind or "recorded" in kind:
        return "measurement"
    return "formula" if kind else "untested"


def need(table: pd.DataFrame, texts: str, numbers: str = "", *, least: float = -np.inf, unique: str = "") -> None:
    """Raise ValueError where a table cannot be drawn.

    texts, numbers: columns that it must have, separated by spaces; numbers are finite and not below `least`. unique:
    columns in which no two rows are the same.
    """
    if missing := [name for name in [*texts.split(), *numbers.split()] if name not in table]:
        raise ValueError(f"The figure needs the columns {', '.join(missing)}, which are none of {list(table.columns)}.")
    if table.empty:
        raise ValueError("A table without a row has nothing to draw.")
    for name in numbers.split():
        values = pd.to_numeric(table[name], errors="coerce")
        wrong = table[name][~(np.isfinite(values) & (values >= least))]
        if len(wrong):
            raise ValueError(f"{name} holds finite numbers from {least:g}, not {wrong.iloc[0]}.")
    if unique and table.duplicated(unique.split()).any():
        first = table[table.duplicated(unique.split())][unique.split()].iloc[0]
        raise ValueError(f"There are two rows for {dict(first)}.")
