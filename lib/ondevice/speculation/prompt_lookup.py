"""Prompt lookup decoding (Saxena, 2023): the newest n-gram's first occurrence, and what followed it there."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.speculation.draft import EMPTY, Draft
from ondevice.speculation.drafter import Drafter


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
        self._known = 0
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(self.ngram)]
        self._read(prompt)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The continuation, at most `budget` tokens of it, or nothing."""
        self._read(tokens)
        for size in range(min(self.ngram, len(tokens) - 1), 0, -1):
            start = self._after[size - 1][tuple(tokens[len(tokens) - size :])]
            if self._follows(start, size, len(tokens)):
                return Draft.chain(tokens[start : start + min(self.tokens, budget)])
        return EMPTY

    def _follows(self, start: int, size: int, length: int) -> bool:
        """Whether text from `start` on may be drafted. Both rules only bound `start`: if the first fails, all do."""
        return start < (length if self.partial else min(length - self.tokens + 1, length - size))

    def _read(self, tokens: Sequence[int]) -> None:
        """Note where each n-gram's first occurrence ends: constant work a token, where a search would read the text."""
        for end in range(self._known + 1, len(tokens) + 1):
            for size, after in enumerate(self._after, 1):
                if size <= end:
                    after.setdefault(tuple(tokens[end - size : end]), end)
        self._known = len(tokens)
