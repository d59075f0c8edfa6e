"""The paper's numbers, and those of the authors' result files, under our names; and what they say of each other.

Nothing here is measured by us: values are quoted, or analytic, computed from quoted ones. Times are in seconds. The
files are data/paper/dragon/*.csv; the column `source` of each says which numbers are of the paper's figures and text,
and which only of the result files that its authors published.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ondevice import assets
from ondevice_studies.dragon.simulator import Bools, replayed

QWEN = "Qwen2.5-1.5B"
OPT = "OPT-1.3B"
# The recordings of device paces whose sums are the least totals of Figure 9, by the figure's model. Both are of one
# prompt length and pace: the one drawn as OPT's is no recording of OPT, which takes half as long in Figure 7.
RECORDINGS = {QWEN: "Latency-20250330144956", OPT: "Latency-20250326224732"}
CASE_PACES = RECORDINGS[OPT]  # of Figure 10
CASE_ACCEPTANCE = "Latency-20250330174023"  # and its decisions, of another run


# Figures


def example() -> dict[str, float]:
    """Figure 4's costs in seconds, by the names of `cost.Costs`, device local."""
    table = _table("fig_04_example")
    return dict(zip(table["quantity"], table["value"], strict=True))


def alone(model: str = OPT) -> tuple[float, ...]:
    """Seconds per token of the device and of the cloud alone (Figure 7), and until the first one (Figure 8).

    Of the first token, the device's is with stored documents and the cloud's from text. No delay is added.
    """
    sides = ["CRCG/Device", "CRCG/Cloud"]
    both = [
        _table(stem).query(f"model == {model!r} and extra_network_latency_ms == 0").set_index("method")
        for stem in ("fig_07_per_token_latency", "fig_08_ttft")
    ]
    return *both[0].loc[sides, "latency_ms_per_token"] / 1000, *both[1].loc[sides, "ttft_s"]


def waiting_formulas() -> pd.DataFrame:
    """Table 1: local, remote (accepted, rejected), formula, steady_form (of Eq. 7, with the corrected round trip)."""
    names = ["previous_local_draft", "previous_remote_draft", "waiting_time_formula", "steady_state_form_used_in_eq7"]
    return _table("table_01_waiting_time")[names].set_axis(["local", "remote", "formula", "steady_form"], axis=1)


def drawn_rates(model: str = QWEN) -> NDArray[np.float64]:
    """[50, 2] rates of acceptance, device and cloud, of the sequences of Figure 9: inferred, they are not published.

    With the device aggregating, a sequence is slow where the cloud's drafts are often rejected, and the other way
    round; at 400 ms both totals fall into two groups with a wide gap between them. Raises ValueError on other models.
    """
    table = _table("fig_09_per_sequence_400_ms")
    table = table[table["model"] == model]
    if table.empty:
        raise ValueError(f"The paper's models are {QWEN} and {OPT}, not {model!r}.")
    totals = table[["cloud_total_s", "device_total_s"]].to_numpy()
    ordered = np.sort(totals, axis=0)
    last_fast = ordered[np.diff(ordered, axis=0).argmax(0), range(2)]
    return np.where(totals > last_fast, *_table("fig_09_acceptance_rates")["acceptance_rate"])


# Recordings


class Recording(NamedTuple):
    """Paces of one of the authors' runs. device: [n] seconds of each token while serving; cloud: mean seconds."""

    device: NDArray[np.float64]
    cloud: float


def paces(run: str) -> Recording:
    """A run's recorded paces. Raises ValueError on a run without them."""
    online = _table("decode_latency_online")
    offline = _table("decode_latency_offline_summary")
    device = online.loc[online["run_id"] == run, "device_decode_ms_while_serving"]
    cloud = offline[(offline["run_id"] == run) & (offline["side"] == "cloud")]
    if device.empty or cloud.empty:
        runs = sorted(set(online["run_id"]) & set(offline.loc[offline["side"] == "cloud", "run_id"]))
        raise ValueError(f"There are no recorded paces of run {run!r}; there are of {', '.join(runs)}.")
    return Recording(1e-3 * device.to_numpy(), 1e-3 * float(np.average(cloud["mean_ms"], weights=cloud["steps"])))


def acceptance_traces() -> dict[str, Bools]:
    """[n, 2] recorded decisions, device and cloud, by run. Five of the seven runs recorded the same ones: kept once."""
    traces: dict[str, Bools] = {}
    for run, rows in _table("acceptance_traces").groupby("run_id", sort=False):
        flags = replayed(rows["device_draft_accepted"], rows["cloud_draft_accepted"])
        if not any(np.array_equal(flags, other) for other in traces.values()):
            traces[str(run)] = flags
    return traces


# What the printed numbers say of each other


def kv_megabytes(model: str, tokens: int = 128, width: int = 4) -> float:
    """10^6 bytes of the keys and values of `tokens` tokens in numbers of `width` bytes.

    50.3 and 7.3 for two documents of 64 tokens in fp32, where the paper says 114 and 16. Raises ValueError on a model
    that is not the paper's.
    """
    table = _table("model_shapes")
    shapes = dict(zip(table["model"], table[["layers", "key_value_heads", "head_size"]].to_numpy(), strict=True))
    if model not in shapes:
        raise ValueError(f"The paper's models are {' and '.join(shapes)}, not {model!r}.")
    return 2 * float(np.prod(shapes[model])) * tokens * width / 1e6


def _table(stem: str) -> pd.DataFrame:
    return assets.paper_table("dragon", stem)
