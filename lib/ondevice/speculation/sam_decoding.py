"""SAM-Decoding (Hu et al., 2024): drafts from the longest match in the text so far, or in a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ondevice.speculation.draft import EMPTY, Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.suffix_automaton import SEPARATOR, Match, SuffixAutomaton

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = 40  # most tokens of a sequence, the root included
GROWTH = 4  # tokens drafted for every token matched
STATIC_BIAS = 5  # tokens that a match in the corpus must be longer than one in the text
THRESHOLD = 5  # least match, bias deducted, that is trusted more than an auxiliary drafter


class SamDecoding(Drafter):
    """Drafts a chain: what followed the earliest occurrence of the longest suffix of the text, the root included.

    The text's automaton is built anew for every request; the corpus' one is kept. The text wins ties.
    corpus: sequences of token ids, or their `automaton`; none is allowed. Continuations do not cross into the next.
    auxiliary: drafts where the match is shorter than the threshold, as in SAM[TR]; then sequences always have full
    length, and where too few tokens follow, those of a shorter match are taken.

    As published, the root is matched but not part of the text yet, so it is never drafted from its own place. Where the
    original fills up drafts with token id 0, ours end. The tree that the Spec-Bench port drafts from the corpus is
    left out: our own drafts are chains, which every model can verify.
    Raises ValueError on a corpus with negative ids.
    """

    def __init__(
        self, corpus: Iterable[Sequence[int]] | SuffixAutomaton = (), auxiliary: Drafter | None = None
    ) -> None:
        self.auxiliary = auxiliary
        self.name = "SAM" if auxiliary is None else f"SAM[{auxiliary.name}]"
        if auxiliary is not None:
            self.wants_prefill, self.drafts_trees = auxiliary.wants_prefill, auxiliary.drafts_trees
            self.vocabulary = auxiliary.vocabulary
        self.corpus = corpus if isinstance(corpus, SuffixAutomaton) else automaton(corpus)
        self._text = SuffixAutomaton()
        self._in_corpus, self._read = Match(), 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last request and read this one's prompt."""
        self._text = SuffixAutomaton(prompt)
        self._in_corpus, self._read = Match(), 0
        self._follow(prompt)
        if self.auxiliary is not None:
            self.auxiliary.begin(prompt)

    def prefilled(self, start: int, logits: Tensor) -> None:
        """For the auxiliary drafter."""
        if self.auxiliary is not None:
            self.auxiliary.prefilled(start, logits)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A chain from the longer match, or what the auxiliary drafter says."""
        self._text.extend(tokens[len(self._text) : -1])
        self._follow(tokens)
        match = self._text.advance(self._text.match, tokens[-1])
        biased = self._in_corpus.length - STATIC_BIAS
        longest = max(match.length, biased)
        if self.auxiliary is not None and longest < THRESHOLD:
            return self.auxiliary.propose(tokens, budget)
        length = min(LENGTH, 1 + GROWTH * longest) if self.auxiliary is None else LENGTH
        if match.length < biased:
            found = self.corpus.continuation(self._in_corpus, min(length - 1, budget))
        else:
            match = match if self.auxiliary is None else self._filling(match)
            found = self._text.continuation(match, min(length - 1, budget))
        return Draft.chain(found) if found else EMPTY

    def observe(self, step: Verified) -> None:
        """For the auxiliary drafter, which learns from every step, whoever drafted."""
        if self.auxiliary is not None:
            self.auxiliary.observe(step)

    def end(self, tokens: Sequence[int]) -> None:
        """For the auxiliary drafter."""
        if self.auxiliary is not None:
            self.auxiliary.end(tokens)

    def _follow(self, tokens: Sequence[int]) -> None:
        """Match in the corpus what was said since the last call."""
        if len(self.corpus):
            for token in tokens[self._read :]:
                self._in_corpus = self.corpus.advance(self._in_corpus, token)
        self._read = len(tokens)

    def _filling(self, match: Match) -> Match:
        """The longest suffix of a match that a full sequence follows, else the shortest one."""
        shorter = self._text.shorter(match)
        while shorter.length and len(self._text) - self._text.end(match) < LENGTH:
            match, shorter = shorter, self._text.shorter(shorter)
        return match


def automaton(corpus: Iterable[Sequence[int]]) -> SuffixAutomaton:
    """Of a corpus, for several drafters: they only read it. Raises ValueError on negative ids."""
    found = SuffixAutomaton()
    for sequence in corpus:
        if len(sequence) and min(sequence) < 0:
            raise ValueError(f"A corpus holds token ids from 0 on, not {min(sequence)}.")
        found.extend(sequence)
        found.extend([SEPARATOR])
    return found
