"""What a pass over n rows takes on this machine, beside what its memory and its instructions allow.

`make record MACHINE=name ARGS="--only diaa/limits"` records it on a quiet machine. A pass reads every weight once, and
multiplies every weight for each row. So it takes at least the time in which its bytes can be read, and at least n times
the time of a row's multiply-adds. Two small kernels measure both: a sum over as many bytes as the model has in 8 bits,
and the runtime's product of matrices in 8 bits that stay in the cache. They take turns with the passes.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from time import perf_counter, sleep

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import pandas as pd
import torch
from onnx import helper, numpy_helper

from ondevice import models
from ondevice.causal_lm import drawing
from ondevice.causal_lm.lean import engine
from ondevice.evidence import Recorder, machine_name
from ondevice.speculation.verify_cost import SETTLED_S, verifications
from ondevice_studies.diaa.costs import Curve, EngineForm, medians

ROWS = (1, 2, 4, 8, 16, 17, 33, 64)
CACHED = 256  # tokens that a pass is behind
SIDE = 1024  # of the kernel's matrices, of which one has 1 MB
FORMS = (EngineForm("8bit-rows", "int8"), EngineForm("4bit", "int8"), EngineForm("float32", "float32"))
BYTES, PRODUCTS = "bytes", "multiply-adds"
KEYS = ["model", "threads", "what", "rows"]


def reading(size: int, threads: int) -> Callable[[], list[float]]:
    """Each call times once how long a number of bytes takes to be read, in seconds."""
    numbers = torch.ones(size // 4, dtype=torch.float32)

    def turn() -> list[float]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            sleep(SETTLED_S)  # the engines' threads spin on for a while
            numbers.sum()
            began = perf_counter()
            numbers.sum().item()
            return [perf_counter() - began]
        finally:
            torch.set_num_threads(before)

    return turn


def multiplying(size: int, threads: int) -> Callable[[], list[float]]:
    """Each call times once a product of uint8 with int8, in seconds per `size` multiply-adds."""
    draws = np.random.default_rng(0)
    weights = draws.integers(-127, 128, (SIDE, SIDE)).astype(np.int8)
    rows = draws.integers(0, 256, (SIDE, SIDE)).astype(np.uint8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["rows", "weights"], ["products"])],
        "product",
        [helper.make_tensor_value_info("rows", onnx.TensorProto.UINT8, rows.shape)],
        [helper.make_tensor_value_info("products", onnx.TensorProto.INT32, rows.shape)],
        [numpy_helper.from_array(weights, "weights")],
    )
    own = helper.make_opsetid("", drawing.OPSET)
    proto = helper.make_model(graph, opset_imports=[own], ir_version=helper.find_min_ir_version_for([own]))
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), drawing.options(threads), providers=["CPUExecutionProvider"]
    )

    def turn() -> list[float]:
        sleep(SETTLED_S)
        session.run(None, {"rows": rows})
        began = perf_counter()
        session.run(None, {"rows": rows})
        return [(perf_counter() - began) * size / SIDE**3]

    return turn


def measured(model: str, threads: int, until: float) -> pd.DataFrame:
    """Seconds of passes and of both limits, as `costs.medians` gives them.

    what: a form, whose passes have `rows`, or BYTES and PRODUCTS, of the model's weights in 8 bits and of one row.
    """
    loaded = models.load(model)
    engines = {
        f"{form.weights}, {form.arithmetic}": engine(
            loaded, threads=threads, weights=form.weights, arithmetic=form.arithmetic
        )
        for form in FORMS
    }
    lm = next(iter(engines.values()))
    size = sum(part.weight.numel() for part in lm.model.modules() if isinstance(part, torch.nn.Linear))
    columns = {"model": model, "threads": threads, "weights": size, "cached": CACHED}
    curves = [Curve(columns | {"what": what}, ROWS, verifications(lm, CACHED, ROWS)) for what, lm in engines.items()]
    curves += [
        Curve(columns | {"what": BYTES}, (1,), reading(size, threads)),
        Curve(columns | {"what": PRODUCTS}, (1,), multiplying(size, threads)),
    ]
    return medians(curves, until)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m ondevice_studies.diaa.limits", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="at most, per number of threads")
    minutes = parser.parse_args(argv).minutes
    gc.disable()
    began = time.monotonic()
    given = "diaa", "limits", KEYS, {"minutes at most": minutes}, [models.SMOLLM2]
    recorder = Recorder(*given, machine=machine_name(), began=began, functions=[measured])
    for threads in (1, 2):
        recorder.add(measured(models.SMOLLM2, threads, time.monotonic() + 60 * minutes))
    print(recorder.finish(), flush=True)


if __name__ == "__main__":
    main()
