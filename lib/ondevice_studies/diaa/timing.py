"""What this machine takes: cost curves T(rows, cached), and whole answers with their parts, interleaved.

`python -m ondevice_studies.diaa.timing --minutes M` on a quiet machine writes curves and whole of
data/records/diaa for this machine, after each part anew, the most important parts first; it begins nothing after the
minutes. One thread.
float32 is the lean engine's, where it has the model; "float32, transformers" and the other formats are transformers'.
Prompts are those of the record. Drafting forwards have a part of their own: one of SpS costs the small T(1), and one
of SWIFT the row "<model>, layers skipped" of the curves. SWIFT itself is not run: it skips layers of the transformers
model, which the lean engine cannot.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch

from ondevice import models
from ondevice.causal_lm import CausalLM, Session, TokenTree
from ondevice.causal_lm.lean import engine
from ondevice.evidence import Recorder, machine_name
from ondevice.evidence import load as load_record
from ondevice.evidence.resampling import median_interval
from ondevice.speculation.largest import Likeliest
from ondevice.speculation.layer_skipping import odd_layers, sublayers
from ondevice.speculation.verify_cost import verifications
from ondevice_papers.diaa.drafter import Learning
from ondevice_papers.diaa.tables import K
from ondevice_studies.diaa.methods import BASE, DIAA, MAIN, MIXTURE, PLAIN, READS, SMALL, DrafterWithBudget, Workbench
from ondevice_studies.diaa.parts import PartTimer
from ondevice_studies.diaa.record import sample
from ondevice_studies.speculation.request_set import Request

ROWS = (1, 2, 4, 8, 16, 24, 33, 48, 64, 80)
CACHED = (64, 256, 768)
SHAPES = ("random:qwen2.5-0.5b", "random:qwen2.5-1.5b")
DTYPES = ("float32", "int8", "bfloat16", "float32, transformers")
AGAIN = ", again"  # the same method a second time: their difference is the floor below which none is read
DRIVEN = (PLAIN, DIAA, READS, MIXTURE, "PLD, transformers' rules", "SAM-D")
PROMPTS = 12  # of a task
KEYS = {"curves": ["model", "dtype", "cached"], "whole": ["model", "method", "task", "request"]}


# Curves


def load(spec: str, dtype: str) -> CausalLM:
    """A model in one of DTYPES; int8: its linear layers by PyTorch's dynamic quantisation, the rest float32."""
    model = models.load(spec, torch.bfloat16 if dtype == "bfloat16" else torch.float32).model
    if dtype == "int8":
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    return engine(model) if dtype == "float32" else CausalLM(model)


def shortened(spec: str, dtype: str) -> CausalLM:
    """A bundled model without the layers that SWIFT skips at first, whole ones: what a draft of it costs."""
    model: Any = models.load(spec).model
    parts = len(sublayers(CausalLM(model)))
    left_out = {1 + part // 2 for part in odd_layers(parts)}
    kept = [layer for index, layer in enumerate(model.model.layers) if index not in left_out]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    return engine(model) if dtype == "float32" else CausalLM(model)


class Curve:
    """T(rows) behind `cached` tokens, measured a turn at a time, each over all rows; their ids do not matter."""

    def __init__(self, lm: CausalLM, cached: int, rows: Sequence[int], label: dict[str, str]) -> None:
        self.cached = cached
        self.rows = rows
        self.label = label
        self.verify = verifications(lm, cached, rows)
        self.times: list[list[float]] = []

    def turn(self) -> None:
        """Once each number of rows."""
        self.times.append(self.verify())

    def table(self) -> pd.DataFrame:
        """rows, cached, seconds (the median, with 95 %: low, high), mean, n."""
        median, low, high = median_interval(self.times)
        columns = {"rows": self.rows, "cached": self.cached, "seconds": median, "low": low, "high": high}
        return pd.DataFrame({**self.label, **columns, "mean": np.mean(self.times, axis=0), "n": len(self.times)})


def of_model(lm: CausalLM, spec: str, dtype: str) -> list[Curve]:
    """All curves of a model; of the bundled ones in float32 also one row without the layers that SWIFT skips."""
    bundled = not spec.startswith("random:")
    label = {"model": spec, "dtype": dtype}
    lengths = CACHED if bundled else (256,)
    of_all = [Curve(lm, cached, ROWS, label) for cached in lengths]
    if bundled and dtype.startswith("float32"):
        label = {"model": f"{spec}, layers skipped", "dtype": dtype}
        short = shortened(spec, dtype)
        of_all += [Curve(short, cached, (1,), label) for cached in lengths]
    return of_all


def curves(spec: str, dtype: str, seconds: float) -> pd.DataFrame:
    """All curves of a model, in turns for about `seconds`. A slow machine or model has fewer turns, at least one."""
    measured = of_model(load(spec, dtype), spec, dtype)
    began = perf_counter()
    while not measured[0].times or (perf_counter() - began < seconds and len(measured[0].times) < 60):
        for curve in measured:
            curve.turn()
    return pd.concat([curve.table() for curve in measured], ignore_index=True)


# Whole answers


class TimedWithReplayedAcceptance:
    """A model of random weights that takes its time, in step with one that says what is accepted; or their sessions.

    Drafts, tables and choices are those of `replayed`, whose forwards are not counted; `shape` verifies every tree
    too. find: where the drafter learns, the search for the K likeliest of the shape's own vocabulary; else None.
    """

    def __init__(self, replayed: Any, shape: Any, timer: PartTimer, find: Any) -> None:
        self.replayed = replayed
        self.shape = shape
        self.timer = timer
        self.find = find

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replayed, name)  # what does not take time: limits, the vocabulary, lengths

    def start(self, capacity: int) -> TimedWithReplayedAcceptance:
        """A session of each of the two models."""
        sessions = self.replayed.start(capacity), self.shape.start(capacity)
        return TimedWithReplayedAcceptance(*sessions, self.timer, self.find)

    def prefill(self, prompt: Sequence[int], *reads: Any) -> torch.Tensor:
        """Prefill both; the shape's prompt is read where the drafter reads it."""
        read = (reads[0], lambda start, logits: self.find(logits)) if reads else ()
        self.timer.timed("prefill", self.shape.prefill)(prompt, *read)
        return self.replayed.prefill(prompt, *reads)

    def verify(self, tree: TokenTree) -> torch.Tensor:
        """The other model's logits."""
        logits = self.timer.timed("verify", self.shape.verify)(tree)
        if self.find:
            self.timer.timed("observe", self.find)(logits)
        return self.replayed.verify(tree)

    def keep(self, path: Sequence[int]) -> None:
        """Keep the rows of a path in both."""
        self.timer.timed("keep", self.shape.keep)(path)
        self.replayed.keep(path)


def answer(
    bench: Workbench, made: DrafterWithBudget, request: Request, shape: CausalLM | None, find: Likeliest
) -> dict[str, float]:
    """prefill_s, decode_s, and of it verify_s and keep_s of the model, drafting_s of models inside the drafter,
    draft_s and observe_s of the drafter itself, choose_s, the rest; tokens, passes.

    shape: is driven; decode_s is then the sum of the parts.
    """
    timer = PartTimer()
    began = perf_counter()
    drafter, budget = made
    lm: Any = bench.lm
    if shape:
        lm = TimedWithReplayedAcceptance(lm, shape, timer, find if isinstance(drafter, Learning) else None)
    model = nullcontext() if shape else timer.on(Session, verify="verify", extend="extend", keep="keep")
    with model, timer.on(drafter, propose="draft", observe="observe"):
        generation = bench.generate(
            lm, drafter, request.ids, request.limit, budget=budget, choice=timer.choice, eos_token_ids=request.ends
        )
    ended = perf_counter()
    parts = {f"{part}_s": timer.seconds[part] for part in ("verify", "keep", "drafting", "draft", "observe")}
    decode = sum(parts.values()) if shape else ended - timer.first
    prefill = timer.seconds["prefill"] if shape else timer.first - began
    times = {"prefill_s": prefill, "decode_s": decode, **parts, "choose_s": decode - sum(parts.values())}
    return {**times, "tokens": len(generation.tokens), "passes": len(generation.steps)}


def whole(
    bench: Workbench,
    requests: Sequence[Request],
    methods: Sequence[str],
    until: float,
    beside: Sequence[Curve] = (),
    shape: str = "",
) -> pd.DataFrame:
    """Every request by every method, in an order that rotates; a row each, with the columns of `answer`.

    A method begins each task with a fresh drafter, as in the record, so that its passes are the recorded ones. Curves
    take a turn after every request, so that what slows the machine for a while slows both. shape: a model that is
    driven with this one's acceptance.
    """
    driven = load(shape, "float32") if shape else None
    find = Likeliest(K)
    rows: list[dict[str, Any]] = []
    made: dict[tuple[str, str], DrafterWithBudget] = {}
    for index, request in enumerate(
        sorted(requests, key=lambda request: request.prompt)
    ):  # all tasks' first ones first
        if time.monotonic() > until:
            break
        gc.collect()
        turn = index % len(methods)
        for name in [*methods[turn:], *methods[:turn]]:
            if (request.task, name) not in made:
                made[request.task, name] = bench.make(name.removesuffix(AGAIN))
            keys = {"model": shape or bench.model, "method": name, "task": request.task, "request": request.prompt}
            rows.append(keys | answer(bench, made[request.task, name], request, driven, find))
        for curve in beside:
            curve.turn()
    return pd.DataFrame(rows)


# All


def parts(minutes: float, ends: float, shapes: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """(name, a part of that table), the most important first. ends: by `time.monotonic`."""
    answers = load_record("diaa", "answers")
    benches = {model: Workbench(model) for model in (BASE, SMALL)}
    for model, share in ((BASE, 0.45), (SMALL, 0.2)):
        requests = sample(benches[model], answers, number=PROMPTS)
        left_out = ("SWIFT",) if model == BASE else ("SWIFT", "SpS")
        methods = [*(name for name in MAIN if name not in left_out), PLAIN + AGAIN, DIAA + AGAIN]
        beside = of_model(benches[model].lm, model, "float32")
        whole(benches[model], requests[:1], methods, ends)  # wakes everything up
        until = min(ends, time.monotonic() + 60 * minutes * share)
        yield "whole", whole(benches[model], requests, methods, until, beside)
        yield "curves", pd.concat([curve.table() for curve in beside], ignore_index=True)
    seconds = 1.5 * minutes
    for dtype, model in product(DTYPES[1:], benches):
        yield "curves", curves(model, dtype, seconds)
    yield "curves", curves(shapes[0], "float32", seconds)
    requests = sample(benches[BASE], answers, number=2)
    until = min(ends, time.monotonic() + 12 * minutes)
    yield "whole", whole(benches[BASE], requests, DRIVEN, until, shape=shapes[0])
    for dtype, shape in list(product(DTYPES, shapes))[1:]:
        yield "curves", curves(shape, dtype, seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """The command. This machine's files, their sidecars and lines in the manifest are made anew after each part."""
    parser = argparse.ArgumentParser(prog="python -m ondevice_studies.diaa.timing", description=__doc__)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    gc.disable()
    began = time.monotonic()
    made = {"threads": 1, "minutes at most": options.minutes}
    tables = defaultdict[str, list[pd.DataFrame]](list)
    for name, table in parts(options.minutes, began + 60 * options.minutes, options.shapes):
        tables[name].append(table)
        recorder = Recorder("diaa", name, KEYS[name], made, [BASE, SMALL], machine=machine_name(), began=began)
        recorder.add(pd.concat(tables[name], ignore_index=True))
        recorder.finish()
        spent = time.monotonic() - began
        print(f"{name}: {len(table)} rows, {spent:.0f} s", flush=True)
        if spent > 60 * options.minutes:
            print("The time is over; what would come next is left out.", flush=True)
            break


if __name__ == "__main__":
    main()
