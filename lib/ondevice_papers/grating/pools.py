"""Recorded pools, and pruning replayed on them: what the engine would have decided, without running a model again.

A layer's scores do not depend on who else is active, so a pool's scores after every layer are recorded once, and any
rule, K or threshold is a matter of milliseconds. The engine decides by the same `pruning.select`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ondevice_papers.grating.clustering import Floats
from ondevice_papers.grating.pruning import PoolOutcome, Rule, cluster_rule, ranking, select


@dataclass(frozen=True)
class Pool:
    """One query's N candidates. scores: [L, N] logits after each layer. relevant: [N].

    split: "validation" or "test"; calibrators take the first only.
    """

    name: str
    split: str
    scores: Floats = field(repr=False)
    relevant: NDArray[np.bool_] = field(repr=False)


@dataclass(frozen=True)
class Measured:
    """Work saved and precision of a pruned pool, beside the full model's.

    saved: share of the layer-candidates not computed. precision: Precision@K, the relevant ones that were chosen over
    the most that could be, min(K, relevant candidates) (section 6.1); 0 where none is relevant. full: that of the model
    without pruning. overlap: share of the full model's top K that was chosen.
    """

    saved: float
    precision: float
    full: float
    overlap: float


def replay(
    pool: Pool, k: int, rule: Rule | None = None, exact_order: bool = False, select: Callable[..., PoolOutcome] = select
) -> PoolOutcome:
    """Select the top K of a recorded pool, as the engine would."""
    layers, candidates = pool.scores.shape
    return select(lambda layer, active: pool.scores[layer - 1, active], candidates, layers, k, rule, exact_order)


def sweep(
    pool: Pool,
    k: int,
    rule: Callable[[float], Rule],
    thresholds: Sequence[float],
    exact_order: bool = False,
    select: Callable[..., PoolOutcome] = select,
) -> list[PoolOutcome]:
    """`replay` by a rule at each of falling thresholds.

    The paper's rule takes its threshold only to say when it decides. So where two thresholds have one outcome, all
    between them have it, too, and are not replayed. Any other rule, also an edited one, is replayed at each threshold.
    """
    if not _is_the_papers(rule):
        return [replay(pool, k, rule(threshold), exact_order, select) for threshold in thresholds]
    outcomes: dict[int, PoolOutcome] = {}

    def fill(first: int, last: int) -> None:
        for index in (first, last):
            if index not in outcomes:
                outcomes[index] = replay(pool, k, rule(thresholds[index]), exact_order, select)
        if same_decisions(outcomes[first], outcomes[last]):
            outcomes.update(dict.fromkeys(range(first + 1, last), outcomes[first]))
        elif last - first > 1:
            middle = (first + last) // 2
            fill(first, middle)
            fill(middle, last)

    fill(0, len(thresholds) - 1)
    return [outcomes[index] for index in range(len(thresholds))]


def _is_the_papers(rule: Callable[[float], Rule]) -> bool:
    """Whether a rule is `cluster_rule`, here or in a notebook's cell that has its text."""
    try:
        return inspect.getsource(rule) == inspect.getsource(cluster_rule)
    except (TypeError, OSError):  # no function, or one without a text
        return False


def same_decisions(first: PoolOutcome, second: PoolOutcome) -> bool:
    """Whether the same candidates were kept, each decided after the same layer."""
    return np.array_equal(first.layer, second.layer) and np.array_equal(first.kept, second.kept)


def measured(pool: Pool, k: int, outcome: PoolOutcome) -> Measured:
    """Work saved, precision and overlap of an outcome, against the full model's."""
    full = ranking(pool.scores[-1])[:k]
    most = max(1, min(k, int(pool.relevant.sum())))
    return Measured(
        outcome.saved,
        pool.relevant[outcome.kept].sum() / most,
        pool.relevant[full].sum() / most,
        outcome.kept[full].mean(),
    )


def measure(pools: Iterable[Pool], k: int, rule: Rule | None, exact_order: bool = False) -> dict[str, Floats]:
    """`measured` of every pool, by name of the quantity, [pools]."""
    measurements = [measured(pool, k, replay(pool, k, rule, exact_order)) for pool in pools]
    names = ("saved", "precision", "full", "overlap")
    return {name: np.array([getattr(measurement, name) for measurement in measurements]) for name in names}


def validation(pools: Sequence[Pool]) -> Sequence[Pool]:
    """The same pools. Raises ValueError on pools of another split: nothing is calibrated on what it is judged by."""
    odd = {pool.split for pool in pools} - {"validation"}
    if odd or not pools:
        raise ValueError(f"A rule is calibrated on validation pools, not on {', '.join(sorted(odd)) or 'none'}.")
    return pools


def kendall(scores: ArrayLike, others: ArrayLike) -> Floats:
    """[...] Kendall's tau-b of scores [..., N], both of the same candidates; 0 where one of them is constant."""
    first = np.asarray(scores, np.float64)
    second = np.asarray(others, np.float64)
    i, j = np.triu_indices(first.shape[-1], 1)
    a = np.sign(first[..., i] - first[..., j])
    b = np.sign(second[..., i] - second[..., j])
    untied = np.sqrt((a != 0).sum(-1) * (b != 0).sum(-1))
    return np.asarray((a * b).sum(-1) / np.maximum(untied, 1), np.float64)
