"""Pruning decisions replayed on recorded scores: what the engine would have decided, without running a model again.

A layer's scores do not depend on who else is active, so that a pool's scores at every layer are recorded once, and any
rule, K or threshold is a matter of milliseconds. The engine decides by the same `Selection`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ondevice.grating.pruning import Outcome, Rule, Selection, ranking


@dataclass(frozen=True)
class Pools:
    """Recorded pools of one model and split.

    scores: [pools, layers, N] logits after each layer; NaN behind the candidates of a smaller pool.
    relevance: [pools, N] 1 where a candidate is relevant, else 0; NaN behind a smaller pool's.
    Raises ValueError on other shapes, and on a pool with a missing score or without a candidate.
    """

    scores: NDArray[np.float64]
    relevance: NDArray[np.float64]

    def __post_init__(self) -> None:
        object.__setattr__(self, "scores", np.asarray(self.scores, np.float64))
        object.__setattr__(self, "relevance", np.asarray(self.relevance, np.float64))
        if self.scores.ndim != 3 or self.relevance.shape != (len(self.scores), self.scores.shape[2]):
            raise ValueError(
                f"Scores are [pools, layers, N] and relevance [pools, N], not {self.scores.shape} and "
                f"{self.relevance.shape}."
            )
        there = ~np.isnan(self.relevance)
        if not there.any(1).all() or (np.isfinite(self.scores) != there[:, None, :]).any():
            raise ValueError("A recorded pool has no candidates, or a candidate without a finite score at some layer.")

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def layers(self) -> int:
        """L."""
        return self.scores.shape[1]

    def pool(self, index: int) -> NDArray[np.float64]:
        """[layers, n] scores of one pool's candidates."""
        return self.scores[index][:, ~np.isnan(self.relevance[index])]

    def take(self, chosen: ArrayLike) -> Pools:
        """Some of the pools, in the given order."""
        wanted = np.asarray(chosen)
        return Pools(self.scores[wanted], self.relevance[wanted])


@dataclass(frozen=True)
class Measured:
    """One rule on every pool; each array is [pools].

    saved: share of the layer-candidates not computed. precision: Precision@K, the relevant ones that were chosen over
    the most that could be, min(K, relevant candidates) (section 6.1); 0 where none is relevant.
    full: precision of the model without pruning. overlap: share of the full model's top K that was chosen.
    """

    saved: NDArray[np.float64]
    precision: NDArray[np.float64]
    full: NDArray[np.float64]
    overlap: NDArray[np.float64]


def replay(scores: ArrayLike, k: int, rule: Rule | None = None, exact_order: bool = False) -> Outcome:
    """What becomes of a pool with recorded scores [layers, N]. See `Selection`.

    Raises ValueError on scores of another shape, and on one that is read and not finite.
    """
    recorded = np.asarray(scores, np.float64)
    if recorded.ndim != 2:
        raise ValueError(f"Recorded scores are [layers, candidates], not of shape {recorded.shape}.")
    selection = Selection(recorded.shape[1], recorded.shape[0], k, rule, exact_order)
    for row in recorded:
        if not len(selection.active):
            break
        selection.step(row[selection.active])
    return selection.outcome()


def measure(pools: Pools, k: int, rule: Rule | None = None, exact_order: bool = False) -> Measured:
    """Replay every pool and compare with the full model."""
    rows = [measured(pools, index, k, replay(pools.pool(index), k, rule, exact_order)) for index in range(len(pools))]
    return Measured(*np.array(rows).T)


def measured(pools: Pools, index: int, k: int, outcome: Outcome) -> tuple[float, float, float, float]:
    """One pool's row of `Measured`."""
    scores = pools.pool(index)
    relevant = pools.relevance[index][~np.isnan(pools.relevance[index])]
    full = ranking(scores[-1])[:k]
    saved = 1 - outcome.work / scores.size
    common, most = len(np.intersect1d(outcome.chosen, full)), max(1.0, min(k, relevant.sum()))
    return saved, relevant[outcome.chosen].sum() / most, relevant[full].sum() / most, common / len(full)
