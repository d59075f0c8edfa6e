"""What keeps quotations of private documents on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Tokens. Shorter runs are phrases of any text and stop answers that quote nothing; longer ones hold whole codes.
# tests/benchmarks/bench_relevance.py counts both kinds for each length.
LENGTH = 4


class Guard:
    """Knows every run of `length` tokens of some texts, by its 64-bit hash.

    documents: each one's ids. Raises ValueError on a length below 2, as single tokens are everywhere.
    """

    def __init__(self, documents: Iterable[Sequence[int]], length: int) -> None:
        if length < 2:
            raise ValueError(f"A quotation has two tokens or more, not {length}.")
        self.length = length
        self._known = {
            hash(tuple(ids[start : start + length])) for ids in documents for start in range(len(ids) - length + 1)
        }

    def quotes(self, tokens: Sequence[int]) -> bool:
        """Whether the last tokens are a run that stands in a document. A false alarm has a chance of 1 in 10^12."""
        return len(tokens) >= self.length and hash(tuple(tokens[-self.length :])) in self._known
