"""What a running system learns from its traffic: prompt and answer lengths, the server's TTFT, the device's speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ondevice_papers.disco.distributions import Latency

KEPT = {"prompts": 500, "answers": 500, "server": 300, "device": 100}  # the newest that count
BINS = 48  # equally likely values that stand for a distribution
LONGEST = 30.0  # seconds, at least, of a server TTFT that was cut off: nothing is known beyond what was seen
# Before anything was seen: a server of median 0.5 s and P99 3 s, a device of 50 tokens/s, prompts of 20 and 100 tokens.
PRIOR: dict[str, list[Any]] = {
    "prompts": [20, 100],
    "answers": [128] * 10,
    "server": [[float(x), True] for x in stats.lognorm.ppf((np.arange(20) + 0.5) / 20, 0.8, scale=0.5)],
    "device": [[20, 0.4, True], [50, 1.0, True], [200, 4.0, True], [1000, 20.0, True]],
}


def survived(seconds: NDArray[np.float64], seen: NDArray[np.bool_], beyond: float) -> Latency:
    """F from TTFTs of which some were cut off, by Kaplan and Meier's estimate.

    seconds, seen: [n] TTFTs, or for how long there was none. beyond: seconds, where what is left of F is put, as
    nothing is known beyond the last one seen.
    """
    curve = stats.ecdf(stats.CensoredData(uncensored=seconds[seen], right=seconds[~seen])).sf
    reached = np.concatenate([[0.0], 1 - np.asarray(curve.probabilities), [1.0]])
    values = np.append(curve.quantiles, max(beyond, curve.quantiles[-1]))
    levels = np.linspace(0, 1, BINS + 1)
    area = np.interp(levels, reached, np.concatenate([[0.0], np.cumsum(np.diff(reached) * values)]))
    return Latency.from_seconds(np.diff(area) * BINS)  # the mean of each bin, so that E[S] stays


def line(tokens: NDArray[np.float64], seconds: NDArray[np.float64], seen: NDArray[np.bool_]) -> tuple[float, float]:
    """(c, 1 / r_p) of D(l) = c + l / r_p, by least squares of relative errors.

    A TTFT that was cut off counts as what the line says, where that is longer.
    """
    columns = np.stack([np.ones_like(tokens), tokens], axis=1) / tokens[:, None]
    values, kept, slope = seconds, seen if seen.sum() > 1 else np.ones_like(seen), 0.0
    for _ in range(3):
        # LAPACK's last digits depend on the processor, and a tie between two choices on them.
        overhead, slope = np.linalg.lstsq(columns[kept], (values / tokens)[kept])[0].round(12)
        if overhead < 0 or slope <= 0:
            overhead = 0.0
            slope = float(np.mean((values / tokens)[kept]))
        values = np.where(seen, seconds, np.maximum(seconds, overhead + slope * tokens))
        kept = np.ones_like(seen)
    return float(overhead), float(slope)


class Traffic:
    """Numbers of the newest requests, no text; the oldest are forgotten.

    prompts, answers: tokens. server: (seconds, whether it came or was cut off). device: (prompt tokens, seconds, same).
    """

    def __init__(self, kept: Mapping[str, Iterable[Any]] | None = None, survived: Any = survived) -> None:
        self._survived = survived
        self.kept = {name: deque((kept or PRIOR)[name], maxlen=size) for name, size in KEPT.items()}
        self.longest = LONGEST
        self.fit()

    def fit(self) -> None:
        """Fit prompt lengths, the server's TTFT and the device's line to the kept numbers."""
        self.prompts = np.quantile(self.kept["prompts"], (np.arange(BINS) + 0.5) / BINS)
        seconds, seen = (np.array(column) for column in zip(*self.kept["server"], strict=True))
        self.longest = max([self.longest, *seconds[seen]])
        self.server = self._survived(seconds, seen.astype(bool), self.longest)
        tokens, seconds, seen = (np.array(column) for column in zip(*self.kept["device"], strict=True))
        self.overhead, self.slope = line(tokens.astype(float), seconds, seen.astype(bool))

    def device_ttft(self, tokens: Any) -> Any:
        """Seconds D(l) until the device's first token, by the fitted line. tokens: of the prompt."""
        return self.overhead + self.slope * tokens
