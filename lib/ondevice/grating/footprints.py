"""Figures 9, 11, 13, 15 and 16: memory over time and seconds, each method in a process of its own (`measuring`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from ondevice.grating import measuring, printed, quantised
from ondevice.grating.measuring import MB, Job, Measured, measure
from ondevice.grating.recordings import model_of

MMAP = 1 << 16  # bytes: malloc's setting with which accelerate's offload holds least
CHUNK = 256  # tokens: the least memory for rows of up to so many
SAMPLES = 400  # of a curve that is kept
# Baselines compute the whole output head, as transformers' own forward does; the last one two rows, as ours does.
HF_ROWS = "HF, two rows of the head"
METHODS: dict[str, dict[str, Any]] = {
    printed.HF: dict(method="transformers", whole_head=True),
    HF_ROWS: dict(method="transformers"),
    printed.OFFLOAD: dict(method="accelerate", whole_head=True, mmap_threshold=MMAP),
    printed.QUANT: dict(method="int8", whole_head=True),
    printed.OURS: dict(method="ours", chunk=CHUNK),
    printed.OURS_QUANT: dict(method="ours", chunk=CHUNK),
}
# Figure 16. Random weights rank nothing, so pruning decides from the middle layer on, whatever the dispersion.
STEPS = dict(zip(printed.STEPS, ("transformers", *measuring.ABLATION[1:]), strict=True))


def memory(
    shape: str, tokens: int, documents: int = 20, methods: Sequence[str] = tuple(METHODS), threads: int = 2
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Each method ranks random documents once, nothing pruned, on a published shape with random weights in bfloat16.

    tokens: of each row. Returns (samples, peaks), as `plots.memory_over_time` and `findings.memory` need them; peak_mb
    is rss_mb. parts_mb: what must be there at the peak, where weights are streamed.
    """
    folder = measuring.prepared(shape)
    query, texts = measuring.random_pool(folder, documents, tokens)
    samples, rows = [], []
    for name in tqdm(methods, desc=f"memory, {tokens} tokens"):
        where = quantised_copy(folder) if name == printed.OURS_QUANT else folder
        found = measure(Job(folder=str(where), query=query, documents=texts, threads=threads, **METHODS[name]))
        samples.append(curve(found).assign(method=name, length=tokens))
        rows.append(peaks(found) | {"method": name, "length": tokens})
    return pd.concat(samples, ignore_index=True), pd.DataFrame(rows)


def peaks(found: Measured) -> dict[str, float]:
    """MB over the imports, and seconds, of one run."""
    row = found.row()
    kept = {name: float(row[name]) for name in ("rss_mb", "anon_mb", "mean_rss_mb", "cached_mb", "parts_mb", "work")}
    return kept | {"peak_mb": kept["rss_mb"], "seconds": float(row["ranking_s"]), "stalled_s": float(row["stalled_s"])}


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


def ablation(shape: str, tokens: int, documents: int = 20, rounds: int = 1, threads: int = 2) -> pd.DataFrame:
    """Figure 16: step, peak_mb, seconds, low, high, work; each technique is added to those before it.

    Seconds are medians over rounds, low and high the least and the greatest; the embedding cache is warm from the
    second pass on, which is the one that counts.
    """
    folder = measuring.prepared(shape)
    query, texts = measuring.random_pool(folder, documents, tokens)
    middle = model_layers(folder) // 2
    runs: dict[str, list[Measured]] = {step: [] for step in STEPS}
    for _ in tqdm(range(rounds), desc="ablation"):
        for step, method in STEPS.items():
            options: dict[str, Any] = dict(threshold=0.0, first=middle) if method != "transformers" else {}
            if method == "transformers":
                options["whole_head"] = True
            repeats = 2 if step == printed.STEPS[-1] else 1
            job = Job(method, str(folder), query, texts, chunk=CHUNK, threads=threads, repeats=repeats, **options)
            runs[step].append(measure(job))
    return pd.DataFrame(_steps(runs))


def _steps(runs: dict[str, list[Measured]]) -> Iterator[dict[str, Any]]:
    for step, found in runs.items():
        seconds = [float(one.seconds[-1]) for one in found]
        yield {
            "step": step, "peak_mb": float(np.median([one.row()["rss_mb"] for one in found])),
            "seconds": float(np.median(seconds)), "low": min(seconds), "high": max(seconds), "work": found[-1].work,
        }  # fmt: skip


def application(
    name: str, setting: str, spec: str, query: str, documents: Sequence[str], threads: int = 2,
    rule: float = float("inf"), k: int = 5,
) -> pd.DataFrame:  # fmt: skip
    """Memory while a bundled reranker ranks one question's candidates, by HF and GRATING, over the imports.

    Columns application, setting, method, seconds, mb. rule: the threshold of GRATING's pruning.
    """
    parts = []
    folder = str(model_of(spec).folder)
    for method, options in ((printed.HF, dict(method="transformers")), (printed.OURS, dict(method="ours"))):
        found = measure(Job(folder=folder, query=query, documents=tuple(documents), threads=threads, chunk=CHUNK,
                            threshold=rule, top_k=k, **options))  # type: ignore[arg-type]  # fmt: skip
        shown = curve(found)[["seconds", "rss_mb"]].rename(columns={"rss_mb": "mb"})
        parts.append(shown.assign(application=name, setting=setting, method=method))
    return pd.concat(parts, ignore_index=True)


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
            if not path.name.endswith(".safetensors") and not (made / path.name).exists():
                shutil.copy(path, made / path.name)
        made.rename(target)
    return target
