"""Cacheback (Ma et al., 2025): tables of which tokens followed each token lately, chained into a tree."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter

LEADER = 1  # tokens of a key
FOLLOWER = 3  # tokens of an entry
LEADERS = 2**20  # most keys of a table
FOLLOWERS = 128  # most entries of a key
RESERVED = 6  # the first level leaves one row in so many to the levels below it

Tokens = tuple[int, ...]


class Followers:
    """A table from leaders, short n-grams, to the n-grams that followed them, in both of which the least recent leaves.

    leaders: most keys. followers: most entries of each. Raises ValueError where either is below 1.
    """

    def __init__(self, leaders: int = LEADERS, followers: int = FOLLOWERS) -> None:
        if leaders < 1 or followers < 1:
            raise ValueError(f"A table has room for one leader and one follower at least, not {leaders}, {followers}.")
        self._leaders = leaders
        self._followers = followers
        self._table: OrderedDict[Tokens, OrderedDict[Tokens, None]] = OrderedDict()  # the least recent first

    def __len__(self) -> int:
        return len(self._table)

    def read(self, tokens: Sequence[int], start: int = 0) -> None:
        """Enter every leader and follower of a text whose last token is at `start` or behind it."""
        width = LEADER + FOLLOWER
        for end in range(max(start + 1, width), len(tokens) + 1):
            middle = end - FOLLOWER
            leader = tuple(tokens[end - width : middle])
            followers = self._table.setdefault(leader, OrderedDict())
            self._table.move_to_end(leader)
            follower = tuple(tokens[middle:end])
            followers[follower] = None
            followers.move_to_end(follower)
            if len(followers) > self._followers:
                followers.popitem(last=False)
            if len(self._table) > self._leaders:
                self._table.popitem(last=False)

    def after(self, leader: Tokens) -> Iterator[Tokens]:
        """The followers of a leader, the most recent first."""
        followers = self._table.get(leader)
        return reversed(followers) if followers else iter(())

    def use(self, leader: Tokens) -> None:
        """Mark a leader as the most recent, where the table has it."""
        if leader in self._table:
            self._table.move_to_end(leader)


class Cacheback(Drafter):
    """Drafts what followed the last token lately, and below each follower what followed its last token.

    Source: arXiv 2511.21699, and the authors' code for Spec-Bench as Liu-Steve/GSAM-Decoding holds it in
    model/cacheback. Their settings: leaders of one token, followers of three, 2^20 leaders with 128 followers each, and
    a table that is cleared before each request. A level is drafted whole before the one below it, the most recent
    follower first. Of the 96 published rows the first level leaves 16 free, here a sixth of any budget. The first
    follower that does not fit ends its level, and below the first level the draft.

    corpus: sequences of token ids for a second table. Requests do not change it, and its followers come behind those of
    the first. The original fills it from the Alpaca instructions; by default it is empty.

    Two choices are ours. Followers with the same beginning share its nodes, as in the first author's later code
    (zyma98/pie, cacheback-decoding). The original drafts the beginning twice, so a budget holds more followers here.
    Drafting begins behind the first generated token, where the original drafts behind prompts below 96 tokens, too.
    """

    name = "Cacheback"
    drafts_trees = True

    def __init__(self, corpus: Iterable[Sequence[int]] = ()) -> None:
        self.corpus = Followers()
        for sequence in corpus:
            self.corpus.read(sequence)

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last request and read this one's prompt."""
        self.recent = Followers()
        self.recent.read(prompt)
        self._read = len(prompt)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """Level by level, until nothing fits or nothing more is known."""
        self.recent.read(tokens, self._read)
        self._read = len(tokens)
        nodes: dict[tuple[int, int], int] = {}  # by parent and token
        leaves = {-1: tuple(tokens[-LEADER:])}  # the nodes that a level grows from, and the leader at each
        room = budget - (budget + 1) // RESERVED
        full = False
        while leaves and not full:
            leaves, full = self._level(nodes, leaves, room)
            if room < budget:
                room = budget
                full = False
        return Draft([token for _, token in nodes], [parent for parent, _ in nodes])

    def _level(
        self, nodes: dict[tuple[int, int], int], leaves: dict[int, Tokens], room: int
    ) -> tuple[dict[int, Tokens], bool]:
        """Add followers below every leaf: the leaves of the next level, and whether one did not fit."""
        below: dict[int, Tokens] = {}
        for leaf, leader in leaves.items():
            self.recent.use(leader)
            for follower in chain(self.recent.after(leader), self.corpus.after(leader)):
                if len(nodes) + _fresh(nodes, leaf, follower) > room:
                    return below, True
                node = leaf
                for token in follower:
                    node = nodes.setdefault((node, token), len(nodes))
                below[node] = (*leader, *follower)[-LEADER:]
        return below, False


def _fresh(nodes: dict[tuple[int, int], int], leaf: int, follower: Tokens) -> int:
    """How many of a follower's tokens would be new nodes below a leaf."""
    node = leaf
    for shared, token in enumerate(follower):
        if (node, token) not in nodes:
            return len(follower) - shared
        node = nodes[node, token]
    return 0
