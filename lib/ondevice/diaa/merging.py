"""Beyond the paper: candidates of the tables and of a suffix match, in one tree by their chances of acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ondevice.diaa.calibration import Calibration
from ondevice.diaa.tables import Tables
from ondevice.speculation import Draft

LONGEST = 16  # longer matches are taken together


class Continuing:
    """How often the text goes on as a suffix match says, by the match's length, learning as requests run.

    Every length begins with `prior` hits in 2 `prior` tries. memory: what of the past stays at a length's next try.
    """

    def __init__(self, prior: float = 1.0, memory: float = 0.999) -> None:
        self._hits = [prior] * (LONGEST + 1)
        self._tries = [2 * prior] * (LONGEST + 1)
        self._memory = memory

    def __call__(self, length: int) -> float:
        """Chance that the next token is the one that followed the match."""
        place = min(length, LONGEST)
        return self._hits[place] / self._tries[place]

    def observe(self, length: int, right: bool) -> None:
        """The token after a match of `length` was, or was not, the text's."""
        place = min(length, LONGEST)
        self._hits[place] = self._memory * self._hits[place] + right
        self._tries[place] = self._memory * self._tries[place] + 1


@dataclass(frozen=True)
class Branch:
    """What a suffix match says: the tokens that followed it, and its length in tokens; 0 is no match."""

    tokens: Sequence[int] = ()
    length: int = 0


@dataclass(frozen=True)
class Mixed:
    """A tree of both, nodes by falling chance of acceptance, so that its first n nodes are the best n.

    ranks: in the tables' row; 0 where the table does not have the token. said: the tables' probability, 0 likewise.
    chances: of each node's whole path. matched: length of the match that a node continues; 0 for nodes off the branch.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    said: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)

    def draft(self, nodes: int) -> Draft:
        """The first `nodes` nodes."""
        return Draft(self.tokens[:nodes], self.parents[:nodes], self.ranks[:nodes])


_Child = tuple[float, int, int, float, int]  # chance after its parent, token, rank, said, matched


def candidates(
    tables: Tables, token: int, calibration: Calibration | None, branch: Branch, place: int, continuing: Continuing
) -> list[_Child]:
    """Children of a node, likeliest first. place: how much of the branch lies above them; -1 off it.

    They exclude each other: what a match gives its token beyond the table's share is taken from the others.
    """
    tokens, said = tables.row(token)
    chances = calibration(said) if calibration else said
    ranked = enumerate(zip(tokens, said, chances, strict=True), 1)
    row = [(chance, child, rank, p, 0) for rank, (child, p, chance) in ranked if child >= 0]
    if branch.length and 0 <= place < len(branch.tokens):
        follower, length = branch.tokens[place], branch.length + place
        known = next((child for child in row if child[1] == follower), (0.0, follower, 0, 0.0, 0))
        chance = max(known[0], continuing(length))
        left = (1 - chance) / (1 - known[0]) if known[0] < 1 else 0.0
        row = [(c * left, child, rank, p, 0) for c, child, rank, p, _ in row if child != follower]
        row.append((chance, follower, known[2], known[3], length))
    return sorted(row, reverse=True)


def grow(
    tables: Tables, root: int, budget: int, calibration: Calibration | None, branch: Branch, continuing: Continuing,
    least: float = 0.0,
) -> Mixed:  # fmt: skip
    """The `budget` likeliest nodes of all, as each one's siblings and children are no likelier than itself.

    least: nodes of a smaller chance are left out.
    """
    found = Mixed()
    queue: list[tuple[float, int, int, float, list[_Child]]] = []

    def offer(node: int, reach: float, children: list[_Child], number: int) -> None:
        if number < len(children) and reach * children[number][0] > least:
            heappush(queue, (-reach * children[number][0], node, number, reach, children))

    offer(-1, 1.0, candidates(tables, root, calibration, branch, 0, continuing), 0)
    on_branch = {-1: 0}  # node: how many of the branch's tokens end with it
    while queue and len(found.tokens) < budget:
        negative, parent, number, reach, children = heappop(queue)
        _, token, rank, said, matched = children[number]
        node = len(found.tokens)
        found.tokens.append(token)
        found.parents.append(parent)
        found.ranks.append(rank)
        found.said.append(said)
        found.chances.append(-negative)
        found.matched.append(matched)
        offer(parent, reach, children, number + 1)
        if matched:
            on_branch[node] = on_branch[parent] + 1
        if node + 1 < budget:
            below = candidates(tables, token, calibration, branch, on_branch.get(node, -1), continuing)
            offer(node, -negative, below, 0)
    return found
