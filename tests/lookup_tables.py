"""What DIAA's tables have to be, whoever wrote into them."""

import numpy as np

from ondevice_papers.diaa.tables import NONE, Tables


def well_formed(tables: Tables) -> bool:
    """Whether shapes, types and rows are as the class says."""
    tokens, probabilities = tables.tokens, tables.probabilities
    assert tokens.shape == probabilities.shape and tokens.dtype == np.int64 and probabilities.dtype == np.float32
    empty, ordered = tokens == NONE, np.sort(tokens, axis=1)
    assert (np.diff(probabilities, axis=1) <= 0).all() and (probabilities >= 0).all()
    assert not probabilities[empty].any() and not (empty[:, :-1] & ~empty[:, 1:]).any()
    assert tokens.min() >= NONE and tokens.max() < len(tokens)
    return not ((np.diff(ordered, axis=1) == 0) & (ordered[:, 1:] != NONE)).any()
