"""DIAA's drafter: a tree from the tables, which every verified node updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ondevice.speculation import Draft, Drafter, Verified
from ondevice.speculation.draft import EMPTY
from ondevice.speculation.largest import Likeliest
from ondevice.speculation.token_recycling import PARENTS, RANKS
from ondevice_papers.diaa.tables import Fresh, Tables, likeliest, overwrite
from ondevice_papers.diaa.tree import Tree, grow, refill

Grow = Callable[[Tables, int, int], Tree]
Update = Callable[[Tables, Sequence[int], Fresh], None]
# Token Recycling's template, breadth-first; its tokens do not matter.
RECYCLING = Draft(np.zeros_like(PARENTS), PARENTS, RANKS)


def every_node(step: Verified) -> list[int]:
    """Rows of the logits that update the tables: of the root and all nodes, breadth first, so that deeper ones win."""
    return [0, *(np.argsort(step.draft.depths, kind="stable") + 1).tolist()]


class Learning(Drafter):
    """What a drafter with tables learns: from the prompt, where it reads it, and from every verified step.

    tables: warmed up, or cold (`Tables.empty`). update: what a forward does to the rows of its tokens.
    learns: the rows of a verified step that update. reads_prompt: whether the prompt's logits update, too; the paper
    has it that the generated tokens do. stale: whether an update waits until the next one, as where it runs beside the
    next forward (computation overlap). Not for two requests at a time.
    """

    drafts_trees = True

    def __init__(
        self,
        tables: Tables,
        update: Update = overwrite,
        learns: Callable[[Verified], list[int]] = every_node,
        reads_prompt: bool = False,
        stale: bool = False,
    ) -> None:
        self.tables, self.update, self.learns, self.stale = tables, update, learns, stale
        self.vocabulary = tables.vocabulary
        self.wants_prefill = reads_prompt
        self._find = Likeliest(tables.k)
        self._waiting: list[tuple[Sequence[int], Fresh]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin a request; the tables stay from request to request."""
        self._prompt = prompt

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Update the tables by the prompt."""
        self.update(self.tables, self._prompt[start : start + len(logits)], likeliest(logits, self._find))

    def observe(self, step: Verified) -> None:
        """Update the tables by what the model said after the root and the nodes."""
        rows = self.learns(step)
        tokens = [step.root, *step.draft.tokens.tolist()]
        fresh = likeliest(step.logits, self._find)
        self._waiting.append(([tokens[row] for row in rows], Fresh(fresh.tokens[rows], fresh.probabilities[rows])))
        self._write(len(self._waiting) - self.stale)

    def end(self, tokens: Sequence[int]) -> None:
        """End a request: the updates that still wait are written into the tables."""
        self._write(len(self._waiting))

    def _write(self, count: int) -> None:
        for keys, fresh in self._waiting[:count]:
            self.update(self.tables, keys, fresh)
        del self._waiting[:count]


class Diaa(Learning):
    """Drafts a tree from the tables.

    grow: the tree below a token within a budget. template: where given, every draft has this shape, cut to the budget,
    and no tree is grown. refresh: steps from one growing of the tree to the next; in between its tokens are refilled
    by rank. learning: of `Learning`. Raises ValueError on a refresh below 1, and on a tree that is none.
    """

    name = "DIAA"

    def __init__(
        self, tables: Tables, *, grow: Grow = grow, template: Draft | None = None, refresh: int = 1, **learning: Any
    ) -> None:
        if refresh < 1:
            raise ValueError(f"A tree is grown every step or more seldom, not every {refresh} steps.")
        super().__init__(tables, **learning)
        self.grow, self.template, self.refresh = grow, template, refresh

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin a request without the last one's tree."""
        super().begin(prompt)
        self._shape = EMPTY
        self._age = 0

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A tree grown below the last token, or the last tree's shape refilled."""
        root = tokens[-1]
        if self.template is not None:
            return refill(self.tables, root, self.template.within(budget, len(self.template)))
        if self._age % self.refresh and len(self._shape):
            self._age += 1
            return refill(self.tables, root, self._shape)
        tree = self.grow(self.tables, root, budget)
        if len(tree) > budget:
            raise ValueError(f"The tree has {len(tree)} nodes; the budget is {budget}.")
        self._shape = tree.draft()
        self._age = 1
        return self._shape


def diaa(vocabulary: int) -> Diaa:
    """A drafter whose tables are empty, until the prompt's logits fill them. vocabulary: number of token ids."""
    return Diaa(Tables.empty(vocabulary), reads_prompt=True)
