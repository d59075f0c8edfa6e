"""In-context distribution calibration (section 3.3): what the model would say after the context's tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ondevice.speculation import Verified
from ondevice.speculation.largest import Likeliest, largest

K = 8  # candidates a row: 4 gave 1 to 3 percent fewer tokens a pass on the validation tasks
PRINTED_K = 3  # Figure 9
CAPACITY = 2**16  # keys, of some 400 bytes each; once full, the older half goes


class Row(NamedTuple):
    """What the model said after a key. order: the key's length in tokens; 0 where the context does not have it.

    tokens: the candidates, likeliest first. chances: their probabilities.
    """

    order: int
    tokens: Sequence[int]
    chances: Sequence[float]


NOTHING = Row(0, (), ())


def learn(table: dict[int | tuple[int, int], Row], keys: Sequence[tuple[int, int]], rows: Sequence[Row]) -> None:
    """Keep what was said last after two tokens, and after the second of them alone.

    keys: (before, token) of each row of logits. rows: their K candidates.
    """
    for (before, token), (_, tokens, chances) in zip(keys, rows, strict=True):
        table[before, token] = Row(2, tokens, chances)
        table[token] = Row(1, tokens, chances)


def look_up(table: dict[int | tuple[int, int], Row], before: int, token: int) -> Row:
    """The row of the last two tokens, else of the last one."""
    return table.get((before, token)) or table.get(token) or NOTHING


@torch.inference_mode()
def likeliest(logits: Tensor) -> list[Row]:
    """The K likeliest tokens of each row of logits [n, V]; their probabilities are among these K.

    A softmax over all of V takes several times as long and drafts no better: rates scale what a row promises.
    """
    values, tokens = largest(logits, K)
    chances = values.float().softmax(-1)
    return [Row(2, *both) for both in zip(tokens.tolist(), chances.tolist(), strict=True)]


class Calibration:
    """Our table: K candidates after the last two tokens, else after the last, from every row of logits there is.

    That is the prompt's, and those of every verified node, accepted or not. It stays for the next request, as the
    history of outputs does. vocabulary: V, at least K. learn, look_up: the functions above, or an experiment's.
    """

    def __init__(
        self, vocabulary: int, capacity: int = CAPACITY, *, learn: Callable[..., None] = learn,
        look_up: Callable[..., Row] = look_up,
    ) -> None:  # fmt: skip
        if vocabulary < K:
            raise ValueError(f"A calibration needs at least {K} token ids, not {vocabulary}.")
        self.vocabulary, self.capacity, self._learn, self._look_up = vocabulary, capacity, learn, look_up
        self.table: dict[int | tuple[int, int], Row] = {}
        self._prompt: list[int] = []
        self._before = -1

    def begin(self, prompt: Sequence[int]) -> None:
        """Take the prompt of a new request; drop the older half of a full table."""
        self._prompt = list(prompt)
        self._before = int(prompt[-1])
        if len(self.table) > self.capacity:
            self.table = dict(list(self.table.items())[len(self.table) // 2 :])

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Logits [c, V] after the prompt's tokens from `start` on; only their candidates are kept."""
        tokens = self._prompt[start : start + len(logits)]
        befores = [self._prompt[start - 1] if start else -1, *tokens[:-1]]
        self._learn(self.table, list(zip(befores, tokens, strict=True)), likeliest(logits))

    def observe(self, step: Verified) -> None:
        """A step was verified: every node's row is what the model says after the node and its parent."""
        tokens = [step.root, *step.draft.tokens.tolist()]
        befores = [self._before, *(tokens[parent + 1] for parent in step.draft.parents.tolist())]
        self._learn(self.table, list(zip(befores, tokens, strict=True)), likeliest(step.logits))
        self._before = tokens[1 + step.path[-1]] if step.path else step.root

    def row(self, before: int, token: int) -> Row:
        """The candidates after two tokens, as `look_up` finds them."""
        return self._look_up(self.table, before, token)


# The paper's rule


class Trie(NamedTuple):
    """A calibrated token tree. tokens: of its nodes. parents: an earlier node, -1 the key. chances: of the path."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]

    def branches(self) -> list[list[int]]:
        """Tokens of the paths from the key to each leaf."""
        inner = set(self.parents)
        branches = []
        for leaf in (node for node in range(len(self.tokens)) if node not in inner):
            path = []
            node = leaf
            while node >= 0:
                path.append(self.tokens[node])
                node = self.parents[node]
            branches.append(path[::-1])
        return branches


def searched(
    positions: dict[int, list[int]], samples: Sequence[tuple[list[int], list[float]]], token: int,
    depth: int = 4, nodes: int = 8, floor: float = 0.02, occurrences: int = 8,
) -> Trie:  # fmt: skip
    """The calibrated tree of a token, depth first (Algorithm of section 3.3), from its first positions in the context.

    Every candidate at a position is looked for in the context, and its own candidates are taken where it stands: at the
    nearest position after, else the last one before. The paper states none of the bounds. depth: tokens of a path.
    floor: least product of probabilities.
    """
    tree = Trie([], [], [])
    node_of = dict[tuple[int, int], int]()

    def visit(position: int, parent: int, reach: float, level: int) -> None:
        for candidate, p in zip(*samples[position], strict=True):
            node = node_of.get((parent, candidate))
            if reach * p < floor or (node is None and len(node_of) == nodes):
                return
            if node is None:
                node = node_of[parent, candidate] = len(node_of)
                tree.tokens.append(candidate)
                tree.parents.append(parent)
                tree.chances.append(0.0)
            tree.chances[node] = max(tree.chances[node], reach * p)
            if level < depth and (where := positions.get(candidate)):
                after = bisect_right(where, position)
                before = bisect_left(where, position) - 1
                if after < len(where) or before >= 0:
                    visit(where[after if after < len(where) else before], node, reach * p, level + 1)

    for position in positions.get(token, ())[:occurrences]:
        visit(position, -1, 1.0, 1)
    return tree


class Printed:
    """The paper's calibration: the K = 3 likeliest tokens (Figure 9) after every token of the prompt, and no others.

    positions: [token] where it stands in the prompt, rising. samples: [position] (tokens, probabilities). searched: the
    function above, or an experiment's.
    """

    def __init__(self, vocabulary: int, *, searched: Callable[..., Trie] = searched) -> None:
        self.vocabulary = vocabulary
        self._searched = searched
        self._likeliest = Likeliest(PRINTED_K)

    def begin(self, prompt: Sequence[int]) -> None:
        """A request comes: the table is of its prompt alone."""
        self._prompt = list(prompt)
        self.positions: defaultdict[int, list[int]] = defaultdict(list)
        self.samples: list[tuple[list[int], list[float]]] = []

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Logits [c, V] after the prompt's tokens from `start` on."""
        for position, token in enumerate(self._prompt[start : start + len(logits)], start):
            self.positions[token].append(position)
        self.samples += zip(*(part.tolist() for part in self._likeliest(logits)), strict=True)

    def observe(self, step: Verified) -> None:
        """Ignore a verified step: the paper learns nothing while decoding."""

    def tree(self, token: int) -> Trie:
        """The calibrated tree of a token."""
        return self._searched(self.positions, self.samples, token)
