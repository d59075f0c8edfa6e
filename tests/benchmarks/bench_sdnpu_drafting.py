"""What sd.npu's drafting costs besides the model, and what it gains: tokens a verification, each part on and off.

1. Requests of four task families, answered by a bundled model (`--requests`): the cost of each step of SAM and PLD with
   calibration and reuse, and tokens a verification against the base alone. 0 leaves this part out.
2. Drawn texts, for vocabularies of any size: the output copies spans of a prompt of 1,000 tokens and changes or leaves
   out some of their tokens. The logits are noise in which the next token stands out, and often one below rejected
   tokens, so that every step has branches of all kinds and a full pool: a heavy case.

A step is SAM's automata, the pool and what is learnt of acceptance (`draft`), and the reuse. The calibration by
accepted tokens, which the paper does not have, is shown apart. One thread, CPU time, no garbage collection.

Run: python tests/benchmarks/bench_sdnpu_drafting.py [--requests N] [--steps N]
"""
# ruff: noqa: E402

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before numpy is imported

import argparse
import functools
import gc
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ondevice import corpus, models
from ondevice.causal_lm import CausalLM
from ondevice.sdnpu.calibration import Calibration
from ondevice.sdnpu.drafter import LMAX, Pld, Sam, SdNpu
from ondevice.sdnpu.measuring import requests
from ondevice.sdnpu.reuse import Reuse
from ondevice.speculation import Draft, Verified, generate

CHUNKS = {8_192: 256, 151_936: 32}  # vocabulary: tokens a forward of prefill
PROMPT = 1_000
TARGET_MS = {8_192: 0.05, 151_936: 0.5}  # calibration, a prompt token
STEP_MS = 0.3  # drafting and reuse, at the smallest vocabulary
PAPER_MS = (2.0, 3.0)  # a prompt token, a step
MODEL = "pydocs-lm-base"
FAMILIES = ("summary", "rag", "doctest", "see_also")  # for summaries, retrieval, fixed forms and short replies
GAIN = 1.15  # tokens a verification over the base's, on the mean of the families; on none below 1


def spans(source: list[int], count: int, vocabulary: int, random: np.random.Generator) -> list[int]:
    """`count` tokens of copied spans, one in eight tokens of them changed, left out or doubled."""
    found: list[int] = []
    while len(found) < count:
        start = int(random.integers(0, len(source)))
        for token in source[start : start + int(random.integers(4, 24))]:
            odd = random.integers(0, 24)
            found += [[int(random.integers(0, vocabulary))], [], [token, token]][odd] if odd < 3 else [token]
    return found[:count]


def rows(pool: torch.Tensor, following: list[int]) -> torch.Tensor:
    """Logits [n, V]: noise, and the token that follows each place on top."""
    found = pool[torch.arange(len(following)) % len(pool)].clone()
    found[torch.arange(len(following)), following] = 12.0
    return found


def said(draft: Draft, root: int, coming: list[int], random: np.random.Generator) -> tuple[list[int], list[int]]:
    """(what the model says after the root and every node, the accepted path), where `coming` is the text."""
    children: dict[int, dict[int, int]] = {}
    for node, (parent, token) in enumerate(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True)):
        children.setdefault(parent, {})[token] = node
    following = [0] * (1 + len(draft))
    for node in range(-1, len(draft)):
        likely = list(children.get(node, {root: 0}))
        following[node + 1] = likely[0] if random.random() < 0.6 else int(random.integers(0, 1000))
    path: list[int] = []
    for depth, token in enumerate(coming):
        node = path[-1] if depth else -1
        following[node + 1] = token
        if token not in children.get(node, {}):
            break
        path.append(children[node][token])
    return following, path


class Timed(SdNpu):
    """Notes the CPU time of its parts, in milliseconds: one entry a step, and of the prefill one a prompt token."""

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.__dict__.setdefault("steps", [])
        self.__dict__.setdefault("prefills", [])

    def prefilled(self, start: int, logits: torch.Tensor) -> None:
        spent = spent_on(super().prefilled, start, logits)[1]
        self.prefills.append(spent / len(logits))

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        draft, spent = spent_on(super().propose, tokens, budget)
        self.steps.append({"draft": spent, "calibration": 0.0, "reuse": 0.0})
        return draft

    def observe(self, step: Verified) -> None:
        calibration, reuse, last = self.calibration, self.reuse, self.steps[-1]
        self.calibration = self.reuse = None
        last["draft"] += spent_on(super().observe, step)[1]
        self.calibration, self.reuse = calibration, reuse
        for name, part in (("calibration", calibration), ("reuse", reuse)):
            if part is not None:
                last[name] = spent_on(part.observe, step)[1]


def spent_on(run: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """(result, milliseconds of CPU time) of a call."""
    start = time.process_time()
    found = run(*arguments)
    return found, 1e3 * (time.process_time() - start)


def drawn(drafter: Timed, vocabulary: int, count: int, seed: int) -> float:
    """Serve one drawn request of `count` steps; returns the tokens a step."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    words = random.zipf(1.3, PROMPT) % 400  # few words, so that tokens come again, as in text
    prompt = spans(words.tolist(), PROMPT, vocabulary, random)
    text = prompt + spans(prompt, count * (LMAX + 1), vocabulary, random)
    noise = torch.randn(min(CHUNKS[vocabulary], 128), vocabulary)
    drafter.begin(prompt)
    for start in range(0, PROMPT, CHUNKS[vocabulary]):
        end = min(start + CHUNKS[vocabulary], PROMPT)
        drafter.prefilled(start, rows(noise, text[start + 1 : end + 1]))
    length = PROMPT + 1
    for _ in range(count):
        tokens = text[:length]
        draft = drafter.propose(tokens, LMAX - 1)
        following, path = said(draft, tokens[-1], text[length : length + LMAX + 1], random)
        emitted = text[length : length + len(path) + 1]
        drafter.observe(Verified(tokens[-1], draft, rows(noise, following), path, emitted))
        length += len(emitted)
    drafter.end(text[:length])
    return (length - PROMPT - 1) / count


def show(name: str, values: list[float], target: float | None = None) -> None:
    """One line: median, 5 % and 95 % quantile, and the verdict on the median."""
    low, median, high = np.quantile(values, [0.05, 0.5, 0.95])
    verdict = "" if target is None else f"target {target:g}: {'met' if median <= target else 'MISSED'}"
    print(f"  {name:<40}{median:>9.4f}  (5 %: {low:.4f}, 95 %: {high:.4f})  {verdict}")
    sys.stdout.flush()


def show_costs(drafter: Timed, vocabulary: int, warm: int) -> None:
    """The lines of a drafter's costs, without its first `warm` steps."""
    show("calibration, a prompt token", drafter.prefills[1:], TARGET_MS[vocabulary])
    steps = drafter.steps[warm:]
    whole = [step["draft"] + step["reuse"] for step in steps]
    show("drafting and reuse, a step", whole, STEP_MS if vocabulary == min(CHUNKS) else None)
    for part in ("draft", "reuse", "calibration"):
        show(f".. {part}", [step[part] for step in steps])


def answer_requests(count: int) -> None:
    """The first part."""
    loaded = models.load(MODEL)
    lm = CausalLM(loaded.model)
    asked = requests(FAMILIES, count, loaded.model, loaded.tokenizer, corpus.documents("test"))
    every = [one for one in asked if one.timed]
    bases = {"SAM": functools.partial(Sam, lm.vocabulary), "PLD": Pld}
    parts = {
        "base": lambda base: Timed(base()),
        "+calibration": lambda base: Timed(base(), Calibration(lm.vocabulary)),
        "+reuse": lambda base: Timed(base(), None, Reuse()),
        "+both": lambda base: Timed(base(), Calibration(lm.vocabulary), Reuse()),
        "+both, as printed": lambda base: Timed(
            base(), Calibration.printed(lm.vocabulary), Reuse("printed"), order="printed"),
    }  # fmt: skip
    print(f"{MODEL}, {len(every)} requests; tokens a verification (times the base's): {', '.join(FAMILIES)}; mean")
    for name, base in bases.items():
        alone: list[float] = []
        for part, make in parts.items():
            drafters = {family: make(base) for family in FAMILIES}  # each family is a task group
            groups = {family: [one for one in every if one.task == family] for family in FAMILIES}
            found = [accepted(lm, drafters[family], groups[family]) for family in FAMILIES]
            alone = alone or found
            gains = [mine / plain for mine, plain in zip(found, alone, strict=True)]
            cells = "  ".join(f"{mine:5.2f} ({gain:.2f})" for mine, gain in zip(found, gains, strict=True))
            met = np.mean(gains) >= GAIN and min(gains) >= 1
            verdict = f"target {GAIN:g}: {'met' if met else 'MISSED'}" if part == "+both" else ""
            print(
                f"  {name + (part if part != 'base' else ''):<24}{cells}   {np.mean(gains):.3f}  {verdict}", flush=True
            )
            if part == "+both":
                whole = make(base)
                whole.steps = [step for drafter in drafters.values() for step in drafter.steps]
                whole.prefills = [one for drafter in drafters.values() for one in drafter.prefills]
                show_costs(whole, lm.vocabulary, 10)


def accepted(lm: CausalLM, drafter: Timed, mine: list[Any]) -> float:
    """Emitted tokens a verification, the prefill's not counted."""
    found = [generate(lm, drafter, one.ids, one.limit, budget=LMAX - 1, ends=one.ends) for one in mine]
    return sum(len(one.tokens) - 1 for one in found) / sum(len(one.steps) for one in found)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    print(f"torch {torch.__version__}, one thread, float32; milliseconds of CPU time, measured here")
    print(f"The paper: {PAPER_MS[0]:g} a prompt token, below {PAPER_MS[1]:g} a step (quoted)")
    if options.requests:
        answer_requests(options.requests)
    for vocabulary in CHUNKS:
        for name, base in {"SAM": functools.partial(Sam, vocabulary), "PLD": Pld}.items():
            drafter = Timed(base(), Calibration(vocabulary), Reuse())
            found = [drawn(drafter, vocabulary, options.steps, seed) for seed in range(3)]
            print(f"Drawn texts, V = {vocabulary}, {name}: {np.mean(found):.1f} tokens a step")
            show_costs(drafter, vocabulary, options.steps)


if __name__ == "__main__":
    main()
