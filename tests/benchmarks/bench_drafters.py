"""The time that drafting and learning take per pass: the mixture's parts, beside Token Recycling and SAM-Decoding.

Our own validation prompts are answered greedily by the lean engine, one thread. On every prompt all drafters take
turns, so load meets them alike. The first prompt warms up. Growth is the drafter's `propose`, learning its `observe`.
Search is the part of learning that finds the likeliest tokens, timed on the same logits once more; tables are the rest.

Run: python tests/benchmarks/bench_drafters.py [--model smollm2-135m-instruct] [--prompts 6] [--tokens 64]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from ondevice import chat, models, prompts
from ondevice.causal_lm.lean import engine
from ondevice.speculation import Draft, Drafter, Verified, bundled, generate
from ondevice.speculation.largest import estimated_likeliest, largest
from ondevice.speculation.logit_tables import K
from ondevice.speculation.sam_decoding import SamDecoding
from ondevice.speculation.token_recycling import TokenRecycling

BUDGETS = (8, 32)


class Timed(Drafter):
    """A drafter whose calls are timed. search: what it does with logits first; times: ms of growth, search, tables."""

    def __init__(self, drafter: Drafter, search: Callable[[Tensor], object] | None) -> None:
        self.drafter, self.search = drafter, search
        self.drafts_trees = drafter.drafts_trees
        self.prefilled, self.end = drafter.prefilled, drafter.end
        self.times: list[tuple[float, float, float]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        """The drafter's."""
        self.drafter.begin(prompt)
        self.wants_prefill = self.drafter.wants_prefill

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The drafter's."""
        start = perf_counter()
        draft = self.drafter.propose(tokens, budget)
        self._growth = perf_counter() - start
        self._full = len(draft) == budget or not self.drafter.drafts_trees
        return draft

    def observe(self, step: Verified) -> None:
        """The drafter's."""
        start = perf_counter()
        self.drafter.observe(step)
        learning = perf_counter() - start
        start = perf_counter()
        if self.search:
            self.search(step.logits)
        search = perf_counter() - start if self.search else 0.0
        if self._full:  # a smaller draft is cheaper
            self.times.append((1e3 * self._growth, 1e3 * search, 1e3 * (learning - search)))


def main() -> None:
    """Time, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.SMOLLM2)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = models.load(options.model)
    lm = engine(loaded, threads=1)
    vocabulary = lm.vocabulary
    drafters = {}
    for budget in BUDGETS:
        drafters["mixture", budget] = Timed(bundled.mixture(), partial(estimated_likeliest, k=K))
        drafters["Token Recycling", budget] = Timed(TokenRecycling(vocabulary), partial(largest, k=K))
        drafters["SAM-Decoding", budget] = Timed(SamDecoding(), None)
    every = prompts.own("validation")
    for prompt in every[:: max(1, len(every) // options.prompts)]:
        ids = chat.prompt_ids(loaded.tokenizer, prompt.text)
        for (_, budget), drafter in drafters.items():
            generate(lm, drafter, ids, options.tokens, budget=budget, eos_token_ids=loaded.eos_token_ids)
            if prompt is every[0]:
                drafter.times.clear()
    print(f"{options.model}, {vocabulary} token ids, one thread; ms per pass of a full draft, medians and quartiles")
    print("nodes  drafter           passes  growth  search  tables   whole  quartiles")
    for (name, budget), drafter in drafters.items():
        times = np.array(drafter.times)
        growth, search, tables = np.median(times, axis=0)
        whole = times.sum(axis=1)
        print(
            f"{budget:5}  {name:16} {len(times):7} {growth:7.2f} {search:7.2f} {tables:7.2f} {np.median(whole):7.2f}"
            f"  {np.quantile(whole, 0.25):.2f} to {np.quantile(whole, 0.75):.2f}"
        )


if __name__ == "__main__":
    main()
