"""The figure style, and the small plots that several notebooks share."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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


def use_style() -> None:
    """Apply the repository's figure style: called once at the top of each notebook."""
    sns.set_theme(context="paper", style="ticks", font_scale=1.05)
    plt.rcParams.update(
        {
            "figure.dpi": 84,  # in a notebook, which has to stay small; saved figures are finer
            "savefig.dpi": 84,
            "figure.constrained_layout.use": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "axes.prop_cycle": plt.cycler(color=list(COLOURS.values())),
            "legend.frameon": False,
        }
    )


def panels(
    rows: int, columns: int, *, width: float = 3.2, height: float = 2.5, **options: Any
) -> tuple[Figure, np.ndarray]:
    """A grid of axes, always [rows, columns]; width and height in inches a panel."""
    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, **options)


def mark_kind(figure: Figure, kind: str) -> None:
    """Write the kind of the numbers (measured, simulated, ...) into the figure's upper right corner."""
    figure.text(0.998, 0.998, kind, ha="right", va="top", fontsize=7, color=COLOURS["grey"], style="italic")


def shared_legend(figure: Figure, axes: Axes, *, columns: int = 4) -> None:
    """One legend above all panels, from one panel's entries."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=columns)


def verdict_bars(counts: pd.DataFrame) -> Figure:
    """Claims by verdict, one bar per paper. counts: columns paper, verdict, claims."""
    colours = {"reproduced": "green", "trend": "sky", "contradicted": "red", "untested": "grey"}
    wide = counts.pivot_table(index="paper", columns="verdict", values="claims", fill_value=0)
    figure, axes = panels(1, 1, width=6.0, height=0.9 + 0.45 * len(wide))
    axis, left = axes[0, 0], np.zeros(len(wide))
    for verdict, colour in colours.items():
        values = wide[verdict].to_numpy() if verdict in wide else np.zeros(len(wide))
        bars = axis.barh(wide.index, values, left=left, color=COLOURS[colour], label=verdict, height=0.6)
        axis.bar_label(bars, [f"{v:.0f}" if v else "" for v in values], label_type="center", color="white")
        left += values
    axis.set(xlabel="claims of the paper")
    axis.grid(visible=False)
    axis.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)
    return figure


def need(
    table: pd.DataFrame, texts: str, numbers: str, *, least: float = -np.inf, most: float = np.inf,
    positive: bool = False, unique: str = "",
) -> None:  # fmt: skip
    """Raise ValueError where a table cannot be drawn.

    texts, numbers: columns that it must have, separated by spaces; numbers are finite and in a range. unique: columns
    in which no two rows are the same.
    """
    missing = [name for name in [*texts.split(), *numbers.split()] if name not in table]
    if missing:
        raise ValueError(f"The figure needs the columns {', '.join(missing)}, which are none of {list(table.columns)}.")
    if table.empty:
        raise ValueError("A table without a row has nothing to draw.")
    for name in numbers.split():
        values = pd.to_numeric(table[name], errors="coerce")
        right = np.isfinite(values) & values.between(least, most) & ((values > 0) | (not positive))
        if not right.all():
            limits = "above 0" if positive else f"from {least:g}" + (f" to {most:g}" if most < np.inf else "")
            raise ValueError(f"{name} holds finite numbers {limits}, not {table[name][~right].iloc[0]}.")
    twice = table.duplicated(unique.split()) if unique else pd.Series(dtype=bool)
    if twice.any():
        raise ValueError(f"There are two rows for {dict(table[twice][unique.split()].iloc[0])}.")
