"""What the notebook's exhibits share: recorded passes, graphs' times, and what follows from both.

Tables are those of data/records/sdnpu (made by `record` and `timing` beside this file). A pass is one forward of the
model that verifies a draft. Means are sums over sums of a task's prompts, averages are over tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ondevice.evidence import Estimate, derived
from ondevice.evidence.resampling import DRAWS, Resampled, interval, resample
from ondevice_papers.sdnpu.drafter import PARTS
from ondevice_programs.graphs.switching import Profile

SWITCHED = ["model", "tokens", "cold"]  # what one comparison of ways of switching is of
PREFILL_ROWS = 256  # of G1
DECODE_ROWS = 32  # of G2
MOST_SHAPES = 3  # static graphs to decode on
BASES = ("PLD", "SAM")  # the paper's, to which it adds calibration and reuse


# Tokens per pass


def accepted(answers: pd.DataFrame, names: Sequence[str] = (), seed: int = 0) -> Resampled:
    """Tokens per pass by task, of methods on the requests that all of them answered. answers: of `spec_bench.load`."""
    decoded, passes = (resample(answers, column, seed, names) for column in ("decoded", "passes"))
    return decoded.over(passes)


def gains(rates: Resampled) -> Resampled:
    """Each recorded part's tokens per pass over its base's, by method."""
    parts = [name for name in (f"{base}+{part}" for base in BASES for part in PARTS) if name in rates.names]
    return rates.ratios({part: (part, part.split("+")[0]) for part in parts})


def in_steps(answers: pd.DataFrame, names: Sequence[str], seed: int = 0) -> pd.DataFrame:
    """By task and in their mean: questions, tokens per pass of methods, and each over the one before, with intervals.

    answers: of `spec_bench.load`, of which those to the questions of the first method count.
    """
    counted = answers[answers["method"] == names[0]].groupby("task").size()
    rates = accepted(
        answers[answers["request"].isin(set(answers.loc[answers["method"] == names[0], "request"]))], names, seed
    )
    steps = rates.ratios({f"{over} over {under}": (over, under) for under, over in pairwise(names)})
    columns = {name: np.r_[rates[name][0], rates[name][0].mean()].round(2) for name in names}
    for name in steps.names:
        draws = [*steps[name].T, steps[name].mean(axis=1)]
        columns[name] = np.array([f"{steps.estimate(draw):.2f}" for draw in draws])
    questions = [*counted[list(rates.tasks)], counted.sum()]
    return derived(pd.DataFrame({"task": [*rates.tasks, "mean"], "questions": questions, **columns}), rates)


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


def profile(blocks: pd.DataFrame) -> Profile:
    """Recorded times of each block's graphs. blocks: of one model, warm or cold."""
    ordered = blocks.sort_values("block")
    return Profile(*(ordered[name].to_numpy() for name in Profile._fields))


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


def by_prompt(whole: pd.DataFrame, column: str) -> Resampled:
    """`column` by task and arm; draws are of each task's prompts, the same ones for every arm."""
    return resample(derived(whole.assign(method=whole["arm"]), whole), column)


def per_token(whole: pd.DataFrame, decoding: bool = False) -> Resampled:
    """ms per token by task and arm: whole requests over their tokens, or decoding over those after the first."""
    seconds = whole["decode_s"] if decoding else whole["prefill_s"] + whole["decode_s"]
    table = derived(whole.assign(ms=1e3 * seconds, counted=whole["tokens"] - decoding), whole)
    return by_prompt(table, "ms").over(by_prompt(table, "counted"))


def rest_seconds(whole: pd.DataFrame, arm: str = "NPU vanilla", kept: str = "CPU vanilla") -> Estimate:
    """Seconds of an arm's decoding, which switching delays, and of the prefill on an engine that switches nothing.

    whole: of one task.
    """
    decoding, first = by_prompt(whole, "decode_s"), by_prompt(whole, "prefill_s")
    return decoding.estimate((decoding[arm] + first[kept])[:, 0])


def parts(whole: pd.DataFrame) -> pd.DataFrame:
    """Figure 13, measured: arm, part (prefill with switching and calibration, drafting, forwards), ms per request."""
    split = whole.assign(
        prefill=whole["prefill_s"],
        drafting=whole["draft_s"] + whole["observe_s"],
        forwards=whole["decode_s"] - whole["draft_s"] - whole["observe_s"],
    )
    means = 1e3 * split.groupby("arm", sort=False)[["prefill", "drafting", "forwards"]].mean()
    return derived(means.reset_index().melt("arm", var_name="part", value_name="ms"), whole)
