"""How what a forward said after a token goes into the tables (Fig. 6: add and replace)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.diaa.tables import NONE, Tables
from ondevice.speculation.largest import Likeliest

if TYPE_CHECKING:
    from torch import Tensor


class Fresh(NamedTuple):
    """The likeliest tokens after some nodes: tokens [n, K] int64 and probabilities [n, K] float32, falling."""

    tokens: NDArray[np.int64]
    probabilities: NDArray[np.float32]


def refreshed(logits: Tensor, find: Likeliest) -> Fresh:
    """The likeliest tokens of each row of logits [n, V]."""
    tokens, probabilities = find(logits)
    return Fresh(tokens.cpu().numpy(), probabilities.cpu().numpy())


def likeliest(logits: Tensor, k: int) -> Fresh:
    """The k likeliest, once."""
    return refreshed(logits, Likeliest(k))


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
