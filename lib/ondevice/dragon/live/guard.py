"""What keeps quotations of private documents on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

_BASE = np.uint64(0x9E3779B97F4A7C15)


class Guard:
    """Knows every run of `length` tokens of some texts, as sorted 64-bit hashes: 8 bytes a token.

    documents: each one's ids. Raises ValueError on a length below 2, as single tokens are everywhere.
    """

    def __init__(self, documents: Iterable[Sequence[int]], length: int) -> None:
        if length < 2:
            raise ValueError(f"A quotation has two tokens or more, not {length}.")
        self.length = length
        self._factors = _BASE ** np.arange(length, dtype=np.uint64)
        hashes = [self._hashes(ids) for ids in documents]
        self._known = np.unique(np.concatenate([*hashes, np.empty(0, np.uint64)]))

    def quotes(self, tokens: Sequence[int]) -> bool:
        """Whether the last tokens are a run that stands in a document. A false alarm has a chance of 1 in 10^12."""
        if len(tokens) < self.length or not len(self._known):
            return False
        wanted = self._hashes(tokens[-self.length :])[0]
        place = int(np.searchsorted(self._known, wanted))
        return place < len(self._known) and bool(self._known[place] == wanted)

    def _hashes(self, ids: Sequence[int]) -> np.ndarray:
        """Of every run of so many ids; arithmetic modulo 2^64."""
        if len(ids) < self.length:
            return np.empty(0, np.uint64)
        values = (np.asarray(ids, np.uint64) + np.uint64(1)) * _BASE
        values ^= values >> np.uint64(29)  # so that neighbouring ids are far apart
        windows = np.lib.stride_tricks.sliding_window_view(values, self.length)
        return (windows * self._factors).sum(axis=1, dtype=np.uint64)
