"""Progressive cluster pruning (section 4.1): who is accepted, goes on or is dropped after each layer.

Candidates do not see each other, so every decision is a function of the scores: nothing here knows of a model. A score
is the model's own head on the hidden state after a layer, as a logit z (of yes against no); p = sigmoid(z).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ondevice_papers.grating.clustering import Floats, kmeans

ACCEPT, DEFER, DROP = 1, 0, -1
CLUSTERS = 3  # the paper's three groups: selected, deferred, dropped
Verdicts = NDArray[np.int8]
Rule = Callable[[Floats, int], Verdicts]
"""(history [l, n]: logits of the n active candidates after layers 1 to l; slots: places left, 1 <= slots < n) ->
verdicts [n]; at most `slots` are accepted and at most n - slots dropped."""
ScoresOf = Callable[[int, NDArray[np.int64]], Floats]


def expit(logits: Floats) -> Floats:
    """Probabilities 1 / (1 + exp(-z)) of logits z."""
    with np.errstate(over="ignore"):  # exp(-z) may be infinite, and the probability 0
        return 1 / (1 + np.exp(-logits))


def dispersion(p: Floats) -> float:
    """The coefficient of variation of probabilities [n] (ddof 0; the paper's trigger).

    The paper leaves open which scores it is of: on logits, whose mean is near 0, it means nothing.
    """
    return float(p.std() / max(p.mean(), 1e-12))


def around_boundary(labels: NDArray[np.int64], scores: Floats, slots: int) -> Verdicts:
    """Verdicts [n]: accepted above the cluster that holds rank `slots`, dropped below it, deferred in it.

    labels: clusters [n] in falling order of scores [n], 0 the highest. Equal scores rank by position.
    """
    boundary = labels[ranking(scores)[slots - 1]]
    return np.sign(boundary - labels).astype(np.int8)


def cluster_rule(threshold: float) -> Rule:
    """The paper's rule: cluster as soon as the dispersion exceeds the threshold, and decide around the K-th place."""

    def verdicts(history: Floats, slots: int) -> Verdicts:
        p = expit(history[-1])
        if not dispersion(p) > threshold:
            return np.full(len(p), DEFER, np.int8)
        return around_boundary(kmeans(p, CLUSTERS), p, slots)

    return verdicts


def ranking(scores: ArrayLike) -> NDArray[np.int64]:
    """Positions [n] in falling order of scores [n]; the earlier position first where scores are equal."""
    return np.argsort(-np.asarray(scores, np.float64), kind="stable")


@dataclass(frozen=True)
class PoolOutcome:
    """How a pool of N candidates was decided.

    history: [L, N] logits after each layer; NaN where a candidate was not run. kept: [N] whether chosen.
    layer: [N] layer after which each was decided, 1 to L.
    """

    history: Floats
    kept: NDArray[np.bool_]
    layer: NDArray[np.int64]

    @property
    def score(self) -> Floats:
        """[N] the logit with which each was decided; of two layers they are not on one scale."""
        return self.history[self.layer - 1, np.arange(len(self.layer))]

    @property
    def chosen(self) -> NDArray[np.int64]:
        """[min(K, N)] candidates, those decided earlier first and by score within a layer."""
        order = np.lexsort((np.arange(len(self.layer)), -self.score, self.layer))
        return order[self.kept[order]]

    @property
    def active(self) -> NDArray[np.int64]:
        """[R] candidates that each layer was run for; R is fewer than L after an early end."""
        return (np.arange(1, self.layer.max() + 1)[:, None] <= self.layer).sum(1)

    @property
    def saved(self) -> float:
        """Share of the N L layer-candidates that was not computed."""
        return 1 - float(self.layer.sum()) / self.history.size


def select(
    scores_of: ScoresOf, candidates: int, layers: int, k: int, rule: Rule | None = None, exact_order: bool = False
) -> PoolOutcome:
    """The top K of N candidates, decided layer by layer.

    scores_of: logits [n] of the active candidates [n] after the next layer, 1 to L. rule: None prunes nothing, nor is
    anybody pruned where K >= N. exact_order: candidates are dropped, never accepted early, so that the chosen are
    ranked by final scores. Else the set is all that is asked for, and as many left as there are places end it.
    """
    history = np.full((layers, candidates), np.nan)
    active = np.arange(candidates)
    kept = np.zeros(candidates, bool)
    decided = np.zeros(candidates, np.int64)
    for layer in range(1, layers + 1):
        history[layer - 1, active] = scores_of(layer, active)
        slots = max(min(k, candidates) - int(kept.sum()), 0)  # a rule may have accepted more than it should
        verdicts = np.full(len(active), DEFER, np.int8)
        if layer == layers or not slots:
            verdicts[:] = DROP
            verdicts[ranking(history[-1, active])[:slots]] = ACCEPT
        elif rule is not None and slots < len(active):
            verdicts = rule(history[:layer, active], slots)
            if exact_order:
                verdicts = np.minimum(verdicts, DEFER)
            elif (left := slots - int((verdicts == ACCEPT).sum())) in (0, int((verdicts == DEFER).sum())):
                verdicts = np.where(verdicts == DEFER, ACCEPT if left else DROP, verdicts)
        kept[active[verdicts == ACCEPT]] = True
        decided[active[verdicts != DEFER]] = layer
        active = active[verdicts == DEFER]
        if not len(active):
            break
    return PoolOutcome(history, kept, decided)
