"""Where the time of whole answers goes on this machine: plain decoding, DIAA and prompt lookup, in turns, by part.

`python -m ondevice_studies.diaa.parts` on a quiet machine records it for SmolLM2, in float32 on one thread. Prompts are
our own, two of each task.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from time import perf_counter

import torch

from ondevice import models, prompts
from ondevice.causal_lm import Session
from ondevice.evidence import Recorder, machine_name
from ondevice.speculation import Drafter, generate
from ondevice_studies.diaa.spec_bench import METHODS
from ondevice_studies.diaa.workbench import Workbench
from ondevice_studies.speculation import plain
from ondevice_studies.speculation.part_timer import PartTimer
from ondevice_studies.speculation.request_set import Request

TOKENS = 64  # of an answer
EACH = 2  # prompts of a task
DRIVEN = ("vanilla", "DIAA", "PLD, transformers' rules")
PARTS = ("verify", "keep", "drafting", "draft", "observe", "choose")
KEYS = ["model", "request", "method"]


def answer(bench: Workbench, drafter: Drafter, budget: int, request: Request) -> dict[str, float]:
    """decode_s, behind the first token, and of it each of PARTS, of which `choose` is the rest; tokens, passes."""
    timer = PartTimer()
    model = timer.on(Session, verify="verify", extend="extend", keep="keep")
    with model, timer.on(drafter, propose="draft", observe="observe"):
        log = generate(
            bench.lm, drafter, request.ids, TOKENS, budget=budget, choice=timer.choice, eos_token_ids=request.ends
        )
    decode = perf_counter() - timer.first
    parts = {f"{part}_s": timer.seconds[part] for part in PARTS if part != "choose"}
    rest = {"choose_s": decode - sum(parts.values()), "decode_s": decode}
    return {**parts, **rest, "tokens": len(log.tokens), "passes": len(log.steps)}


def record(bench: Workbench, recorder: Recorder) -> None:
    """Every prompt by every method, in an order that rotates. A drafter keeps its state from prompt to prompt."""
    drafters = {name: (METHODS[name].drafter(bench), METHODS[name].budget) for name in DRIVEN[1:]}
    drafters["vanilla"] = (Drafter(), 1)
    chosen = [prompt for task in prompts.TASKS for prompt in [p for p in prompts.own() if p.task == task][:EACH]]
    for number, prompt in enumerate(chosen):
        request = plain.rendered(bench.loaded, prompt, TOKENS)
        turn = number % len(DRIVEN)
        for name in (*DRIVEN[turn:], *DRIVEN[:turn]):
            columns = answer(bench, *drafters[name], request)
            keys = {"model": bench.model, "task": prompt.task, "request": prompt.id, "method": name}
            recorder.add([keys | columns])


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m ondevice_studies.diaa.parts", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(plain.LABELS), default=[models.SMOLLM2])
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    recorder = Recorder(
        "diaa",
        "parts",
        KEYS,
        {"tokens": TOKENS, "threads": 1, "dtype": "float32"},
        options.models,
        machine=machine_name(),
        began=time.monotonic(),
        functions=[record],
    )
    for model in options.models:
        record(Workbench(model), recorder)
        print(f"{model}: {len(recorder.rows())} rows", flush=True)
    print(recorder.finish())


if __name__ == "__main__":
    main()
