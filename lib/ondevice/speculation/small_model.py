"""Speculative sampling with a small model as the drafter (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ondevice.speculation.draft import EMPTY, Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.follower import Follower

if TYPE_CHECKING:
    from ondevice.causal_lm import CausalLM


class SmallModel(Drafter):
    """A small model of the same vocabulary says a chain of tokens greedily, and the target verifies them.

    Spec-Bench's settings of "SpS": 5 tokens, schedule "heuristic": two more after a draft that was accepted whole,
    one less after any other, at least one. As in transformers the number carries over to the next request.
    Lossless with sampling too, as the loop draws every token from the target's distribution. The original accepts a
    drafted token with probability min(1, p/q); a greedy draft (q = 1) makes that the same probability p.

    Where the output outgrows the small model's context, drafts end; the request goes on without.
    Raises ValueError on a number below one and on other schedules.
    """

    name = "small model"

    def __init__(self, lm: CausalLM, tokens: int = 5, schedule: Literal["constant", "heuristic"] = "constant") -> None:
        if tokens < 1:
            raise ValueError(f"A small model drafts at least one token, not {tokens}.")
        if schedule not in ("constant", "heuristic"):
            raise ValueError(f"The schedule is constant or heuristic, not {schedule}.")
        self.lm = lm
        self.vocabulary = lm.vocabulary
        self.tokens = tokens  # of the next draft
        self._heuristic = schedule == "heuristic"
        self._follower: Follower | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        self._follower = Follower(self.lm, prompt)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        if self._follower is None:
            return EMPTY
        drafted: list[int] = []
        logits = self._follower.follow(tokens)
        while logits is not None:
            drafted.append(int(logits.argmax()))
            if len(drafted) >= min(self.tokens, budget):
                break
            logits = self._follower.go_on(drafted[-1])
        return Draft.chain(drafted)

    def observe(self, step: Verified) -> None:
        if self._heuristic and len(step.draft):
            self.tokens = self.tokens + 2 if len(step.path) == len(step.draft) else max(1, self.tokens - 1)

    def end(self, tokens: Sequence[int]) -> None:
        self._follower = None  # its cache is no use to the next request
