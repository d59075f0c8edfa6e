"""A model that replays known answers: what a drafter would do on them, without a forward.

Greedy decoding is lossless, so of a known answer only the rows of accepted nodes matter, and these are known. A drafter
that reads logits, as look-up tables do, needs the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ondevice.causal_lm import TokenTree


class ReplayedModel:
    """In place of a `CausalLM`. answers: by prompt the answer's tokens, the end token with them where it came.

    tree_refusal: why the model that gave them can verify only chains; None where it verifies trees.
    Logits are 1 at the token that comes next, in the rows of accepted nodes, and 0 elsewhere.
    """

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        vocabulary: int,
        context: int,
        tree_refusal: str | None = None,
    ) -> None:
        self.answers = answers
        self.vocabulary = vocabulary
        self.context = context
        self.tree_refusal = tree_refusal

    def require_trees(self) -> None:
        """Nothing is refused: trees can be verified."""

    def start(self, capacity: int = 0) -> Any:
        """A session of one request."""
        return _Session(self)


class _Session:
    def __init__(self, lm: ReplayedModel) -> None:
        self._lm = lm
        self.length = 0

    def prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        self._prompt = len(prompt)
        self._answer = self._lm.answers[tuple(prompt)]
        self.length = self._prompt
        return self._logits(1, {0: 0})[0]

    def verify(self, tree: TokenTree) -> torch.Tensor:
        below = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        children = {key: row for row, key in reversed(list(enumerate(below)))}
        rows = dict[int, int]()
        row = 0
        for index in range(self.length - self._prompt + 1, len(self._answer)):  # from what comes after the root
            rows[row] = index
            if (row := children.get((row, self._answer[index]), -1)) < 0:
                break
        return self._logits(len(tree), rows)

    def keep(self, path: Sequence[int]) -> None:
        self.length += len(path)

    def _logits(self, rows: int, next_tokens: Mapping[int, int]) -> torch.Tensor:
        logits = torch.zeros(rows, self._lm.vocabulary)
        for row, index in next_tokens.items():
            logits[row, self._answer[index]] = 1
        return logits
