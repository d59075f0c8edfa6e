"""In-context distribution calibration (section 3.3): what the model would say after the context's tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from ondevice.speculation.largest import Likeliest

K = 3  # Figure 9


class Trie(NamedTuple):
    """A calibrated token tree. tokens: of its nodes. parents: an earlier node, -1 the key."""

    tokens: list[int]
    parents: list[int]


def searched(
    positions: dict[int, list[int]],
    samples: Sequence[tuple[list[int], list[float]]],
    token: int,
    depth: int = 4,
    nodes: int = 8,
    floor: float = 0.02,
    occurrences: int = 8,
) -> Trie:
    """The calibrated tree of a token, depth first (Algorithm of section 3.3), from its first positions in the context.

    Every candidate at a position is looked for in the context, and its own candidates are taken where it stands: at the
    nearest position after, else the last one before. The paper states none of the bounds. depth: tokens of a path.
    floor: least product of probabilities.
    """
    tree = Trie([], [])
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
            if level < depth and (where := positions.get(candidate)):
                after = bisect_right(where, position)
                before = bisect_left(where, position) - 1
                if after < len(where) or before >= 0:
                    visit(where[after if after < len(where) else before], node, reach * p, level + 1)

    for position in positions.get(token, ())[:occurrences]:
        visit(position, -1, 1.0, 1)
    return tree


class PromptCalibration:
    """The K likeliest tokens after every token of the prompt, and no others: nothing is learnt while decoding.

    positions: [token] where it stands in the prompt, rising. samples: [position] (tokens, probabilities). searched: the
    function above, or an experiment's.
    """

    def __init__(self, searched: Callable[..., Trie] = searched) -> None:
        self._searched = searched
        self._likeliest = Likeliest(K)

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

    def tree(self, token: int) -> Trie:
        """The calibrated tree of a token."""
        return self._searched(self.positions, self.samples, token)
