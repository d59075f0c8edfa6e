"""SuffixDecoding (Oliaro et al., 2024): the tree of what most often followed a match, its size set by the match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from ondevice.speculation.draft import EMPTY, Draft
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.suffix_automaton import SEPARATOR, Match, SuffixAutomaton

ALPHA = 4.0  # most nodes of a tree, for every token matched


class SuffixDecoding(Drafter):
    """Drafts the tree with the greatest score of all matches in the request's text, earlier outputs and a corpus.

    A node's score is its parent's times its share of the parent's occurrences; a tree takes the best nodes first, at
    most `alpha` for every token of the match, and its own score is the sum of theirs. The authors' suffix trees are
    automata here, which count the same occurrences.
    """

    name = "SuffixDecoding"
    drafts_trees = True

    def __init__(self, corpus: SuffixAutomaton | None = None, alpha: float = ALPHA) -> None:
        self.alpha = alpha
        self._others = [SuffixAutomaton(), *([corpus] if corpus else [])]  # earlier outputs, the corpus

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last request's text, read this one's prompt; earlier outputs stay."""
        self._text, self._matches, self._read = SuffixAutomaton(), [Match() for _ in self._others], 0
        self._prompt = len(prompt)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The tree with the greatest score of all matches."""
        self._text.extend(tokens[len(self._text) :])
        for token in tokens[self._read :]:
            pairs = zip(self._others, self._matches, strict=True)
            self._matches = [automaton.advance(match, token) for automaton, match in pairs]
        self._read = len(tokens)
        best = EMPTY
        score = 0.0
        texts = zip([self._text, *self._others], [self._text.match, *self._matches], strict=True)
        for automaton, longest in texts:
            for match in _suffixes(automaton, longest):
                tree, total = _tree(automaton, match.state, min(budget, int(self.alpha * match.length)))
                if total > score:
                    best = tree
                    score = total
        return best

    def end(self, tokens: Sequence[int]) -> None:
        """Keep the output, for later requests."""
        self._others[0].extend([*tokens[self._prompt :], SEPARATOR])


def _suffixes(automaton: SuffixAutomaton, match: Match) -> Iterator[Match]:
    """The match and its suffixes that stand at more places: those between have the same tree, and allow less."""
    while match.length:
        yield match
        match = automaton.shorter(match)


def _tree(automaton: SuffixAutomaton, state: int, nodes: int) -> tuple[Draft, float]:
    """The draft below a state and its score."""
    tokens: list[int] = []
    parents: list[int] = []
    total = 0.0
    queue = [(-share, -1, token, after) for token, after, share in automaton.following(state)]
    heapify(queue)
    while queue and len(tokens) < nodes:
        score, parent, token, at = heappop(queue)
        total -= score
        for following, after, share in automaton.following(at):
            heappush(queue, (score * share, len(tokens), following, after))
        tokens.append(token)
        parents.append(parent)
    return Draft(tokens, parents), total
