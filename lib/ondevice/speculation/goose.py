"""Goose (Jin et al., 2026): a chain copied from the context, with Token Recycling's candidates as branches of it."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.speculation.draft import Draft
from ondevice.speculation.ngrams import NGrams
from ondevice.speculation.suffix_automaton import Match, SuffixAutomaton
from ondevice.speculation.token_recycling import K, TokenRecycling

SPINE = 10  # most tokens copied
SHARE = 0.5  # of the budget that they may take


class Goose(TokenRecycling):
    """Drafts a spine, what followed the longest match in the request's text or else in a corpus, and branches.

    Branches hang at the root and at every node of the spine, by the rank that their tokens have in the matrix: all
    first ones, from the root down, then all second ones. Without a match it is Token Recycling's template. No code is
    published; the spine's share of the budget is ours.
    """

    name = "Goose"

    def __init__(self, vocabulary: int, corpus: SuffixAutomaton | None = None, share: float = SHARE) -> None:
        super().__init__(vocabulary)
        self.corpus = corpus or SuffixAutomaton()
        self.share = share

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last request's text and read this one's prompt."""
        self._text, self._match, self._read = NGrams(prompt), Match(), 0

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The spine and its branches, or the template."""
        spine = self._spine(tokens)[: max(1, int(self.share * budget))]
        if not spine:
            return super().propose(tokens, budget)
        drafted = [*spine]
        parents = [*range(-1, len(spine) - 1)]
        keys = [tokens[-1], *spine]
        for rank in range(K):
            for index, key in enumerate(keys):
                candidate = int(self.matrix[key, rank])
                if len(drafted) < budget and candidate != dict(enumerate(spine)).get(index):
                    drafted.append(candidate)
                    parents.append(index - 1)
        return Draft(drafted, parents)

    def _spine(self, tokens: Sequence[int]) -> list[int]:
        self._text.extend(tokens[len(self._text) :])
        for token in tokens[self._read :]:
            self._match = self.corpus.advance(self._match, token)
        self._read = len(tokens)
        length, followers = self._text.after(tokens[-self._text.longest :])
        if length > 1 or length >= self._match.length:
            return self._text.text[followers[-1] :][:SPINE] if followers else []
        return self.corpus.continuation(self._match, SPINE)
