"""What a figure shows, as two hashes: of its data and artists, and of its structure without their numbers.

Positions count as shares of their axes, so backend, resolution, fonts and layout change nothing. They are rounded to a
ten-thousandth of the axis. The edges between two steps lie at fractions that no short decimal hits: another processor's
rounding, some 1e-13 of a value, then crosses one about once in a billion numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.category import StrCategoryLocator
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator

_STEPS = 10_000  # of an axis
_SHIFT = 0.3819660113  # of a step
_LOOKS = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor", "linestyle", "linewidth", "marker")
_NUMBER = re.compile(r"-?\d[\d.,]*(e[-+]?\d+)?")


def hashes(figure: Figure) -> tuple[str, str]:
    """SHA-256 of all that the figure shows, and of the same without numbers: kinds, counts, colours, words."""
    with np.errstate(all="ignore"):
        panels = [_panel(axes) for axes in figure.findobj(Axes) if isinstance(axes, Axes)]
    shown = [panels, _words(figure.texts), [_words(legend.get_texts()) for legend in figure.legends]]
    first, second = (hashlib.sha256(json.dumps(each).encode()).hexdigest() for each in (shown, _structure(shown)))
    return first, second


def _panel(axes: Axes) -> list[Any]:
    ends = np.array([axes.get_xlim(), axes.get_ylim()])  # asked for first, as this also brings transforms up to date
    grid, legend = axes.get_subplotspec(), axes.get_legend()
    marks = [*axes.lines, *axes.collections, *axes.patches, *axes.images]
    return [
        list(map(int, grid.get_geometry())) if grid else None,
        [axes.get_xscale(), axes.get_yscale(), *(_range(*limits) for limits in axes.transScale.transform(ends.T).T)],
        [axes.get_title(loc) for loc in ("left", "center", "right")] + [axes.get_xlabel(), axes.get_ylabel()],
        [_ticks(axes.xaxis), _ticks(axes.yaxis)],
        _words(legend.get_texts()) if legend else None,
        [_mark(axes, mark) for mark in marks],
        [_words(axes.texts), *(_position(axes, text) for text in axes.texts)],
    ]


def _mark(axes: Axes, mark: Any) -> list[Any]:
    mapped = getattr(mark, "get_array", lambda: None)()  # to colours, which are then not looked at
    looks = {name: getattr(mark, f"get_{name}")() for name in _LOOKS if hasattr(mark, f"get_{name}")}
    shown = {
        name: str(look) if "color" not in name else _hex(look)
        for name, look in looks.items()
        if mapped is None or "color" not in name
    }
    free = isinstance(mark, PathCollection)  # marks of a size in points, at its offsets
    paths = mark.get_paths() if hasattr(mark, "get_paths") else [mark.get_path()] if hasattr(mark, "get_path") else []
    points = [_steps(xy) if free else _shares(axes, mark.get_transform(), xy) for xy in (p.vertices for p in paths)]
    if free:
        points += [_shares(axes, mark.get_offset_transform(), mark.get_offsets()), _steps(mark.get_sizes())]
    if mapped is not None:
        low, high = mark.get_clim()
        points += [mark.get_cmap().name, _range(low, high), _steps((mapped - low) / (high - low))]
    label = str(mark.get_label())
    return [type(mark).__name__, "" if label.startswith("_") else label, shown, points]


def _ticks(axis: Any) -> list[Any]:
    """The texts of ticks that were set by hand; how many a locator finds depends on the layout."""
    formatter, locator = axis.get_major_formatter(), axis.get_major_locator()
    fixed = isinstance(locator, FixedLocator | StrCategoryLocator)
    return [type(formatter).__name__, list(map(str, formatter.format_ticks(list(locator())))) if fixed else None]


def _words(texts: Any) -> list[Any]:
    return [[text.get_text(), _hex(text.get_color())] for text in texts]


def _position(axes: Axes, text: Any) -> list[Any]:
    noted = isinstance(text, Annotation)
    x, y = text.xy if noted else text.get_position()
    transform = axes.transData if noted else text.get_transform()
    return _shares(axes, transform, [[text.convert_xunits(x), text.convert_yunits(y)]])


def _shares(axes: Axes, transform: Any, points: Any) -> list[Any]:
    """[n, 2] steps from the axes' lower left corner."""
    xy: Any = np.ma.filled(np.ma.asarray(points, dtype=float), np.nan).reshape(-1, 2)
    return _steps(axes.transAxes.inverted().transform(transform.transform(xy)))


def _range(low: float, high: float) -> list[Any]:
    """Where a range begins, in steps of its length, and its length, in steps of the same share."""
    return _steps([low / (high - low), np.log(abs(high - low))])


def _steps(values: Any) -> list[Any]:
    numbers: Any = np.ma.filled(np.ma.asarray(values, dtype=float), np.nan)
    return (np.floor(numbers * _STEPS + _SHIFT) + 0.0).tolist()  # + 0.0: no negative zero


def _hex(colours: Any) -> list[str]:
    return [to_hex(colour, keep_alpha=True) for colour in to_rgba_array(colours)]


def _structure(shown: Any) -> Any:
    if isinstance(shown, dict | list):
        items = shown.items() if isinstance(shown, dict) else enumerate(shown)
        return [[str(key), _structure(value)] for key, value in items]
    if isinstance(shown, str):
        return shown if shown.startswith("#") else _NUMBER.sub("0", shown)
    return None if shown is None else 0
