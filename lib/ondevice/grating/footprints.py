"""Figures 9 and 16: memory over time and seconds, each method in a process of its own (`measuring`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from ondevice import assets, commands
from ondevice.grating import measuring, printed, quantised
from ondevice.grating.measuring import MB, Job, Measured, measure

MMAP = 1 << 16  # bytes: malloc's setting with which accelerate's offload holds least
REPEATS = 2  # queries, one after the other: the first has nothing in the page cache and no embedding rows
CHUNK = 128  # tokens: the least memory for rows of up to so many
SAMPLES = 400  # of a curve that is kept
# Baselines compute the whole output head, as transformers' own forward does; these two only the rows that ours does.
HF_ROWS, OFFLOAD_ROWS = "HF, two rows of the head", "HF Offload, two rows of the head"
METHODS: dict[str, dict[str, Any]] = {
    printed.HF: dict(method="transformers", whole_head=True),
    HF_ROWS: dict(method="transformers"),
    printed.OFFLOAD: dict(method="accelerate", whole_head=True, mmap_threshold=MMAP),
    OFFLOAD_ROWS: dict(method="accelerate", mmap_threshold=MMAP),
    printed.QUANT: dict(method="int8", whole_head=True),
    printed.OURS: dict(method="ours", chunk=CHUNK, offload=True),
    printed.OURS_QUANT: dict(method="ours", chunk=CHUNK, offload=True),
}
# Figure 16. Random weights rank nothing, so pruning decides from the middle layer on, whatever the dispersion.
STEPS = dict(zip(printed.STEPS, ("transformers", *measuring.ABLATION[1:]), strict=True))


def memory(
    shape: str, tokens: int, documents: int = 20, methods: Sequence[str] = tuple(METHODS), threads: int = 2,
    rounds: int = 1,
) -> tuple[pd.DataFrame, pd.DataFrame]:  # fmt: skip
    """Each method ranks random documents REPEATS times, nothing pruned, on a published shape with random weights.

    tokens: of each row. Returns (samples, peaks), as `plots.memory_over_time` and `findings.memory` need them: samples
    of the first round, peaks the medians of all, with a row a method. peak_mb is rss_mb; first_s is of the first query,
    seconds of those after it. parts_mb: what must be there at the peak, where weights are streamed.
    """
    folder = measuring.prepared(shape)
    query, texts = measuring.random_pool(folder, documents, tokens)
    samples, rows = [], []
    for turn, name in tqdm([(turn, name) for turn in range(rounds) for name in methods], desc=f"{tokens} tokens"):
        where = quantised_copy(folder) if name == printed.OURS_QUANT else folder
        found = measure(Job(folder=str(where), query=query, documents=texts, threads=threads, repeats=REPEATS,
                            **METHODS[name]))  # fmt: skip
        if turn == 0:
            samples.append(curve(found).assign(method=name, length=tokens))
        rows.append(peaks(found) | {"method": name, "length": tokens})
    middle = pd.DataFrame(rows).groupby(["method", "length"], sort=False).median().reset_index()
    return pd.concat(samples, ignore_index=True), middle


def peaks(found: Measured) -> dict[str, float]:
    """MB over the imports, and seconds, of one run."""
    row = found.row()
    names = ("rss_mb", "anon_mb", "mean_rss_mb", "cached_mb", "parts_mb", "work", "first_s", "stalled_s")
    kept = {name: float(row[name]) for name in names}
    return kept | {"peak_mb": kept["rss_mb"], "seconds": float(row["next_s"])}


def curve(found: Measured) -> pd.DataFrame:
    """seconds (since the load began), rss_mb, anon_mb: at most SAMPLES points, each the greatest of its stretch."""
    memory = found.memory
    marks = np.asarray(memory.at)
    first, last = int(marks[0]), int(marks[-1]) + 1
    table = pd.DataFrame({
        "seconds": memory.seconds[first:last], "rss_mb": memory.growth("resident")[first:last] / MB,
        "anon_mb": memory.growth("anonymous", "shared")[first:last] / MB,
    })  # fmt: skip
    part = np.arange(len(table)) * SAMPLES // max(len(table), SAMPLES)
    return table.groupby(part).agg(seconds=("seconds", "first"), rss_mb=("rss_mb", "max"), anon_mb=("anon_mb", "max"))


def ablation(
    shape: str, tokens: int, documents: int = 20, rounds: int = 1, threads: int = 2, repeats: int = REPEATS
) -> pd.DataFrame:
    """Figure 16: step, peak_mb, first_s, seconds, low, high, work; each technique is added to those before it.

    first_s: of the first query, median of the rounds. seconds: of the queries after it, median of all; low and high are
    the least and the greatest. With one repeat they are those of the first.
    """
    folder = measuring.prepared(shape)
    query, texts = measuring.random_pool(folder, documents, tokens)
    middle = model_layers(folder) // 2
    runs: dict[str, list[Measured]] = {step: [] for step in STEPS}
    for step in tqdm([step for _ in range(rounds) for step in STEPS], desc="ablation"):
        job = Job(STEPS[step], str(folder), query, texts, chunk=CHUNK, threads=threads, repeats=repeats)
        plain = STEPS[step] == "transformers"
        job = replace(job, whole_head=True) if plain else replace(job, threshold=0.0, first=middle)
        runs[step].append(measure(job))
    return pd.DataFrame(_steps(runs))


def _steps(runs: dict[str, list[Measured]]) -> Iterator[dict[str, Any]]:
    for step, found in runs.items():
        seconds = np.concatenate([one.seconds[min(1, len(one.seconds) - 1) :] for one in found])
        yield {
            "step": step, "peak_mb": float(np.median([one.row()["rss_mb"] for one in found])),
            "first_s": float(np.median([one.seconds[0] for one in found])), "seconds": float(np.median(seconds)),
            "low": float(seconds.min()), "high": float(seconds.max()), "work": found[-1].work,
        }  # fmt: skip


def recorded_ablation() -> pd.DataFrame:
    """`ablation` of 60 candidates of 500 tokens on the 0.6B shape, as the paper's, recorded once: it takes minutes.

    Record it anew: python -m ondevice.grating.footprints
    """
    return pd.read_csv(_recorded())


def _recorded() -> Path:
    return assets.data("traces", "grating_ablation.csv")


def model_layers(folder: Path) -> int:
    """Layers of a saved model."""
    from ondevice.grating.checkpoint import Checkpoint

    return len(Checkpoint.open(folder).groups.layers)


def quantised_copy(folder: Path) -> Path:
    """The folder's int8 form beside it, written whole on first use."""
    target = folder.with_name(f"{folder.name}-int8")
    if not target.is_dir():
        made = folder.with_name(f".{folder.name}-int8-made")
        shutil.rmtree(made, ignore_errors=True)
        quantised.save(folder, made)
        for path in folder.iterdir():
            if ".safetensors" not in path.name and not (made / path.name).exists():
                shutil.copy(path, made / path.name)
        made.rename(target)
    return target


if __name__ == "__main__":
    commands.no_arguments("python -m ondevice.grating.footprints", __doc__)
    table = ablation("qwen3-reranker-0.6b", 500, documents=60, repeats=1)
    table.round(3).to_csv(_recorded(), index=False)
