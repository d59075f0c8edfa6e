"""Prompt lookup decoding (Saxena, 2023): the newest n-gram's first occurrence, and what followed it there."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.speculation.draft import EMPTY, Draft
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.ngrams import NGrams


class PromptLookup(Drafter):
    """Drafts a chain: what follows the leftmost occurrence of the longest n-gram that ends the text.

    ngram: longest n-gram tried; shorter ones follow, down to one token. tokens: length of a draft.
    partial: whether a continuation that the text's end cuts short is drafted; else the next shorter n-gram is tried.
    The rules in use are `original` and `transformers`. Raises ValueError on lengths below one.
    """

    def __init__(self, ngram: int, tokens: int, partial: bool, name: str = "PLD") -> None:
        if ngram < 1 or tokens < 1:
            raise ValueError(f"An n-gram and a draft have at least one token, not {ngram} and {tokens}.")
        self.ngram, self.tokens, self.partial, self.name = ngram, tokens, partial, name
        self.begin(())

    @classmethod
    def original(cls) -> PromptLookup:
        """The author's rule: trigrams down to single tokens, ten tokens or none."""
        return cls(3, 10, partial=False, name="PLD")

    @classmethod
    def transformers(cls, tokens: int = 10, ngram: int = 2) -> PromptLookup:
        """The rule of transformers 5.23, whose n-gram is 2 unless told."""
        return cls(ngram, tokens, partial=True, name="PLD (transformers)")

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last request and read this one's prompt."""
        self._text = NGrams(prompt, self.ngram)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The continuation, at most `budget` tokens of it, or nothing."""
        self._text.extend(tokens[len(self._text) :])
        for size in range(min(self.ngram, len(tokens) - 1), 0, -1):
            length, positions = self._text.after(tokens[-size:])
            if length == size and (self.partial or positions[0] <= len(tokens) - max(self.tokens, size + 1)):
                return Draft.chain(tokens[positions[0] : positions[0] + min(self.tokens, budget)])
        return EMPTY
