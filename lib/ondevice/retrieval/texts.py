"""What every index shares: texts or passages as plain strings, the check of k, and the best k of a row of scores."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Protocol

import numpy as np


class Titled(Protocol):
    """A passage with a title, as `corpus.Passage`."""

    @property
    def title(self) -> str: ...
    @property
    def text(self) -> str: ...


def plain(items: Sequence[str | Titled]) -> list[str]:
    """The texts as they are indexed, a passage with its title first. Raises ValueError when there are none."""
    if not items:
        raise ValueError("There are no texts to index.")
    return [item if isinstance(item, str) else f"{item.title}\n{item.text}" for item in items]


def check_k(k: int, pool: int) -> None:
    """Raise ValueError unless 1 <= k <= pool."""
    if not 1 <= k <= pool:
        raise ValueError(f"k = {k}: it must be from 1 to {pool}, the number of texts in the index.")


def digest(texts: Sequence[str], *settings: object) -> str:
    """A key for files made from these texts with these settings."""
    checksum = sha256(repr(settings).encode())
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        checksum.update(len(encoded).to_bytes(8, "little") + encoded)
    return checksum.hexdigest()[:24]


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """[k] positions of the highest of [n] scores, in falling order; of equal ones the first come first."""
    threshold = np.partition(scores, -k)[-k]
    above = np.flatnonzero(scores > threshold)
    equal = np.flatnonzero(scores == threshold)[: k - len(above)]
    positions = np.concatenate([above, equal])
    return positions[np.lexsort((positions, -scores[positions]))]
