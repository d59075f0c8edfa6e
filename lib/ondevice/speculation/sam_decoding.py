"""SAM-Decoding (Hu et al., 2024): drafts from the longest match in the text so far, or in a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.suffix_automaton import SEPARATOR, Match, SuffixAutomaton

LENGTH = 40  # most tokens of a sequence, the root included
GROWTH = 4  # tokens drafted for every token matched
STATIC_BIAS = 5  # tokens that a match in the corpus must be longer than one in the text


class SamDecoding(Drafter):
    """Drafts a chain: what followed the earliest occurrence of the longest suffix of the text, the root included.

    The text's automaton is built anew for every request; the corpus' one is kept. The text wins ties.
    corpus: the `automaton` of sequences of token ids, or none. Continuations do not cross into the next sequence.

    As published, the root is matched but not part of the text yet, so it is never drafted from its own place. Where the
    original fills up drafts with token id 0, ours end. The tree that the Spec-Bench port drafts from the corpus is
    left out: our own drafts are chains, which every model can verify. So is the drafter beside (SAM[TR]).
    """

    name = "SAM"

    def __init__(self, corpus: SuffixAutomaton | None = None) -> None:
        self.corpus = corpus or SuffixAutomaton()

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last request and read this one's prompt."""
        self._text = SuffixAutomaton(prompt)
        self._in_corpus = Match()
        self._read = 0
        self._follow(prompt)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """What followed the longer match, as a chain."""
        self._text.extend(tokens[len(self._text) : -1])
        self._follow(tokens)
        match = self._text.advance(self._text.match, tokens[-1])
        biased = self._in_corpus.length - STATIC_BIAS
        length = min(LENGTH - 1, GROWTH * max(match.length, biased), budget)
        longer = (self.corpus, self._in_corpus) if match.length < biased else (self._text, match)
        return Draft.chain(longer[0].continuation(longer[1], length))

    def _follow(self, tokens: Sequence[int]) -> None:
        """Match in the corpus what was said since the last call."""
        for token in tokens[self._read :]:
            self._in_corpus = self.corpus.advance(self._in_corpus, token)
        self._read = len(tokens)


def automaton(corpus: Iterable[Sequence[int]]) -> SuffixAutomaton:
    """The automaton of a corpus, for several drafters: they only read it."""
    return SuffixAutomaton(token for sequence in corpus for token in (*sequence, SEPARATOR))
