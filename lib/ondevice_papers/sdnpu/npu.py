"""The paper's phones as a model of time, fitted to its own numbers; and whether its Table 3 follows from the fit.

On one static graph every pass takes F, whatever it drafts. So a token of an answer takes P + s + (F + d) / a: its share
P of the prefill, its share s of the switching that nothing hides, and a pass with its drafting d over the a tokens that
a pass gives. Times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ondevice import shapes
from ondevice.evidence import born

DRAFTING = 3.0  # ms per step; section 4.4: "less than"
CLOSE = 0.25  # of a printed cell: so far may a prediction lie from it
COLUMNS = {  # of Table 3: whether it speculates, and whether switching is hidden
    "NPU": (False, False),
    "+G": (False, True),
    "+SD": (True, False),
    "+G+SD": (True, True),
    "Ours": (True, True),
}
SIZES = {"Qwen2.5-0.5B": "qwen2.5-0.5b", "Qwen2.5-1.5B": "qwen2.5-1.5b", "LLaMA3.2-3B": "llama-3.2-3b"}
FITTED, HELD_OUT = ("Qwen2.5-0.5B", "LLaMA3.2-3B"), "Qwen2.5-1.5B"


def per_token(prefill: float, switching: float, forward: float, accepted: float, drafting: float = 0.0) -> float:
    """ms per token of an answer: P + s + (F + d) / a."""
    return prefill + switching + (forward + drafting) / accepted


def cells(times: NDArray[np.float64], accepted: float, gain: float, per_token: Callable[..., float]) -> list[float]:
    """A model's row of Table 3. times: P, s and F. accepted: of SAM; sd.npu's is `gain` times as much."""
    prefill, switching, forward = times
    row = []
    for column, (speculates, hidden) in COLUMNS.items():
        tokens = accepted * (gain if column == "Ours" else 1.0) if speculates else 1.0
        drafting = DRAFTING if speculates else 0.0
        row.append(per_token(prefill, 0.0 if hidden else switching, forward, tokens, drafting))
    return row


def admitted(row: pd.Series, accepted: tuple[float, float]) -> tuple[float, float]:
    """The least and the greatest F with which some P and s bring all printed cells of a row within CLOSE.

    Neither P nor s is negative. row: of Table 3, ms per token. accepted: tokens per pass of SAM and of sd.npu. NaN
    where there is none.
    """
    fits = []
    for forward in np.arange(0.5, row.max() * accepted[1], 0.5):
        # What a cell leaves for P, or for P + s where switching is not hidden: [least, greatest].
        left: dict[bool, list[tuple[float, float]]] = {False: [(0.0, np.inf)], True: [(0.0, np.inf)]}
        for column, (speculates, hidden) in COLUMNS.items():
            tokens = accepted[column == "Ours"] if speculates else 1.0
            spent = (forward + (DRAFTING if speculates else 0.0)) / tokens
            left[hidden].append(((1 - CLOSE) * row[column] - spent, (1 + CLOSE) * row[column] - spent))
        ends = {hidden: (max(low for low, _ in both), min(high for _, high in both)) for hidden, both in left.items()}
        if ends[True][0] <= min(ends[True][1], ends[False][1]) and ends[False][0] <= ends[False][1]:
            fits.append(float(forward))
    return (fits[0], fits[-1]) if fits else (np.nan, np.nan)


def fitted(
    table_3: pd.DataFrame,
    accepted: tuple[float, float],
    forwards: Mapping[str, float],
    per_token: Callable[..., float] = per_token,
) -> pd.DataFrame:
    """model, column, printed, fitted, error, held_out: Table 3 from a least-squares fit that has not seen the 1.5B row.

    Fitted, in relative error, are P, s and F of the 0.5B and the 3B and the acceptance of SAM with each, which the
    paper does not print; the 1.5B's times lie on lines through theirs, by weights. table_3: by model, columns of
    COLUMNS. accepted: of SAM and of sd.npu with the 1.5B, by Table 4, whose ratio serves all. forwards: further values
    of the 1.5B's F, by figure; they are fitted, too.
    """
    weights = np.array([shapes.shape(SIZES[model]).parameters for model in (*FITTED, HELD_OUT)], float)
    position = (weights[2] - weights[0]) / (weights[1] - weights[0])
    gain = accepted[1] / accepted[0]
    wanted = table_3.loc[list(FITTED), list(COLUMNS)].to_numpy(float).ravel()

    def rows(unknown: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Times [2, 3] of the fitted models, and the cells of both."""
        times = unknown[:6].reshape(2, 3)
        both = [cells(each, 1 + gained, gain, per_token) for each, gained in zip(times, unknown[6:], strict=True)]
        return times, np.ravel(both)

    def between(times: NDArray[np.float64]) -> NDArray[np.float64]:
        return times[0] + position * (times[1] - times[0])

    def errors(unknown: NDArray[np.float64]) -> NDArray[np.float64]:
        times, both = rows(unknown)
        further = np.log(max(between(times)[2], 1e-9) / np.array(list(forwards.values())))
        return np.r_[np.log(both / wanted), further]

    starts = np.random.default_rng(0).uniform(0.1, 1, (20, 8)) * [10, 5, 40, 30, 5, 100, 3, 3]
    fits = (least_squares(errors, start, bounds=(1e-6, 1e4)) for start in starts)
    times, both = rows(min(fits, key=lambda fit: fit.cost).x)
    predicted = [*both, *cells(between(times), accepted[0], gain, per_token)]
    named = [(model, column) for model in (*FITTED, HELD_OUT) for column in COLUMNS]
    table = pd.DataFrame(named, columns=["model", "column"])
    table["printed"] = table_3.loc[[*FITTED, HELD_OUT], list(COLUMNS)].to_numpy(float).ravel()
    table["fitted"] = predicted
    return born(
        table.assign(error=table["fitted"] / table["printed"] - 1, held_out=table["model"] == HELD_OUT), "simulated"
    )
