"""The NPU as a model of time: a static graph of shape S costs F(S), however many of its rows hold a token.

Everything here is simulated. Steps come from the log of a real generation, their time from F, which is fitted to what
the paper prints (`printed.npu_curve`). Times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ondevice import shapes
from ondevice.sdnpu.measuring import AVERAGE, VANILLA, Measured
from ondevice.speculation import Generation

DECODE_SHAPE = 32  # rows of G2, section 3.2
DRAFT_MS = 3.0  # a step, section 4.4: "less than"
CALIBRATE_MS = 2.0  # a prompt token, section 4.4
OURS = "sd.npu"


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

    @property
    def ratio(self) -> float:
        """slope / intercept; infinite where nothing is paid once a forward."""
        return self.slope / self.intercept if self.intercept else float("inf")


def fit(rows: ArrayLike, forward_ms: ArrayLike) -> Curve:
    """The line with the least sum of squared relative errors; two points are met exactly.

    rows, forward_ms: [m] sizes of a forward and its time. Raises ValueError under two sizes, or on a time of 0 or less.
    """
    sizes, times = np.asarray(rows, float), np.asarray(forward_ms, float)
    if sizes.shape != times.shape or len(np.unique(sizes)) < 2 or not (times > 0).all():
        raise ValueError(f"A line is fitted to positive times of two sizes or more, not {times} at {sizes}.")
    slope, intercept = np.polyfit(sizes, times, 1, w=1 / times)
    return Curve(float(intercept), float(slope))


class Engine(Protocol):
    """What runs a forward."""

    def forward_ms(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Of each number of rows, the root included."""
        ...


@dataclass(frozen=True)
class Npu:
    """Runs one static graph of `shape` rows as often as the rows need: ceil(n / S) F(S)."""

    cost: Curve
    shape: int = DECODE_SHAPE

    def __post_init__(self) -> None:
        if self.shape < 1:
            raise ValueError(f"A graph has at least one row, not {self.shape}.")

    def runs(self, rows: ArrayLike) -> NDArray[np.int64]:
        """How often the graph runs for each number of rows; above one, a draft spilled."""
        found = np.asarray(rows)
        if (found < 1).any():
            raise ValueError(f"A forward has at least one row, the root, not {found.min()}.")
        return np.asarray(np.ceil(found / self.shape), np.int64)

    def forward_ms(self, rows: ArrayLike) -> NDArray[np.float64]:
        """ceil(n / S) F(S)."""
        return self.runs(rows) * self.cost(self.shape)


@dataclass(frozen=True)
class Cpu:
    """Runs any number of rows at once: F(n)."""

    cost: Curve

    def forward_ms(self, rows: ArrayLike) -> NDArray[np.float64]:
        """F(n)."""
        return self.cost(rows)


@dataclass(frozen=True)
class Prefill:
    """G1, by default at 1 ms a token, the paper's 1,000 tokens/s.

    It is not on the decode graph's line, which gives 4.4 ms a token at 256 rows (`printed.fit_residuals`): the paper's
    numbers are of different phones, so this graph has its own time.
    """

    shape: int = 256
    ms: float = 256.0

    def __post_init__(self) -> None:
        if self.shape < 1 or not self.ms > 0:
            raise ValueError(f"A prefill graph has rows and takes time, not {self.shape} rows in {self.ms} ms.")

    def __call__(self, prompt: int) -> float:
        """Of a whole prompt, its last chunk padded."""
        return -(-prompt // self.shape) * self.ms


@dataclass(frozen=True)
class Eagle:
    """EAGLE-2 as the paper simulates it: a fixed number of tokens a verification, and a draft model that is charged.

    share: of the target's forward, one pass of the draft model (`draft_share`). accepted: tokens a verification.
    The paper gives no more. passes: a step; EAGLE-2's trees are grown in six. draft_rows: of a pass. rows: verified;
    EAGLE-2 verifies 60, which take two runs of a 32-graph. One graph's fill is the default: kinder to EAGLE, and with
    60 rows its step would cost more than the paper's own range allows.
    """

    share: float
    accepted: float = 5.5
    passes: int = 6
    draft_rows: int = 10
    rows: int = DECODE_SHAPE

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or self.accepted < 1 or self.passes < 0 or min(self.draft_rows, self.rows) < 1:
            raise ValueError(f"A share is in [0, 1] and a verification gives a token or more, not as in {self}.")

    def step_ms(self, engine: Engine) -> tuple[float, float]:
        """(drafting, verification) of a step."""
        passes = self.passes * self.share * engine.forward_ms(self.draft_rows)
        return float(passes), float(engine.forward_ms(self.rows))


def draft_parameters(model: str) -> tuple[int, int]:
    """Weights of EAGLE's draft model, one layer and the output layer, and of the target's forward.

    model: a name of `shapes`.
    """
    values, total = shapes.shape(model).values, shapes.shape(model).parameters
    head = values["vocab_size"] * values["hidden_size"]
    layers = total - head * (1 if values["tie_word_embeddings"] else 2)
    return layers // values["num_hidden_layers"] + head, layers + head


def draft_share(model: str) -> float:
    """The first of these over the second."""
    draft, target = draft_parameters(model)
    return draft / target


@dataclass(frozen=True)
class Arm:
    """A system of Figure 10 or Table 3.

    method: whose steps it takes, a name of the measured methods. draft_ms: a step. calibrate_ms: a prompt token.
    switch_ms: a request, what a change of graphs adds to the prefill (of a schedule: its time less the prefill's).
    eagle: where steps are simulated too; then `method` gives prompts and numbers of tokens only.
    """

    name: str
    method: str
    engine: Engine
    draft_ms: float = 0.0
    calibrate_ms: float = 0.0
    switch_ms: float = 0.0
    eagle: Eagle | None = None

    def __post_init__(self) -> None:
        if min(self.draft_ms, self.calibrate_ms, self.switch_ms) < 0:
            raise ValueError(f"{self.name} cannot take negative time: {self}.")


@dataclass(frozen=True)
class Latency:
    """A request's simulated time by part. tokens: of the output, the prefill's included. steps: verifications."""

    prompt_tokens: int
    tokens: int
    steps: float
    prefill_ms: float
    calibrate_ms: float
    switch_ms: float
    draft_ms: float
    forward_ms: float

    @property
    def decode_ms(self) -> float:
        """After the first token."""
        return self.draft_ms + self.forward_ms

    @property
    def total_ms(self) -> float:
        """End to end."""
        return self.prefill_ms + self.calibrate_ms + self.switch_ms + self.decode_ms

    @property
    def per_token_ms(self) -> float:
        """End to end over the output's tokens, as Table 3 has it."""
        return self.total_ms / self.tokens

    @property
    def decode_per_token_ms(self) -> float:
        """Decoding over the tokens after the first; NaN where there are none."""
        return self.decode_ms / (self.tokens - 1) if self.tokens > 1 else float("nan")


_DERIVED = ("decode_ms", "total_ms", "per_token_ms", "decode_per_token_ms")


def latency(found: Generation, arm: Arm, prefill: Prefill | None = None) -> Latency:
    """What a logged request would take in this arm. Raises ValueError where it gave no token."""
    if not found.tokens:
        raise ValueError("A request without an output has no time a token.")
    if arm.eagle is None:
        steps = float(len(found.steps))
        rows = np.array([1 + step.drafted for step in found.steps], np.int64)
        drafting, forward = arm.draft_ms * steps, float(arm.engine.forward_ms(rows).sum())
    else:
        steps = (len(found.tokens) - 1) / arm.eagle.accepted
        drafting, forward = (steps * ms for ms in arm.eagle.step_ms(arm.engine))
    first = (prefill or Prefill())(found.prompt)
    calibrating = arm.calibrate_ms * found.prompt
    return Latency(
        found.prompt, len(found.tokens), steps, first, calibrating, arm.switch_ms, drafting, forward
    )  # fmt: skip


def by_shape(cost: Curve, sizes: Sequence[int], accepted: float, draft_ms: float = DRAFT_MS) -> pd.DataFrame:
    """What a graph's shape means (Fig. 5): shape, forward_ms, prefill_ms (a token), decode_ms (a token).

    accepted: tokens a verification, whatever the shape, with drafts that fill one graph. Raises ValueError under 1.
    """
    if accepted < 1:
        raise ValueError(f"A verification gives a token or more, not {accepted}.")
    forward = cost(list(sizes))
    decode = (forward + draft_ms) / accepted
    return pd.DataFrame(
        {"shape": list(sizes), "forward_ms": forward, "prefill_ms": forward / np.asarray(sizes), "decode_ms": decode}
    )


def figure_10(
    npu: Npu, cpu: Cpu, eagle: Eagle, switch_ms: float, *, sam: str = "SAM", ours: str = OURS,
    calibrate_ms: float = CALIBRATE_MS, draft_ms: float = DRAFT_MS, progressive_ms: float = 0.0,
) -> list[Arm]:  # fmt: skip
    """The paper's six baselines and sd.npu. All decode on the NPU's one decode graph, or on the CPU, which needs none.

    switch_ms, progressive_ms: what loading that graph adds to a request at once, and in sd.npu's schedule.
    sam, ours: names of the measured methods.
    """
    return [
        Arm("NPU vanilla", VANILLA, npu, switch_ms=switch_ms),
        Arm("CPU vanilla", VANILLA, cpu),
        Arm("NPU-SAM", sam, npu, draft_ms, switch_ms=switch_ms),
        Arm("CPU-SAM", sam, cpu, draft_ms),
        Arm("NPU-EAGLE", VANILLA, npu, switch_ms=switch_ms, eagle=eagle),
        Arm("CPU-EAGLE", VANILLA, cpu, eagle=eagle),
        Arm(OURS, ours, npu, draft_ms, calibrate_ms, progressive_ms),
    ]


def table_3(
    npu: Npu, switch_ms: float, *, sam: str = "SAM", ours: str = OURS, calibrate_ms: float = CALIBRATE_MS,
    draft_ms: float = DRAFT_MS, progressive_ms: float = 0.0,
) -> list[Arm]:  # fmt: skip
    """Table 3's columns, under its names. Parameters: as in `figure_10`."""
    return [
        Arm("NPU", VANILLA, npu, switch_ms=switch_ms),
        Arm("+G", VANILLA, npu, switch_ms=progressive_ms),
        Arm("+SD", sam, npu, draft_ms, switch_ms=switch_ms),
        Arm("+G+SD", sam, npu, draft_ms, switch_ms=progressive_ms),
        Arm("Ours", ours, npu, draft_ms, calibrate_ms, progressive_ms),
    ]


def simulate(
    measured: Iterable[Measured], arms: Sequence[Arm], model: str = "", prefill: Prefill | None = None
) -> pd.DataFrame:
    """One row a request, round and arm: model, arm, task, prompt, round, the parts of `Latency` and what follows.

    Raises ValueError where an arm's method was not measured.
    """
    found = list(measured)
    missing = {arm.method for arm in arms} - {one.method for one in found}
    if missing:
        raise ValueError(f"There are no measured steps of {', '.join(sorted(missing))}.")
    rows = []
    for arm in arms:
        for one in found:
            if one.method == arm.method:
                parts = latency(one.found, arm, prefill)
                keys = {"model": model, "arm": arm.name, "task": one.request.task, "prompt": one.request.prompt}
                derived = {name: getattr(parts, name) for name in _DERIVED}
                rows.append(keys | {"round": one.round} | asdict(parts) | derived)
    return pd.DataFrame(rows)


def by_task(simulated: pd.DataFrame) -> pd.DataFrame:
    """model, arm, task and the means over the requests of every other column; `average` is the mean over the tasks."""
    keys = ["model", "arm", "task"]
    table = simulated.drop(columns=["prompt", "round"]).groupby(keys, sort=False).mean().reset_index()
    average = table.drop(columns="task").groupby(keys[:2], sort=False).mean().reset_index().assign(task=AVERAGE)
    return pd.concat([table, average], ignore_index=True)


def speedups(cells: pd.DataFrame, value: str = "per_token_ms", over: str = OURS) -> pd.DataFrame:
    """By how much `over` is faster than each other arm: model, arm, task, speedup.

    cells: `by_task`. The task `average` is the mean of the tasks' ratios. Raises ValueError without that arm.
    """
    if over not in set(cells["arm"]):
        raise ValueError(f"There is no arm {over!r}; there are {', '.join(cells['arm'].unique())}.")
    tasks = cells[cells["task"] != AVERAGE]
    ours = tasks[tasks["arm"] == over].set_index(["model", "task"])[value].rename("ours")
    found = tasks.join(ours, on=["model", "task"])
    found = found.assign(speedup=found[value] / found["ours"])[["model", "arm", "task", "speedup"]]
    mean = found.groupby(["model", "arm"], sort=False)["speedup"].mean().reset_index().assign(task=AVERAGE)
    return pd.concat([found, mean], ignore_index=True)[["model", "arm", "task", "speedup"]]


def energy(simulated: pd.DataFrame, watts: Mapping[str, float]) -> pd.DataFrame:
    """The table with `joules`, which is an assumed power times the simulated time and no more.

    watts: by arm; the paper prints none. Raises ValueError where an arm has none, or one that is not positive.
    """
    missing = sorted(set(simulated["arm"]) - {arm for arm, power in watts.items() if power > 0})
    if missing:
        raise ValueError(f"A positive power is needed for {', '.join(missing)}.")
    return simulated.assign(joules=simulated["arm"].map(watts) * simulated["total_ms"] / 1e3)
