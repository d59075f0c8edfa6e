"""What the notebook's exhibits share: recorded passes, graphs' times, and what follows from both.

Tables are those of data/records/sdnpu (made by `record` and `timing` beside this file). A pass is one forward of the
model that verifies a draft. Means are sums over sums of a task's prompts, averages are over tasks and models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, islice, pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import ArrayLike, NDArray

from ondevice import evidence, plotting
from ondevice.evidence import Estimate, derived, kind_of
from ondevice.evidence.resampling import DRAWS, Resampled, interval, resample
from ondevice.speculation import generate
from ondevice_papers.sdnpu.drafter import BASES
from ondevice_papers.sdnpu.scheduling import Load, Prefill, Timeline, execute
from ondevice_studies.sdnpu.workbench import REQUEST
from ondevice_studies.speculation.prompts import _spread

SWITCHED = ["model", "precision", "tokens", "cold"]  # what one comparison of ways of switching is of
DECODE_ROWS = 32  # of G2
MOST_SHAPES = 3  # static graphs to decode on


# Tokens a pass


def accepted(passes: pd.DataFrame) -> Resampled:
    """Tokens a pass of every method, the model's own included; its tasks are pairs `model task`."""
    sums = passes.groupby([*REQUEST, "method"], sort=False)["emitted"].agg(["sum", "size"]).reset_index()
    sums["task"] = sums["model"] + " " + sums["task"]
    table = derived(sums, passes)
    return resample(table, "sum").over(resample(table, "size"))


def gains(rates: Resampled, suffix: str = "") -> Resampled:
    """Each part's tokens a pass over its base's, by method. suffix: ", printed" for the paper's rules."""
    parts = [f"{base}+{part}{suffix}" for base in BASES for part in ("calibration", "reuse", "both")]
    return rates.ratios({part: (part, part.split("+")[0]) for part in parts})


def chosen_online(rates: Resampled) -> pd.DataFrame:
    """base, task, choice, low, high: both parts over the best of calibration, reuse and both, chosen in hindsight.

    What decides online is the rate of each source; 1 is never lost.
    """
    rows = []
    for base in BASES:
        both = rates[f"{base}+both"]
        best = np.max([rates[f"{base}+{part}"] for part in ("calibration", "reuse", "both")], axis=0)
        for place, task in enumerate(rates.tasks):
            part = rates.estimate((both / best)[:, place])
            rows.append((base, task, part.value, part.low, part.high))
    return derived(pd.DataFrame(rows, columns=["base", "task", "choice", "low", "high"]), rates)


def draft_lengths(passes: pd.DataFrame) -> pd.DataFrame:
    """model, task, method, drafted, share of the passes with so many tokens drafted."""
    keys = ["model", "task", "method"]
    shares = passes.groupby(keys, sort=False)["drafted"].value_counts(normalize=True).rename("share")
    return derived(shares.reset_index().sort_values([*keys, "drafted"], ignore_index=True), passes)


def own_model(lm: Any, tokenizer: Any, drafter: Any, budget: int, tasks: Sequence[str], count: int) -> float:
    """Tokens a pass of a drafter on the first prompts of each task, by a model that is not recorded."""
    emitted = forwards = 0
    for task in tasks:
        for one in islice(_spread(task, "test"), count):
            ids = tokenizer(one.prompt, verbose=False)["input_ids"][: lm.context - 128]
            found = generate(lm, drafter, ids, 128, budget=budget, eos_token_ids={tokenizer.eos_token_id})
            emitted = emitted + len(found.tokens) - 1
            forwards = forwards + len(found.steps)
    return emitted / forwards


# Graphs of a few shapes


def forward(curve: pd.DataFrame, rows: ArrayLike) -> NDArray[np.float64]:
    """Seconds of a static graph of so many rows: linear between those measured. curve: rows, seconds of one model."""
    known = curve.sort_values("rows")
    return np.interp(np.asarray(rows, float), known["rows"], known["seconds"])


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


# Switching


def added_ms(prefill: Prefill, rule: Callable[[Prefill], list[Load]]) -> float:
    """What a way of switching adds to a prefill on G1."""
    return execute(prefill, rule(prefill)).exposed


def gantt(axis: Axes, timeline: Timeline) -> None:
    """Computes above, loads below, blocks numbered from 1; broken lines end chunks, a full one the whole."""
    labels = ("compute on G1", "compute on G2", "load of G2")
    colours = dict(zip(labels, ("sky", "orange", "green"), strict=True))
    blocks = timeline.prefill.blocks
    spans = [
        (1, place % blocks, labels[graph - 1], start, end)
        for place, (graph, start, end) in enumerate(
            zip(timeline.graph.flat, timeline.compute_start.flat, timeline.compute_end.flat, strict=True)
        )
    ]
    loads = zip(timeline.load_block, timeline.load_start, timeline.load_end, strict=True)
    spans += [(0, int(block), labels[2], start, end) for block, start, end in loads]
    for row, block, label, start, end in spans:
        colour = plotting.COLOURS[colours[label]]
        axis.barh(row, end - start, left=start, height=0.8, color=colour, edgecolor="white", lw=0.6, label=label)
        axis.text((start + end) / 2, row, str(block + 1), ha="center", va="center", fontsize=7)
    for end in timeline.compute_end[:, -1]:
        axis.axvline(end, color=plotting.COLOURS["grey"], ls=":", lw=1)
    axis.axvline(timeline.latency, color=plotting.COLOURS["black"], lw=1)
    axis.set_yticks([0, 1], ["load", "compute"])
    axis.set_ylim(-0.5, 1.5)
    axis.grid(visible=False)


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
    for keys, mine in switching.groupby(SWITCHED, sort=False):
        named: Any = list(zip(mine["memory"], mine["way"], strict=True))
        of = medians(mine.assign(way=named))
        both = of[1.0, "keep both"]
        worst = of[1.0, "synchronous"]
        for (memory, way), seconds in of.items():
            share = interval(100 * (1 - (seconds - both) / (worst - both)), mine["round"].nunique(), "recorded")
            rows.append((*keys, memory, way, seconds[0], seconds[0] - both[0], share.value, *share.interval, share.n))
    columns = [*SWITCHED, "memory", "way", "seconds", "added", "hidden", "low", "high", "n"]
    return derived(pd.DataFrame(rows, columns=columns), switching)


# Whole requests, measured


def whole_requests(whole: pd.DataFrame, decoding: bool = False) -> Resampled:
    """ms a token by arm: whole requests over their tokens, or decoding over those after the first.

    Of a request the median of its rounds; tasks are pairs `model task`.
    """
    keys = ["model", "task", "request", "arm"]
    seconds = whole["decode_s"] if decoding else whole["prefill_s"] + whole["decode_s"]
    table = whole.assign(ms=1e3 * seconds, counted=whole["tokens"] - decoding)
    table = table.groupby(keys, sort=False)[["ms", "counted"]].median().reset_index()
    table = derived(table.assign(task=table["model"] + " " + table["task"]).rename(columns={"arm": "method"}), whole)
    return resample(table, "ms").over(resample(table, "counted"))


def prefills(whole: pd.DataFrame) -> Resampled:
    """Seconds to the first token by arm, the mean over requests; of a request the median of its rounds."""
    table = whole.groupby(["model", "task", "request", "arm"], sort=False)["prefill_s"].median().reset_index()
    table = table.assign(task=table["model"] + " " + table["task"]).rename(columns={"arm": "method"})
    return resample(derived(table, whole), "prefill_s")


def rest_seconds(whole: pd.DataFrame, arm: str = "NPU vanilla", kept: str = "CPU vanilla") -> Estimate:
    """Seconds of decoding of an arm, which switching delays, and of the prefill on an engine that switches nothing."""
    mine = whole[whole["arm"] == arm].groupby("request")["decode_s"].median()
    first = whole[whole["arm"] == kept].groupby("request")["prefill_s"].median()
    return evidence.mean((mine + first).tolist(), kind_of(whole))


def parts(whole: pd.DataFrame, task: str = "summary") -> pd.DataFrame:
    """Figure 13, measured: model, arm, part (prefill with switching and calibration, drafting, forwards), ms."""
    mine = whole[whole["task"] == task]
    split = mine.assign(
        prefill=mine["prefill_s"],
        drafting=mine["draft_s"] + mine["observe_s"],
        forwards=mine["decode_s"] - mine["draft_s"] - mine["observe_s"],
    )
    means = 1e3 * split.groupby(["model", "arm"], sort=False)[["prefill", "drafting", "forwards"]].mean()
    return derived(means.reset_index().melt(["model", "arm"], var_name="part", value_name="ms"), whole)


def compared(tables: Mapping[str, Resampled], column: str) -> pd.DataFrame:
    """Averages of several samples side by side: name, and for each `column` with its low and high."""
    found = [one.averages(column).assign(what=what) for what, one in tables.items()]
    return derived(pd.concat(found, ignore_index=True), *tables.values())
