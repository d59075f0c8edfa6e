"""What is computed from the paper's printed numbers alone: what they say of one forward, and the models' weights.

Nothing here is measured: values are quoted (data/paper/sdnpu), or computed from quoted ones. Times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ondevice import assets, shapes

Line = Callable[[ArrayLike], NDArray[np.float64]]  # ms of a forward of so many rows


def numbers() -> pd.DataFrame:
    """The paper's numbers that stand in no table, by quantity: low, high (empty beyond a bound), unit, source."""
    return assets.paper_table("sdnpu", "paper_text_numbers").set_index("quantity")


def figure_6(rows: ArrayLike) -> NDArray[np.float64]:
    """ms of a forward of so many rows, by the line through Figure 6's two times."""
    per_token = numbers()["low"]
    single, full = (count * per_token[f"time at draft length {count}"] for count in (1, 32))
    return single + (full - single) / 31 * (np.asarray(rows, float) - 1)


def flat(rows: ArrayLike) -> NDArray[np.float64]:
    """The time of one row in Figure 6, whatever the rows."""
    return np.full(np.shape(rows), figure_6(1))


def throughput_loss(line: Line, short: int = 8, long: int = 64) -> float:
    """Percent by which fewer rows are run in a second on a graph of `short` rows than on one of `long`."""
    return float(100 * (1 - (short / line(short)) / (long / line(long))))


def forwards() -> pd.DataFrame:
    """source, low, high: ms of Qwen2.5-1.5B's forward of 32 rows by each part of the paper; bounds where it gives one.

    By Tables 3 and 4 a token takes at least the forward over the tokens of a pass, on the same graph in all columns.
    """
    quoted = numbers()
    table_3 = assets.paper_table("sdnpu", "table_03_ablation_latency").set_index(["model", "paper_label"])
    latency = table_3["per_token_latency_ms"]["Qwen2.5-1.5B"]
    table_4 = assets.paper_table("sdnpu", "table_04_acceptance_ratio").query(
        "model == 'Qwen2.5-1.5B' and dataset == 'summary' and drafter == 'SAM' and with_sdnpu_techniques == 'yes'"
    )
    accepted = float(table_4["accepted_tokens_per_verification"].iloc[0])
    decoding = quoted["low"]["decoding on the graph of 32 rows"]
    rows = [
        ("Figure 5, decoding at 4.2 tokens per pass", *(2 * [decoding * quoted["low"]["accepted in Figure 5"]])),
        ("Figure 5, prefill", 0.0, 32 * quoted["high"]["prefill on the graph of 32 rows"]),
        ("Figure 6", *(2 * [float(figure_6(32))])),
        ("Tables 3 and 4, sd.npu", 0.0, latency["Ours"] * accepted),
        ("Table 3, plain decoding", 0.0, latency["+G"]),
    ]
    return pd.DataFrame(rows, columns=["source", "low", "high"])


def weights(bits: float = 16) -> pd.DataFrame:
    """GB (10^9 bytes) of the latency tests' models, by name: weights_gb, twice_gb (CPU and NPU), draft_gb (EAGLE's).

    The paper does not state its precision. Its 3.05 to 3.12 GB for the 1.5B on the NPU are the weights in 16 bits.
    """
    each = bits / 8 / 1e9
    rows = []
    for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.2-3b"):
        total = shapes.shape(name).parameters * each
        rows.append((name, total, 2 * total, _draft_parameters(name) * each))
    return pd.DataFrame(rows, columns=["model", "weights_gb", "twice_gb", "draft_gb"]).set_index("model")


def _draft_parameters(model: str) -> int:
    """Weights of EAGLE's draft model: one layer, and the output layer."""
    values = shapes.shape(model).values
    head = values["vocab_size"] * values["hidden_size"]
    layers = shapes.shape(model).parameters - head * (1 if values["tie_word_embeddings"] else 2)
    return int(layers // values["num_hidden_layers"] + head)
