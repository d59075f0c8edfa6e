"""The figure style, and the small plots that several notebooks share."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe-Ito: told apart by readers with any kind of colour vision.
COLOURS = {
    "blue": "#0072B2", "orange": "#E69F00", "green": "#009E73", "red": "#D55E00",
    "purple": "#CC79A7", "sky": "#56B4E9", "yellow": "#F0E442", "black": "#000000", "grey": "#7F7F7F",
}


def use_style() -> None:
    """Apply the repository's figure style: called once at the top of each notebook."""
    sns.set_theme(context="paper", style="ticks", font_scale=1.05)
    plt.rcParams.update({
        "figure.dpi": 100, "savefig.dpi": 150, "figure.constrained_layout.use": True,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "axes.prop_cycle": plt.cycler(color=list(COLOURS.values())), "legend.frameon": False,
    })


def panels(rows: int, columns: int, *, width: float = 3.2, height: float = 2.5, **options: Any) -> tuple[Figure, np.ndarray]:
    """A grid of axes, always [rows, columns]; width and height in inches a panel."""
    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, **options)


def mark_kind(figure: Figure, kind: str) -> None:
    """Write the kind of the numbers (measured, simulated, ...) into the figure's lower right corner."""
    figure.text(0.995, 0.002, kind, ha="right", va="bottom", fontsize=7, color=COLOURS["grey"], style="italic")


def shared_legend(figure: Figure, axes: Axes, *, columns: int = 4) -> None:
    """One legend above all panels, from one panel's entries."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=columns)
