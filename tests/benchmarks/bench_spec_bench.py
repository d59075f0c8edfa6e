"""Drafted answers against plain decoding on Spec-Bench's requests: whole answers in turns, in one format.

Requests are the first of each task. For each of them plain decoding in the format, plain decoding in 4 bits and
integers, unpadded, and the bundled mixture with each budget answer in turns, in an order that rotates. The mixture
keeps what it has learnt. Speeds are ratios of times per token behind the first, with 95 % over requests.

Run: python tests/benchmarks/bench_spec_bench.py [--each 10] [--tokens 64] [--threads 1] [--weights 8bit-rows]
"""

from __future__ import annotations

import argparse
from itertools import groupby

from ondevice import chat, models, prompts
from ondevice.causal_lm.lean import engine
from ondevice.speculation import Drafter
from ondevice.speculation.bundled import mixture
from ondevice_programs.bench.drafters import answered
from ondevice_programs.bench.predictions import speed

BUDGETS = (4, 8, 15)
PLAIN, FASTEST = "plain", "plain in 4 bits, integers"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--each", type=int, default=10, help="requests of a task")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weights", default="8bit-rows")
    options = parser.parse_args()
    loaded = models.load(models.SMOLLM2)
    arithmetic = "int8" if options.weights == "8bit-rows" else "float32"
    lm = engine(loaded, threads=options.threads, weights=options.weights, arithmetic=arithmetic)
    other = engine(loaded, threads=options.threads, weights="4bit", arithmetic="int8", drafts=False)
    arms = {PLAIN: (lm, Drafter(), 1), FASTEST: (other, Drafter(), 1)}
    arms |= {f"mixture, {budget} nodes": (lm, mixture(), budget) for budget in BUDGETS}
    by_task = groupby(sorted(prompts.spec_bench(), key=lambda prompt: prompt.task), key=lambda prompt: prompt.task)
    requests = [prompt for _, group in by_task for prompt in list(group)[: options.each]]
    times = {name: [] for name in arms}
    passes, drafting, same = dict.fromkeys(arms, 0), dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0)
    for number, prompt in enumerate(requests):
        ids = chat.prompt_ids(loaded.tokenizer, prompt.text)
        names = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
        logs = {
            name: answered(*arms[name][:2], ids, options.tokens, loaded.eos_token_ids, arms[name][2]) for name in names
        }
        for name, log in logs.items():
            times[name].append([log["seconds"] - log["first"], log["emitted"]])
            passes[name] += sum(log["rows"].values())
            drafting[name] += log["drafting"] - log["opening"]
            same[name] += log["tokens"] == logs[PLAIN]["tokens"]
    print(f"{len(requests)} requests, {options.weights}, threads: {options.threads}")
    for name, pairs in times.items():
        seconds, tokens = (sum(pair[k] for pair in pairs) for k in (0, 1))
        over = [speed(times[base], pairs) for base in (PLAIN, FASTEST)]
        ratios = "   ".join(f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, low, high in over)
        print(
            f"{name:28}{1e3 * seconds / tokens:8.2f} ms per token{tokens / passes[name]:7.2f} tokens per pass"
            f"{1e3 * drafting[name] / passes[name]:7.2f} ms drafting   {ratios}   same: {same[name]}"
        )


if __name__ == "__main__":
    main()
