"""t-LUT and p-LUT: for every token its likeliest next tokens and their probabilities (paper, Look-Up Tables)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ondevice.speculation.largest import Likeliest

K = 8  # candidates of a token (Experimental Settings)
NONE = -1  # an empty place of the t-LUT


@dataclass(frozen=True, eq=False)
class Tables:
    """Both tables, keyed by the last token: Table 4's sizes are those of one row per vocabulary id.

    tokens: [V, K] int64, -1 where empty. probabilities: [V, K] float32, 0 where empty. A row's probabilities fall, its
    tokens are distinct, empty places come last. Drafters write into the arrays.
    """

    tokens: NDArray[np.int64]
    probabilities: NDArray[np.float32]

    @classmethod
    def empty(cls, vocabulary: int, k: int = K) -> Tables:
        """Cold tables. Raises ValueError where a row could not be filled with distinct tokens."""
        if not 1 <= k <= vocabulary:
            raise ValueError(f"A row holds 1 to {vocabulary} candidates, the vocabulary, not {k}.")
        return cls(np.full((vocabulary, k), NONE, np.int64), np.zeros((vocabulary, k), np.float32))

    @property
    def vocabulary(self) -> int:
        """V, the number of token ids, and so of rows."""
        return len(self.tokens)

    @property
    def k(self) -> int:
        """K, the candidates of a row."""
        return self.tokens.shape[1]

    @property
    def mebibytes(self) -> tuple[float, float]:
        """The sizes of the t-LUT and of the p-LUT in MiB; Table 4 prints MiB as MB."""
        return self.tokens.nbytes / 2**20, self.probabilities.nbytes / 2**20

    def row(self, token: int) -> list[tuple[int, float]]:
        """The candidates after a token and their probabilities, the likeliest first."""
        pairs = zip(self.tokens[token].tolist(), self.probabilities[token].tolist(), strict=True)
        return [pair for pair in pairs if pair[0] != NONE]

    def copy(self) -> Tables:
        """Independent tables with the same content."""
        return Tables(self.tokens.copy(), self.probabilities.copy())


class Fresh(NamedTuple):
    """The likeliest tokens after some nodes: tokens [n, K] int64 and probabilities [n, K] float32, falling."""

    tokens: NDArray[np.int64]
    probabilities: NDArray[np.float32]


def likeliest(logits: Tensor, find: Likeliest) -> Fresh:
    """The likeliest tokens of each row of logits [n, V]."""
    tokens, probabilities = find(logits)
    return Fresh(tokens.cpu().numpy(), probabilities.cpu().numpy())


def overwrite(tables: Tables, keys: Sequence[int], fresh: Fresh) -> None:
    """Fig. 6's add and replace: a row becomes what the forward just said after its token.

    All K fresh entries of a node are fed in ("all of the generated tokens") and none of them evicts another, so that
    they push out the whole old row. keys: [n] tokens of the nodes; of equal ones the later wins.
    """
    newest = {key: node for node, key in enumerate(keys)}
    rows = list(newest)
    nodes = list(newest.values())
    tables.tokens[rows] = fresh.tokens[nodes]
    tables.probabilities[rows] = fresh.probabilities[nodes]
