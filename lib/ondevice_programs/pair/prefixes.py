"""Keys and values of documents' prompts in memory, so that a document is prefilled once for all questions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from ondevice_papers.dragon.batch import Member

SIZE = 1 << 27  # bytes


class Prefixes:
    """Rows of prefixes by their ids; those used longest ago go first. Rows depend on the ids before them alone.

    size: bytes of all rows, at most. hits, misses: of `fill` so far.
    """

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.hits = self.misses = 0
        self._rows: OrderedDict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._taken = 0

    def fill(self, session: Member, prefix: Sequence[int]) -> None:
        """Commit the prefix to the empty session, where its rows are known."""
        key = tuple(prefix)
        rows = self._rows.get(key)
        if rows is None:
            self.misses += 1
            return
        self.hits += 1
        self._rows.move_to_end(key)
        session.put(prefix, *rows)

    def keep(self, session: Member, prefix: Sequence[int]) -> None:
        """Take copies of the rows of a session that has committed the prefix, and perhaps more."""
        key = tuple(prefix)
        if key in self._rows:
            return
        self._rows[key] = session.first(len(key))
        self._taken += _bytes(self._rows[key])
        while self._taken > self.size:
            _, rows = self._rows.popitem(last=False)
            self._taken -= _bytes(rows)


def _bytes(rows: tuple[torch.Tensor, torch.Tensor]) -> int:
    return sum(part.nbytes for part in rows)
