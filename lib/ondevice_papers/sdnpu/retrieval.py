"""Where drafts are retrieved from: PLD, SAM with a history, SuffixDecoding; alone, each is a drafter of its own."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.speculation import Draft, Drafter
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.suffix_automaton import SEPARATOR, Match, SuffixAutomaton
from ondevice.speculation.suffix_decoding import SuffixDecoding
from ondevice_papers.sdnpu.history import History

LONGEST, SHORTEST, GROWTH = 40, 10, 4  # tokens of SAM's drafts, the root included, and more for each that matched
Retrieved = tuple[list[Sequence[int]], int]  # branches, and how many tokens of the text's end stand before them


def branches(tokens: Sequence[int], parents: Sequence[int]) -> list[Sequence[int]]:
    """Branches: the tokens from the root to each leaf of a tree. parents: of each node, an earlier one, -1 the root."""
    paths: list[Sequence[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    inner = set(parents)
    return [path for node, path in enumerate(paths) if node not in inner]


class Pld(PromptLookup):
    """PLD: of the request's own text, the leftmost continuation of its last three tokens, or of fewer; at most ten.

    A continuation that the text's end cuts short is drafted, too: most of the paper's drafts are short (Figure 6), but
    the original's, without these, have ten tokens or none.
    """

    def __init__(self) -> None:
        super().__init__(3, 10, partial=True)

    def retrieve(self, tokens: Sequence[int], budget: int) -> Retrieved:
        """The one branch that prompt look-up drafts, and how many tokens matched."""
        continuation = self.propose(tokens, budget).tokens.tolist()
        return ([continuation], self._text.after(tokens[-self.ngram :])[0]) if continuation else ([], 0)


class Sam(Drafter):
    """SAM: what followed the first occurrence of the longest suffix of the text, in the history or in the text itself.

    n = min(40, 1 + 4 m) tokens after a match of m, but at least 10, the root included. It is one search over history,
    prompt and output: the longest match counts, of equals the history's, which came first. The history's automaton is
    kept; `end` adds the finished response to it, so that no request is drafted from its own output to come.
    history: of the task group, in memory by default.
    """

    name = "SAM"

    def __init__(self, vocabulary: int, history: History | None = None) -> None:
        self.history = History(vocabulary) if history is None else history
        if self.history.vocabulary != vocabulary:
            raise ValueError(f"The history has {self.history.vocabulary} token ids, the model {vocabulary}.")
        self.vocabulary = vocabulary
        self._stored, self._responses_read, self._dropped = SuffixAutomaton(), 0, 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Read what came into the history; forget the last request."""
        if self._dropped != self.history.dropped:
            self._stored, self._responses_read, self._dropped = SuffixAutomaton(), 0, self.history.dropped
        for response in self.history.responses[self._responses_read :]:
            self._stored.extend([*response, SEPARATOR])
        self._responses_read = len(self.history.responses)
        self._text, self._match, self._prompt = SuffixAutomaton(), Match(), len(prompt)
        self._read(prompt)

    def retrieve(self, tokens: Sequence[int], budget: int) -> Retrieved:
        """At most `budget` tokens after the longest match."""
        self._read(tokens)
        match = self._text.match
        automaton = self._text
        if self._match.length >= match.length:
            match = self._match
            automaton = self._stored
        if not match.length:
            return [], 0
        length = min(LONGEST, max(SHORTEST, 1 + GROWTH * match.length))
        continuation = automaton.continuation(match, min(length - 1, budget))
        return ([continuation] if continuation else []), match.length

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """What `retrieve` gives, as a draft without branches."""
        branches, _ = self.retrieve(tokens, budget)
        return Draft.chain(branches[0] if branches else ())

    def end(self, tokens: Sequence[int]) -> None:
        """Add the response to the history."""
        self.history.append(tokens[self._prompt :])

    def _read(self, tokens: Sequence[int]) -> None:
        new = tokens[len(self._text) :]
        self._text.extend(new)
        for token in new:
            self._match = self._stored.advance(self._match, token)


class Suffixes(SuffixDecoding):
    """SuffixDecoding, whose tree is taken apart into its branches."""

    vocabulary = None

    def retrieve(self, tokens: Sequence[int], budget: int) -> Retrieved:
        """The paths to the leaves of what `propose` drafts."""
        draft = self.propose(tokens, budget)
        matched = max((match.length for match in (self._text.match, *self._matches)), default=0)
        return branches(draft.tokens.tolist(), draft.parents.tolist()), matched


Base = Pld | Sam | Suffixes
