"""The dynamic token tree, grown best-first from the tables within a budget (Dynamic Tree Construction, Fig. 7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from ondevice.diaa.tables import Tables
from ondevice.speculation import Draft


@dataclass(frozen=True)
class Growth:
    """How a tree grows; the values are Fig. 7's, the only ones printed.

    delta: decay a level. alpha: decay a rank. tau: least score of a node below the first level.
    ranks: whether a path's topk is its `last` node's rank, as printed, or the `sum` over its nodes, which makes scores
        fall along every path.
    counts: what the budget limits: drafted `nodes`; these and the `root`; or the printed C(T), the `paths` from root
        to leaf added up, which counts shared nodes repeatedly.
    """

    delta: float = 0.8
    alpha: float = 0.7
    tau: float = 5e-3
    ranks: Literal["last", "sum"] = "last"
    counts: Literal["nodes", "root", "paths"] = "nodes"

    def __post_init__(self) -> None:
        if not (0 < self.delta <= 1 and 0 < self.alpha <= 1 and self.tau >= 0):
            raise ValueError(f"Decays are in (0, 1] and tau is not negative: {self.delta}, {self.alpha}, {self.tau}.")
        if self.ranks not in ("last", "sum") or self.counts not in ("nodes", "root", "paths"):
            raise ValueError(f"Ranks: last or sum; counts: nodes, root or paths; not {self.ranks} and {self.counts}.")


@dataclass(frozen=True)
class Tree:
    """A grown tree, nodes in the order of insertion: tokens, parents (-1 is the root), ranks from 1.

    paths: product of the tables' probabilities down to each node. scores: s of Eq. 2.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    paths: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def draft(self) -> Draft:
        """What is to be verified."""
        return Draft(self.tokens, self.parents, self.ranks)


def grow(tables: Tables, root: int, budget: int, growth: Growth) -> Tree:
    """The tree below the token `root`: its own candidates first, then those of the node with the best score.

    Candidates come in rank order; those with a score below tau are left out, except on the first level. Equal scores
    go to the earlier node. Growth ends where the next node would exceed the budget, or nothing is left.
    """
    tree = Tree()
    widths = [growth.alpha**rank for rank in range(tables.k)]
    depths: list[int] = []
    products: list[float] = []  # of the width decays that a node hands on
    queue: list[tuple[float, int]] = []
    spent = int(growth.counts == "root")
    by_paths, summed = growth.counts == "paths", growth.ranks == "sum"
    node, token, reach, depth, width, least = -1, root, 1.0, 0, 1.0, 0.0
    while spent < budget:
        decay = growth.delta**depth
        for rank, (candidate, probability) in enumerate(zip(*tables.row(token), strict=True)):
            if candidate < 0:
                break
            product = width * widths[rank]
            score = reach * probability * decay * product
            price = depth + 1 if by_paths and rank else 1  # a first child makes a path longer, others begin one
            if score < least or spent + price > budget:  # scores fall with the rank: none after this one passes
                break
            spent += price
            heappush(queue, (-score, len(tree.tokens)))
            tree.tokens.append(candidate)
            tree.parents.append(node)
            tree.ranks.append(rank + 1)
            tree.paths.append(reach * probability)
            tree.scores.append(score)
            depths.append(depth + 1)
            products.append(product if summed else 1.0)
        if not queue:
            break
        node = heappop(queue)[1]
        token, reach, depth, width = tree.tokens[node], tree.paths[node], depths[node], products[node]
        least = growth.tau
    return tree


def refill(tables: Tables, root: int, shape: Draft) -> Draft:
    """A tree of the same shape below another root: every node takes the token of its rank in its parent's row.

    A node whose place is empty is left out with all below it: there is nothing to verify.
    """
    tokens: list[int] = []
    parents: list[int] = []
    ranks: list[int] = []
    places = {-1: -1}
    read = tables.tokens.item
    for node, (parent, rank) in enumerate(zip(shape.parents.tolist(), shape.ranks.tolist(), strict=True)):
        above = places.get(parent)
        if above is None or rank > tables.k:
            continue
        token = read(root if above < 0 else tokens[above], rank - 1)
        if token >= 0:
            places[node] = len(tokens)
            tokens.append(token)
            parents.append(above)
            ranks.append(rank)
    return Draft(tokens, parents, ranks)
