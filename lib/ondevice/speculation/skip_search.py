"""Searching which sublayers to skip, as SWIFT does (Xia et al. 2025): random sets, now and then a Bayesian one."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

BAYES_EVERY = 25  # tries
UCB = 2.5  # standard deviations above the mean
CANDIDATES = 256  # random sets that the surrogate chooses from


class SkipSearch:
    """The best set so far, and when to stop. A set is a sorted array of places among `parts`.

    parts: sublayers that may be skipped. ratio: share of them to skip, at least one. It starts from every odd layer,
    as long as no set has been scored better.
    enough, patience, tries: it stops at a score above `enough`, after `patience` tries that were no better, or after
    `tries` in all.
    """

    def __init__(
        self, parts: int, ratio: float = 0.45, enough: float = 0.93, patience: int = 300, tries: int = 1000,
        seed: int = 0,
    ) -> None:  # fmt: skip
        if not 0 < ratio < 1:
            raise ValueError(f"The skip ratio is a share between 0 and 1, not {ratio}.")
        self.parts = parts
        self.size = max(1, int(ratio * parts))
        self.best: NDArray[np.int64] = np.flatnonzero(np.arange(parts) // 2 % 2 == 0)  # the first part is in layer 1
        self.score = -1.0  # of the best set; not known before the first try
        self._limits = enough, patience, tries
        self._idle = 0
        self._tried: list[NDArray[np.float64]] = []
        self._scores: list[float] = []
        self._random = np.random.default_rng(seed)

    @property
    def is_over(self) -> bool:
        """Whether a stop rule holds."""
        enough, patience, tries = self._limits
        return self.score > enough or self._idle >= patience or len(self._scores) >= tries

    def try_one(self, score_of: Callable[[NDArray[np.int64]], float]) -> bool:
        """Score one more set; whether it became the best. The first is the start set itself."""
        first = not self._scores
        found = self.best if first else self._next()
        score = score_of(found)
        self._tried.append(self._vectors([found])[0])
        self._scores.append(score)
        if score <= self.score:
            self._idle += 1
            return False
        self.best, self.score, self._idle = found, score, 0
        return not first

    def _next(self) -> NDArray[np.int64]:
        if len(self._scores) % BAYES_EVERY:
            return self._drawn()
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern

        surrogate = GaussianProcessRegressor(Matern(nu=2.5), alpha=1e-2, normalize_y=True, random_state=0)
        drawn = [self._drawn() for _ in range(CANDIDATES)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the kernel's length scale may end at a bound, which is of no matter here
            surrogate.fit(np.array(self._tried), np.array(self._scores))
            mean, deviation = surrogate.predict(self._vectors(drawn), return_std=True)
        return drawn[int(np.argmax(mean + UCB * deviation))]

    def _drawn(self) -> NDArray[np.int64]:
        return np.sort(self._random.choice(self.parts, self.size, replace=False))

    def _vectors(self, sets: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        """[sets, parts], 1 where a part is skipped."""
        vectors = np.zeros((len(sets), self.parts))
        for row, places in zip(vectors, sets, strict=True):
            row[places] = 1
        return vectors
