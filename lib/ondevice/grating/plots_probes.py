"""The figure of linear probes. It draws a table of `probe_experiments.table`; shares are fractions of 1.

It raises ValueError where the table lacks a column, has no row, two rows for one point, or an impossible value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ondevice.plotting import COLOURS, need, panels

_COLOURS, _LINES, _MARKERS = ("blue", "orange", "green"), ("-", ":", "--"), "osD"
_PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.4g}")


def saved_work(table: pd.DataFrame, target: float = 0.98, bar: float = 0.35, kind: str = "replayed") -> Figure:
    """Work that is saved against the overlap with the full model's top K; a panel a model.

    table: columns model, scores, rule, target (overlap asked for), saved (share of the layer-candidates), overlap,
    low, high (what is reached on test pools, 95 %). target, bar: marked, the overlap and the saving to reach.
    """
    need(table, "model scores rule", "target", unique="model scores rule target")
    need(table, "", "target saved overlap low high", least=0, most=1)
    models, scores, rules = (list(dict.fromkeys(table[name])) for name in ("model", "scores", "rule"))
    if len(scores) > len(_COLOURS) or len(rules) > len(_LINES):
        raise ValueError(f"At most {len(_COLOURS)} kinds of scores and rules can be told apart.")
    figure, axes = panels(1, len(models), width=8.7 / max(1.4, len(models)), height=2.9, sharey=True)
    for axis, model in zip(axes[0], models, strict=True):
        axis.axvline(target, color=COLOURS["black"], ls="--", lw=0.9, label=f"overlap {target:g}, {bar:.0%} saved")
        axis.axhline(bar, color=COLOURS["black"], ls="--", lw=0.9)
        for (said, rule), rows in table[table["model"] == model].groupby(["scores", "rule"], sort=False):
            place = rules.index(rule)
            style: dict[str, Any] = dict(color=COLOURS[_COLOURS[scores.index(said)]], ls=_LINES[place], ms=4.5)
            rows = rows.sort_values("target")
            error = np.abs(rows[["low", "high"]].to_numpy() - rows[["overlap"]].to_numpy()).T
            axis.errorbar(rows["overlap"], rows["saved"], xerr=error, marker=_MARKERS[place], elinewidth=0.7,
                          label=f"{said}, {rule}", **style)  # fmt: skip
        axis.set_title(model, fontsize=9)
        axis.set_xlabel("overlap with the full model's top K")
        axis.yaxis.set_major_formatter(_PERCENT)
    axes[0, 0].set(ylabel="layer-candidates saved (%)", ylim=(0, None))
    found = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(found.values()), list(found), title=kind, loc="outside upper center", ncols=3,
                  fontsize=8, title_fontsize=8)  # fmt: skip
    return figure
