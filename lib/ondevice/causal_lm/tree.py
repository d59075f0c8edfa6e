"""Token trees: what one forward pass verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Candidate continuations of a session, as rows of one forward pass; a chain is a tree with one branch.

    tokens: [n] token ids, n >= 1.
    parents: [n] row of each node's parent, which comes before it; -1 is a child of the last committed token.
    Raises ValueError on anything else.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]

    def __init__(self, tokens: ArrayLike, parents: ArrayLike) -> None:
        object.__setattr__(self, "tokens", integers(tokens, "A tree's tokens"))
        object.__setattr__(self, "parents", integers(parents, "A tree's parents"))
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"A tree has one parent a token, not {len(self.parents)} for {len(self.tokens)}.")
        if not len(self.tokens):
            raise ValueError("A tree to verify holds at least one token; this one is empty.")
        rows = np.arange(len(self.parents))
        wrong = np.flatnonzero((self.parents < -1) | (self.parents >= rows))
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(f"The parent of row {row} must be -1 or an earlier row, not {self.parents[row]}.")
        self.tokens.flags.writeable = self.parents.flags.writeable = False

    @classmethod
    def chain(cls, tokens: ArrayLike) -> TokenTree:
        """A sequence draft: each token follows the one before it."""
        ids = integers(tokens, "A chain's tokens")
        return cls(ids, np.arange(-1, len(ids) - 1))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def topology(self) -> Topology:
        """What depends on the parents alone; trees of one shape share it."""
        return _topology(self.parents.tobytes())

    @property
    def depths(self) -> NDArray[np.int64]:
        """[n] steps from the last committed token to each node, at least 1."""
        return self.topology.depths

    def path_to(self, row: int) -> list[int]:
        """Rows from a child of the last committed token down to `row`, both included."""
        if not 0 <= row < len(self):
            raise ValueError(f"Row {row} is not one of the tree's {len(self)}.")
        path = [row]
        while (parent := int(self.parents[path[-1]])) >= 0:
            path.append(parent)
        return path[::-1]

    def check_path(self, rows: Sequence[int]) -> None:
        """Raise ValueError unless `rows` start below the last committed token and go from parent to child."""
        above = -1
        for row in rows:
            if not 0 <= row < len(self) or self.parents[row] != above:
                below = "the last committed token" if above < 0 else f"row {above}"
                raise ValueError(f"{list(rows)} is no path of this tree: row {row} is not a child of {below}.")
            above = row


@dataclass(frozen=True, eq=False)
class Topology:
    """The shape of a tree: depths [n]; sees [n, n], whether a row's path holds a column's node (itself included)."""

    depths: NDArray[np.int64]
    sees: NDArray[np.bool_]

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it."""
        return int(self.depths[-1]) == len(self.depths)

    @cached_property
    def depth(self) -> int:
        """The longest path, in nodes."""
        return int(self.depths.max())

    @lru_cache(maxsize=256)  # noqa: B019 - as many topologies as are kept anyway
    def offsets(self, device: torch.device) -> torch.Tensor:
        """[n] each node's position, counted from the first position after the last committed token."""
        return torch.from_numpy(self.depths - 1).to(device)

    @lru_cache(maxsize=256)  # noqa: B019 - as above
    def hidden(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[n, n] what attention adds among the tree's rows: 0 where a row sees a column, else the dtype's minimum.

        An additive mask is right for sdpa and for eager attention, in which a boolean one is silently wrong.
        """
        sees = torch.from_numpy(self.sees)
        return torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min).to(device)


@lru_cache(maxsize=256)  # drafters reuse shapes: templates, and trees refilled between rebuilds
def _topology(parents: bytes) -> Topology:
    rows = np.frombuffer(parents, dtype=np.int64).tolist()
    depths = [0] * len(rows)
    sees = np.eye(len(rows), dtype=np.bool_)
    for row, parent in enumerate(rows):
        depths[row] = 1
        if parent >= 0:
            depths[row] += depths[parent]
            sees[row] |= sees[parent]
    return Topology(np.array(depths, dtype=np.int64), sees)


def integers(values: ArrayLike, what: str) -> NDArray[np.int64]:
    """A fresh [n] int64 array; raises ValueError on other shapes and on what is no integer."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{what} are one row of integers, not an array of shape {array.shape}.")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{what} are integers, not {array.dtype}.")
    return array.astype(np.int64)
