"""sd.npu's drafter: what a lookup retrieves, with calibrated and reused branches in one trace pool (3.3, 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from ondevice.sdnpu.calibration import NOTHING, Calibration, Row, Search
from ondevice.sdnpu.history import History
from ondevice.sdnpu.reuse import Reuse
from ondevice.speculation import Draft, Drafter, Verified
from ondevice.speculation.draft import EMPTY
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.suffix_automaton import SEPARATOR, Match, SuffixAutomaton

if TYPE_CHECKING:
    from torch import Tensor

LMAX = 32  # tokens of the decoding graph, the root included
LEAST = 5e-3  # a node's least chance: less gained nothing on the validation tasks
LONGEST, SHORTEST, GROWTH = 40, 10, 4  # tokens of SAM's drafts, the root included, and more for each that matched
_SURE = 3  # tokens matched from which on a printed pool begins with the retrieved branch
_LONG = 16  # longer matches are taken together

# Bases


class Retrieved(NamedTuple):
    """A continuation that was found in the text. matched: tokens of the text's end that stand before it there."""

    tokens: Sequence[int]
    matched: int


class Base(Protocol):
    """Where drafts are retrieved from; as a drafter, it drafts this alone."""

    name: str
    vocabulary: int | None

    def begin(self, prompt: Sequence[int]) -> None: ...

    def retrieve(self, tokens: Sequence[int], budget: int) -> Retrieved: ...

    def end(self, tokens: Sequence[int]) -> None: ...


class Pld(PromptLookup):
    """PLD: of the request's own text, the leftmost continuation of its last three tokens, or of fewer; at most ten.

    A continuation that the text's end cuts short is drafted, too: most of the paper's drafts are short (Figure 6), but
    the original's, without these, have ten tokens or none.
    """

    def __init__(self) -> None:
        super().__init__(3, 10, partial=True)

    def retrieve(self, tokens: Sequence[int], budget: int) -> Retrieved:
        """What `propose` drafts."""
        found = self.propose(tokens, budget).tokens.tolist()
        return Retrieved(found, self._text.after(tokens[-self.ngram :])[0] if found else 0)


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
        self._stored, self._known, self._dropped = SuffixAutomaton(), 0, 0
        self._text, self._match, self._prompt = SuffixAutomaton(), Match(), 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Read what came into the history; forget the last request."""
        if self._dropped != self.history.dropped:
            self._stored, self._known, self._dropped = SuffixAutomaton(), 0, self.history.dropped
        for response in self.history.responses[self._known :]:
            self._stored.extend([*response, SEPARATOR])
        self._known = len(self.history.responses)
        self._text, self._match, self._prompt = SuffixAutomaton(), Match(), len(prompt)
        self._read(prompt)

    def retrieve(self, tokens: Sequence[int], budget: int) -> Retrieved:
        """At most `budget` tokens after the longest match."""
        self._read(tokens)
        match, where = self._text.match, self._text
        if self._match.length >= match.length:
            match, where = self._match, self._stored
        if not match.length:
            return Retrieved((), 0)
        length = min(LONGEST, max(SHORTEST, 1 + GROWTH * match.length))
        return Retrieved(where.continuation(match, min(length - 1, budget)), match.length)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The same as a chain."""
        return Draft.chain(self.retrieve(tokens, budget).tokens)

    def end(self, tokens: Sequence[int]) -> None:
        """Add the response to the history."""
        self.history.append(tokens[self._prompt :])

    def _read(self, tokens: Sequence[int]) -> None:
        new = tokens[len(self._text) :]
        self._text.extend(new)
        for token in new:
            self._match = self._stored.advance(self._match, token)


# The trace pool


class Branch(NamedTuple):
    """Tokens that may follow the root. kind: `match`, or a reused segment's. matched: tokens before it that agree."""

    kind: str
    tokens: Sequence[int]
    matched: int = 0


_On = tuple[tuple[Branch, int], ...]  # branches that go on at a node, each with how many of its tokens lie above


class Chances:
    """How often each source says the right token where it is asked, learning as requests run.

    A source is a kind and a number: how many tokens agree before it, or a key's length. Each begins with `prior`
    imagined tries, so that a new drafter does not follow its first accidents.
    memory: what of the past stays at a source's next try.
    """

    def __init__(self, prior: float = 4.0, memory: float = 0.999) -> None:
        self._prior, self._memory = prior, memory
        self._tables: dict[str, tuple[list[float], list[float], list[float]]] = {}  # hits, tries, hits / tries

    def of(self, kind: str) -> list[float]:
        """[17] right tokens for each that a source of the kind promises, at most 1, by number; only to be read."""
        return self._table(kind)[2]

    def observe(self, kind: str, number: int, promised: float, right: bool) -> None:
        """A source promised `promised` tokens, at most 1, and one of its tokens was right or none."""
        hits, tries, chances = self._table(kind)
        number = min(number, _LONG)
        hits[number] = self._memory * hits[number] + right
        tries[number] = self._memory * tries[number] + promised
        chances[number] = min(1.0, hits[number] / tries[number])

    def _table(self, kind: str) -> tuple[list[float], list[float], list[float]]:
        if kind not in self._tables:
            guesses = [first_guess(kind, number) for number in range(_LONG + 1)]
            self._tables[kind] = [self._prior * guess for guess in guesses], [self._prior] * len(guesses), guesses
        return self._tables[kind]


def first_guess(kind: str, number: int) -> float:
    """A source's chance before anything is known."""
    if kind == "calibrated":
        return 0.8 if number == 2 else 0.4
    if kind == "match":
        return min(0.95, 0.2 + 0.1 * number)
    return min(0.8, 0.3 + 0.1 * number)


@dataclass
class Pool:
    """A draft as it grows. tokens, parents: of its nodes.

    asked: for nodes whose children were looked for, the root's -1 among them: the calibrated row and the branches.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    asked: dict[int, tuple[Row, _On]] = field(default_factory=dict)


# What may follow a node: the node; what makes chances of whole paths of their chances; tokens, likeliest first; their
# chances; the branches that go on below some of them. A plain tuple, as one is made for every node.
_Children = tuple[int, float, Sequence[int], Sequence[float], dict[int, _On]]
_NONE: dict[int, _On] = {}


def grow(
    tail: tuple[int, int], budget: int, calibration: Calibration | None, branches: Sequence[Branch], chances: Chances,
    least: float = LEAST,
) -> Pool:  # fmt: skip
    """The `budget` nodes that are likeliest to be accepted: no node is likelier than its parent or its elder sibling.

    tail: the last two tokens of the text, the root second. least: nodes of a smaller chance are left out.
    """
    pool = Pool()
    tokens, parents = pool.tokens, pool.parents
    queue: list[tuple[float, int, int, _Children]] = []  # the chance, negative; the turn; the place among the children
    node, (before, token), reach, turn = -1, tail, 1.0, 0
    on: _On = tuple((branch, 0) for branch in branches)
    calibrated = chances.of("calibrated")
    tables = {branch.kind: chances.of(branch.kind) for branch in branches}
    while len(tokens) < budget:
        row = calibration.row(before, token) if calibration else NOTHING
        if row.keys or on:
            pool.asked[node] = row, on
            scale = calibrated[row.keys]
            children = _merged(node, reach, row, scale, on, tables) if on else (node, reach * scale, *row[1:], _NONE)
            heappush(queue, (-children[1] * children[3][0], turn, 0, children))
        if not queue or queue[0][0] > -least:
            break
        negative, _, place, children = queue[0]
        parent, scale, offered, shares, ons = children
        turn += 2
        if place + 1 < len(offered):
            heapreplace(queue, (-scale * shares[place + 1], turn - 1, place + 1, children))
        else:
            heappop(queue)
        before = tokens[parent] if parent >= 0 else tail[1]
        token, node, reach = offered[place], len(tokens), -negative
        on = ons.get(token, ())
        tokens.append(token)
        parents.append(parent)
    return pool


def _merged(node: int, reach: float, row: Row, scale: float, on: _On, chances: dict[str, list[float]]) -> _Children:
    """Children of a node on branches. A token that several sources offer is one child, with their largest chance.

    Children exclude each other: what branches give their tokens is taken from the calibrated ones.
    """
    if len(on) == 1 and not row.keys:  # as most of a retrieved branch
        ((branch, place),) = on
        token, number = branch.tokens[place], branch.matched + place
        below: dict[int, _On] = {token: ((branch, place + 1),)} if place + 1 < len(branch.tokens) else _NONE
        return node, reach, (token,), (chances[branch.kind][number if number < _LONG else _LONG],), below
    found: dict[int, float] = {}
    ons: dict[int, _On] = {}
    left = 1.0
    for branch, place in on:
        kind, tokens, matched = branch
        token, number = tokens[place], matched + place
        chance = chances[kind][number if number < _LONG else _LONG]
        if chance > found.get(token, 0.0):
            found[token] = chance
        if place + 1 < len(tokens):
            ons[token] = (*ons.get(token, ()), (branch, place + 1))
    for chance in found.values():
        left *= 1 - chance
    for token, p in zip(row.tokens, row.probabilities, strict=True):
        found[token] = max(found[token], scale * p) if token in found else left * scale * p
    best = sorted(found, key=found.__getitem__, reverse=True) if len(found) > 1 else list(found)
    return node, reach, best, [found[token] for token in best], ons


# The drafter


def merged(branches: Sequence[Sequence[int]], budget: int) -> Draft:
    """The trie of several sequences, the first ones first, cut to `budget` nodes."""
    places: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    for branch in branches:
        node = -1
        for token in branch:
            if (node, token) not in places:
                if len(tokens) == budget:
                    break
                places[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = places[node, token]
    return Draft(tokens, parents)


class SdNpu(Drafter):
    """Context-aligned drafts: of a base, a calibration of the context, and a reuse of rejected drafts, each optional.

    base: `Pld`, `Sam`, or None. calibration, reuse: None leaves them out; without both it drafts as the base does.
    order: `gain`: the nodes that are likeliest to be accepted, by what each source has been worth so far (`Chances`).
        `printed`: reused segments, the retrieved branch, the branches of the calibrated tree, one after the other until
        the pool is full; the retrieved branch comes first after a match of three tokens. Shared beginnings are merged.
    limit: Lmax, most tokens of a verification, the root included; the loop's budget bounds drafts, too.
    least: nodes of a smaller chance are not drafted; 0 fills the pool, as a graph of a fixed shape costs the same.
    search: of the calibrated tree in `printed` order.
    One drafter serves one task group, a request at a time; what its base, calibration and chances have learnt stays.
    As in the paper: `SdNpu(base, Calibration.printed(V), Reuse("printed"), order="printed")`.
    Raises ValueError on a limit below 2, where no token could be drafted, and on parts for different vocabularies.
    """

    def __init__(
        self, base: Base | None = None, calibration: Calibration | None = None, reuse: Reuse | None = None, *,
        order: Literal["gain", "printed"] = "gain", limit: int = LMAX, least: float = LEAST,
        search: Search | None = None, name: str | None = None,
    ) -> None:  # fmt: skip
        if limit < 2:
            raise ValueError(f"A verification has room for the root and a drafted token, 2 tokens, not {limit}.")
        if not 0 <= least < 1:
            raise ValueError(f"A node's least chance is in [0, 1), not {least}.")
        if not isinstance(calibration, Calibration | None) or not isinstance(reuse, Reuse | None):
            raise ValueError("The parts are a base, a Calibration and a Reuse, in this order, each an object or None.")
        if order not in ("gain", "printed"):
            raise ValueError(f"There is no order {order!r} of branches; there are gain and printed.")
        known = {part.vocabulary for part in (base, calibration) if part is not None and part.vocabulary is not None}
        if len(known) > 1:
            raise ValueError(f"The base and the calibration have {min(known)} and {max(known)} token ids.")
        self.base, self.calibration, self.reuse = base, calibration, reuse
        self.order, self.limit, self.least, self.search = order, limit, least, search
        self.vocabulary = next(iter(known), None)
        self.wants_prefill = calibration is not None
        self.drafts_trees = calibration is not None or reuse is not None
        parts = [base.name if base else "", "calibration" if calibration else "", "reuse" if reuse else ""]
        self.name = "+".join(part for part in parts if part) or "vanilla" if name is None else name
        self.chances = Chances()
        self._drafted: tuple[Draft, Pool] | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        """A request comes. Raises ValueError on an empty prompt."""
        if not len(prompt):
            raise ValueError("A prompt has at least one token, not 0.")
        self._drafted = None
        for part in (self.base, self.calibration):
            if part is not None:
                part.begin(prompt)
        if self.reuse is not None:
            self.reuse.begin()

    def prefilled(self, start: int, logits: Tensor) -> None:
        """For the calibration."""
        if self.calibration is not None:
            self.calibration.prefilled(start, logits)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """At most Lmax - 1 nodes."""
        room = min(budget, self.limit - 1)
        found = self.base.retrieve(tokens, room) if self.base is not None else Retrieved((), 0)
        if not self.drafts_trees:
            return Draft.chain(found.tokens) if found.tokens else EMPTY
        segments = self.reuse.segments() if self.reuse is not None else []
        if self.order == "printed":
            return merged(self._printed(tokens[-1], found, [segment.tokens for segment in segments]), room)
        branches = [Branch("match", found.tokens, found.matched)] if found.tokens else []
        branches += [Branch(segment.kind, segment.tokens) for segment in segments]
        tail = (tokens[-2] if len(tokens) > 1 else -1), tokens[-1]
        pool = grow(tail, room, self.calibration, branches, self.chances, self.least)
        self._drafted = Draft(np.array(pool.tokens, np.int64), np.array(pool.parents, np.int64)), pool
        return self._drafted[0]

    def observe(self, step: Verified) -> None:
        """Learn from a step."""
        if self._drafted and self._drafted[0] is step.draft:  # the loop cuts drafts near the end of the output only
            self._learn(self._drafted[1], step)
        if self.calibration is not None:
            self.calibration.observe(step)
        if self.reuse is not None:
            self.reuse.observe(step)

    def end(self, tokens: Sequence[int]) -> None:
        """For the base, whose history it goes into."""
        if self.base is not None:
            self.base.end(tokens)

    def _printed(self, root: int, found: Retrieved, segments: list[Sequence[int]]) -> list[Sequence[int]]:
        calibrated = self.calibration.tree(root, self.search).branches() if self.calibration is not None else []
        sure = found.matched >= _SURE
        return [found.tokens, *segments, *calibrated] if sure else [*segments, found.tokens, *calibrated]

    def _learn(self, pool: Pool, step: Verified) -> None:
        """The model's choice at every node that was reached judges all that was offered there, drafted or not."""
        reached = [-1, *step.path]
        for node, said in zip(reached, step.emitted, strict=False):  # an end token stops before the last choice
            row, on = pool.asked.get(node, (NOTHING, ()))
            if row.keys:
                self.chances.observe("calibrated", row.keys, sum(row.probabilities), said in row.tokens)
            for branch, place in on:
                self.chances.observe(branch.kind, branch.matched + place, 1.0, branch.tokens[place] == said)
