"""Cold start (Table 4): the time to load a model's weights from disk, and then to give a first token."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch

from ondevice import meters, models, shapes
from ondevice.evidence import Estimate, born, resampled

SHAPES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")  # Table 4's
_PROMPT = torch.arange(5)[None]  # as many tokens as the paper's "How to use GitHub?"
# A system that cannot drop a file from its page cache has no loads from disk to time.
_CACHES = ("warm", "cold") if hasattr(os, "posix_fadvise") else ("warm",)


@contextlib.contextmanager
def written(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Label -> temporary folder, of published shapes with random weights in bf16.

    A shape that does not fit the free memory and disk is left out.
    """
    with tempfile.TemporaryDirectory() as root:
        paths = {}
        for name in names:
            size = 2 * shapes.shape(name).parameters
            if psutil.virtual_memory().available > 1.5 * size and psutil.disk_usage(root).free > 1.2 * size:
                _in_a_process("write", name, str(Path(root, name)))
                paths[f"random:{name}"] = str(Path(root, name))
        yield paths


def loads(paths: Mapping[str, str], turn: int) -> pd.DataFrame:
    """By a fresh process, each model once with its file in the page cache (warm) and once with it dropped (cold).

    paths: label -> folder. Columns: turn, model, page_cache, parameters, megabytes, load_s (until all weights are in
    memory), ttft_s (of 5 tokens), threads, busy (cores busy with something else meanwhile). A load before them warms
    up and is not told.
    """
    rows = json.loads(_in_a_process("time", json.dumps(dict(paths))))
    return born(pd.DataFrame([{"turn": turn, **row} for row in rows]), "measured")


def exponents(table: pd.DataFrame) -> dict[str, Estimate]:
    """How load time grows with size, by page_cache: 1 is linear. Slope through all sizes' medians, in logarithms.

    Intervals are over turns, each of which loads every size.
    """

    estimates = {}
    for cache, rows in table.groupby("page_cache"):
        size = np.log(rows["parameters"].to_numpy())
        seconds = np.log(rows["load_s"].to_numpy())

        def slope(drawn: np.ndarray, size: np.ndarray = size, seconds: np.ndarray = seconds) -> float:
            medians = pd.Series(seconds[drawn]).groupby(size[drawn]).median()
            return float(np.polyfit(medians.index, medians, 1)[0])

        estimates[str(cache)] = resampled(slope, len(rows), table, drawn="turns", clusters=rows["turn"].tolist())
    return estimates


def watched(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What a call returns, and how many cores were busy with something else meanwhile."""
    psutil.cpu_percent()
    own = process_time()
    began = perf_counter()
    result = call(*arguments)
    share = (process_time() - own) / (perf_counter() - began)
    return result, round(max(0.0, psutil.cpu_percent() / 100 * (os.cpu_count() or 1) - share), 2)


def _in_a_process(*arguments: str) -> str:
    """What a fresh process of this module prints: its memory is given back, and it starts without the weights."""
    command = [sys.executable, "-m", "ondevice_studies.disco.cold_start", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"A cold start failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def _time(paths: Mapping[str, str]) -> list[dict[str, Any]]:
    rows = []
    for label, folder in paths.items():
        files = sorted(Path(folder).glob("*.safetensors"))
        megabytes = round(sum(file.stat().st_size for file in files) / 1e6, 1)
        _once(folder)
        for cache in _CACHES:
            if cache == "cold":
                meters.evict(files)
            timings, busy = watched(_once, folder)
            rows.append(
                {"model": label, "page_cache": cache, "megabytes": megabytes, **timings, "threads": 1, "busy": busy}
            )
    return rows


def _once(folder: str) -> dict[str, float]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    start = perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True).eval()
    for weights in model.parameters():  # a mapped file is read when it is touched: once a page
        weights.detach().view(-1)[::2048].sum()
    loaded = perf_counter()
    with torch.inference_mode():
        model(input_ids=_PROMPT, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
    result = {"parameters": model.num_parameters(), "load_s": loaded - start, "ttft_s": perf_counter() - loaded}
    del model, weights
    gc.collect()
    return result


if __name__ == "__main__":
    if sys.argv[1] == "write":
        models.load(f"random:{sys.argv[2]}", torch.bfloat16).model.save_pretrained(sys.argv[3])
    else:
        torch.set_num_threads(1)
        print(json.dumps(_time(json.loads(sys.argv[2]))))
