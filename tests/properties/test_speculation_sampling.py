"""Drawn tokens are the model's own whatever is drafted: with one seed the very tokens, not only their distribution.

A walk that favours the draft, or draws a rejected token anew, says other tokens or draws more often than it says one.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from every_drafter import DRAFTERS, target, targets, tiny, uncached
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ondevice.speculation import generate

PROMPT, LIMIT = [3, 1], 16


class Drawing:
    """A token drawn as transformers draws, by a generator of its own. asked: how often."""

    def __init__(self, seed: int, top_k: int, top_p: float) -> None:
        warpers = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)]
        self.warped, self.random, self.asked = LogitsProcessorList(warpers), torch.Generator().manual_seed(seed), 0

    def __call__(self, logits: torch.Tensor) -> int:
        self.asked += 1
        return int(torch.multinomial(self.warped(None, logits[None])[0].softmax(0), 1, generator=self.random))


CHOICES = [(1, 48, 1.0), (2, 5, 0.9)]  # seeds, the likeliest that are left, and their mass


@cache
def said_without(kind: str, layers: int, choice: tuple[int, int, float]) -> list[int]:
    """Without a draft and without a cache."""
    return uncached(tiny(kind, layers), PROMPT, LIMIT, Drawing(*choice))


@pytest.mark.parametrize(("kind", "name"), targets())
def test_with_one_seed_the_tokens_are_those_drawn_without_a_draft_and_without_a_cache(kind: str, name: str) -> None:
    of = target(kind, name)
    right = {choice: said_without(kind, of.layers, choice) for choice in CHOICES}
    drafter = DRAFTERS[name](of, [[*PROMPT, *said] for said in right.values()])
    for end, (choice, said) in zip((LIMIT, 9), right.items(), strict=True):
        drawing, ends = Drawing(*choice), set(said[end : end + 1])
        said = said if not ends else said[: said.index(said[end]) + 1]  # nothing is drawn behind an end
        log = generate(of, drafter, PROMPT, LIMIT, budget=16, choice=drawing, eos_token_ids=ends)
        assert list(log.tokens) == said and drawing.asked == len(said)
