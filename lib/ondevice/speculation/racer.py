"""RACER (Zhang et al., 2026): copied continuations of the last tokens, and beside them a tree of recycled logits."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import count

import numpy as np
from torch import Tensor

from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.largest import largest

BREADTH = 8  # candidates of a token, and children of the root
NGRAM = 10  # tokens of a pattern
SHORTEST = 2  # tokens of a match, the newest one among them
NODES = 10_000  # of the trie of patterns


class _Node:
    """A node of the trie: how many patterns pass through it, and what goes on from it."""

    __slots__ = ("children", "count", "parent", "token")

    def __init__(self, token: int, parent: _Node | None) -> None:
        self.token = token
        self.parent = parent
        self.count = 0
        self.children: dict[int, _Node] = {}


class Patterns:
    """A trie of n-grams with bounded memory: where it is full, the leaf that was used longest ago leaves.

    nodes: the most that it has, the root aside. They must hold one pattern, else ValueError.
    """

    def __init__(self, nodes: int = NODES) -> None:
        if nodes < NGRAM:
            raise ValueError(f"The trie of patterns needs at least {NGRAM} nodes, not {nodes}.")
        self.root = _Node(-1, None)
        self._nodes = nodes
        self._used: OrderedDict[_Node, None] = OrderedDict()  # the longest unused first, no node before its children

    def __len__(self) -> int:
        return len(self._used)

    def add(self, pattern: Sequence[int]) -> None:
        """Count one more occurrence of a pattern, and of each of its beginnings."""
        node = self.root
        for token in pattern:
            below = node.children.get(token)
            if below is None:
                below = node.children[token] = _Node(token, node)
            below.count += 1
            node = below
        self.use(node)
        while len(self._used) > self._nodes:
            oldest, _ = self._used.popitem(last=False)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.token]

    def use(self, node: _Node) -> None:
        """Mark a node and all above it as used now, the uppermost last."""
        above: _Node | None = node
        while above is not None and above is not self.root:
            self._used[above] = None
            self._used.move_to_end(above)
            above = above.parent

    def matches(self, tokens: Sequence[int]) -> list[_Node]:
        """The nodes of all suffixes of `tokens` that begin a pattern, the longest first, down to `SHORTEST` tokens.

        They are the outputs of an Aho-Corasick automaton in its state after `tokens`.
        """
        ends: list[_Node] = []
        for length in range(min(NGRAM, len(tokens)), SHORTEST - 1, -1):
            node = self.root
            for token in tokens[len(tokens) - length :]:
                if token not in node.children:
                    break
                node = node.children[token]
            else:
                ends.append(node)
        return ends


class Racer(Drafter):
    """Drafts a retrieval tree, and fills the budget with a logits tree.

    Source: arXiv 2604.14885, and the authors' code, hkr04/RACER. Retrieval: the n-grams of the text are patterns, and
    the nodes below all matches of the text's end compete by their counts. The most frequent is drafted first, and of
    equal ones the shallower. Logits: breadth first from the root, each child by its rank in its parent's row, which
    holds the likeliest next tokens where the parent's token was last seen. The root has `BREADTH` children. A node's
    first child has half its breadth, or all of it at depth 1, and each further child half of that, at least 1.
    Published settings: patterns of 10 tokens, 10,000 nodes, breadth 8, and 64 rows with the root among them. Rows and
    patterns outlive requests, and the prompt's logits are read.

    Four choices are ours. A node that several matches or both trees share counts once in the budget; the original
    counts it each time, and so drafts less. Matches are looked up from the trie's root, in 54 steps at most; the
    original follows fail links, which it sets after a prompt and loses where it uses a node, and so misses matches.
    Only leaves are evicted; the original evicts nodes with children, too. A row never seen drafts nothing; the original
    drafts token 0. With budget and lost links aside, both drafted the same trees of 300 random texts and rows.

    vocabulary: V, at least `BREADTH`, else ValueError; a row takes 32 bytes per token id. nodes: of the patterns' trie.
    """

    name = "RACER"
    wants_prefill = True
    drafts_trees = True

    def __init__(self, vocabulary: int, nodes: int = NODES) -> None:
        if vocabulary < BREADTH:
            raise ValueError(f"RACER needs at least {BREADTH} token ids, not {vocabulary}.")
        self.vocabulary = vocabulary
        self.rows = np.full((vocabulary, BREADTH), -1, np.int32)  # -1: never seen
        self.patterns = Patterns(nodes)

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt's patterns; those of earlier requests stay."""
        self._prompt = list(prompt)
        self._read = 0
        self._add(self._prompt, len(prompt))

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Enter the candidates of the prompt's tokens."""
        self._enter(self._prompt[start : start + len(logits)], logits)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The retrieval tree, then the logits tree in what is left of the budget."""
        self._add(tokens, len(tokens) - 1)  # as published: a match of the end with itself would have no continuation
        tree = _Tree(budget)
        self._retrieve(tree, self.patterns.matches(tokens[-NGRAM:]))
        self._recycle(tree, tokens[-1])
        return Draft(tree.tokens, tree.parents)

    def observe(self, step: Verified) -> None:
        """Enter the candidates of the root and of every node; of equal tokens, the later node counts."""
        self._enter([step.root, *step.draft.tokens.tolist()], step.logits)

    def _add(self, tokens: Sequence[int], stop: int) -> None:
        """Add the patterns of tokens[:stop] that end in what was not read yet."""
        for end in range(max(self._read + 1, NGRAM), stop + 1):
            self.patterns.add(tokens[end - NGRAM : end])
        self._read = stop

    def _enter(self, tokens: Iterable[int], logits: Tensor) -> None:
        candidates = largest(logits, BREADTH)[1].cpu().numpy()
        last = {token: row for row, token in enumerate(tokens)}
        self.rows[list(last)] = candidates[list(last.values())]

    def _retrieve(self, tree: _Tree, matches: list[_Node]) -> None:
        order = count()  # of equal nodes that below the longer match
        queue: list[tuple[int, int, int, int, _Node]] = []

        def offer(node: _Node, parent: int, depth: int) -> None:
            for child in node.children.values():
                heappush(queue, (-child.count, depth, next(order), parent, child))

        for match in matches:
            offer(match, -1, 1)
        for match in reversed(matches):
            self.patterns.use(match)
        while queue and not tree.full:
            _, depth, _, parent, node = heappop(queue)
            offer(node, tree.add(node.token, parent), depth + 1)

    def _recycle(self, tree: _Tree, root: int) -> None:
        queue = deque([(root, -1, BREADTH, 0)])
        while queue and not tree.full:
            token, node, breadth, depth = queue.popleft()
            narrower = breadth if depth == 1 else breadth // 2
            for candidate in self.rows[token, :breadth].tolist():
                if candidate < 0 or tree.full:
                    break
                queue.append((candidate, tree.add(candidate, node), max(1, narrower), depth + 1))
                narrower //= 2


class _Tree:
    """A draft that grows; equal children of a node are one."""

    def __init__(self, budget: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._budget = budget
        self._nodes: dict[tuple[int, int], int] = {}

    @property
    def full(self) -> bool:
        """Whether the budget is used up."""
        return len(self.tokens) >= self._budget

    def add(self, token: int, parent: int) -> int:
        """The node of a token below a parent."""
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node
