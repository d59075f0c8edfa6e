"""The dynamic token tree, grown best-first from the tables within a budget (Dynamic Tree Construction, Fig. 7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from ondevice.speculation import Draft
from ondevice_papers.diaa.tables import NONE, Tables

ROOT = -1


@dataclass(frozen=True)
class Tree:
    """A tree below a root token, nodes in the order of their insertion.

    parents: -1 is the root. ranks: places in the parents' rows, from 1. paths: product of the tables' probabilities
    from the root to each node. depths: steps from the root.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    paths: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, rank: int, path: float) -> int:
        """Insert a node; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.ranks.append(rank)
        self.paths.append(path)
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        return len(self) - 1

    def at(self, node: int, root: int) -> tuple[int, float, int]:
        """(token, path, depth) of a node, or of the root."""
        return (root, 1.0, 0) if node == ROOT else (self.tokens[node], self.paths[node], self.depths[node])

    def draft(self, nodes: int | None = None) -> Draft:
        """What is to be verified: the first `nodes` nodes, by default all."""
        return Draft(self.tokens[:nodes], self.parents[:nodes], self.ranks[:nodes])


def grow(tables: Tables, root: int, budget: int, delta: float = 0.8, alpha: float = 0.7, tau: float = 5e-3) -> Tree:
    """The tree below the token `root`: always the candidates of the node with the best score next (Fig. 7, Eq. 2).

    score = (product of p from the root) * delta^(depth - 1) * alpha^(rank - 1)

    Candidates below tau are left out, but for the root's own. Of equal scores the earlier node comes first.
    """
    tree = Tree()
    queue = [(-1.0, ROOT)]
    while queue and len(tree) < budget:
        _, node = heappop(queue)
        token, path, depth = tree.at(node, root)
        for rank, (candidate, p) in enumerate(tables.row(token)):
            score = path * p * delta**depth * alpha**rank
            if len(tree) == budget or (score < tau and node != ROOT):
                break  # scores fall with the rank
            heappush(queue, (-score, tree.add(candidate, node, rank + 1, path * p)))
    return tree


def refill(tables: Tables, root: int, shape: Draft) -> Draft:
    """A tree of the same shape below another root: every node takes the token of its rank in its parent's row.

    A node whose place is empty is left out with all below it: there is nothing to verify.
    """
    tree = Tree()
    numbers = {ROOT: ROOT}  # in the new tree, by the node of the shape
    for node, (parent, rank) in enumerate(zip(shape.parents.tolist(), shape.ranks.tolist(), strict=True)):
        if parent in numbers and rank <= tables.k:
            above = numbers[parent]
            token = int(tables.tokens[root if above == ROOT else tree.tokens[above], rank - 1])
            if token != NONE:
                numbers[node] = tree.add(token, above, rank, 0.0)
    return tree.draft()
