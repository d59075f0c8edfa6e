"""Whether drafts change a token: every drafter on our 60 prompts, live, in each format, against plain decoding there.

`make record PAPER=diaa ARGS="--identity smollm2-135m-instruct"` records it. A difference counts as a near-tie where the
plain answer's two likeliest logits were closer than 1e-4 at the first token that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ondevice import evidence, prompts
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.lean import Arithmetic, Weights, engine
from ondevice.speculation import Drafter, generate
from ondevice_studies.diaa import spec_bench
from ondevice_studies.diaa.workbench import Bench
from ondevice_studies.speculation import plain
from ondevice_studies.speculation.prompts import digest, noting
from ondevice_studies.speculation.request_set import Request, loop_start

FORMATS: tuple[tuple[Weights, Arithmetic], ...] = (("float32", "float32"), ("4bit", "float32"), ("4bit", "int8"))
METHODS = (
    "DIAA", "cold", "TR", "PLD", "SAM-D", "mixture 32", "Goose 32", "RACER 32", "SuffixDecoding 32", "Cacheback 32",
    "LogitSpec 32",
)  # fmt: skip
NEAR = 1e-4  # a logit's lead, below which two tokens are a tie that rounding decides
KEYS = ["model", "weights", "arithmetic", "method"]


def plain_answers(lm: CausalLM, requests: Sequence[Request]) -> dict[str, tuple[list[int], list[float]]]:
    """By request: the tokens of its plain answer before any loop, and by how much the likeliest logit led at each."""
    answers = {}
    for request in requests:
        margins: list[float] = []
        tokens = generate(lm, Drafter(), request.ids, request.limit, choice=noting(margins), eos_token_ids=request.ends)
        answer = list(tokens.tokens)
        limit = loop_start(answer) or len(answer)
        answers[request.name] = answer[:limit], margins[:limit]
    return answers


def compared(
    drafter: Drafter, budget: int, lm: CausalLM, request: Request, right: tuple[list[int], list[float]]
) -> dict[str, Any]:
    """The columns of one answer: tokens, passes, identical, near_tie, the plain answer's least margin and its hash."""
    answer, margins = right
    generation = generate(lm, drafter, request.ids, len(answer), budget=budget, eos_token_ids=request.ends)
    tokens = list(generation.tokens)
    apart = next((index for index, pair in enumerate(zip(tokens, answer, strict=False)) if pair[0] != pair[1]), None)
    return {
        "request": request.name,
        "task": request.task,
        "prompt_sha": digest(request.ids),
        "answer_sha": digest(answer),
        "tokens": len(answer),
        "passes": len(generation.steps),
        "identical": tokens == answer,
        "near_tie": apart is not None and margins[apart] < NEAR,
        "margin": min(margins),
    }


def record(model: str) -> None:
    """Record what is missing, a format and a method at a time."""
    recorder = evidence.Recorder(
        "diaa", f"{plain.LABELS[model]}-identity", KEYS, {"tokens": plain.LONGEST, "threads": 1, "near": NEAR}, [model],
        parts=sorted({spec_bench.METHODS[name].module for name in METHODS}),
    )  # fmt: skip
    bench = Bench(model)
    requests = [plain.rendered(bench.loaded, prompt, plain.LONGEST) for prompt in prompts.own()]
    for weights, arithmetic in FORMATS:
        missing = [name for name in METHODS if (model, weights, arithmetic, name) not in recorder.done]
        if not missing:
            continue
        lm = engine(bench.loaded, threads=1, weights=weights, arithmetic=arithmetic)
        answers = plain_answers(lm, requests)
        for name in missing:
            method = spec_bench.METHODS[name]
            rows = []
            for task in prompts.TASKS:
                drafter = method.drafter(bench)
                of_task = [request for request in requests if request.task == task]
                rows += [compared(drafter, method.budget, lm, request, answers[request.name]) for request in of_task]
            keys = {"model": model, "weights": weights, "arithmetic": arithmetic, "method": name}
            recorder.add([keys | row for row in rows])
            recorder.checkpoint()
            same = sum(row["identical"] for row in rows)
            print(f"{weights}, {arithmetic}, {name}: {same} of {len(rows)} identical", flush=True)
    print(recorder.finish())
