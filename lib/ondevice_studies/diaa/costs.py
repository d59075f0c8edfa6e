"""What a forward pass over n rows takes on this machine, in every format: the cost curves of public models.

`make record MACHINE=name ARGS="--only diaa/formats"` records them on a quiet machine. All curves of a model take a turn
after each other, so that what slows the machine for a while slows all. One of them is measured twice: the difference is
the floor below which none is read.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from ondevice import models
from ondevice.causal_lm.lean import Arithmetic, Weights, engine
from ondevice.evidence import Recorder, machine_name
from ondevice.evidence.resampling import median_interval
from ondevice.speculation.verify_cost import verifications
from ondevice_studies.speculation import plain

ROWS = (1, 2, 4, 8, 16, 33, 64, 81)
CACHED = {models.SMOLLM2: (64, 256, 768), models.QWEN: (256,)}
TURNS = 40
KEYS = ["model", "threads", "weights", "arithmetic", "rows_alone", "run", "cached", "rows"]


@dataclass(frozen=True)
class EngineForm:
    """An engine's form. padded: whether a lone row is run as two, which drafts in int8 need. run: 2 is a repetition."""

    weights: Weights
    arithmetic: Arithmetic
    padded: bool = True
    run: Literal[1, 2] = 1

    @property
    def label(self) -> dict[str, object]:
        """Its columns."""
        alone = "padded" if self.padded and self.arithmetic == "int8" else "alone"
        return {"weights": self.weights, "arithmetic": self.arithmetic, "rows_alone": alone, "run": self.run}


FORMATS = (
    EngineForm("float32", "float32"),
    EngineForm("4bit", "float32"),
    EngineForm("4bit", "int8"),
    EngineForm("4bit", "int8", padded=False),
    EngineForm("8bit", "int8"),
    EngineForm("8bit-rows", "int8"),
    EngineForm("4bit", "float32", run=2),
)


@dataclass(frozen=True)
class Curve:
    """What is timed. columns: that name it. turn: times each of `rows` once, in seconds."""

    columns: dict[str, object]
    rows: Sequence[int]
    turn: Callable[[], list[float]]


def medians(curves: Sequence[Curve], until: float) -> pd.DataFrame:
    """Seconds of all curves, in turns until a time (`time.monotonic`), at least three and at most TURNS."""
    times: list[list[list[float]]] = [[] for _ in curves]
    while len(times[0]) < 3 or (time.monotonic() < until and len(times[0]) < TURNS):
        gc.collect()
        for seconds, curve in zip(times, curves, strict=True):
            seconds.append(curve.turn())
    tables = []
    for seconds, curve in zip(times, curves, strict=True):
        median, low, high = median_interval(seconds)
        columns = {"rows": curve.rows, "seconds": median, "low": low, "high": high, "mean": np.mean(seconds, axis=0)}
        tables.append(pd.DataFrame({**curve.columns, **columns, "n": len(seconds)}))
    return pd.concat(tables, ignore_index=True)


def curves(model: str, threads: int, until: float) -> pd.DataFrame:
    """All curves of a model, as `medians` gives them."""
    loaded = models.load(model)
    measured: list[Curve] = []
    for form in FORMATS:
        lm = engine(loaded, threads=threads, weights=form.weights, arithmetic=form.arithmetic, drafts=form.padded)
        for cached in CACHED[model]:
            columns = {"model": model, "threads": threads, **form.label, "cached": cached}
            measured.append(Curve(columns, rows_of(form), verifications(lm, cached, rows_of(form))))
    return medians(measured, until)


def rows_of(form: EngineForm) -> tuple[int, ...]:
    """The rows that a format is measured at; a lone row that is not padded is for plain decoding alone."""
    return ROWS if form.padded else ROWS[:1]


def main(argv: Sequence[str] | None = None) -> None:
    """The command. The file is made anew after each model and number of threads."""
    parser = argparse.ArgumentParser(prog="python -m ondevice_studies.diaa.costs", description=__doc__)
    parser.add_argument("--minutes", type=float, default=6.0, help="at most, per model and number of threads")
    parser.add_argument("--models", nargs="+", default=[models.SMOLLM2], choices=list(plain.LABELS))
    options = parser.parse_args(argv)
    gc.disable()
    began = time.monotonic()
    tables: list[pd.DataFrame] = []
    for model in options.models:
        for threads in (1, 2):
            tables.append(curves(model, threads, time.monotonic() + 60 * options.minutes))
            recorder = Recorder(
                "diaa",
                "formats",
                KEYS,
                {"minutes at most": options.minutes},
                options.models,
                machine=machine_name(),
                began=began,
                functions=[curves],
            )
            recorder.add(pd.concat(tables, ignore_index=True))
            recorder.finish()
            print(f"{model}, {threads} threads: {len(tables[-1])} rows, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
