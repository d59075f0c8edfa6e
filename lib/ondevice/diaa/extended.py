"""Beyond the paper: DIAA with calibrated probabilities, a size set by the verification's cost, and suffix matches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.diaa.calibration import Calibration, Continuing
from ondevice.diaa.drafter import Learning
from ondevice.diaa.tables import Tables
from ondevice.diaa.tree import ROOT, Tree
from ondevice.speculation import Draft, Verified
from ondevice.speculation.suffix_automaton import Match, SuffixAutomaton

LEAST = 5e-3  # a node's least chance; Fig. 7's tau, here of acceptance
REACH = 16  # most tokens of a suffix match
LARGEST = 64  # nodes that sizing chooses from
# Of a pass, by nodes: what a row costs in float32 without matrix units, for decisions that are the same everywhere.
SECONDS: NDArray[np.float64] = np.asarray(1 + 0.02 * np.arange(LARGEST + 1), np.float64)


class Candidate(NamedTuple):
    """A child of a node. chance: of being accepted once the node is. rank, p: in the tables' row, 0 where not in it.

    matched: length of the suffix match that it continues, 0 off the branch.
    """

    chance: float
    token: int
    rank: int
    p: float
    matched: int


@dataclass(frozen=True)
class Mixed(Tree):
    """A tree whose nodes come by falling chance of acceptance, so that its first n are the best n."""

    candidates: list[Candidate] = field(default_factory=list)


Children = Callable[[int, int], list[Candidate]]


def candidates(
    row: list[tuple[int, float]], rates: list[float], follower: int, chance: float, matched: int
) -> list[Candidate]:
    """A node's children, likeliest first: the tables' and, where a match goes on, its follower.

    They exclude each other: what the match gives its token beyond the table's rate is taken from the others.
    """
    pairs = enumerate(zip(row, rates, strict=True), 1)
    mine = [Candidate(rate, token, rank, p, 0) for rank, ((token, p), rate) in pairs]
    if matched:
        known = next((child for child in mine if child.token == follower), Candidate(0.0, follower, 0, 0.0, 0))
        most = max(known.chance, chance)
        left = (1 - most) / (1 - known.chance) if known.chance < 1 else 0.0
        mine = [child._replace(chance=child.chance * left) for child in mine if child.token != follower]
        mine.append(known._replace(chance=most, matched=matched))
    return sorted(mine, reverse=True)


def grow_likeliest(children: Children, root: int, budget: int) -> Mixed:
    """The `budget` likeliest nodes of all: no node is likelier than its parent or the sibling before it.

    children: of a token and the tokens of the match above them (-1 off it), likeliest first.
    """
    tree = Mixed()
    on_branch = {ROOT: 0}
    queue: list[tuple[float, int, int, list[Candidate]]] = []

    def offer(node: int, number: int, mine: list[Candidate]) -> None:
        path = 1.0 if node == ROOT else tree.paths[node]
        if number < len(mine) and path * mine[number].chance > LEAST:
            heappush(queue, (-path * mine[number].chance, node, number, mine))

    offer(ROOT, 0, children(root, 0))
    while queue and len(tree) < budget:
        chance, parent, number, mine = heappop(queue)
        child = mine[number]
        node = tree.add(child.token, parent, child.rank, -chance)
        tree.candidates.append(child)
        if child.matched:
            on_branch[node] = on_branch[parent] + 1
        offer(parent, number + 1, mine)
        offer(node, 0, children(child.token, on_branch.get(node, -1)))
    return tree


def most_per_second(chances: Sequence[float], seconds: NDArray[np.float64]) -> int:
    """How many of a tree's first nodes to verify: the most expected tokens for the time of the pass.

    chances: of the nodes, falling. seconds: [1 + n] of a pass with 0, 1 .. nodes.
    """
    expected = 1 + np.cumsum([0.0, *chances])
    return int(np.argmax(expected / seconds[: len(expected)]))


class Extended(Learning):
    """Drafts the likeliest nodes of tables and suffix match, as many as pay.

    calibrate: corrects the tables' probabilities by what was accepted; None leaves them. size: how many nodes pay;
    None drafts as many as the budget allows. seconds: of a pass by nodes, in any unit.
    suffixes: whether what followed the longest match of the request's text competes with the tables.
    """

    name = "DIAA, extended"

    def __init__(
        self, tables: Tables, *, candidates: Callable[..., list[Candidate]] = candidates,
        grow_likeliest: Callable[[Children, int, int], Mixed] = grow_likeliest,
        calibrate: Calibration | None = None, size: Callable[..., int] | None = most_per_second,
        seconds: NDArray[np.float64] = SECONDS, suffixes: bool = True, reads_prompt: bool = True, **learning: Any,
    ) -> None:  # fmt: skip
        super().__init__(tables, reads_prompt=reads_prompt, **learning)
        self.candidates, self.grow_likeliest, self.size, self.seconds = candidates, grow_likeliest, size, seconds
        self.calibrate, self.continuing, self.suffixes = calibrate, Continuing(), suffixes

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt; tables and what was learnt of acceptance stay."""
        super().begin(prompt)
        self._text = SuffixAutomaton(prompt)
        self._drafted: tuple[Draft, Mixed] | None = None

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The likeliest nodes below the last token, cut to what pays."""
        self._text.extend(tokens[len(self._text) :])
        match = self._text.match if self.suffixes else Match()  # the longest suffix of the text, the root included
        length, branch = match.length, self._text.continuation(match, REACH) if match.length else []

        def children(token: int, place: int) -> list[Candidate]:
            row = self.tables.row(token)
            probabilities = [p for _, p in row]
            rates = self.calibrate(probabilities) if self.calibrate else probabilities
            goes_on = 0 <= place < len(branch)
            matched = length + place if goes_on else 0
            return self.candidates(row, rates, branch[place] if goes_on else 0, self.continuing(matched), matched)

        tree = self.grow_likeliest(children, tokens[-1], budget)
        if len(tree) > budget:
            raise ValueError(f"The tree has {len(tree)} nodes; the budget is {budget}.")
        draft = tree.draft(self.size(tree.paths, self.seconds) if self.size else None)
        self._drafted = draft, tree
        return draft

    def observe(self, step: Verified) -> None:
        """Update the tables, and what is known of acceptance.

        The model's choice at every node that was reached judges all candidates there, those too that did not pay: so
        what is learnt does not depend on the size that it sets, and a tree that fell to nothing can grow again.
        """
        super().observe(step)
        if self._drafted is None or self._drafted[0] is not step.draft:
            return  # the loop cuts drafts near the end of the output only
        tree = self._drafted[1]
        chosen = dict(zip([ROOT, *step.path], step.emitted, strict=False))  # an end token stops before the last choice
        for parent, child in zip(tree.parents, tree.candidates, strict=True):
            if parent in chosen:
                right = child.token == chosen[parent]
                if child.rank and self.calibrate:
                    self.calibrate.observe(child.rank, child.p, right)
                if child.matched:
                    self.continuing.observe(child.matched, right)
