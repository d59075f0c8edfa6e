"""How what a forward said after a token goes into the tables (Fig. 6: add and replace)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ondevice.diaa.tables import NONE, Tables
from ondevice.speculation.largest import largest

if TYPE_CHECKING:
    from torch import Tensor


class Fresh(NamedTuple):
    """The likeliest tokens after some nodes: tokens [n, K] int64 and probabilities [n, K] float32, falling."""

    tokens: NDArray[np.int64]
    probabilities: NDArray[np.float32]


class Likeliest:
    """Finds the k likeliest tokens of each row of logits [n, V], and their softmax in float32 over the vocabulary.

    It keeps the float32 copy that it works on: touching fresh memory for it took longer than the search.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._room = torch.empty(0, 0)

    @torch.inference_mode()
    def __call__(self, logits: Tensor) -> Fresh:
        """The likeliest tokens and their probabilities."""
        scores = self._copy(logits)
        values, tokens = largest(scores, self._k)
        top = values[:, :1]
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        return Fresh(tokens.cpu().numpy(), ((values - top).exp() / total).cpu().numpy())

    def _copy(self, logits: Tensor) -> Tensor:
        rows, width = logits.shape
        if len(self._room) < rows or self._room.shape[1] != width or self._room.device != logits.device:
            self._room = torch.empty(rows, width, device=logits.device)
        return self._room[:rows].copy_(logits)


def likeliest(logits: Tensor, k: int) -> Fresh:
    """The same once."""
    return Likeliest(k)(logits)


@dataclass(frozen=True)
class Rule:
    """How a row takes fresh entries in.

    kind: `overwrite`: the fresh row replaces the old one. It is what add and replace come to where all K fresh entries
        of a node are fed in, as the text says ("all of the generated tokens"), and none of them evicts another.
        `replace`: the first `fresh` entries come in and push out the least probable old ones.
        `union`: the K most probable of fresh and old entries, where both have a token with its fresh probability.
    accepted_only: whether only the root and accepted nodes update, instead of every verified node.
    """

    kind: Literal["overwrite", "replace", "union"] = "overwrite"
    fresh: int = 1
    accepted_only: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("overwrite", "replace", "union"):
            raise ValueError(f"There is no update {self.kind!r}; there are overwrite, replace and union.")
        if self.fresh < 1:
            raise ValueError(f"At least one entry is fresh, not {self.fresh}.")

    def apply(self, tables: Tables, keys: NDArray[np.int64], fresh: Fresh) -> None:
        """Update the rows `keys` [n] in their order: of equal keys the later one wins."""
        if self.kind == "overwrite":
            tables.write(keys, *fresh)
            return
        for place, key in enumerate(keys.tolist()):
            self._merge(tables, key, fresh.tokens[place], fresh.probabilities[place])

    def _merge(self, tables: Tables, key: int, tokens: NDArray[np.int64], probabilities: NDArray[np.float32]) -> None:
        count = self.fresh if self.kind == "replace" else tables.k
        new_tokens, new_probabilities = tokens[:count], probabilities[:count]
        old = (tables.tokens[key] != NONE) & ~np.isin(tables.tokens[key], new_tokens)
        if self.kind == "replace":  # fresh entries are protected: else each would push out the one before it
            old[np.flatnonzero(old)[tables.k - len(new_tokens) :]] = False
        merged = np.concatenate([new_tokens, tables.tokens[key][old]])
        values = np.concatenate([new_probabilities, tables.probabilities[key][old]])
        best = np.argsort(-values, kind="stable")[: tables.k]
        tables.tokens[key], tables.probabilities[key] = NONE, 0
        tables.tokens[key, : len(best)], tables.probabilities[key, : len(best)] = merged[best], values[best]
