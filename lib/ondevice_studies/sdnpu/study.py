"""What the notebook's exhibits share: recorded passes, graphs' times, and what follows from both.

Tables are those of data/records/sdnpu (made by `record` and `timing` beside this file). A pass is one forward of the
model that verifies a draft. Means are sums over sums of a task's prompts, averages are over tasks and models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ondevice import evidence
from ondevice.evidence import Estimate, derived, kind_of
from ondevice.evidence.resampling import DRAWS, Resampled, interval
from ondevice_papers.sdnpu.drafter import BASES, PARTS
from ondevice_studies.sdnpu.workbench import REQUEST
from ondevice_studies.speculation.nested import OfPrompts, joined, resample_models

SWITCHED = ["model", "precision", "tokens", "cold"]  # what one comparison of ways of switching is of
DECODE_ROWS = 32  # of G2
MOST_SHAPES = 3  # static graphs to decode on


def by_prompt(table: pd.DataFrame, column: str) -> OfPrompts:
    """`column` of a table with model, task, request and method; its tasks are pairs `model task`.

    A task's request of one number has the same prompt for both models, so a draw takes it for both.
    """
    return joined(resample_models(table, column))


def rate(table: pd.DataFrame, column: str, per: str) -> OfPrompts:
    """The means of one column over those of another one, so sums over sums; both as in `by_prompt`."""
    sample = by_prompt(table, column)
    return replace(sample, values=sample.values / by_prompt(table, per).values)


def of_the_paper(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """A record's rows of the paper's rules and its baselines. column: with methods, arms or rules.

    Records of the small models hold rules of our own, too, which lost to the mixture on SmolLM2 and left.
    """
    names = table[column]
    own = names.isin(["ours", "CPU ours"]) | (names.str.contains("+", regex=False) & ~names.str.contains(", printed"))
    own &= ~names.str.contains(" +G", regex=False)
    renamed = names.str.replace(", printed", "").replace("printed", "sd.npu")
    return derived(table.assign(**{column: renamed})[~own], table)


# Tokens per pass


def accepted(passes: pd.DataFrame) -> OfPrompts:
    """Tokens a pass of every method, the model's own included; its tasks are pairs `model task`."""
    sums = passes.groupby([*REQUEST, "method"], sort=False)["emitted"].agg(["sum", "size"]).reset_index()
    return rate(derived(sums, passes), "sum", "size")


def gains(rates: Resampled) -> Resampled:
    """Each part's tokens per pass over its base's, by method."""
    parts = [f"{base}+{part}" for base in BASES for part in PARTS]
    return rates.ratios({part: (part, part.split("+")[0]) for part in parts})


# Graphs of a few shapes


def forward(curve: pd.DataFrame, rows: ArrayLike) -> NDArray[np.float64]:
    """Seconds of a static graph of so many rows: linear between those measured. curve: rows, seconds of one model."""
    measured = curve.sort_values("rows")
    return np.interp(np.asarray(rows, float), measured["rows"], measured["seconds"])


def best_shapes(rows: ArrayLike, seconds: NDArray[np.float64], count: int = MOST_SHAPES) -> tuple[Sequence[int], float]:
    """(shapes, share of the speed that graphs of any shape have): the `count` shapes that are fastest together.

    rows: of each pass. seconds: [m] a graph of 1 .. m rows. All choices are tried; the largest must hold every pass.
    """
    counts = np.bincount(np.asarray(rows), minlength=len(seconds) + 1)[1:]
    most = int(np.flatnonzero(counts).max()) + 1
    any_shape = float(counts @ np.minimum.accumulate(seconds[::-1])[::-1])
    tried = combinations(range(1, most + 1), count)
    best = min(tried, key=lambda shapes: (_spent(counts, seconds, shapes, most), shapes))
    return best, any_shape / _spent(counts, seconds, best, most)


def _spent(counts: NDArray[np.int64], seconds: NDArray[np.float64], shapes: Sequence[int], most: int) -> float:
    """Seconds of all passes, each on the smallest graph that holds it."""
    if shapes[-1] < most:
        return np.inf
    sums = np.concatenate([[0], np.cumsum(counts)])
    ends = [0, *shapes]
    return float(sum((sums[b] - sums[a]) * seconds[b - 1] for a, b in pairwise(ends)))


# Switching, measured


def medians(switching: pd.DataFrame, column: str = "total_s") -> dict[Any, NDArray[np.float64]]:
    """By way [1 + DRAWS]: the median over the rounds, then of draws of rounds, the same ones for every way.

    switching: the rows of one comparison.
    """
    wide = switching.pivot_table(index="round", columns="way", values=column).dropna()
    drawn = np.random.default_rng(0).integers(0, len(wide), (DRAWS, len(wide)))
    return {way: np.r_[np.median(v), np.median(v.to_numpy()[drawn], axis=1)] for way, v in wide.items()}


def hidden(switching: pd.DataFrame) -> pd.DataFrame:
    """SWITCHED, memory, way, seconds, added (to keeping both), hidden (% of what synchronous adds), low, high, n.

    Ways with memory to spare are compared with synchronous switching without.
    """
    rows = []
    for keys, comparison in switching.groupby(SWITCHED, sort=False):
        named: Any = list(zip(comparison["memory"], comparison["way"], strict=True))
        draws = medians(comparison.assign(way=named))
        both = draws[1.0, "keep both"]
        worst = draws[1.0, "synchronous"]
        for (memory, way), seconds in draws.items():
            percent = 100 * (1 - (seconds - both) / (worst - both))
            share = interval(percent, comparison["round"].nunique(), "recorded", "rounds")
            rows.append((*keys, memory, way, seconds[0], seconds[0] - both[0], share.value, *share.interval, share.n))
    columns = [*SWITCHED, "memory", "way", "seconds", "added", "hidden", "low", "high", "n"]
    return derived(pd.DataFrame(rows, columns=columns), switching)


# Whole requests, measured


def whole_requests(whole: pd.DataFrame, decoding: bool = False) -> OfPrompts:
    """ms a token by arm: whole requests over their tokens, or decoding over those after the first.

    Of a request the median of its rounds; tasks are pairs `model task`.
    """
    seconds = whole["decode_s"] if decoding else whole["prefill_s"] + whole["decode_s"]
    table = whole.assign(ms=1e3 * seconds, counted=whole["tokens"] - decoding)
    return rate(of_rounds(table, ["ms", "counted"]), "ms", "counted")


def prefills(whole: pd.DataFrame) -> OfPrompts:
    """Seconds to the first token by arm, the mean over requests; of a request the median of its rounds."""
    return by_prompt(of_rounds(whole, ["prefill_s"]), "prefill_s")


def of_rounds(whole: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """model, task, request, method, which is the arm, and of `columns` the median of a request's rounds."""
    table = whole.groupby(["model", "task", "request", "arm"], sort=False)[list(columns)].median().reset_index()
    return derived(table.rename(columns={"arm": "method"}), whole)


def rest_seconds(whole: pd.DataFrame, arm: str = "NPU vanilla", kept: str = "CPU vanilla") -> Estimate:
    """Seconds of decoding of an arm, which switching delays, and of the prefill on an engine that switches nothing."""
    decoding = whole[whole["arm"] == arm].groupby("request")["decode_s"].median()
    first = whole[whole["arm"] == kept].groupby("request")["prefill_s"].median()
    return evidence.mean((decoding + first).tolist(), kind_of(whole), drawn="prompts")


def parts(whole: pd.DataFrame, task: str = "summary") -> pd.DataFrame:
    """Figure 13, measured: model, arm, part (prefill with switching and calibration, drafting, forwards), ms."""
    requests = whole[whole["task"] == task]
    split = requests.assign(
        prefill=requests["prefill_s"],
        drafting=requests["draft_s"] + requests["observe_s"],
        forwards=requests["decode_s"] - requests["draft_s"] - requests["observe_s"],
    )
    means = 1e3 * split.groupby(["model", "arm"], sort=False)[["prefill", "drafting", "forwards"]].mean()
    return derived(means.reset_index().melt(["model", "arm"], var_name="part", value_name="ms"), whole)
