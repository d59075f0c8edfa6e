"""Batches of sequences of different lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def by_length(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Positions sorted by length, so that little is padding, in batches of at most `most` padded tokens."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > most:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
