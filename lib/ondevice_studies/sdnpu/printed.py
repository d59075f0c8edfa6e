"""What the simulation takes from the paper's printed numbers: F of the NPU and of the CPU, and the models' weights.

Nothing here is measured: values are quoted (data/paper/sdnpu), or computed from quoted ones. Times are in milliseconds.
"""

from __future__ import annotations

import math

import pandas as pd

from ondevice import assets, shapes
from ondevice_papers.sdnpu.npu import Curve, draft_parameters, fit


def numbers() -> pd.DataFrame:
    """The paper's numbers that stand in no table, by quantity: low, high (empty beyond a bound), unit, source."""
    return assets.paper_table("sdnpu", "paper_text_numbers").set_index("quantity")


def npu_curve() -> Curve:
    """F through Fig. 6's two values: 46.9 + 4.24 n.

    The length of a draft is taken for the shape of its graph: on one graph of 32 rows a token alone would take 32 times
    what it takes in a full draft, and the printed factor is 9.
    """
    per_token = numbers()["low"]
    return fit([1, 32], [rows * per_token[f"time at draft length {rows}"] for rows in (1, 32)])


def throughput_loss(curve: Curve, short: int = 8, long: int = 64) -> float:
    """Percent by which fewer rows are run in a second on a graph of `short` rows than on one of `long`."""
    return float(100 * (1 - (short / curve(short)) / (long / curve(long))))


def cpu_curve(rows: float, accepted: float) -> Curve:
    """The phone's CPU: one row as long as the NPU's, which Fig. 6 calls similar, and SAM's steps with its printed gain.

    rows, accepted: means of SAM's steps in the log, root and the model's own token included. SAM on the CPU gains 0.92
    to 1.13 there; their geometric mean is put in, so it is no result. Raises ValueError where SAM drafted nothing.
    """
    quoted = numbers()
    low, high = (quoted[end]["speed-up of SAM over CPU vanilla"] for end in ("low", "high"))
    step = accepted / math.sqrt(low * high)
    if rows <= 1 or step < 1:
        raise ValueError(f"SAM's steps have drafts and gain something, not {rows} rows for {accepted} tokens.")
    one_row = quoted["low"]["time at draft length 1"]
    slope = one_row * (step - 1) / (rows - 1)
    return Curve(one_row - slope, slope)


def weights(bits: float = 16) -> pd.DataFrame:
    """GB (10^9 bytes) of the latency tests' models, by name: weights_gb, twice_gb (CPU and NPU), draft_gb (EAGLE's).

    The paper does not state its precision. Its 3.05 to 3.12 GB for the 1.5B on the NPU are the weights in 16 bits.
    """
    each = bits / 8 / 1e9
    rows = []
    for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.2-3b"):
        total = shapes.shape(name).parameters * each
        rows.append((name, total, 2 * total, draft_parameters(name)[0] * each))
    return pd.DataFrame(rows, columns=["model", "weights_gb", "twice_gb", "draft_gb"]).set_index("model")
