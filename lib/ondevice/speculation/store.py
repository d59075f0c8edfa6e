"""What follows the n-grams of a large text: Witten-Bell back-off in sorted arrays, which processes share as a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ondevice import assets

ORDERS = 6  # tokens of the longest context
K = 8  # tokens kept of a context
LEAST = 0.02  # share of shorter contexts below which they are not asked
_MASK = 2**64 - 1
_FACTORS = [pow(0x9E3779B97F4A7C15, order + 1, 2**64) for order in range(ORDERS)]
_SEPARATOR = -1  # ends a sequence: no context holds it, and it follows none


class Store:
    """The contexts of every order that a text has, hashed, each with its likeliest next tokens.

    Witten and Bell (1991): with N tokens, T of them different, seen after a context h, and h' less its oldest token,

        p(x | h) = (count(h x) + T * p(x | h')) / (N + T)

    A context that was seen once is not lengthened: what follows it is known.
    """

    def __init__(self, tables: Sequence[Sequence[NDArray]]) -> None:
        self._tables = tables

    @classmethod
    def from_sequences(cls, sequences: Iterable[ArrayLike]) -> Store:
        """Index sequences of ids, no context over their ends. Raises ValueError where all are shorter than 2."""
        parts = [np.append(np.asarray(sequence, np.int64), _SEPARATOR) for sequence in sequences]
        text = np.concatenate([[_SEPARATOR], *parts])
        if len(text) < 2 + len(parts) or max(map(len, parts)) < 3:
            raise ValueError("A store is of sequences of at least two tokens.")
        after = text[1:]
        here = np.arange(len(text) - 1)
        here = here[after != _SEPARATOR]
        share = (np.bincount(after[here]) / max(1, len(here)))[after[here]]  # p(x | the shorter context) of each place
        hashes = np.zeros(len(here), np.uint64)
        tables = []
        for order in range(ORDERS):
            oldest = text[here - order]  # the first token of all is a separator, so that no index runs below 0
            complete = oldest != _SEPARATOR
            here = here[complete]
            share = share[complete]
            hashes = hashes[complete] + (oldest[complete] + 1).astype(np.uint64) * np.uint64(_FACTORS[order])
            table, share, once = _order(hashes, after[here], share)
            tables.append(table)
            here, share, hashes = here[~once], share[~once], hashes[~once]
        return cls(tables)

    def after(self, context: Sequence[int]) -> tuple[int, dict[int, float]]:
        """(order, p by token) of the longest suffix of a context that the text has, at most `ORDERS` long; (0, {})."""
        hashes = []
        total = 0
        for token, factor in zip(reversed(context[-ORDERS:]), _FACTORS, strict=False):
            total = (total + (int(token) + 1) * factor) & _MASK  # numpy's integers would overflow
            hashes.append(total)
        shares: dict[int, float] = {}
        longest = 0
        left = 1.0
        for order in range(len(hashes), 0, -1):
            keys, starts, tokens, chances, backed_off = self._tables[order - 1]
            index = int(keys.searchsorted(np.uint64(hashes[order - 1])))
            if index == len(keys) or int(keys[index]) != hashes[order - 1]:
                continue
            longest = longest or order
            span = slice(int(starts[index]), int(starts[index + 1]))
            for token, chance in zip(tokens[span].tolist(), chances[span].tolist(), strict=True):
                shares.setdefault(token, left * chance)
            left *= float(backed_off[index])
            if len(shares) >= K or left < LEAST:
                break
        return longest, shares

    def save(self, folder: Path) -> None:
        """Write the arrays into a new folder, which appears whole. Raises OSError where there is one with files."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as temporary:
            partial = Path(temporary) / folder.name
            partial.mkdir()
            for order, table in enumerate(self._tables):
                for part, array in enumerate(table):
                    np.save(partial / f"{order}.{part}.npy", array)
            partial.rename(folder)

    @classmethod
    def load(cls, folder: Path) -> Store:
        """The arrays of a folder, mapped: processes share them."""
        files = ([folder / f"{order}.{part}.npy" for part in range(5)] for order in range(ORDERS))
        return cls([[np.asarray(assets.array(file, mapped=True)) for file in table] for table in files])

    @property
    def megabytes(self) -> float:
        """The size of the arrays, in 10^6 bytes."""
        return sum(array.nbytes for table in self._tables for array in table) / 1e6


def _order(
    hashes: NDArray[np.uint64], after: NDArray[np.int64], share: NDArray[np.float64]
) -> tuple[list[NDArray], NDArray[np.float64], NDArray[np.bool_]]:
    """The table of an order, p of each place's own next token, and where a context was seen once.

    hashes, after, share: [n] of each place its context, the token after it and that one's p after the shorter context.
    """
    order = np.lexsort((after, hashes))
    context = hashes[order]
    token = after[order]
    first = np.r_[True, context[1:] != context[:-1]][: len(context)]
    pair = first | np.r_[True, token[1:] != token[:-1]][: len(context)]
    of_place = np.cumsum(first) - 1
    pair_of_place = np.cumsum(pair) - 1
    seen, starts = np.bincount(of_place), np.flatnonzero(pair)  # N; the first place of each pair
    of_pair = of_place[starts]
    count = np.bincount(pair_of_place)
    kinds = np.bincount(of_pair)  # T
    chance = (count + kinds[of_pair] * share[order][starts]) / (seen + kinds)[of_pair]
    ranked = np.lexsort((-chance, of_pair))
    rank = np.arange(len(ranked)) - np.searchsorted(of_pair, np.arange(len(seen)))[of_pair]
    kept = ranked[rank < K]  # pairs lie by their contexts already, so that ranks are theirs
    table = [
        context[first],
        np.searchsorted(of_pair[kept], np.arange(len(seen) + 1)).astype(np.uint32),
        token[starts][kept].astype(np.min_scalar_type(int(token.max(initial=0)))),
        chance[kept].astype(np.float32),
        (kinds / (seen + kinds)).astype(np.float32),
    ]
    own = np.empty(len(order))
    once = np.empty(len(order), bool)
    own[order] = chance[pair_of_place]
    once[order] = (seen == 1)[of_place]
    return table, own, once
