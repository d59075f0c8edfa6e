"""A suffix automaton over token ids: the longest earlier occurrence of what was just said, and what followed it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

SEPARATOR = -1  # ends a sequence within the text; no model says it, so no match crosses it


class Match(NamedTuple):
    """A suffix of what was read that occurs in the text: the state that holds it, and its length."""

    state: int = 0
    length: int = 0


class SuffixAutomaton:
    """Every substring of a growing text (Blumer et al., 1985), with the earliest end of each.

    Amortised constant time a token. A state stands for the substrings that end at the same places; it is a number into
    parallel lists, where one object a state would cost more memory and an indirection more. A state's transitions are
    a dictionary: most states have but one of them.

    A match, `match` or one of `advance`, holds until the text grows.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # the state of the longest suffix that ends at more places
        self._length = [0]  # of the longest substring
        self._end = [0]  # text[:end] ends with the first occurrence
        self._count = [0]  # occurrences
        self._last = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.text)

    @property
    def match(self) -> Match:
        """The longest suffix of the text that also occurs earlier in it.

        This is the link of the whole text. A pointer advanced beside the growing text, as published, stays on a state
        that has been split and can then miss the earliest occurrence.
        """
        state = max(self._link[self._last], 0)
        return Match(state, self._length[state])

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        nexts, links, lengths = self._next, self._link, self._length
        for token in map(int, tokens):
            self.text.append(token)
            new = len(nexts)
            state = self._last
            nexts.append({})
            links.append(0)
            lengths.append(len(self.text))
            self._end.append(len(self.text))
            self._count.append(0)
            self._last = new
            while state >= 0 and token not in nexts[state]:
                nexts[state][token] = new
                state = links[state]
            if state >= 0:
                links[new] = self._exactly(state, token)
            while new:
                self._count[new] += 1
                new = links[new]

    def advance(self, match: Match, token: int) -> Match:
        """The longest suffix of what was matched, and then `token`, that occurs in the text."""
        state, length = match
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        following = self._next[state].get(token)
        return Match() if following is None else Match(following, length + 1)

    def shorter(self, match: Match) -> Match:
        """The longest suffix of what was matched that stands at more places."""
        state = max(self._link[match.state], 0)
        return Match(state, self._length[state])

    def following(self, state: int) -> list[tuple[int, int, float]]:
        """(token, state behind it, share of the state's occurrences), of all tokens that follow a state somewhere."""
        seen = self._count[state] or len(self.text)
        pairs = self._next[state].items()
        return [(token, after, self._count[after] / seen) for token, after in pairs if token != SEPARATOR]

    def continuation(self, match: Match, count: int) -> list[int]:
        """At most `count` tokens that follow the first occurrence, up to the next separator."""
        start = self._end[match.state]
        tokens = self.text[start : start + max(count, 0)]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def _exactly(self, state: int, token: int) -> int:
        """The state whose longest substring is that of `state` and then `token`; split off where there is none yet."""
        nexts, links, lengths = self._next, self._link, self._length
        wide = nexts[state][token]
        if lengths[wide] == lengths[state] + 1:
            return wide
        split = len(nexts)
        nexts.append(nexts[wide].copy())
        links.append(links[wide])
        lengths.append(lengths[state] + 1)
        self._end.append(self._end[wide])  # until now, both parts ended at the same places
        self._count.append(self._count[wide])
        links[wide] = split
        while state >= 0 and nexts[state].get(token) == wide:
            nexts[state][token] = split
            state = links[state]
        return split
