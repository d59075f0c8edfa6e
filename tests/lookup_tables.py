"""What DIAA's tables have to be, whoever wrote into them, and random ones."""

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


def random_tables(seed: int, k: int = 8, vocabulary: int = 48) -> Tables:
    """Rows of 0 to k candidates."""
    random, tables = np.random.default_rng(seed), Tables.empty(vocabulary, k)
    for key in range(vocabulary):
        n = random.integers(0, k + 1)
        tables.tokens[key, :n] = random.permutation(vocabulary)[:n]
        tables.probabilities[key, :n] = -np.sort(-random.dirichlet([0.3] * (n + 1))[:n])
    assert well_formed(tables)
    return tables
