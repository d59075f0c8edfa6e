"""The NPU as a model of time: a static graph of shape S costs F(S), however many of its rows hold a token.

Everything here is simulated: recorded passes give the rows, F, fitted to what the paper prints (`printed.npu_curve`),
their time. Times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ondevice import shapes
from ondevice.evidence import born

DECODE_SHAPE = 32  # rows of G2, section 3.2
DRAFT_MS = 3.0  # a step, section 4.4: "less than"
CALIBRATE_MS = 2.0  # a prompt token, section 4.4
PREFILL_ROWS, PREFILL_MS = 256, 256.0  # G1: 1 ms a token, the paper's 1,000 tokens/s; not on the decode graph's line
OURS = "sd.npu"
BETTER = "sd.npu (ours)"
PRINTED_METHOD = "SAM+both, printed"  # whose recorded passes OURS takes
METHOD = "SAM+both"  # and BETTER


@dataclass(frozen=True)
class Curve:
    """F(n) = intercept + slope * n: a forward over n rows. Raises ValueError unless both are at least 0, one above."""

    intercept: float
    slope: float

    def __post_init__(self) -> None:
        if not (np.isfinite([self.intercept, self.slope]).all() and min(self.intercept, self.slope) >= 0 < self(1)):
            raise ValueError(f"A forward's time neither falls with its rows nor is 0: {self.intercept}, {self.slope}.")

    def __call__(self, rows: ArrayLike) -> NDArray[np.float64]:
        """F of each number of rows, in the shape of `rows`."""
        return self.intercept + self.slope * np.asarray(rows, float)


def fit(rows: ArrayLike, forward_ms: ArrayLike) -> Curve:
    """The line with the least sum of squared relative errors; two points are met exactly.

    rows, forward_ms: [m] sizes of a forward and its time. Raises ValueError under two sizes, or on a time of 0 or less.
    """
    sizes = np.asarray(rows, float)
    times = np.asarray(forward_ms, float)
    if sizes.shape != times.shape or len(np.unique(sizes)) < 2 or not (times > 0).all():
        raise ValueError(f"A line is fitted to positive times of two sizes or more, not {times} at {sizes}.")
    slope, intercept = np.polyfit(sizes, times, 1, w=1 / times)
    return Curve(float(intercept), float(slope))


def predicted(rows: ArrayLike, forward_ms: ArrayLike) -> pd.DataFrame:
    """rows, measured, predicted, error: a line fitted to every second size foretells the others."""
    sizes, times = (np.asarray(part, float) for part in (rows, forward_ms))
    line = fit(sizes[::2], times[::2])
    foretold = line(sizes[1::2])
    return pd.DataFrame({"rows": sizes[1::2].astype(int), "measured": times[1::2], "predicted": foretold,
                         "error": foretold / times[1::2] - 1})  # fmt: skip


class Engine(Protocol):
    """What runs a forward."""

    def forward_ms(self, rows: ArrayLike) -> NDArray[np.float64]:
        """ms of a forward of each number of rows, the root included."""
        ...


@dataclass(frozen=True)
class Npu:
    """Runs one static graph of `shape` rows as often as the rows need: ceil(n / S) F(S)."""

    cost: Curve
    shape: int = DECODE_SHAPE

    def forward_ms(self, rows: ArrayLike) -> NDArray[np.float64]:
        """ms of a forward of n rows: ceil(n / S) F(S)."""
        return np.ceil(np.asarray(rows) / self.shape) * self.cost(self.shape)


@dataclass(frozen=True)
class Cpu:
    """Runs any number of rows at once: F(n)."""

    cost: Curve

    def forward_ms(self, rows: ArrayLike) -> NDArray[np.float64]:
        """ms of a forward of n rows: F(n)."""
        return self.cost(rows)


@dataclass(frozen=True)
class Eagle:
    """EAGLE-2 as the paper simulates it: a fixed number of tokens a verification, and a draft model that is charged.

    share: of the target's forward, one pass of the draft model (`draft_share`). accepted: tokens a verification.
    The paper gives no more. passes: a step; EAGLE-2's trees are grown in six. draft_rows: of a pass. rows: verified;
    EAGLE-2 verifies 60, which take two runs of a 32-graph. One graph's fill is the default: kinder to EAGLE.
    """

    share: float
    accepted: float = 5.5
    passes: int = 6
    draft_rows: int = 10
    rows: int = DECODE_SHAPE

    def step_ms(self, engine: Engine) -> tuple[float, float]:
        """(drafting, verification) ms of one step of EAGLE on an engine."""
        passes = self.passes * self.share * engine.forward_ms(self.draft_rows)
        return float(passes), float(engine.forward_ms(self.rows))


def draft_parameters(model: str) -> tuple[int, int]:
    """Weights of EAGLE's draft model, one layer and the output layer, and of the target's forward.

    model: a name of `shapes`.
    """
    values = shapes.shape(model).values
    total = shapes.shape(model).parameters
    head = values["vocab_size"] * values["hidden_size"]
    layers = total - head * (1 if values["tie_word_embeddings"] else 2)
    return layers // values["num_hidden_layers"] + head, layers + head


def draft_share(model: str) -> float:
    """EAGLE's draft model over its target: weights of one forward of each."""
    draft, target = draft_parameters(model)
    return draft / target


@dataclass(frozen=True)
class Arm:
    """A system of Figure 10 or Table 3.

    method: whose recorded passes it takes. draft_ms: a step. calibrate_ms: a prompt token. switch_ms: a request, what a
    change of graphs adds to the prefill. eagle: where steps are simulated too.
    """

    name: str
    method: str
    engine: Engine
    draft_ms: float = 0.0
    calibrate_ms: float = 0.0
    switch_ms: float = 0.0
    eagle: Eagle | None = None


def simulate(answers: pd.DataFrame, passes: pd.DataFrame, arms: Sequence[Arm]) -> pd.DataFrame:
    """What each recorded request would take: model, task, request, arm, tokens, and in ms prefill, calibrate, switch,
    draft, forward, decode (the last two together) and total.
    """
    keys = ["model", "task", "request"]
    tables = []
    for arm in arms:
        table = answers[answers["method"] == arm.method].set_index(keys)[["prompt_tokens", "tokens"]]
        forwards = passes[passes["method"] == arm.method]
        if arm.eagle is None:
            spent = forwards[keys].assign(ms=arm.engine.forward_ms(1 + forwards["drafted"]), draft=arm.draft_ms)
            sums = spent.groupby(keys)[["draft", "ms"]].sum().reindex(table.index, fill_value=0.0)
            draft = sums["draft"]
            forward = sums["ms"]
        else:
            draft, forward = ((table["tokens"] - 1) / arm.eagle.accepted * ms for ms in arm.eagle.step_ms(arm.engine))
        tables.append(table.assign(
            arm=arm.name, prefill=-(-table["prompt_tokens"] // PREFILL_ROWS) * PREFILL_MS,
            calibrate=arm.calibrate_ms * table["prompt_tokens"], switch=arm.switch_ms, draft=draft, forward=forward,
        ).reset_index())  # fmt: skip
    simulated = pd.concat(tables, ignore_index=True)
    decode = simulated["draft"] + simulated["forward"]
    total = decode + simulated[["prefill", "calibrate", "switch"]].sum(axis=1)
    return born(simulated.assign(decode=decode, total=total), "simulated")


def figure_10(npu: Npu, cpu: Cpu, eagle: Eagle, switch_ms: float, greedy_ms: float, ours_ms: float) -> list[Arm]:
    """The paper's six baselines, sd.npu as printed, and ours. All on the NPU decode on its one decode graph.

    switch_ms, greedy_ms, ours_ms: what loading that graph adds to a request at once, by the paper's schedule, by ours.
    """
    return [
        Arm("NPU vanilla", "vanilla", npu, switch_ms=switch_ms),
        Arm("CPU vanilla", "vanilla", cpu),
        Arm("NPU-SAM", "SAM", npu, DRAFT_MS, switch_ms=switch_ms),
        Arm("CPU-SAM", "SAM", cpu, DRAFT_MS),
        Arm("NPU-EAGLE", "vanilla", npu, switch_ms=switch_ms, eagle=eagle),
        Arm("CPU-EAGLE", "vanilla", cpu, eagle=eagle),
        Arm(OURS, PRINTED_METHOD, npu, DRAFT_MS, CALIBRATE_MS, greedy_ms),
        Arm(BETTER, METHOD, npu, DRAFT_MS, CALIBRATE_MS, ours_ms),
    ]


def table_3(npu: Npu, switch_ms: float, greedy_ms: float) -> list[Arm]:
    """Table 3's columns, under its names."""
    return [
        Arm("NPU", "vanilla", npu, switch_ms=switch_ms),
        Arm("+G", "vanilla", npu, switch_ms=greedy_ms),
        Arm("+SD", "SAM", npu, DRAFT_MS, switch_ms=switch_ms),
        Arm("+G+SD", "SAM", npu, DRAFT_MS, switch_ms=greedy_ms),
        Arm("Ours", PRINTED_METHOD, npu, DRAFT_MS, CALIBRATE_MS, greedy_ms),
    ]


def energies(simulated: pd.DataFrame, watts: Mapping[str, Mapping[str, float]], ours: str = OURS) -> pd.DataFrame:
    """Figure 11: model, task, arm, assumption, joules_over_ours: an assumed power times the simulated time, no more.

    watts: by assumption, by arm, over sd.npu's; the paper prints none.
    """
    means = simulated.groupby(["model", "task", "arm"], sort=False)["total"].mean()
    over = (means / means.xs(ours, level="arm")).rename("time").reset_index()
    tables = [
        over.assign(assumption=name, joules_over_ours=over["time"] * over["arm"].map(power))
        for name, power in watts.items()
    ]
    return born(pd.concat(tables, ignore_index=True).drop(columns="time").dropna(), "simulated")
