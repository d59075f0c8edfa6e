"""The time of whole answers with the mixture over plain decoding's, in each format, live.

Two of our own prompts per task are answered to their end, or to 256 tokens or their first loop. In every round each
prompt is answered by plain decoding and by a mixture of texts and logits, in turns. Drafts are sized by T(n) as it is
measured at the start, with 3 ms per pass for drafting. A round begins with a new mixture. Times are from the request to
its last token; the ratio is that of sums, with an interval by prompts.

Run: python tests/benchmarks/bench_speculation.py [--model smollm2-135m-instruct] [--threads 2] [--rounds 3]
     [--formats float32 4bit 4bit-int8]
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np
import torch

from ondevice import chat, evidence, models, prompts
from ondevice.causal_lm.lean import engine
from ondevice.speculation import Drafter, bundled, generate
from ondevice.speculation.verify_cost import verifications
from ondevice_studies.speculation.request_set import loop_start

FORMATS = {
    "float32": ("float32", "float32"),
    "8bit": ("8bit", "float32"),
    "4bit": ("4bit", "float32"),
    "8bit-int8": ("8bit", "int8"),
    "4bit-int8": ("4bit", "int8"),
}
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 33)
DRAFTING = 3e-3  # seconds per pass


def main() -> None:
    """Time, and print a line per format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.SMOLLM2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["float32", "4bit", "4bit-int8"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = models.load(options.model)
    asked = [prompt for task in prompts.TASKS for prompt in [p for p in prompts.own() if p.task == task][:2]]
    for name in options.formats:
        weights, arithmetic = FORMATS[name]
        lm = engine(loaded, threads=options.threads, weights=weights, arithmetic=arithmetic)
        turn = verifications(lm, 256, ROWS)
        cost = np.interp(np.arange(1, 34), ROWS, np.median([turn() for _ in range(6)][1:], axis=0))
        seconds = np.concatenate([cost[:1], cost[1:] + DRAFTING])
        limits: dict[str, int] = {}
        times = np.zeros((options.rounds, len(asked), 2))
        counts, same = np.zeros((len(asked), 2), int), 0
        for turn_number in range(options.rounds):
            drafters = Drafter(), bundled.mixture(seconds=seconds)
            for number, prompt in enumerate(asked):
                ids = chat.prompt_ids(loaded.tokenizer, prompt.text)
                if prompt.id not in limits:
                    answer = generate(lm, Drafter(), ids, 256, eos_token_ids=loaded.eos_token_ids).tokens
                    limits[prompt.id] = loop_start(answer) or len(answer)
                said = []
                for arm in (0, 1) if (turn_number + number) % 2 else (1, 0):
                    began = perf_counter()
                    log = generate(lm, drafters[arm], ids, limits[prompt.id], budget=32,
                                   eos_token_ids=loaded.eos_token_ids)  # fmt: skip
                    times[turn_number, number, arm] = perf_counter() - began
                    counts[number, arm] = len(log.steps)
                    said.append(list(log.tokens))
                same += said[0] == said[1]
        of_prompt = np.median(times, axis=0)
        speed = evidence.resampled(
            lambda rows, t=of_prompt: float(t[rows, 0].sum() / t[rows, 1].sum()), len(asked), "measured",
            [prompt.task for prompt in asked], drawn="prompts",
        )  # fmt: skip
        tokens = sum(limits.values())
        print(
            f"{name}: T(9)/T(1) {cost[8] / cost[0]:.2f}, T(33)/T(1) {cost[32] / cost[0]:.2f}; {len(asked)} answers of "
            f"{tokens} tokens, {same} of {options.rounds * len(asked)} the same; ms per token plain "
            f"{1e3 * of_prompt[:, 0].sum() / tokens:.1f}, mixture {1e3 * of_prompt[:, 1].sum() / tokens:.1f}; "
            f"tokens per pass {(counts[:, 0].sum() / counts[:, 1].sum()):.2f}; "
            f"speed {speed.value:.2f} [{speed.low:.2f}, {speed.high:.2f}]",
            flush=True,
        )


if __name__ == "__main__":
    main()
