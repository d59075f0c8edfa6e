"""What the experiments' tables say of each claim: the values that the rules of `claims` judge, by claim.

larger, small: names of our two models in the tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from ondevice import shapes
from ondevice.diaa.tables import Tables
from ondevice.evidence import Value
from ondevice.speculation.measuring import AVERAGE

PAPER_METHODS = ("vanilla", "SpS", "SWIFT", "SAM-D", "TR", "DIAA")
_K = 8  # a tree of no more nodes is one row of the table, static or grown
_INT4, _HALF = 0.5, 2  # bytes a weight


def best_on_average(cells: pd.DataFrame, larger: str, small: str) -> dict[str, Value]:
    """c02, c03, c05, c06: DIAA's averages over the best baseline's. cells: `by_task` of both models."""
    found: dict[str, Value] = {}
    for model, goodput, latency in ((larger, "diaa-c02", "diaa-c05"), (small, "diaa-c03", "diaa-c06")):
        rows = _paper_rows(cells, model)
        mean = rows[rows["task"] == AVERAGE].set_index("method")
        others, ours = mean.drop(index="DIAA"), mean.loc["DIAA"].to_dict()
        found[goodput] = float(ours["goodput_tokens_per_s"] / others["goodput_tokens_per_s"].max())
        found[latency] = float(others["latency_ms_per_token"].min() / ours["latency_ms_per_token"])
    return found


def across_tasks(cells: pd.DataFrame, larger: str, small: str) -> dict[str, Value]:
    """c07, c08, c10: DIAA's rank over the cells, SAM-D on rag, and the spread over the tasks. cells: `by_task`."""
    ranks, on_rag, spreads = [], [], []
    for model in (larger, small):
        rows = _paper_rows(cells, model)
        wide: Any = rows[rows["task"] != AVERAGE].pivot(index="task", columns="method", values="goodput_tokens_per_s")
        ranks += wide.rank(axis=1, ascending=False)["DIAA"].tolist()
        on_rag.append(float(wide.loc["rag", "SAM-D"] / wide.loc["rag", "DIAA"]))
        spread = wide.std() / wide.mean()
        spreads.append(float(spread["DIAA"] / spread["SAM-D"]))
    return {"diaa-c07": float(np.mean(np.array(ranks) <= 2)), "diaa-c08": on_rag, "diaa-c10": spreads}


def redundancy(speedups: pd.DataFrame, repetition: pd.DataFrame) -> dict[str, Value]:
    """c09: rank correlation of speed-up and redundancy over the tasks, and doctest's place; means over the models."""
    correlations, places = [], []
    ours = speedups[(speedups["method"] == "DIAA") & (speedups["task"] != AVERAGE)]
    for model, rows in ours.groupby("model"):
        known = repetition[repetition["model"] == model].set_index("task")["redundancy"]
        gain = rows.set_index("task")["speedup"]
        correlations.append(gain.corr(known.reindex(gain.index), method="spearman"))
        places.append(gain.rank(ascending=False)["doctest"])
    return {"diaa-c09": (float(np.mean(correlations)), float(np.mean(places)))}


def table_2(speedups: pd.DataFrame, larger: str, small: str) -> dict[str, Value]:
    """c11, c12, c14, c15: average speed-ups."""
    mean = speedups[speedups["task"] == AVERAGE].set_index(["model", "method"])["speedup"]

    def range_of(methods: Iterable[str]) -> tuple[float, float]:
        known = [mean[key] for key in ((m, method) for m in (larger, small) for method in methods) if key in mean]
        return float(min(known)), float(max(known))

    return {
        "diaa-c11": range_of(("SpS", "SWIFT")),
        "diaa-c12": float(mean[larger, "DIAA"]),
        "diaa-c14": float(mean[small, "DIAA"]),
        "diaa-c15": range_of(("TR", "SAM-D")),
    }


def table_3(ratios: pd.DataFrame) -> dict[str, Value]:
    """c16 to c19. ratios: [task, variant, ratio], goodput without a part over full DIAA's, tasks only."""
    wide: Any = 1 / ratios.pivot(index="task", columns="variant", values="ratio")
    between = wide["w/o DT"] / wide["w/o LUT"]

    def least_and_mean(values: pd.Series) -> tuple[float, float]:
        return float(values.min()), float(values.mean())

    return {
        "diaa-c16": least_and_mean(wide["w/o LUT"]),
        "diaa-c17": least_and_mean(between),
        "diaa-c18": least_and_mean(wide["w/o CO"]),
        "diaa-c19": least_and_mean(pd.Series(wide.to_numpy().ravel())),
    }


def trees(table: pd.DataFrame) -> dict[str, Value]:
    """c23, c24: where the dynamic tree has more than the static one. table: `static_and_dynamic`."""
    measures = ["goodput_tokens_per_s", "tokens_per_step", "acceptance_rate"]
    wide: Any = table[table["size"] > _K].pivot(index=["task", "size"], columns="tree", values=measures)
    more = pd.DataFrame({name: wide[name, "dynamic"] > wide[name, "static"] for name in measures})
    average = more.index.get_level_values("task") == AVERAGE
    cells = more[~average].mean().to_dict()
    return {
        "diaa-c23": more[average].mean()[measures].tolist(),
        "diaa-c24": (cells["acceptance_rate"], cells["tokens_per_step"]),
    }


def best_size(table: pd.DataFrame) -> dict[str, Value]:
    """c25, of trees grown every step. table: `size_and_refresh`."""
    rows = table[(table["task"] == AVERAGE) & (table["interval"] == 1)].sort_values("size")
    goodput = rows["goodput_tokens_per_s"].to_numpy()
    return {"diaa-c25": (float(goodput.argmax()), float(goodput.max() / goodput[-1]))}


def initial(table: pd.DataFrame) -> dict[str, Value]:
    """c26. table: `initialised`."""
    warm = table[(table["task"] == AVERAGE) & (table["tables"] != "cold")].groupby("model")["goodput_tokens_per_s"]
    return {"diaa-c26": float((warm.max() / warm.min() - 1).max())}


def shares(parts: pd.DataFrame, larger: str) -> dict[str, Value]:
    """c27 to c29, percent of the decoding time. parts: [model, part, share]."""
    wide: Any = 100 * parts.pivot(index="model", columns="part", values="share")
    return {
        "diaa-c27": float(wide.loc[larger, "forward"]),
        "diaa-c28": float(wide["tree"].mean()),
        "diaa-c29": float(wide["tables"].mean()),
    }


def identity(runs: pd.DataFrame) -> dict[str, Value]:
    """c30. runs: in fp32."""
    ours = runs[runs["method"] == "DIAA"]
    return {"diaa-c30": (float(ours["identical"].mean()), float(ours["agreed"].sum()))}


def confidence(reliability: pd.DataFrame) -> dict[str, Value]:
    """c32, least of the models. reliability: its table of what was said and what was accepted."""
    said = reliability[reliability["probability"] == "tables"].groupby("model")
    ranks = [rows["said"].corr(rows["accepted"], method="spearman") for _, rows in said]
    return {"diaa-c32": float(min(ranks))}


def weights() -> pd.DataFrame:
    """Bytes of the paper's models as it runs them, and of its draft model, last.

    Columns: model, weights_gb (10^9 bytes), tables_mib, tables_percent (of the weights).

    INT4 counts half a byte a weight; embedding and output layer stay in 16 bit, as GPTQ leaves them.
    """
    rows = []
    paper = (("vicuna-7b-v1.5", True), ("llama-3.2-3b", True), ("llama-3.2-1b", False), ("llama-3.2-1b", True))
    for name, quantised in paper:
        shape = shapes.shape(name)
        values = shape.values
        ends = values["vocab_size"] * values["hidden_size"] * (1 if values["tie_word_embeddings"] else 2)
        total = (shape.parameters - ends) * (_INT4 if quantised else _HALF) + ends * _HALF
        tables = sum(Tables.empty(values["vocab_size"]).bytes)
        label = f"{name}{', INT4' if quantised else ''}"
        rows.append((label, total / 1e9, tables / 2**20, 100 * tables / total))
    return pd.DataFrame(rows, columns=["model", "weights_gb", "tables_mib", "tables_percent"])


def memory(counted: pd.DataFrame) -> dict[str, Value]:
    """c22, c31. counted: `weights`."""
    known = dict(zip(counted["model"], counted["weights_gb"], strict=True))
    run_as_printed = counted[counted["model"] != "llama-3.2-1b, INT4"]
    return {
        "diaa-c22": known["llama-3.2-1b, INT4"],
        "diaa-c31": float(run_as_printed["tables_percent"].max()),
    }


def _paper_rows(cells: pd.DataFrame, model: str) -> pd.DataFrame:
    """One model's rows of the methods that the paper compares."""
    return cells[(cells["model"] == model) & cells["method"].isin(PAPER_METHODS)]
