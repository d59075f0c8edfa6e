"""What sd.npu's drafting costs besides the model: calibrating a prompt, and drafting, learning and reuse in each step.

Prompt and output are drawn here: the output copies spans of a prompt of 1,000 tokens and changes or leaves out some of
their tokens. The logits are noise in which the next token of the text stands out, in most rows below rejected tokens,
too, so that all kinds of branches are drafted. Vocabularies: the bundled models' and Qwen2.5's. One thread, CPU time.
A step: SAM's automata, the pool, what is learnt of acceptance (`draft`), the reuse, the calibration by accepted tokens.

Run: python tests/benchmarks/bench_sdnpu_drafting.py [--steps N]
"""
# ruff: noqa: E402

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before numpy is imported

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ondevice.sdnpu.calibration import Calibration
from ondevice.sdnpu.drafter import LMAX, Pld, Sam, SdNpu
from ondevice.sdnpu.reuse import Reuse
from ondevice.speculation import Draft, Verified

CHUNKS = {8_192: 256, 151_936: 32}  # vocabulary: tokens a forward of prefill
PROMPT = 1_000
TARGET_MS = {8_192: 0.05, 151_936: 0.5}  # calibration, a prompt token
STEP_MS = 0.3  # drafting and reuse, at the smallest vocabulary
PAPER_MS = (2.0, 3.0)  # a prompt token, a step


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


def timed(spent: dict[str, float], name: str, run: Callable[..., Any], *arguments: Any) -> Any:
    """The call's result; its CPU time is added to `spent`."""
    start = time.process_time()
    found = run(*arguments)
    spent[name] = spent.get(name, 0.0) + 1e3 * (time.process_time() - start)
    return found


def request(drafter: SdNpu, vocabulary: int, count: int, seed: int) -> tuple[float, list[dict[str, float]], float]:
    """(calibration a prompt token, every step's parts, tokens a step); times in milliseconds."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    words = random.zipf(1.3, PROMPT) % 400  # few words, so that tokens come again, as in text
    prompt = spans(words.tolist(), PROMPT, vocabulary, random)
    text = prompt + spans(prompt, count * (LMAX + 1), vocabulary, random)
    noise = torch.randn(min(CHUNKS[vocabulary], 128), vocabulary)
    prefill: dict[str, float] = {}
    drafter.begin(prompt)
    for start in range(0, PROMPT, CHUNKS[vocabulary]):
        end = min(start + CHUNKS[vocabulary], PROMPT)
        timed(prefill, "all", drafter.prefilled, start, rows(noise, text[start + 1 : end + 1]))
    length, found, emitted = PROMPT + 1, [], 0
    calibration, reuse = drafter.calibration, drafter.reuse
    for _ in range(count):
        spent: dict[str, float] = {}
        tokens = text[:length]
        draft = timed(spent, "draft", drafter.propose, tokens, LMAX - 1)
        following, path = said(draft, tokens[-1], text[length : length + LMAX + 1], random)
        step = Verified(tokens[-1], draft, rows(noise, following), path, text[length : length + len(path) + 1])
        drafter.calibration = drafter.reuse = None
        timed(spent, "draft", drafter.observe, step)
        drafter.calibration, drafter.reuse = calibration, reuse
        timed(spent, "calibration", calibration.observe, step)
        timed(spent, "reuse", reuse.observe, step)
        length, emitted = length + len(step.emitted), emitted + len(step.emitted)
        found.append(spent)
    drafter.end(text[:length])
    return prefill["all"] / PROMPT, found, emitted / count


def show(name: str, values: list[float], target: float | None = None) -> None:
    """One line: median, 5 % and 95 % quantile, and the verdict on the median."""
    low, median, high = np.quantile(values, [0.05, 0.5, 0.95])
    verdict = "" if target is None else f"target {target:g}: {'met' if median <= target else 'MISSED'}"
    print(f"  {name:<40}{median:>9.4f}  (5 %: {low:.4f}, 95 %: {high:.4f})  {verdict}")
    sys.stdout.flush()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    count = parser.parse_args().steps
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, float32; milliseconds of CPU time, measured here")
    print(f"The paper: {PAPER_MS[0]:g} a prompt token, below {PAPER_MS[1]:g} a step (quoted)")
    for vocabulary in CHUNKS:
        bases = {"SAM": functools.partial(Sam, vocabulary), "PLD": Pld}
        for name, base in bases.items():
            drafter = SdNpu(base(), Calibration(vocabulary), Reuse())
            found = [request(drafter, vocabulary, count, seed) for seed in range(4)]
            steps = [step for _, several, _ in found[1:] for step in several]
            accepted = np.mean([tokens for _, _, tokens in found])
            print(f"V = {vocabulary}, {name}: {accepted:.1f} tokens a step")
            show("calibration, a prompt token", [one for one, _, _ in found[1:]], TARGET_MS[vocabulary])
            whole = [step["draft"] + step["reuse"] for step in steps]
            show("drafting and reuse, a step", whole, STEP_MS if vocabulary == min(CHUNKS) else None)
            for part in ("draft", "reuse", "calibration"):
                show(f".. {part}", [step[part] for step in steps])


if __name__ == "__main__":
    main()
