"""The paper's tables under our names of models, tasks and variants, to be drawn beside ours."""

from __future__ import annotations

import pandas as pd

from ondevice import assets
from ondevice.diaa.experiments import TASKS
from ondevice.speculation.measuring import AVERAGE

_FAMILIES = {printed: family for family, printed in TASKS.items()}
_VARIANTS = {
    "without_lut": "w/o LUT",
    "without_dynamic_tree": "w/o DT",
    "without_lut_and_dynamic_tree": "w/o LUT+DT",
    "without_computation_overlap": "w/o CO",
}


def speedups(larger: str, small: str) -> pd.DataFrame:
    """Vanilla's latency over each method's in Table 1: model, method, task, speedup; `average` is the tasks' mean.

    larger, small: names of ours that stand for the 3B and the 1B.
    """
    printed = assets.paper_table("diaa", "table_01_goodput_latency")
    printed = printed[printed["model_label"].isin(["3B", "1B"]) & (printed["task"] != AVERAGE)]
    plain = printed[printed["method"] == "Vanilla"].set_index(["model_label", "task"])["latency_ms_per_token"]
    keys = pd.MultiIndex.from_frame(printed[["model_label", "task"]])
    found = pd.DataFrame({
        "model": printed["model_label"].map({"3B": larger, "1B": small}), "method": printed["method"],
        "task": printed["task"].map(_FAMILIES),
        "speedup": plain.reindex(keys).to_numpy() / printed["latency_ms_per_token"],
    })  # fmt: skip
    found = found[found["method"] != "Vanilla"]
    mean = found.groupby(["model", "method"], sort=False)["speedup"].mean().reset_index().assign(task=AVERAGE)
    return pd.concat([found, mean], ignore_index=True)


def ablation() -> pd.DataFrame:
    """Table 3's goodput without a part over that of full DIAA: task, variant, ratio."""
    printed = assets.paper_table("diaa", "table_03_ablation_goodput")
    wide = printed.pivot(index="task", columns="variant", values="goodput_tokens_per_s").rename(index=_FAMILIES)
    ratios = wide[list(_VARIANTS)].div(wide["diaa_full"], axis=0).rename(columns=_VARIANTS)
    return ratios.reset_index().melt("task", var_name="variant", value_name="ratio")
