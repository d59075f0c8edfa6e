"""Where an answer begins to run in circles."""

from __future__ import annotations

from collections.abc import Sequence

LOOP = 8  # tokens: an n-gram of this length that stands for the third time is a loop
TIMES = 3


def loop_start(ids: Sequence[int]) -> int | None:
    """Where a loop begins, or None: the second place of the n-gram that is first to stand for the third time.

    What is before it holds no loop. Occurrences may overlap, so a loop of a short period begins with its second period.
    """
    starts: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - LOOP + 1):
        seen = starts.setdefault(tuple(ids[start : start + LOOP]), [])
        seen.append(start)
        if len(seen) == TIMES:
            return seen[1]
    return None
