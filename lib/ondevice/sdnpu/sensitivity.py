"""How much of a simulated speed-up is the NPU's: over F's slope, the graph's shape and what every token costs besides.

All simulated, from the logs of two generations. F is held at one shape, `HELD`, and only its form changes, as the paper
prints little more of it than one decode step's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ondevice.sdnpu.npu import DECODE_SHAPE, DRAFT_MS, Curve, Npu
from ondevice.speculation import Generation

HELD = DECODE_SHAPE  # rows at which every F takes the same time


@dataclass(frozen=True, eq=False)
class Log:
    """What one method's verifications did. rows: [n] of each, root included. tokens: emitted in all."""

    rows: NDArray[np.int64]
    tokens: int

    def __post_init__(self) -> None:
        if not len(self.rows) or self.tokens < 1:
            raise ValueError(f"A log has verifications and tokens, not {len(self.rows)} and {self.tokens}.")

    @classmethod
    def of(cls, found: Iterable[Generation]) -> Log:
        """All verifications of these requests."""
        steps = [step for one in found for step in one.steps]
        return cls(np.array([1 + step.drafted for step in steps], np.int64), sum(step.emitted for step in steps))

    @property
    def accepted(self) -> float:
        """Tokens a verification, the model's own included."""
        return self.tokens / len(self.rows)

    def spilled(self, shape: int = DECODE_SHAPE) -> float:
        """Share of the verifications that need more than one run of a graph of `shape` rows."""
        return float((self.rows > shape).mean())


def held(curve: Curve, ratio: float) -> Curve:
    """The curve of another slope / intercept with the same F(HELD). Raises ValueError on a ratio below 0."""
    if not 0 <= ratio < np.inf:
        raise ValueError(f"A slope over an intercept is finite and at least 0, not {ratio}.")
    intercept = float(curve(HELD)) / (1 + ratio * HELD)
    return Curve(intercept, ratio * intercept)


def per_token_ms(log: Log, npu: Npu, draft_ms: float) -> float:
    """Decoding time a token; draft_ms a step."""
    return float((npu.forward_ms(log.rows) + draft_ms).sum() / log.tokens)


def speedups(
    ours: Log, base: Log, curve: Curve, ratios: Sequence[float], shapes: Sequence[int],
    constants: Sequence[float] = (0,), *, base_shape: int | None = None, draft_ms: float = DRAFT_MS,
    base_draft_ms: float = DRAFT_MS,
) -> NDArray[np.float64]:  # fmt: skip
    """[R, S, C] by how much `ours` is faster than `base`.

    ratios: [R] slope / intercept of F, whose F(HELD) is that of `curve`. shapes: [S] rows of the graph of both.
    constants: [C] ms a token that both pay besides decoding, as prefill and a switch of graphs are.
    base_shape: where the baseline has a graph of its own, as vanilla decoding would have with one row.
    On one graph F's form cancels, as both pay multiples of F(S): only drafting and spills are left.
    """
    if min(constants) < 0:
        raise ValueError(f"What a token costs besides is at least 0 ms, not {min(constants)}.")
    besides = np.asarray(constants, float)
    found = np.empty((len(ratios), len(shapes), len(besides)))
    for row, ratio in enumerate(ratios):
        cost = held(curve, ratio)
        for column, shape in enumerate(shapes):
            mine = per_token_ms(ours, Npu(cost, shape), draft_ms)
            theirs = per_token_ms(base, Npu(cost, base_shape or shape), base_draft_ms)
            found[row, column] = (besides + theirs) / (besides + mine)
    return found


def table(
    ours: Log, sam: Log, vanilla: Log, curve: Curve, ratios: Sequence[float], shapes: Sequence[int],
    constants: Sequence[float] = (0,),
) -> pd.DataFrame:  # fmt: skip
    """The same over three baselines, to be saved: ratio, shape, constant_ms, over_sam, over_vanilla, over_one_row.

    over_vanilla: that decodes on the same graph. over_one_row: on a graph of one row.
    """
    grid = (curve, ratios, shapes, constants)
    index = pd.MultiIndex.from_product([ratios, shapes, constants], names=["ratio", "shape", "constant_ms"])
    arrays: Mapping[str, NDArray[np.float64]] = {
        "over_sam": speedups(ours, sam, *grid),
        "over_vanilla": speedups(ours, vanilla, *grid, base_draft_ms=0.0),
        "over_one_row": speedups(ours, vanilla, *grid, base_draft_ms=0.0, base_shape=1),
    }
    return pd.DataFrame({name: found.ravel() for name, found in arrays.items()}, index=index).reset_index()
