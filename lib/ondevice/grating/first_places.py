"""What a cross-encoder is worth: how often it puts a relevant candidate first, and how often an embedder does.

The paper cites a gain of 15 to 25 percent over bi-encoders (section 1). Both order the same recorded candidates: the
rerankers by their recorded scores, the embedder, which finds half of the applications' candidates, by its vectors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ondevice import retrieval
from ondevice.grating.calibration import interval
from ondevice.grating.recordings import Asked, Recording, asked
from ondevice.precision import mixed_precision

EMBEDDER = "embedder"


def first_places(recordings: Iterable[Recording]) -> pd.DataFrame:
    """Precision@1 by query set: queries, ranker, precision, low, high (95 % over pools), pools.

    recordings: of the same pools. Pools whose texts the installed packages do not have as recorded are in no row.
    Raises ValueError without recordings, and where their pools differ.
    """
    given = list(recordings)
    if not given or any(not np.array_equal(one.candidates, given[0].candidates) for one in given):
        raise ValueError("Rankers are compared on recordings, one or more, of the same pools.")
    pools = asked(given[0], range(len(given[0].pools)))
    places = np.array([pool.place for pool in pools])
    firsts = {one.model: np.nanargmax(one.pools.scores[places, -1], 1) for one in given} | {EMBEDDER: _nearest(pools)}
    relevance, queries, rows = given[0].pools.relevance[places], given[0].queries[places], []
    for name in dict.fromkeys(queries.tolist()):
        for ranker, first in firsts.items():
            found = interval(np.take_along_axis(relevance, first[:, None], 1)[queries == name, 0])
            rows.append((name, ranker, found.mean, found.low, found.high, int((queries == name).sum())))
    return pd.DataFrame(rows, columns=["queries", "ranker", "precision", "low", "high", "pools"])


def _nearest(pools: Sequence[Asked]) -> NDArray[np.int64]:
    """[pools] the candidate with the vector nearest to the query's; products in bfloat16 where it pays."""
    texts = list(dict.fromkeys(text for pool in pools for text in pool.documents))
    encoder = retrieval.embedder()
    encoder = dataclasses.replace(encoder, key=f"{encoder.key}-mixed")  # cached apart from exact vectors
    with mixed_precision("cpu"):
        vectors = dict(zip(texts, retrieval.embeddings(texts, encoder), strict=True))
        asked_for = encoder([pool.query for pool in pools])
    found = [int(np.argmax([vectors[text] @ query for text in pool.documents]))
             for pool, query in zip(pools, asked_for, strict=True)]  # fmt: skip
    return np.array(found, np.int64)
