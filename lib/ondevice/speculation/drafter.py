"""What guesses tokens ahead. The loop calls it; a method of speculative decoding is a class with these methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ondevice.speculation.draft import EMPTY, Draft


@dataclass(frozen=True)
class Verified:
    """A verified step, as a drafter sees it.

    root: the token that the draft hung below. draft: what was verified. logits: [1 + n, V] after the root and after
    every node. path: nodes of the draft that were accepted, from the root downwards.
    emitted: accepted tokens and the one that the model said after them; shorter where the output ended on the way.
    """

    root: int
    draft: Draft
    logits: Tensor
    path: Sequence[int]
    emitted: Sequence[int]


class Drafter:
    """Base of all drafters, itself the vanilla one, which never drafts.

    One drafter may serve many requests, one after the other; what it keeps between them is up to it.

    wants_prefill: whether it reads the prompt's logits, which costs the output layer over the whole prompt. `begin` may
    decide it for its request.
    drafts_trees: whether drafts may branch; a model that verifies chains alone gets each draft's first chain.
    vocabulary: how many token ids it knows; None is any number.
    forwards: how many a model has run for its drafts so far, prompts aside.
    """

    name = "vanilla"
    wants_prefill = False
    drafts_trees = False
    vocabulary: int | None = None
    forwards = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """A request comes; called before its prefill."""

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Logits [c, V] after the prompt's tokens from position `start` on; where `wants_prefill`."""

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """At most `budget` nodes below tokens[-1]. tokens: the prompt and all that was said; not to be changed."""
        return EMPTY

    def observe(self, step: Verified) -> None:
        """A step was verified and its tokens emitted."""

    def end(self, tokens: Sequence[int]) -> None:
        """The request is over. tokens: the prompt and the whole output."""
