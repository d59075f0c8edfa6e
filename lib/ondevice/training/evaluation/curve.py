"""The loss curve of a training run, from its log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ondevice import assets, plotting

ROWS = 200  # of the committed table
_PERPLEXITIES = (8, 10, 12, 15, 20, 25, 30, 40, 50, 70, 100, 150, 200, 300, 500, 1000)  # ticks


def read_log(path: Path) -> pd.DataFrame:
    """A run's log.csv, or a curve.csv made from one; raises ValueError when it is neither."""
    found = pd.read_csv(path)
    missing = {"step", "tokens", "loss", "lr", "seconds", "perplexity"} - set(found.columns)
    if missing or found.empty:
        raise ValueError(f"{path.name} is no log of a training run: it lacks {', '.join(sorted(missing)) or 'rows'}.")
    return found


def thinned(log: pd.DataFrame, rows: int = ROWS) -> pd.DataFrame:
    """About `rows` rows: losses averaged over runs of neighbours, and every row with a perplexity, the last included.

    tokens, seconds and the rest are those at a run's end.
    """
    size = max(1, round(len(log) / rows))
    ends = (np.arange(len(log)) % size == size - 1) | log["perplexity"].notna() | (np.arange(len(log)) == len(log) - 1)
    group = np.concatenate([[0], np.cumsum(ends)[:-1]])
    kept = log.groupby(group).last(skipna=False)
    kept["loss"] = log.groupby(group)["loss"].mean().round(4)
    return kept.reset_index(drop=True)


def training_facts(log: pd.DataFrame) -> dict[str, Any]:
    """What a log says of its run: steps, tokens, tokens a step, minutes, the peak rate, whether it ended at rate 0."""
    last = log.iloc[-1]
    peak = float(log["lr"].max())
    return {
        "steps": int(last["step"]), "tokens": int(last["tokens"]),
        "tokens_a_step": int(last["tokens"]) // int(last["step"]), "minutes": round(float(last["seconds"]) / 60, 1),
        "peak_matrix_rate": peak, "finished": bool(last["lr"] < 0.01 * peak),
        "last_loss": round(float(log["loss"].tail(10).mean()), 4),
    }  # fmt: skip


def draw(log: pd.DataFrame) -> Figure:
    """Training loss (as logged, and smoothed) and the validation perplexity, against millions of tokens."""
    plotting.use_style()
    figure, axes = plotting.panels(1, 2, width=3.6, height=2.7)
    left, right = axes[0]
    millions = log["tokens"] / 1e6
    smooth = log["loss"].rolling(max(1, len(log) // 30), center=True, min_periods=1).mean()
    left.plot(millions, log["loss"], color=plotting.COLOURS["sky"], lw=0.6, alpha=0.7, label="as logged")
    left.plot(millions, smooth, color=plotting.COLOURS["blue"], label="smoothed")
    left.set(xlabel="tokens (millions)", ylabel="training loss (nats a token)", xlim=(0, None))
    left.legend()
    validated = log.dropna(subset=["perplexity"])
    right.plot(validated["tokens"] / 1e6, validated["perplexity"], "o-", ms=3, color=plotting.COLOURS["orange"])
    right.set(xlabel="tokens (millions)", ylabel="validation perplexity", xlim=left.get_xlim())
    if len(validated):
        right.set_yscale("log")
        low, high = 0.9 * validated["perplexity"].min(), 1.15 * validated["perplexity"].max()
        right.set_ylim(low, high)
        shown = [tick for tick in _PERPLEXITIES if low <= tick <= high]
        right.set_yticks(shown, [str(tick) for tick in shown])
        right.minorticks_off()
    plotting.mark_kind(figure, "measured")
    return figure


def write(log: pd.DataFrame, folder: Path) -> None:
    """Write curve.csv and curve.png."""
    import matplotlib.pyplot as plt

    with assets.writing(folder / "curve.csv") as temporary:
        thinned(log).to_csv(temporary, index=False, lineterminator="\n")
    figure = draw(log)
    with assets.writing(folder / "curve.png") as temporary:
        figure.savefig(temporary, dpi=150)
    plt.close(figure)
