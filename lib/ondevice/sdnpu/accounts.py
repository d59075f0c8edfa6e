"""Where a request's time and energy go, as Figures 2, 11 and 13 show it: measured here, simulated for the NPU."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from ondevice.sdnpu import npu, printed
from ondevice.sdnpu.experiments import OURS, TASKS
from ondevice.sdnpu.measuring import AVERAGE, VANILLA

HERE, THERE = "this CPU, measured", "NPU model, simulated"
_ARMS = {VANILLA: "CPU vanilla", "SAM": "CPU-SAM", OURS: npu.OURS}  # what ran here
_SIMULATED = {
    "prefill": "prefill_ms", "calibration": "calibrate_ms", "switch": "switch_ms", "drafting": "draft_ms",
    "forward": "forward_ms",
}  # fmt: skip


def prefill_and_decode(runs: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """Figure 2: model, task, source, prefill_ms, decode_ms, decode_share of plain decoding, means over the requests.

    runs: `measuring.runs`, wall clock. cells: `npu.by_task`, of which the arm CPU vanilla is taken.
    """
    plain = runs[runs["method"] == VANILLA]
    here = 1e3 * plain.groupby(["model", "task"], sort=False)[["prefill_s", "decode_s"]].mean()
    here = here.rename(columns={"prefill_s": "prefill_ms", "decode_s": "decode_ms"}).reset_index()
    there = cells[(cells["arm"] == "CPU vanilla") & (cells["task"] != AVERAGE)]
    found = pd.concat([here.assign(source=HERE), there.assign(source=THERE)], ignore_index=True)
    share = found["decode_ms"] / (found["prefill_ms"] + found["decode_ms"])
    return found.assign(decode_share=share)[["model", "task", "source", "prefill_ms", "decode_ms", "decode_share"]]


def parts(runs: pd.DataFrame, cells: pd.DataFrame, task: str = "summary") -> pd.DataFrame:
    """Figure 13: model, arm, source, part, ms, means over the requests of a task.

    Here the calibration is within the prefill, and what is neither drafting nor learning counts as the forward.
    """
    mine = runs[(runs["task"] == task) & runs["method"].isin(_ARMS)]
    mine = mine.assign(arm=mine["method"].map(_ARMS), drafting=mine["draft_s"] + mine["observe_s"])
    here = 1e3 * mine.groupby(["model", "arm"], sort=False)[["prefill_s", "drafting", "decode_s"]].mean()
    here["forward"] = here["decode_s"] - here["drafting"]
    here = here.rename(columns={"prefill_s": "prefill"}).drop(columns="decode_s").reset_index().assign(source=HERE)
    there = cells[cells["task"] == task].rename(columns={column: part for part, column in _SIMULATED.items()})
    keys = ["model", "arm", "source"]
    tables = [here, there.assign(source=THERE)[[*keys, *_SIMULATED]]]
    return pd.concat([table.melt(keys, var_name="part", value_name="ms") for table in tables], ignore_index=True)


def powers() -> dict[str, Mapping[str, float]]:
    """Assumed watts by arm over sd.npu's: all alike, and what the paper's greatest gains in energy and time imply."""
    ratios = printed.power_ratios().set_index("baseline")["power"]
    arms = {
        "NPU vanilla": "NPU vanilla", "CPU vanilla": "CPU vanilla", "NPU-SAM": "SAM", "CPU-SAM": "SAM",
        "NPU-EAGLE": "EAGLE", "CPU-EAGLE": "EAGLE",
    }  # fmt: skip
    implied = {arm: float(ratios[baseline]) for arm, baseline in arms.items()} | {npu.OURS: 1.0}
    return {"one power": dict.fromkeys(implied, 1.0), "implied powers": implied}


def energies(simulated: pd.DataFrame) -> pd.DataFrame:
    """Figure 11: model, arm, task, joules_over_ours, assumption, of decoding. simulated: `npu.by_task`."""
    tables = []
    for assumption, watts in powers().items():
        table = npu.energy(simulated.assign(total_ms=simulated["decode_per_token_ms"]), watts)
        ours = table[table["arm"] == npu.OURS].set_index(["model", "task"])["joules"].rename("ours")
        table = table.join(ours, on=["model", "task"])
        ratio = table.assign(joules_over_ours=table["joules"] / table["ours"], assumption=assumption)
        tables.append(ratio[["model", "arm", "task", "joules_over_ours", "assumption"]])
    found = pd.concat(tables, ignore_index=True)
    return found[found["task"] != AVERAGE].reset_index(drop=True)


def implied(model: str) -> pd.DataFrame:
    """Speed-ups that Table 4 and the fit imply, in Figure 10's terms: model, arm, task, speedup."""
    arms = {"over_npu_vanilla": "NPU vanilla", "over_cpu_vanilla": "CPU vanilla", "over_sam": "NPU-SAM",
            "over_npu_eagle": "NPU-EAGLE"}  # fmt: skip
    ours = {paper: family for family, paper in TASKS.items()}
    table = printed.implied_speedups().rename(columns=arms)
    found = table.melt("task", list(arms.values()), "arm", "speedup")
    return found.assign(task=found["task"].map(ours), model=model)
