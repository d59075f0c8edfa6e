"""One tree over a mixture of what texts and the model's own last logits say comes next, likeliest nodes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.logit_tables import NOTHING, LogitTables, Share
from ondevice.speculation.ngrams import NGrams
from ondevice.speculation.store import ORDERS, Store

LEAST = 1e-3  # a node's least chance
WIDEST = 12  # children of a node
RECENT = 32  # positions of a match that are counted
CLASSES = (0, 1, 2, 3, 4, 4, 5, 5, 5, 6)  # of matches in the request's text by length; longer ones are of the last
# Tokens of a prompt beyond which its logits cost more time than they save: the output layer takes 1 to 2 % of a pass
# for each prompt token, and brings some 14 % more tokens per pass.
LONGEST_READ = 512
KEPT = 50_000  # tokens of answers, which take some 60 MB
SHAPE = max(CLASSES) + 1, 1 + ORDERS  # of weights, before their sources: by the request's match, and by others
SEEN = 3  # whether logits were seen after neither the last token nor the last two, after the last alone, or after both
LOGITS_SHAPE = SEEN, 2, *SHAPE  # of weights with the logits' sources; the second index is 1 for the root's children
TEXTS = 4  # sources of every mixture
LOGITS = 7  # sources of the logits
LIGHT = 0.01  # a weight below which a source is left out where there are logits, to save time
SEPARATOR = -1  # between answers

Class = tuple[int, int, int, int]  # of a context, an index into LOGITS_SHAPE
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

    weights: by the class of a context and by source (`fitting`). Texts are the request's counts, its first and its
    newest match, earlier answers, then the stores. Behind them come the sources from logits (`LogitTables`): the row of
    the last two tokens and its first choice, the last token's mean and its newest row's first choice, siblings, what
    came after siblings, and recent candidates. Weights [*LOGITS_SHAPE, texts + LOGITS] are of all. With weights
    [*SHAPE, texts], or where the logits' sources weigh nothing, no logits are read. By default texts weigh alike. A
    prompt's own logits are read up to `LONGEST_READ` tokens.
    seconds: of a pass that drafts 0, 1 .. nodes, the drafting with it; None drafts what the budget allows. Where no
    node pays, none is drafted, which costs one look-up.
    tables: of the logits, where they are shared or have another size.
    Raises ValueError where the weights are of other sources.
    """

    name = "mixture"
    drafts_trees = True

    def __init__(
        self,
        weights: NDArray[np.float64] | None = None,
        stores: Sequence[Store] = (),
        *,
        seconds: NDArray[np.float64] | None = None,
        tables: LogitTables | None = None,
        mix: Callable[..., list[tuple[int, float]]] = mix,
        grow: Callable[..., Any] = grow_likeliest,
        size: Callable[..., int] = most_per_second,
    ) -> None:
        texts = TEXTS + len(stores)
        weights = np.full((*SHAPE, texts), 1 / texts) if weights is None else weights
        if weights.shape not in ((*SHAPE, texts), (*LOGITS_SHAPE, texts + LOGITS)):
            shapes = f"{[*SHAPE, texts]}, or {[*LOGITS_SHAPE, texts + LOGITS]} with logits"
            raise ValueError(f"The weights are {list(weights.shape)}; for these sources they are {shapes}.")
        self.wants_prefill = self._reads = weights.shape[-1] > texts and bool(weights[..., texts:].any())
        if self._reads:
            weights = np.where(weights < LIGHT, 0.0, weights)
        else:
            weights = np.broadcast_to(weights[..., :texts], (*LOGITS_SHAPE, texts))
        self.weights, self.stores, self.seconds = weights.tolist(), stores, seconds
        self.mix, self.grow, self.size = mix, grow, size
        # A node pays where its chance is beyond its cost, at the rate of plain passes or a better one.
        self.least = LEAST if seconds is None else max(LEAST, float(np.diff(seconds).min() / seconds[0]))
        self.answers = NGrams(longest=ORDERS)
        self.tables = LogitTables() if tables is None else tables

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt; earlier answers and rows of logits stay."""
        self.wants_prefill = self._reads and len(prompt) <= LONGEST_READ
        self.text = NGrams(prompt)
        self._prompt = len(prompt)
        if self._reads:
            self.tables.begin(prompt)

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Enter the prompt's logits into the tables."""
        self.tables.prefilled(start, logits)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The likeliest nodes below the last token."""
        self.text.extend(tokens[len(self.text) :])
        most = budget if self.seconds is None else min(budget, len(self.seconds) - 1)
        context = list(tokens[-self.text.longest :])

        def children(prefix: list[int]) -> tuple[list[tuple[int, float]], int]:
            (seen, below_root, kind, order), reach, shares = self.sources(prefix, prefix is context)
            weighted = zip(self.weights[seen][below_root][kind][order], shares, strict=True)
            used = [(weight, share) for weight, share in weighted if weight and share]
            return self.mix(*zip(*used, strict=True)) if used else [], reach

        drafted, parents, chances = self.grow(children, context, most, self.least)
        pay = len(drafted) if self.seconds is None else self.size(chances, self.seconds)
        return Draft(drafted[:pay], parents[:pay])

    def observe(self, step: Verified) -> None:
        """Enter the logits after the root and all nodes into the tables."""
        if self._reads:
            text = self.text.text
            before = text[-2] if len(text) > 1 and text[-1] == step.root else None
            self.tables.observe(before, step)

    def end(self, tokens: Sequence[int]) -> None:
        """Keep the answer, for later requests; after very many of them, begin anew."""
        if len(self.answers) > KEPT:
            self.answers = NGrams(longest=ORDERS)
        self.answers.extend([*tokens[max(0, self._prompt - ORDERS) :], SEPARATOR])

    def sources(self, context: list[int], below_root: bool) -> tuple[Class, int, list[Share]]:
        """(class, how many of its last tokens count, p by token of every source) of what comes after a context."""
        length, positions = self.text.after(context)
        text = self.text.text
        ends: list[Share] = [{text[positions[0]]: 1.0}, {text[positions[-1]]: 1.0}] if positions else [{}, {}]
        order, answer_positions = self.answers.after(context, ORDERS)
        shares = [_counted(self.text, positions), *ends, _counted(self.answers, answer_positions)]
        for store in self.stores:
            longest, share = store.after(context)
            order = max(order, longest)
            shares.append(share)
        seen = 0
        reach = max(length, order)
        if self._reads:
            tables = self.tables
            pair, mean, single = tables.after(context[-2] if len(context) > 1 else SEPARATOR, context[-1])
            shares += (pair, _first(pair), mean, _first(single))
            shares += (tables.siblings, tables.after_siblings) if below_root else (NOTHING, NOTHING)
            shares.append(tables.candidates)
            seen = 2 if pair else 1 if single else 0
            reach = max(reach, 2)
        return (seen, int(below_root), CLASSES[min(length, len(CLASSES) - 1)], order), reach, shares


def _first(row: Share) -> Share:
    """The whole chance for the likeliest token of a row."""
    return {next(iter(row)): 1.0} if row else NOTHING


def _counted(text: NGrams, positions: Sequence[int]) -> Share:
    """The share of each token among those at the last positions."""
    recent = positions[-RECENT:]
    share = dict[int, float]()
    for position in recent:
        token = text.text[position]
        share[token] = share.get(token, 0.0) + 1 / len(recent)
    share.pop(SEPARATOR, None)
    return share
