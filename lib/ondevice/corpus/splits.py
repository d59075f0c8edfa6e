"""Splits by hash of the qualified name, and the removal of duplicates and near-duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from ondevice.corpus.reading import Document, words

SPLITS = ("train", "validation", "test")
NGRAM = 8  # words
# A document goes when more than this share of its 8-grams stands in documents before it. Held-out documents come after
# all of train, so theirs is the share that train (and for test, validation) gives away.
LARGEST_OVERLAP = {"train": 0.8, "validation": 0.5, "test": 0.5}


@dataclass(frozen=True)
class Selection:
    """The documents kept, by split and in order of their names, and how many went and why."""

    documents: dict[str, list[Document]]
    exact_duplicates: int
    near_duplicates: dict[str, int]


def split_of(name: str) -> str:
    """train (90 %), validation (5 %) or test (5 %), the same on every machine and for every version of a package."""
    bucket = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % 100
    return "train" if bucket < 90 else "validation" if bucket < 95 else "test"


def select(documents: Sequence[Document]) -> Selection:
    """Drop exact duplicates (same words), split, then drop near-duplicates by 8-gram overlap.

    documents: sorted by name. Raises ValueError when there are none.
    """
    if not documents:
        raise ValueError("The corpus is empty: no docstring of at least eight words was found.")
    distinct: dict[str, Document] = {}
    for document in documents:
        distinct.setdefault(" ".join(words(document.docstring)), document)
    ordered = sorted(distinct.values(), key=lambda document: (SPLITS.index(split_of(document.name)), document.name))
    overlaps = overlap_with_earlier([document.docstring for document in ordered])
    kept: dict[str, list[Document]] = {split: [] for split in SPLITS}
    dropped = dict.fromkeys(SPLITS, 0)
    for document, overlap in zip(ordered, overlaps, strict=True):
        split = split_of(document.name)
        if overlap > LARGEST_OVERLAP[split]:
            dropped[split] += 1
        else:
            kept[split].append(document)
    return Selection(kept, len(documents) - len(distinct), dropped)


def overlap_with_earlier(texts: Sequence[str]) -> np.ndarray:
    """[n] share of each text's word 8-grams that stand in any text before it; 0 for a text under eight words."""
    identifiers: dict[str, int] = {}
    hashes = []
    owners = []
    for index, text in enumerate(texts):
        ids = [identifiers.setdefault(word, len(identifiers)) for word in words(text)]
        ngrams = np.unique(_ngram_hashes(np.array(ids, dtype=np.uint64)))
        hashes.append(ngrams)
        owners.append(np.full(len(ngrams), index))
    flat = np.concatenate(hashes)
    owner = np.concatenate(owners)
    _, first = np.unique(flat, return_index=True)  # index of the first occurrence
    seen = np.ones(len(flat))
    seen[first] = 0
    total = np.bincount(owner, minlength=len(texts))
    return np.bincount(owner, weights=seen, minlength=len(texts)) / np.maximum(total, 1)


def _ngram_hashes(ids: np.ndarray) -> np.ndarray:
    """[n - 7] 64-bit hashes of the n-grams of word ids [n]: a random linear form, modulo 2^64."""
    count = len(ids) - NGRAM + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    factors = np.random.default_rng(0).integers(1, 2**63, NGRAM, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    mixed = (ids + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return np.lib.stride_tricks.sliding_window_view(mixed, NGRAM) @ factors
