"""LogitSpec (Liu et al., 2025): the last logits guess the token after the next one, and both are looked up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ondevice.speculation.draft import EMPTY, Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.ngrams import NGrams

NGRAM = 3  # tokens of the longest query
COPIED = 6  # tokens copied behind a match
LENGTHS = ((8, 4), (32, 3))  # up to this rank of a guess so many tokens are drafted of it, its own with them; then one
GUESSES = 64


class LogitSpec(Drafter):
    """Drafts what followed the last n-gram, and beside it the likeliest guesses with what followed them.

    The logits that chose the newest token have other likely tokens: these are guessed to come after it. Of several
    positions of an n-gram the newest counts that goes on for `COPIED` tokens. Published rules, the pool of a request.
    """

    name = "LogitSpec"
    drafts_trees = True

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last request and read this one's prompt."""
        self._text = NGrams(prompt, NGRAM)
        self._guesses = list[int]()

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """Chains side by side, cut to the budget."""
        self._text.extend(tokens[len(self._text) :])
        chains = [self._copied(tokens[-NGRAM:])]
        for rank, guess in enumerate(self._guesses):
            if guess != tokens[-1]:
                length = next((length for most, length in LENGTHS if rank <= most), 1)
                chains.append([guess, *self._copied([*tokens[-NGRAM:], guess])][:length])
        drafted = list[int]()
        parents = list[int]()
        for chain in chains:
            for depth, token in enumerate(chain):
                parents.append(len(drafted) - 1 if depth else -1)
                drafted.append(token)
            if len(drafted) >= budget:
                break
        return Draft(drafted[:budget], parents[:budget]) if drafted else EMPTY

    def observe(self, step: Verified) -> None:
        """Keep the guesses of the logits that chose the newest token."""
        row = step.logits[step.path[-1] + 1 if step.path else 0]
        self._guesses = torch.topk(row, min(GUESSES, len(row))).indices.tolist()

    def _copied(self, context: Sequence[int]) -> list[int]:
        _, positions = self._text.after(context)
        whole = [position for position in positions[-COPIED:] if position + COPIED <= len(self._text)]
        start = (whole or positions or [len(self._text)])[-1 if whole else 0]
        return self._text.text[start : start + COPIED]
