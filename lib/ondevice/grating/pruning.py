"""Progressive cluster pruning (section 4.1): who is accepted, goes on or is dropped after each layer.

Candidates do not see each other, so that every decision is a function of the scores: nothing here knows of a model.
A score is the model's own head on the hidden state after a layer, as a logit (of yes against no).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from ondevice.grating.clustering import kmeans

ACCEPT, DEFER, DROP = 1, 0, -1
Statistic = Literal["cv", "std", "iqr"]
_LEAST_MEAN = 1e-12  # of probabilities, below which their mean is not divided by


class Rule(Protocol):
    """How candidates are decided after a layer that is not the last."""

    def verdicts(self, history: NDArray[np.float64], slots: int) -> NDArray[np.int8]:
        """ACCEPT, DEFER or DROP for each active candidate, [n].

        history: [l, n] logits of the n active candidates after layers 1 to l. slots: places left, 1 <= slots < n.
        At most `slots` are accepted, at most n - slots dropped.
        """


@dataclass(frozen=True)
class ClusterRule:
    """The paper's rule: cluster as soon as the scores' dispersion exceeds a threshold, decide around the K-th.

    threshold: tau; decisions are made where the statistic is above it. Infinity never prunes.
    statistic: of the active candidates: "cv" of probabilities (the paper's; std / mean, ddof 0), "std" or "iqr" of
    logits. The paper leaves open which scores its CV is of: on logits, of mean near 0, it means nothing. CV of
    probabilities vanishes where all are near 1, and a listwise loss leaves their common level open; "std" and "iqr" do
    not depend on it.
    clusters: the paper's three groups suggest 3. on: what is clustered. first: first layer to decide after.
    Raises ValueError on a threshold that is not a number, and on values below 1.
    """

    threshold: float
    statistic: Statistic = "cv"
    clusters: int = 3
    on: Literal["probability", "logit"] = "probability"
    first: int = 1

    def __post_init__(self) -> None:
        if np.isnan(self.threshold):
            raise ValueError("The dispersion threshold is not a number.")
        if self.statistic not in ("cv", "std", "iqr"):
            raise ValueError(f"The statistic is cv, std or iqr, not {self.statistic!r}.")
        if self.on not in ("probability", "logit"):
            raise ValueError(f"What is clustered is probability or logit, not {self.on!r}.")
        if self.clusters < 1 or self.first < 1:
            raise ValueError(f"Clusters and first layer are at least 1, not {self.clusters} and {self.first}.")

    def strength(self, history: NDArray[np.float64]) -> float:
        """The statistic of the last layer's scores; -inf where the rule never decides."""
        layers, n = history.shape
        return dispersion(history[-1], self.statistic) if layers >= self.first and n > 1 else -np.inf

    def verdicts(self, history: NDArray[np.float64], slots: int) -> NDArray[np.int8]:
        """See `Rule`."""
        if not self.strength(history) > self.threshold:
            return np.zeros(history.shape[1], np.int8)
        return around_boundary(self.partition(history[-1]), history[-1], slots)

    def partition(self, logits: NDArray[np.float64]) -> NDArray[np.int64]:
        """Clusters [n] of logits [n], 0 the highest."""
        return kmeans(expit(logits) if self.on == "probability" else logits, self.clusters)


def dispersion(logits: ArrayLike, statistic: Statistic = "cv") -> float:
    """The statistic of logits [n]; see `ClusterRule`."""
    z = np.asarray(logits, np.float64)
    if statistic == "cv":
        p = expit(z)
        return float(p.std() / max(p.mean(), _LEAST_MEAN))
    return float(z.std()) if statistic == "std" else float(np.subtract(*np.quantile(z, [0.75, 0.25])))


def around_boundary(labels: NDArray[np.int64], scores: NDArray[np.float64], slots: int) -> NDArray[np.int8]:
    """Verdicts [n]: accepted above the cluster that holds rank `slots`, dropped below it, deferred in it.

    labels: clusters [n] in falling order of scores [n], 0 the highest. Equal scores rank by position.
    """
    boundary = labels[ranking(scores)[slots - 1]]
    return np.sign(boundary - labels).astype(np.int8)


def ranking(scores: ArrayLike) -> NDArray[np.int64]:
    """Positions [n] in falling order of scores [n]; the earlier position first where scores are equal."""
    return np.argsort(-np.asarray(scores, np.float64), kind="stable")


@dataclass(frozen=True)
class Outcome:
    """How a pool of N candidates was decided.

    chosen: [min(K, N)] candidates; in exact-order mode ranked by final score, else those decided earlier first and by
    score within a layer: scores of two layers are not on one scale, so that this is no ranking.
    layer: [N] layer after which each was decided, 1 to L; 0 where none was needed. kept: [N] whether chosen.
    score: [N] logit after that layer (NaN after layer 0).
    """

    chosen: NDArray[np.int64]
    layer: NDArray[np.int64]
    kept: NDArray[np.bool_]
    score: NDArray[np.float64]

    @property
    def work(self) -> int:
        """Layer-candidates computed; without pruning L N."""
        return int(self.layer.sum())

    @property
    def ended(self) -> int:
        """The last layer that was computed."""
        return int(self.layer.max())


class Selection:
    """The top K of a pool, decided layer by layer: give `step` the active candidates' scores until none is active.

    candidates: N. layers: L, of the model. k: K. rule: None prunes nothing.
    exact_order: candidates are dropped, never accepted early, so that the chosen are ranked by final scores; a wrong
    drop can still change the set. Else the set is all that is asked for: it ends as soon as as many are left as there
    are places, and at once where K >= N.
    active: [n] candidates that the next layer is for, in rising order.
    Raises ValueError on a K, N or L below 1.
    """

    def __init__(
        self, candidates: int, layers: int, k: int, rule: Rule | None = None, exact_order: bool = False
    ) -> None:
        for name, value in (("K", k), ("number of candidates", candidates), ("number of layers", layers)):
            if value < 1:
                raise ValueError(f"The {name} is at least 1, not {value}.")
        self.k, self.layers, self.rule, self.exact_order = min(k, candidates), layers, rule, exact_order
        self.active = np.arange(candidates)
        self._history = np.full((layers, candidates), np.nan)
        self._layer = np.zeros(candidates, np.int64)
        self._kept, self._open = np.zeros(candidates, bool), np.ones(candidates, bool)
        self._done = 0
        if k >= candidates and not exact_order:
            self._decide(self.active, True)

    def step(self, scores: ArrayLike) -> NDArray[np.int64]:
        """The candidates that go on, [m]; empty at the end. scores: [n] logits of `active` after the next layer.

        Raises ValueError on a score that is not a finite number, on a wrong number of scores and after the end.
        """
        found = np.asarray(scores, np.float64)
        if found.shape != self.active.shape or not len(found):
            raise ValueError(f"Scores of {len(self.active)} active candidates are needed, not of shape {found.shape}.")
        if not np.isfinite(found).all():
            odd = self.active[~np.isfinite(found)][0]
            raise ValueError(f"The score of candidate {odd} after layer {self._done + 1} is not a finite number.")
        self._history[self._done, self.active] = found
        self._done += 1
        if self._done == self.layers:
            order = self.active[ranking(found)]
            slots = self.k - int(self._kept.sum())
            self._decide(order[:slots], True)
            self._decide(order[slots:], False)
        elif self.rule is not None:
            self._prune(self.rule)
        return self.active

    def _prune(self, rule: Rule) -> None:
        slots = self.k - int(self._kept.sum())
        if slots >= len(self.active):  # nobody can be dropped, and the order is asked for
            return
        verdicts = rule.verdicts(self._history[: self._done, self.active], slots)
        if self.exact_order:
            verdicts = np.minimum(verdicts, DEFER)
        accepted, dropped = self.active[verdicts == ACCEPT], self.active[verdicts == DROP]
        if len(accepted) > slots or len(dropped) > len(self.active) - slots:
            raise ValueError(
                f"A rule accepted {len(accepted)} and dropped {len(dropped)} of {len(self.active)} for {slots} places."
            )
        self._decide(accepted, True)
        self._decide(dropped, False)
        slots -= len(accepted)
        if not self.exact_order and slots in (0, len(self.active)):
            self._decide(self.active, slots > 0)

    def _decide(self, candidates: NDArray[np.int64], kept: bool) -> None:
        self._layer[candidates], self._kept[candidates], self._open[candidates] = self._done, kept, False
        self.active = np.flatnonzero(self._open)

    def outcome(self) -> Outcome:
        """What was decided. Raises ValueError while candidates are active."""
        if len(self.active):
            raise ValueError(f"{len(self.active)} candidates are not decided yet.")
        everyone = np.arange(len(self._layer))
        scores = np.where(self._layer > 0, self._history[self._layer - 1, everyone], np.nan)
        order = np.lexsort((everyone, -scores, self._layer))
        return Outcome(order[self._kept[order]], self._layer, self._kept, scores)
