"""Speculative sampling with a small model as the drafter (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.causal_lm import CausalLM
from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.follower import Follower
from ondevice.speculation.largest import likeliest


class SmallModel(Drafter):
    """A small model of the same vocabulary says a chain of tokens greedily, and the target verifies them.

    Spec-Bench's settings of "SpS": 5 tokens and `heuristic`: two more after a draft that was accepted whole, one less
    after any other, at least one. As in transformers the number carries over to the next request.
    Lossless with sampling too, as the loop draws every token from the target's distribution. The original accepts a
    drafted token with probability min(1, p/q); a greedy draft (q = 1) makes that the same probability p.

    Where the output outgrows the small model's context, drafts end; the request goes on without.
    """

    name = "small model"

    def __init__(self, lm: CausalLM, tokens: int = 5, heuristic: bool = False) -> None:
        self.lm, self.vocabulary, self.forwards = lm, lm.vocabulary, 0
        self.tokens = tokens
        self._heuristic = heuristic

    def begin(self, prompt: Sequence[int]) -> None:
        """Prefill the prompt in the small model's session."""
        self._follower = Follower(self.lm, prompt)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A chain of what the small model says."""
        drafted: list[int] = []
        logits = self._follower.follow(tokens)
        while logits is not None:
            self.forwards += 1
            drafted.append(int(likeliest(logits)))
            if len(drafted) >= min(self.tokens, budget):
                break
            logits = self._follower.go_on(drafted[-1])
        return Draft.chain(drafted)

    def observe(self, step: Verified) -> None:
        """Set the length of the next draft."""
        if self._heuristic and len(step.draft):
            self.tokens = self.tokens + 2 if len(step.path) == len(step.draft) else max(1, self.tokens - 1)
