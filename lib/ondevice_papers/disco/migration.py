"""Token-level migration (section 4.3): when to hand a stream over, and what the reader and the bill see of it.

A stream is generated faster than it is read. Once the unread buffer outlasts the hand-over, the cheaper endpoint
prefills prompt plus prefix and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ondevice_papers.disco.costs import Prices

READING_RATE = 1 / 0.209  # tokens/s; the TBT P99 of Table 3, within section 2.2's 4 to 5


def expected_remaining(answers: ArrayLike, cap: int) -> NDArray[np.float64]:
    """E[n - n0 | n > n0] for n0 = 0, 1, ..., with answers cut at `cap` tokens: up to the longest, where it is 0."""
    n = np.sort(np.minimum(answers, cap))
    n0 = np.arange(n[-1] + 1)
    shorter = np.searchsorted(n, n0, side="right")
    beyond = np.concatenate([[0], np.cumsum(n[::-1])])[len(n) - shorter]  # sum of the n > n0
    return beyond / np.maximum(1, len(n) - shorter) - n0 * (shorter < len(n))


def saving(source: Prices, target: Prices, remaining: Any) -> Any:
    """Eq. 4, in $: what the rest of an answer costs less at the target (printed as |difference|, and as a cost)."""
    return (source.decode - target.decode) * remaining


def overhead(source: Prices, target: Prices, tokens: Any, meanwhile: Any) -> Any:
    """What a hand-over costs, in $, which the paper leaves open: a second prefill, and what the source decodes on."""
    return tokens * target.prefill + meanwhile * source.decode


def buffer(pace: float, seconds: Any) -> Any:
    """Eq. 5: B = r_c t_m, the unread tokens that mask a hand-over of t_m seconds."""
    return pace * seconds


@dataclass(frozen=True)
class Migration:
    """The rule by which an answer leaves its endpoint for a cheaper one.

    source, target: $ a token. remaining: E[n - n0 | n > n0] for n0 = 0, 1, ..., tokens. seconds: t_m for a prompt and
    prefix of so many tokens. pace: r_c, tokens/s. source_rate: tokens/s at which the source goes on until the target is
    ready (Figure 4's overlap); 0 where it stops.
    """

    source: Prices
    target: Prices
    remaining: NDArray[np.float64]
    seconds: Callable[[Any], Any]
    pace: float = READING_RATE
    source_rate: float = 0.0

    def due(self, prompt: Any, generated: Any, shown: Any) -> Any:
        """Whether to hand over with n0 = generated tokens, of which k = shown are read; tokens, of any one shape."""
        t_m = self.seconds(prompt + generated)
        left = self.remaining[np.minimum(generated, len(self.remaining) - 1)]
        costs = overhead(self.source, self.target, prompt + generated, self.source_rate * t_m)
        pays = saving(self.source, self.target, left) > costs
        return (generated - shown >= buffer(self.pace, t_m) - 1e-9) & pays


@dataclass(frozen=True)
class Answers:
    """R answers as an endpoint gives them and another takes them over, all [R].

    prompt, length: tokens. ttft: seconds. source_gap, target_gap: seconds between tokens. target_ttft: seconds that the
    target really takes until its first token, beside its prefill of `prefill` seconds per token (one number or [R]).
    """

    prompt: NDArray[np.int64]
    length: NDArray[np.int64]
    ttft: NDArray[np.float64]
    source_gap: NDArray[np.float64]
    target_gap: NDArray[np.float64]
    target_ttft: NDArray[np.float64]
    prefill: float | NDArray[np.float64] = 0.0


@dataclass(frozen=True)
class Streams:
    """What becomes of R answers of up to N tokens. delivered: [R, N] seconds, NaN past an answer's end.

    handover_at: [R] tokens generated when the target was asked, 0 if it never was; unread: [R] those not shown by then.
    migrated: [R] whether it took over. source_tokens, target_tokens: [R] decoded by either.
    """

    delivered: NDArray[np.float64]
    handover_at: NDArray[np.int64]
    unread: NDArray[np.int64]
    migrated: NDArray[np.bool_]
    source_tokens: NDArray[np.int64]
    target_tokens: NDArray[np.int64]


def paced(generated: NDArray[np.float64], pace: float) -> NDArray[np.float64]:
    """d_i = max(g_i, d_{i-1} + 1 / r_c): when the tokens generated at g, [R, N], are shown."""
    steps = np.arange(generated.shape[1])
    return np.maximum.accumulate(generated - steps / pace, axis=1) + steps / pace


def stream(rule: Migration, answers: Answers, pace: float = READING_RATE, overlap: bool = False) -> Streams:
    """Play answers token by token to readers of `pace`, under a rule.

    overlap: the source goes on until the target is ready, and keeps the answer where the buffer has run out by then
    (Figure 4). Else it stops at the trigger, and the reader waits for a target that is late.
    """
    a = answers
    n = np.arange(1, answers.length.max() + 1)
    generated = a.ttft[:, None] + (n - 1) * a.source_gap[:, None]
    read = np.minimum(n, (generated - a.ttft[:, None]) * pace + 1 + 1e-9).astype(int)  # tokens shown at each step
    due = rule.due(a.prompt[:, None], n, read) & (n < a.length[:, None])
    n0 = np.where(due.any(axis=1), due.argmax(axis=1) + 1, 0)
    rows = np.arange(len(n0))
    at = np.maximum(0, n0 - 1)
    delay = a.target_ttft + a.prefill * (a.prompt + n0)
    unread = np.where(n0 > 0, n0 - read[rows, at], 0)
    migrated = (n0 > 0) & (delay <= unread / pace if overlap else True)
    rest = (generated[rows, at] + delay)[:, None] + (n - 1 - n0[:, None]) * a.target_gap[:, None]
    generated = np.where(migrated[:, None] & (n > n0[:, None]), rest, generated)
    meanwhile = np.minimum(delay / a.source_gap, a.length - n0).astype(int) if overlap else 0
    return Streams(
        np.where(n <= a.length[:, None], paced(generated, pace), np.nan),
        n0,
        unread,
        migrated,
        np.where(migrated, n0 + meanwhile, a.length),
        np.where(migrated, a.length - n0, 0),
    )
