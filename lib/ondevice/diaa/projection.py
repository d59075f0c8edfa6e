"""Projection: what measured acceptance would bring on a model whose verification cost alone was measured.

`python -m ondevice.diaa.projection random:qwen2.5-0.5b random:llama-3.2-1b` measures T(n) of shapes in bf16 and writes
data/traces/verify_cost.csv. Random weights take as long as any others, but say nothing: steps come from another model.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

import pandas as pd
import psutil
import torch
from tqdm import tqdm

from ondevice import assets, evidence, models
from ondevice.causal_lm import CausalLM
from ondevice.diaa.budget import VerifyCost, measure

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80)  # rows: the root and the nodes
CONTEXT = 256  # tokens in the cache
TRACE = "verify_cost"


def curve(
    spec: str, dtype: torch.dtype = torch.bfloat16, context: int = CONTEXT, sizes: Sequence[int] = SIZES,
    repeats: int = 5,
) -> pd.DataFrame:  # fmt: skip
    """T(n) of a model: model, rows, seconds (median), ratio (to one row), context, dtype, threads, machine."""
    lm = CausalLM(models.load(spec, dtype).model)
    cost = measure(lm, context, sizes, repeats)
    machine = evidence.environment()["machine"]
    table = pd.DataFrame({"model": spec.rstrip("/").rpartition("/")[2], "rows": cost.sizes, "seconds": cost.seconds})
    return table.assign(
        ratio=table["seconds"] / table["seconds"].iloc[0],
        context=context,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        machine=f"{machine['processor']}, {machine['cores']} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.system()}",
    )


def cost_of(curves: pd.DataFrame, model: str) -> VerifyCost:
    """One model's T(n) of a table of curves; raises ValueError with the models there are."""
    mine = curves[curves["model"] == model].sort_values("rows")
    if mine.empty:
        raise ValueError(f"There is no curve of {model!r}; there are {', '.join(curves['model'].unique())}.")
    return VerifyCost(mine["rows"].tolist(), mine["seconds"].tolist())


def projected(steps: pd.DataFrame, cost: VerifyCost) -> pd.DataFrame:
    """A projection, not a measurement: the speed-up that these steps would have on a model with this T(n).

    steps: `measuring.steps`, one row a verification, of one model or several. It assumes the target would accept what
    the model did that took the steps, and that drafting, choosing and keeping take no time beyond `cost.overhead`.
    Columns: model (that took the steps), method, task, tokens_per_step, rows_per_step, projected_speedup: tokens times
    T(1), over the sum of T(rows) over the steps. The task `average` holds the means over the tasks.
    """
    keys = ["model", "method", "task"]
    seconds = cost.steps(int(steps["drafted"].max()))
    timed = steps[[*keys, "emitted", "drafted"]].assign(seconds=seconds[steps["drafted"].to_numpy()])
    groups = timed.groupby(keys, sort=False)
    table = pd.DataFrame({
        "tokens_per_step": groups["emitted"].mean(), "rows_per_step": 1 + groups["drafted"].mean(),
        "projected_speedup": groups["emitted"].sum() * float(seconds[0]) / groups["seconds"].sum(),
    }).reset_index()  # fmt: skip
    average = table.drop(columns="task").groupby(keys[:2], sort=False).mean().reset_index()
    average.insert(2, "task", "average")
    return pd.concat([table, average], ignore_index=True)


def main(specs: Sequence[str]) -> None:
    """Measure the models' curves and keep them."""
    if not specs:
        raise SystemExit("Name one model or more, such as random:qwen2.5-0.5b.")
    measured = pd.concat([curve(spec) for spec in tqdm(specs, desc="curves", leave=False)], ignore_index=True)
    assets.write_text(assets.ROOT / "data" / "traces" / f"{TRACE}.csv", measured.to_csv(index=False))
    print(measured.to_string(index=False))


if __name__ == "__main__":
    main(sys.argv[1:])
