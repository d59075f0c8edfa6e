"""One tree over a mixture of what the request, earlier answers and stores say comes next, likeliest nodes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.ngrams import NGrams
from ondevice.speculation.store import ORDERS, Store

LEAST = 1e-3  # a node's least chance
WIDEST = 12  # children of a node
RECENT = 32  # positions of a match that are counted
CLASSES = (0, 1, 2, 3, 4, 4, 5, 5, 5, 6)  # of matches in the request's text by length; longer ones are of the last
KEPT = 50_000  # tokens of answers, which take some 60 MB
SHAPE = max(CLASSES) + 1, 1 + ORDERS  # of weights, before their sources
SEPARATOR = -1  # between answers

Share = dict[int, float]  # p by token
Children = Callable[[list[int]], tuple[list[tuple[int, float]], int]]


def mix(weights: Sequence[float], shares: Sequence[Share]) -> list[tuple[int, float]]:
    """(token, chance), the likeliest first, of p(x | context) = sum over sources s of w_s * p_s(x | context)."""
    mixed: Share = {}
    for weight, share in zip(weights, shares, strict=True):
        for token, p in share.items():
            mixed[token] = mixed.get(token, 0.0) + weight * p
    return sorted(mixed.items(), key=lambda pair: -pair[1])[:WIDEST]


def grow_likeliest(
    children: Children, context: list[int], budget: int, least: float = LEAST
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and chances of the `budget` likeliest nodes: a node's chance is the product down its path.

    children: (token, chance) after a context, the likeliest first, and how much of the context they rest on. No node
    is likelier than its parent or the sibling before it, so that the first n nodes are the best n. least: chance below
    which none is wanted.
    """
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    queue: list[tuple[Any, ...]] = []
    order = count()

    def offer(above: float, parent: int, number: int, candidates: list[tuple[int, float]], prefix: list[int]) -> None:
        if number < len(candidates) and above * candidates[number][1] > least:
            heappush(queue, (-above * candidates[number][1], next(order), above, parent, number, candidates, prefix))

    def expand(chance: float, node: int, prefix: list[int]) -> None:
        candidates, length = children(prefix)
        offer(chance, node, 0, candidates, prefix[len(prefix) - length :])

    expand(1.0, -1, context)
    while queue and len(tokens) < budget:
        chance, _, above, parent, number, candidates, prefix = heappop(queue)
        tokens.append(candidates[number][0])
        parents.append(parent)
        chances.append(-chance)
        offer(above, parent, number + 1, candidates, prefix)
        if len(tokens) < budget:
            expand(-chance, len(tokens) - 1, [*prefix, candidates[number][0]])
    return tokens, parents, chances


def most_per_second(chances: Sequence[float], seconds: NDArray[np.float64]) -> int:
    """How many of a tree's first nodes to verify: the most expected tokens for the time of the pass.

    chances: of the nodes, falling. seconds: [1 + n] of a pass with 0, 1 .. nodes.
    """
    expected = 1 + np.cumsum([0.0, *chances])
    return int(np.argmax(expected / seconds[: len(expected)]))


class Mixture(Drafter):
    """Drafts the likeliest nodes of all, as many as the budget allows, or as pay.

    weights: [*SHAPE, sources], by class of the match in the request and longest order elsewhere (`fitting`); by default
    all weigh alike. Sources are the request's counts, its first and its newest match, earlier answers, then the stores.
    seconds: of a pass that drafts 0, 1 .. nodes, the drafting with it; None drafts what the budget allows. Where no
    node pays, none is drafted, which costs one look-up.
    Raises ValueError where the weights are of other sources.
    """

    name = "mixture"
    drafts_trees = True

    def __init__(
        self, weights: NDArray[np.float64] | None = None, stores: Sequence[Store] = (), *,
        seconds: NDArray[np.float64] | None = None,
        mix: Callable[..., list[tuple[int, float]]] = mix, grow: Callable[..., Any] = grow_likeliest,
        size: Callable[..., int] = most_per_second,
    ) -> None:  # fmt: skip
        many = 4 + len(stores)
        weights = np.full((*SHAPE, many), 1 / many) if weights is None else weights
        if weights.shape != (*SHAPE, many):
            raise ValueError(f"The weights are {list(weights.shape)}; for these sources they are {[*SHAPE, many]}.")
        self.weights, self.stores, self.seconds = weights.tolist(), stores, seconds
        self.mix, self.grow, self.size = mix, grow, size
        # A node pays where its chance is beyond its cost, at the rate of plain passes or a better one.
        self.least = LEAST if seconds is None else max(LEAST, float(np.diff(seconds).min() / seconds[0]))
        self.answers = NGrams(longest=ORDERS)

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt; earlier answers stay."""
        self.text = NGrams(prompt)
        self._prompt = len(prompt)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The likeliest nodes below the last token."""
        self.text.extend(tokens[len(self.text) :])
        most = budget if self.seconds is None else min(budget, len(self.seconds) - 1)
        drafted, parents, chances = self.grow(self._children, list(tokens[-self.text.longest :]), most, self.least)
        pay = len(drafted) if self.seconds is None else self.size(chances, self.seconds)
        return Draft(drafted[:pay], parents[:pay])

    def end(self, tokens: Sequence[int]) -> None:
        """Keep the answer, for later requests; after very many of them, begin anew."""
        if len(self.answers) > KEPT:
            self.answers = NGrams(longest=ORDERS)
        self.answers.extend([*tokens[max(0, self._prompt - ORDERS) :], SEPARATOR])

    def sources(self, context: list[int]) -> tuple[int, int, int, list[Share]]:
        """(length of the request's match, its class, longest order elsewhere, p by token of every source)."""
        length, positions = self.text.after(context)
        text = self.text.text
        ends: list[Share] = [{text[positions[0]]: 1.0}, {text[positions[-1]]: 1.0}] if positions else [{}, {}]
        order, answer_positions = self.answers.after(context, ORDERS)
        shares = [_counted(self.text, positions), *ends, _counted(self.answers, answer_positions)]
        for store in self.stores:
            longest, share = store.after(context)
            order = max(order, longest)
            shares.append(share)
        return length, CLASSES[min(length, len(CLASSES) - 1)], order, shares

    def _children(self, context: list[int]) -> tuple[list[tuple[int, float]], int]:
        length, kind, order, shares = self.sources(context)
        return self.mix(self.weights[kind][order], shares), max(length, order)


def _counted(text: NGrams, positions: Sequence[int]) -> Share:
    """The share of each token among those at the last positions."""
    recent = positions[-RECENT:]
    share = dict[int, float]()
    for position in recent:
        token = text.text[position]
        share[token] = share.get(token, 0.0) + 1 / len(recent)
    share.pop(SEPARATOR, None)
    return share
