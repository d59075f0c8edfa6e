"""DIAA's drafter: a tree from the tables, which every verified node updates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ondevice.diaa.overlap import Background, Foreground
from ondevice.diaa.tables import Tables
from ondevice.diaa.tree import Growth, grow, refill
from ondevice.diaa.updates import Fresh, Rule
from ondevice.speculation import Draft, Drafter, Verified
from ondevice.speculation.draft import EMPTY
from ondevice.speculation.token_recycling import PARENTS, RANKS

if TYPE_CHECKING:
    from torch import Tensor

# Token Recycling's template, breadth-first; its tokens do not matter.
RECYCLING = Draft(np.zeros_like(PARENTS), PARENTS, RANKS)


class Diaa(Drafter):
    """Drafts by the two tables, which it writes into and keeps from one request to the next.

    Its parts, each of which the ablation switches off:
    tables: warmed up, or cold (`Tables.empty`).
    growth: how the dynamic tree grows. template: where given, every draft has this shape instead, cut to the budget,
        and no tree is grown. `RECYCLING` makes it Token Recycling, but for empty rows, which draft nothing here.
    overlap: whether updates run beside the next forward, which makes the tables one step stale. For an accelerator:
        on two cores staleness costs more than the thread saves.
    Beyond these: refresh: steps from one growing of the tree to the next; in between its shape is kept and its tokens
        are refilled by rank. rule: how updates enter the tables. reads_prompt: whether the prompt's logits do, too.
    Not for two requests at a time. Raises ValueError on a refresh below 1.
    """

    drafts_trees = True

    def __init__(
        self, tables: Tables, growth: Growth | None = None, *, refresh: int = 1, template: Draft | None = None,
        overlap: bool = False, rule: Rule | None = None, reads_prompt: bool = False, name: str = "DIAA",
    ) -> None:  # fmt: skip
        if refresh < 1:
            raise ValueError(f"A tree is grown every step or more seldom, not every {refresh} steps.")
        self.tables, self.growth, self.refresh = tables, growth or Growth(), refresh
        self.template, self.rule, self.name = template, rule or Rule(), name
        self.vocabulary = tables.vocabulary
        self.wants_prefill = reads_prompt
        self._updates: Background | Foreground = Background(tables.k) if overlap else Foreground(tables.k)
        self._shape, self._age = EMPTY, 0
        self._prompt: Sequence[int] = ()

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last request's tree; its tables stay."""
        self._updates.finish()
        self._shape, self._prompt = EMPTY, list(prompt)

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Update the tables by the prompt."""
        keys = np.array(self._prompt[start : start + len(logits)])
        self._updates.submit(logits, partial(self._write, keys, np.arange(len(keys))))

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A tree grown below the last token, or the last tree's shape refilled."""
        root = tokens[-1]
        if self.template is not None:
            return refill(self.tables, root, self.template.within(budget, len(self.template)))
        self._age += 1
        if self._age >= self.refresh or not len(self._shape) or len(self._shape) > budget:
            self._shape, self._age = self._grown(root, budget), 0
            return self._shape
        return refill(self.tables, root, self._shape)

    def observe(self, step: Verified) -> None:
        """Update the tables by all verified nodes, breadth first: where a token stands twice, the later node wins."""
        if self.rule.accepted_only:
            rows = np.array([0, *(node + 1 for node in step.path)])
        else:
            rows = np.concatenate([[0], 1 + np.argsort(step.draft.depths, kind="stable")])
        keys = np.concatenate([[step.root], step.draft.tokens])[rows]
        self._updates.submit(step.logits, partial(self._write, keys, rows))

    def end(self, tokens: Sequence[int]) -> None:
        """Bring the tables up to date."""
        self._updates.finish()

    def _grown(self, root: int, budget: int) -> Draft:
        return grow(self.tables, root, budget, self.growth).draft()

    def _write(self, keys: NDArray[np.int64], rows: NDArray[np.int64], fresh: Fresh) -> None:
        self.rule.apply(self.tables, keys, Fresh(fresh.tokens[rows], fresh.probabilities[rows]))
