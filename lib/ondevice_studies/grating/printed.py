"""The paper's numbers under our names, and what they say of each other.

Nothing here is measured: values are quoted, or analytic, computed from quoted ones and from published shapes. Memory is
in MB of 10^6 bytes unless it is called MiB, as the paper mixes the two.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import logit

from ondevice import assets, shapes

HF, OFFLOAD = "HF", "HF Offload"
SMALL = "qwen3-reranker-0.6b"  # our name of the shape of Figures 1, 12 to 16 and section 4.4
STABLE_LAYERS = (7, 13)  # Figure 2


# Tables


def models() -> pd.DataFrame:
    """Table 1: model, size_billion_params, architecture."""
    return assets.paper_table("grating", "table_01_evaluated_models")


def workloads() -> pd.DataFrame:
    """Table 2: workload, description, source_cited."""
    return assets.paper_table("grating", "table_02_workloads")


def number(quantity: str) -> float:
    """A number that the text states, by its row in data/paper/grating/paper_text_numbers.csv; ValueError on others."""
    table = assets.paper_table("grating", "paper_text_numbers").set_index("quantity")["value"]
    if quantity not in table.index:
        raise ValueError(f"The paper's text has no number {quantity!r}; it has {', '.join(table.index)}.")
    return float(table[quantity])


def memory_ratios() -> dict[str, tuple[float, float]]:
    """(least, greatest) peak memory of a baseline over GRATING's, over the five models of Figure 9."""
    table = assets.paper_table("grating", "fig_09_memory_ratios").set_index("baseline")
    return {str(name): (row["least_ratio"], row["greatest_ratio"]) for name, row in table.iterrows()}


def ablation() -> pd.DataFrame:
    """Figure 16: step, peak, latency (fractions of the baseline's; NaN: not stated), added_ms, peak_mib, reading."""
    table = assets.paper_table("grating", "fig_16_ablation")
    return pd.DataFrame({
        "step": table["step"], "peak": table["peak_percent_of_baseline"] / 100,
        "latency": table["latency_percent_of_baseline"] / 100, "added_ms": table["added_latency_ms"],
        "peak_mib": table["peak_mib"], "reading": table["reading"],
    })  # fmt: skip


# The worked example, section 4.5


def worked_example() -> NDArray[np.float64]:
    """[12, 20] logits, made up so that the rule of section 4.1 decides as the paper's example does, with K = 10.

    With a threshold of 0.3: after layer 9 two are selected and two dropped; after layer 10 the other 16 are too close
    together; after layer 11 the boundary cluster is the 8 that are missing. The paper prints no scores.
    """
    rank = np.arange(20)
    layer = np.arange(1, 13)[:, None]
    p = 0.5 + 0.002 * layer * (9.5 - rank) / 9.5  # close together
    p[8:, :2] = 0.97
    p[8:, 18:] = 0.03  # after layer 9 the ends are far off
    p[10:, 2:10] = 0.9 - 0.002 * rank[2:10]
    p[10:, 10:18] = 0.2 - 0.002 * rank[10:18]
    return np.asarray(logit(p), np.float64)


# What the numbers say of each other


def embedding_share() -> float:
    """Percent of the memory that is embedding table, once two layers are all the others there are (section 4.4)."""
    sizes = {key: parameter.numel() for key, parameter in shapes.shape(SMALL).empty().named_parameters()}
    layer = sum(size for key, size in sizes.items() if ".layers.0." in key)
    table = sizes["model.embed_tokens.weight"]
    return 100 * table / (table + 2 * layer)


def vocabulary_share() -> float:
    """Percent of the vocabulary that 20 documents of 512 tokens touch at most (section 4.4)."""
    return float(100 * 20 * 512 / shapes.shape(SMALL).values["vocab_size"])


def weights_mb(bits: float) -> float:
    """MB of all weights."""
    return shapes.shape(SMALL).parameters * bits / 8e6


def baseline_seconds() -> tuple[float, float]:
    """(least, greatest) latency of Figure 16's baseline, by -49.0 %, then +85 ms, then -48.5 %, as they are rounded."""
    steps = ablation().set_index("step")
    added = steps["added_ms"].sum() / 1e3
    change = steps["latency"]["embedding cache"] - steps["latency"]["pruning"]
    return float(added / (change + 0.001)), float(added / (change - 0.001))


def baseline_mib() -> float:
    """Peak of Figure 16's baseline, by 271 MiB being 21.6 % of it."""
    steps = ablation().set_index("step")
    return float(steps["peak_mib"]["embedding cache"] / steps["peak"]["embedding cache"])


def findings() -> pd.DataFrame:
    """The paper's statements against each other: where, finding, printed, computed, agrees (None: nothing printed)."""
    columns = ["where", "finding", "printed", "computed", "agrees"]
    return pd.DataFrame([*_in_the_ablation(), *_elsewhere()], columns=columns)


def _in_the_ablation() -> list[tuple[str, str, str, str, bool | None]]:
    steps = ablation().set_index("step")["peak"]
    chunked = float(steps["chunked execution"])
    window = float(steps["sliding window"])
    base = baseline_mib()
    (low, high) = baseline_seconds()
    cache = (1 - number("embedding cache") / 100) * number("memory of the embedding table")
    of_base = base * window - cache
    of_step = base * chunked * window - cache
    last = number("ablation, peak memory of all techniques")
    tensors = float((steps["pruning"] - 1) * base) * 2**20 / 1e6  # what the monolithic batch adds
    printed_mb = number("intermediate tensors of a monolithic batch")
    return [
        ("4.2, 6.4", "latency that the sliding window adds", "none", "81 ms in the ablation", False),
        ("6.4", "the baseline's latency, by -49.0 %, +85 ms and -48.5 %", "-", f"{low:.0f} to {high:.0f} s", None),
        ("3.3, 6.4", "what the monolithic batch adds", f"{printed_mb:.0f} MB",
         f"{tensors:.0f} MB by 44.8 % of {base:.0f} MiB", abs(tensors / printed_mb - 1) < 0.05),
        ("6.4", "left after the embedding cache, if -57.8 % is of the baseline", f"{last:.0f} MiB",
         f"{of_base:.0f} MiB", abs(of_base / last - 1) < 0.05),
        ("6.4", "the same, if -57.8 % is of the step before", f"{last:.0f} MiB", f"{of_step:.0f} MiB",
         abs(of_step / last - 1) < 0.05),
    ]  # fmt: skip


def _elsewhere() -> list[tuple[str, str, str, str, bool | None]]:
    cut = 100 * (1 - 1 / number("peak memory factor at most"))
    abstract = number("peak memory reduction at most (abstract)")
    search = number("file search: reranker peak memory")
    four = weights_mb(number("file search: bits of a weight"))
    sixteen = weights_mb(16)
    share = embedding_share()
    touched = vocabulary_share()
    context = 100 / number("least peak memory reduction in applications")
    against = [number(f"best case, latency reduction against {name}") for name in (HF, OFFLOAD)]
    slower = (100 - against[0]) / (100 - against[1])
    return [
        ("abstract, 6.2", "greatest reduction of peak memory", f"{abstract} %", f"{cut:.1f} % by 11.45x",
         abs(cut - abstract) < 0.1),
        ("1", "peak memory of the 4-bit 0.6B reranker", f"{search:.0f} MB",
         f"weights {four:.0f} MB; in 16 bits {sixteen:.0f}", search < 2 * four),
        ("4.4", "embedding table, of it and two layers", "over 83 %", f"{share:.1f} %", share > 83),
        ("4.4", "vocabulary that 20 x 512 tokens touch at most", "6.75 %", f"{touched:.2f} %",
         abs(touched - 6.75) <= 0.005),
        ("abstract, 6.3", "long context: HF's peak, if about 1 GiB is the least saving, 18.6 %", "-",
         f"{context:.1f} GiB", None),
        ("6.2", "HF Offload's latency over HF's, by -89 % and -72 %", "-", f"{slower:.2f}x", None),
    ]  # fmt: skip
