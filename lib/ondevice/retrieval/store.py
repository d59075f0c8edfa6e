"""Vectors and indexes kept in the cache, keyed by a hash of the texts and settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ondevice import assets
from ondevice.retrieval.dense import DenseIndex
from ondevice.retrieval.embedding import Embedder, embedder
from ondevice.retrieval.sparse import SparseIndex
from ondevice.retrieval.texts import Titled, digest, plain

_LOG = logging.getLogger(__name__)
_BLOCK = 4096  # texts whose vectors are a file, so that an interrupted run keeps what it has embedded
_FORMAT = 1  # raise it when the words or the building of an index change


def embeddings(texts: Sequence[str | Titled], encoder: Embedder | None = None) -> np.ndarray:
    """[n, size] float32: the texts' vectors, from the cache where they are in it. encoder: MiniLM unless given."""
    encoder = encoder or embedder()
    lines = plain(texts)
    blocks = [lines[start : start + _BLOCK] for start in range(0, len(lines), _BLOCK)]
    return np.concatenate([_vectors(block, encoder) for block in blocks])


def dense_index(texts: Sequence[str | Titled], encoder: Embedder | None = None) -> DenseIndex:
    """The dense index of the texts, whose vectors are kept. encoder: MiniLM unless given."""
    encoder = encoder or embedder()
    return DenseIndex.build(embeddings(texts, encoder), encoder)


def sparse_index(texts: Sequence[str | Titled]) -> SparseIndex:
    """The BM25 index of the texts, from the cache or built and kept."""
    return kept_sparse_index(texts, assets.cache_folder("retrieval") / f"bm25-{digest(plain(texts), _FORMAT)}.npz")


def kept_sparse_index(texts: Sequence[str | Titled], path: Path, mode: int = 0o666) -> SparseIndex:
    """The BM25 index of the texts, from one file (.npz), or built and written there, whole and with the mode.

    A file that is of other texts is replaced, and one that is damaged too, with a warning.
    """
    key = digest(plain(texts), _FORMAT)
    try:
        arrays = assets.arrays(path)  # of a zip file: each is checked by its sum as it is read
        if str(arrays["key"]) == key:
            return SparseIndex.from_arrays(arrays)
    except FileNotFoundError:
        pass
    except Exception as error:  # whatever a damaged or foreign file raises
        _LOG.warning("A damaged index is made anew (%s: %s).", path.name, type(error).__name__)
    index = SparseIndex.build(texts)
    kept: dict[str, Any] = {"key": np.array(key), **index.arrays}
    try:
        with assets.writing(path, mode) as temporary:
            np.savez(temporary, **kept)
    except OSError as error:
        _LOG.warning("The index could not be kept (%s).", error.strerror)
    return index


def _vectors(block: list[str], encoder: Embedder) -> np.ndarray:
    path = assets.cache_folder("retrieval") / f"vectors-{digest(block, _FORMAT, encoder.key)}.npy"
    if not path.is_file():
        computed = encoder(block)
        with assets.writing(path) as temporary:
            np.save(temporary, computed)
    vectors = assets.array(path)
    if vectors.shape != (len(block), encoder.size):
        raise ValueError(f"{path} does not fit its texts: delete it.")
    return vectors
