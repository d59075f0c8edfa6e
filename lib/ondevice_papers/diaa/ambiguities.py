"""What the paper leaves open, read otherwise: each is a function that an experiment can take.

The readings in use are those of `tables`, `tree` and `drafter`; these here lost, or tie, in the record.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.speculation import Verified
from ondevice_papers.diaa.tables import NONE, Fresh, Tables
from ondevice_papers.diaa.tree import Tree, grow


def replace(tables: Tables, keys: Sequence[int], fresh: Fresh) -> None:
    """Fig. 6 read narrowly: only the likeliest fresh token comes in, and pushes out the least probable old one."""
    _merge(tables, keys, Fresh(fresh.tokens[:, :1], fresh.probabilities[:, :1]), keep=tables.k - 1)


def union(tables: Tables, keys: Sequence[int], fresh: Fresh) -> None:
    """The K most probable of fresh and old entries; where both have a token, with its fresh probability."""
    _merge(tables, keys, fresh, keep=tables.k)


def _merge(tables: Tables, keys: Sequence[int], fresh: Fresh, keep: int) -> None:
    """A row becomes the best of fresh entries and of the first `keep` old ones that are not among them."""
    for key, tokens, probabilities in zip(keys, fresh.tokens, fresh.probabilities, strict=True):
        old = np.flatnonzero((tables.tokens[key] != NONE) & ~np.isin(tables.tokens[key], tokens))[:keep]
        merged = np.concatenate([tokens, tables.tokens[key][old]])
        values = np.concatenate([probabilities, tables.probabilities[key][old]])
        best = np.argsort(-values, kind="stable")[: tables.k]
        tables.tokens[key] = NONE
        tables.probabilities[key] = 0
        tables.tokens[key, : len(best)] = merged[best]
        tables.probabilities[key, : len(best)] = values[best]


def accepted_only(step: Verified) -> list[int]:
    """Only the root and accepted nodes update the tables: "the generated tokens" read as those that came out."""
    return [0, *(node + 1 for node in step.path)]


def grow_counting_root(tables: Tables, root: int, budget: int) -> Tree:
    """The budget counts the root too."""
    return grow(tables, root, budget - 1)
