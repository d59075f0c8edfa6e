"""Speeds by regime: what a pass over n rows costs, over one of a single row, decides what a draft is worth.

The paper's regime is implied by its own numbers. Token Recycling verifies 81 rows. Its authors report 2.73 tokens per
pass, and DIAA's Table 2 a speed-up of 2.08 for the 3B model. So a pass over 81 rows takes 2.73 / 2.08 = 1.31 times one
over a single row. Speeds in it are simulated, from recorded passes and that line. Others have recorded curves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ondevice import assets, evidence

TOKENS_PER_PASS = 2.73  # of Token Recycling on Spec-Bench, by its authors and by Spec-Bench's leaderboard
MODELS = {"7B": "Vicuna-7b-v1.5-INT4", "3B": "Llama-3.2-3B-Instruct-INT4", "1B": "Llama-3.2-1B-Instruct"}
FORMS = {"float32": "float32", "4bit": "4 bits", "8bit": "8 bits", "8bit-rows": "8 bits by row"}
TEMPLATE = 81  # rows of its pass, the root's with them


@dataclass(frozen=True)
class Regime:
    """T(n)/T(1) of one model, format and machine. rows, ratios: [k] points of it; between them it is linear.

    kind: of the speeds that follow.
    """

    name: str
    kind: str
    rows: NDArray[np.float64]
    ratios: NDArray[np.float64]

    def cost(self, rows: ArrayLike) -> NDArray[np.float64]:
        """T(rows)/T(1), beyond the last point along the last slope."""
        n = np.asarray(rows, float)
        slope = np.diff(self.ratios[-2:])[0] / np.diff(self.rows[-2:])[0]
        beyond = np.maximum(0.0, n - self.rows[-1]) * slope
        return np.interp(n, self.rows, self.ratios) + beyond


def implied(size: str) -> Regime:
    """The paper's regime for its model of a size, `7B`, `3B` or `1B`, by Token Recycling's speed-up in its Table 2."""
    table = assets.paper_table("diaa", "table_02_speedup").set_index(["model", "method"])["speedup_over_vanilla_x"]
    ratio = TOKENS_PER_PASS / float(table[MODELS[size], "TR"])
    points = np.array([1.0, TEMPLATE])
    return Regime(f"the paper's, {size}, implied", "simulated", points, np.array([1.0, ratio]))


def measured(curves: pd.DataFrame, machine: str, model: str, weights: str, arithmetic: str, threads: int) -> Regime:
    """The regime of a recorded curve behind 256 tokens (`costs`). Raises ValueError where there is none."""
    same: dict[str, object] = {"machine": machine, "model": model, "threads": threads, "cached": 256, "run": 1}
    same |= {"weights": weights, "arithmetic": arithmetic}
    rows = curves[(curves[list(same)] == pd.Series(same)).all(axis=1)]
    rows = rows[rows["rows_alone"] != "alone"] if arithmetic == "int8" else rows
    if rows.empty:
        raise ValueError(f"There is no curve of {model} in {weights}, {arithmetic}, {threads} threads on {machine}.")
    rows = rows.sort_values("rows")
    seconds = rows["mean"].to_numpy(float)
    form = FORMS[weights] + (" in integers" if arithmetic == "int8" else "")
    label = f"{form}, {threads} thread{'s' if threads > 1 else ''}, {machine}"
    return Regime(label, "recorded", rows["rows"].to_numpy(float), seconds / seconds[0])


def all_measured(model: str) -> dict[str, Regime]:
    """By name the recorded regimes of a model: of every machine, format and number of threads.

    In integers a lone row is one that was padded to two, as trees are verified exactly only so.
    """
    curves = evidence.times("diaa", "formats")
    curves = curves[curves["model"] == model]
    keys = ["machine", "weights", "arithmetic", "threads"]
    every = [measured(curves, m, model, w, a, t) for m, w, a, t in curves[keys].drop_duplicates().to_numpy()]
    return {regime.name: regime for regime in every}


def timed(answers: pd.DataFrame, passes: pd.DataFrame, regime: Regime, skipped: float = 0.5) -> pd.DataFrame:
    """The answers with the time of their decoding, in passes over a single row, and its ratios to their tokens.

    Added: spent (in all), latency (spent per token) and speed (tokens per such a pass).

    A drafter's own work is left out. skipped: what a forward of the model without its skipped layers costs, over one of
    the whole model. Plain decoding, whose passes are not recorded, has a speed of 1.
    """
    keys = ["model", "task", "request", "method"]
    cost = regime.cost(1 + passes["drafted"]) + skipped * passes["drafting_passes"]
    spent = passes.assign(spent=cost).groupby(keys, sort=False)["spent"].sum().reset_index()
    table = answers.merge(spent, on=keys, how="left")
    plain = table["method"] == "vanilla"
    table = table.assign(spent=table["spent"].where(~plain, table["decoded"]))
    table = table[table["decoded"] > 0]
    table = table.assign(speed=table["decoded"] / table["spent"], latency=table["spent"] / table["decoded"])
    if regime.kind == "simulated":
        return evidence.born(table, "simulated")
    return evidence.derived(table, answers, passes, "predicted")
