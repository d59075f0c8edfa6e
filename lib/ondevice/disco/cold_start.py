"""Cold start (Table 4): the time to load a model's weights from disk, and then to give a first token.

`python -m ondevice.disco.cold_start qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b` measures shapes with random weights and
writes data/traces/cold_start.csv, which a notebook shows where measuring them anew would take too long.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch

from ondevice import assets, commands, evidence, models, shapes
from ondevice.disco import device_probe

_PROMPT = torch.arange(5)[None]  # as many tokens as the paper's "How to use GitHub?"
_WARM_UPS = 1


def of_models(specs: Sequence[str], runs: int) -> pd.DataFrame:
    """`of_folder` of bundled models and folders."""
    folders = [str(assets.data("models", spec)) if spec in models.bundled() else spec for spec in specs]
    return pd.concat([of_folder(folder, device_probe.label(spec), runs)
                      for folder, spec in zip(folders, specs, strict=True)])  # fmt: skip


def of_shapes(names: Sequence[str], runs: int) -> pd.DataFrame:
    """`of_folder` of published shapes with random weights in bf16, written to a temporary folder one at a time.

    A shape that does not fit the free memory and disk is left out; MemoryError when none fits.
    """
    parts = []
    for name in names:
        size = 2 * shapes.shape(name).parameters
        with tempfile.TemporaryDirectory() as folder:
            if psutil.virtual_memory().available > 1.5 * size and psutil.disk_usage(folder).free > 1.2 * size:
                _in_a_process("write", name, folder)
                parts.append(of_folder(folder, f"random:{name}", runs))
    if not parts:
        raise MemoryError(f"None of {', '.join(names)} fits the free memory and disk.")
    return pd.concat(parts, ignore_index=True)


def of_folder(folder: str, label: str, runs: int) -> pd.DataFrame:
    """Medians of `runs` loads by one fresh process, with the file in the page cache (warm) and dropped from it (cold).

    Two rows: model, parameters, megabytes, page_cache, runs, load_s (until all weights are in memory), ttft_s (of 5
    tokens), threads, busy (cores busy with something else meanwhile), machine, measured_on.
    """
    return pd.DataFrame([{"model": label, **row} for row in json.loads(_in_a_process("time", folder, str(runs)))])


def exponents(table: pd.DataFrame) -> dict[str, float]:
    """How load time grows with size, largest model against smallest: 1 is linear. By page_cache."""
    found = {}
    for cache, rows in table.groupby("page_cache"):
        small, large = (rows.loc[getattr(rows["parameters"], which)()] for which in ("idxmin", "idxmax"))
        found[str(cache)] = float(
            np.log(large["load_s"] / small["load_s"]) / np.log(large["parameters"] / small["parameters"])
        )
    return found


def _in_a_process(*arguments: str) -> str:
    """What a fresh process of this module prints: its memory is given back, and it starts without the weights."""
    command = [sys.executable, "-m", "ondevice.disco.cold_start", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"A cold start failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def _write(shape: str, folder: str) -> None:
    models.load(f"random:{shape}", torch.bfloat16).model.save_pretrained(folder)


def _time(folder: str, runs: int) -> list[dict[str, Any]]:
    files = sorted(Path(folder).glob("*.safetensors"))
    machine = evidence.environment()["machine"]
    rows = []
    with device_probe.one_thread():
        for cache in ("warm", "cold"):
            psutil.cpu_percent()
            started = perf_counter()
            mine = psutil.Process().cpu_times()
            timed = [_once(folder, files, cold=cache == "cold") for _ in range(_WARM_UPS + runs)][_WARM_UPS:]
            now = psutil.Process().cpu_times()
            own = (now.user + now.system - mine.user - mine.system) / (perf_counter() - started)
            busy = psutil.cpu_percent() / 100 * (os.cpu_count() or 1) - own
            medians = pd.DataFrame(timed, columns=["load_s", "ttft_s", "parameters"]).median()
            rows.append({
                "parameters": int(medians["parameters"]),
                "megabytes": round(sum(file.stat().st_size for file in files) / 1e6, 1), "page_cache": cache,
                "runs": runs, "load_s": medians["load_s"], "ttft_s": medians["ttft_s"],
                "threads": 1, "busy": round(max(busy, 0.0), 1),
                "machine": f"{machine['processor']}, {machine['cores']} cores, "
                           f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.system()}",
                "measured_on": f"{datetime.now(UTC):%Y-%m-%d}",
            })  # fmt: skip
    return rows


def _once(folder: str, files: Sequence[Path], cold: bool) -> tuple[float, float, int]:
    """(seconds to load, seconds to the first token, parameters)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if cold:
        for file in files:
            _drop_from_cache(file)
    start = perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True).eval()
    for weights in model.parameters():  # a mapped file is read when it is touched: once a page
        weights.detach().view(-1)[::2048].sum()
    loaded = perf_counter()
    with torch.inference_mode():
        model(input_ids=_PROMPT, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
    result = loaded - start, perf_counter() - loaded, model.num_parameters()
    del model, weights
    gc.collect()
    return result


def _drop_from_cache(file: Path) -> None:
    """Have the next reader fetch a file from the disk; where the system cannot, it stays cached."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # what is not written yet cannot be dropped
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Measure the named shapes and keep them."""
    parser = commands.Parser(
        "python -m ondevice.disco.cold_start", description=__doc__,
        example="python -m ondevice.disco.cold_start qwen2.5-0.5b",
    )  # fmt: skip
    parser.add_argument("shapes", nargs="+", metavar="shape", choices=sorted(shapes.SHAPES), help="published shapes")
    names = parser.parse_args().shapes
    with commands.refusing(parser.prog):
        measured = of_shapes(names, 5)
    assets.write_text(assets.data("traces", "cold_start.csv"), measured.to_csv(index=False))
    print(measured.to_string(index=False))


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        _write(*sys.argv[2:])
    elif sys.argv[1:2] == ["time"]:
        print(json.dumps(_time(sys.argv[2], int(sys.argv[3]))))
    else:
        main()
