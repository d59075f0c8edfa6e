"""Token-level migration (section 4.3): when to hand a stream over, and what the reader and the bill see of it.

A stream is generated faster than it is read. Once the unread buffer outlasts the hand-over, the dearer endpoint stops
and the cheaper one prefills prompt plus prefix and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ondevice.disco.costs import Prices
from ondevice.disco.distributions import Device, Latency
from ondevice.disco.handoff import Handoff

READING_RATE = 1 / 0.209  # tokens/s; the TBT P99 of Table 3, within section 2.2's 4 to 5


def buffer_tokens(consumption_rate: float, migration_time: ArrayLike) -> np.ndarray:
    """B = r_c t_m (Eq. 5): unread tokens that mask a hand-over of t_m seconds."""
    return consumption_rate * np.asarray(migration_time)


def expected_remaining(output_lengths: ArrayLike, cap: int) -> np.ndarray:
    """E[n - n0 | n > n0] for n0 = 0 .. cap - 1 tokens generated, with answers cut at `cap` tokens: [cap]."""
    n = np.minimum(np.asarray(output_lengths), cap)
    if n.size == 0 or not n.min() >= 1:  # a NaN compares false
        raise ValueError("Output lengths are at least one token each.")
    n0 = np.arange(cap)[:, None]
    longer = n[None, :] > n0
    count = longer.sum(axis=1)
    return np.where(count, ((n[None, :] - n0) * longer).sum(axis=1) / np.maximum(1, count), 0.0)


@dataclass(frozen=True)
class Migration:
    """When an answer leaves its endpoint: the buffer masks the hand-over (Eq. 5) and the saving exceeds it (Eq. 4).

    source, target: $ per token. remaining: E[n - n0 | n > n0] for n0 = 0, 1, ..., tokens. seconds: t_m for a prompt and
    prefix of so many tokens. pace: r_c, tokens/s.
    """

    source: Prices
    target: Prices
    remaining: np.ndarray
    seconds: Callable[[int], float]
    pace: float

    def due(self, prompt: int, generated: int, shown: int) -> bool:
        """Whether to hand over now; prompt, generated (n0) and shown in tokens."""
        left = float(self.remaining[min(generated, len(self.remaining) - 1)])
        saving = (self.source.decode - self.target.decode) * left
        buffer = self.pace * self.seconds(prompt + generated)
        return generated - shown >= buffer and saving > (prompt + generated) * self.target.prefill


@dataclass(frozen=True)
class MigrationRule:
    """When a stream that the constrained endpoint won goes to the other one.

    source, target: $ per token. delay: seconds before the target's first token beyond its prefill; for a server the P99
    of its TTFT. prefill_rate: the target's, tokens/s; infinite for a server, whose TTFT has no length in it.
    remaining: E[n_rem | n > n0], [cap] tokens. margin: seconds added to t_m, for a target less steady than assumed.
    """

    source: Prices
    target: Prices
    delay: float
    prefill_rate: float
    remaining: np.ndarray
    consumption_rate: float = READING_RATE
    handoff: Handoff = "stop"
    source_rate: float = 0.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.handoff not in ("stop", "overlap"):
            raise ValueError(f"Unknown hand-off {self.handoff!r}; there are stop and overlap.")
        if not (self.consumption_rate > 0 and self.prefill_rate > 0 and self.delay >= 0 and self.margin >= 0):
            raise ValueError("Migration needs positive rates and delays that are not negative.")

    def migration_time(self, prompt: ArrayLike, generated: ArrayLike) -> np.ndarray:
        """t_m in seconds: prefill of prompt plus prefix, or the server's P99 TTFT."""
        tokens = np.add(np.asarray(prompt, dtype=float), generated)
        return tokens / self.prefill_rate + self.delay + self.margin

    def buffer(self, prompt: ArrayLike, generated: ArrayLike) -> np.ndarray:
        """B of Eq. 5 at this point of the stream, tokens."""
        return buffer_tokens(self.consumption_rate, self.migration_time(prompt, generated))

    def pays(self, prompt: ArrayLike, generated: ArrayLike) -> np.ndarray:
        """Eq. 4 made explicit: the saving on what is left exceeds the overhead.

        saving = (c_source - c_target) E[n_rem]; the paper prints it as the cost of migrating, with the sign lost.
        overhead = the target's prefill of prompt and prefix, and in overlap the source's decoding meanwhile.
        """
        n0 = np.asarray(generated)
        left = np.where(n0 < len(self.remaining), self.remaining[np.minimum(n0, len(self.remaining) - 1)], 0.0)
        overhead = (np.asarray(prompt) + n0) * self.target.prefill
        if self.handoff == "overlap":
            overhead = overhead + self.source.decode * self.source_rate * self.migration_time(prompt, generated)
        return (self.source.decode - self.target.decode) * left > overhead

    def should_migrate(self, prompt: ArrayLike, generated: ArrayLike, shown: ArrayLike) -> np.ndarray:
        """Whether to hand over now: the buffer is full enough, and it pays."""
        full = np.asarray(generated) - shown >= self.buffer(prompt, generated) - 1e-9
        return full & self.pays(prompt, generated)


def to_device(source: Prices, target: Prices, device: Device, remaining: np.ndarray, **options) -> MigrationRule:
    """Server to device: t_m = (l + n0) / r_p + c."""
    return MigrationRule(source, target, device.overhead, device.prefill_rate, remaining, **options)


def to_server(
    source: Prices, target: Prices, server: Latency, remaining: np.ndarray, quantile: float = 0.99, **options
) -> MigrationRule:
    """Device to server: t_m is a high quantile of the server's TTFT."""
    return MigrationRule(source, target, server.quantile(quantile), float("inf"), remaining, **options)


@dataclass(frozen=True)
class Streams:
    """R answers of up to N tokens. delivered: [R, N] seconds since the request, NaN past the answer's end.

    handover: [R] tokens generated when the source was left, -1 if it never was. buffered: [R] unread tokens then (B).
    late: [R] tokens shown after their time. source_tokens: [R] decoded by the first endpoint, target_tokens: [R] by the
    second, target_prefill: [R] tokens prefilled by the second.
    """

    delivered: np.ndarray
    handover: np.ndarray
    buffered: np.ndarray
    late: np.ndarray
    source_tokens: np.ndarray
    target_tokens: np.ndarray
    target_prefill: np.ndarray

    @property
    def migrated(self) -> np.ndarray:
        """[R] whether the target took over."""
        return self.handover >= 0

    def tbt(self, rows: np.ndarray) -> np.ndarray:
        """Times between tokens, pooled over the given rows, seconds."""
        gaps = np.diff(self.delivered[rows], axis=1)
        return gaps[np.isfinite(gaps)]


def stream(
    rule: MigrationRule | None,
    prompt: np.ndarray,
    answer: np.ndarray,
    ttft: np.ndarray,
    source_gap: np.ndarray,
    target_delay: np.ndarray,
    target_gap: np.ndarray,
    consumption_rate: float = READING_RATE,
) -> Streams:
    """Play R answers token by token, paced at the reading rate; rule None never migrates. All arguments [R].

    prompt, answer: tokens. ttft: seconds. source_gap, target_gap: seconds between generated tokens. target_delay: the
    hand-over's real duration beyond the target's prefill (its overhead, or a server TTFT), seconds.
    In overlap the hand-over is called off when the target is later than the buffer lasts, and the source goes on.
    """
    steps = np.arange(int(answer.max(initial=1)))
    exists = steps < answer[:, None]
    generated = ttft[:, None] + steps * source_gap[:, None]
    n0, buffered = _handover(rule, prompt, answer, ttft, generated, source_gap, consumption_rate)
    asked = n0 > 0
    at = generated[np.arange(len(n0)), np.maximum(0, n0 - 1)]
    took = target_delay + ((prompt + n0) / rule.prefill_rate if rule else 0.0)
    migrated = asked
    if rule is not None and rule.handoff == "overlap":
        migrated = asked & (took <= buffered / consumption_rate)
    from_target = (at + took)[:, None] + (steps - n0[:, None]) * target_gap[:, None]
    generated = np.where(migrated[:, None] & (steps >= n0[:, None]), from_target, generated)
    due = ttft[:, None] + steps / consumption_rate
    # d_i = max(g_i, d_{i-1} + 1 / r_c), unrolled into a running maximum
    delivered = np.maximum.accumulate(generated - steps / consumption_rate, axis=1) + steps / consumption_rate
    late = ((delivered > due + 1e-9) & exists).sum(axis=1)
    source_tokens = np.where(migrated, n0, answer)
    if rule is not None and rule.handoff == "overlap":
        meanwhile = np.floor(np.where(migrated, took, 0.0) / source_gap).astype(int)
        source_tokens = np.minimum(answer, source_tokens + meanwhile)
    return Streams(
        delivered=np.where(exists, delivered, np.nan),
        handover=np.where(migrated, n0, -1),
        buffered=np.where(migrated, buffered, 0.0),
        late=late,
        source_tokens=source_tokens,
        target_tokens=np.where(migrated, answer - n0, 0),
        target_prefill=np.where(asked, prompt + n0, 0),
    )


def _handover(
    rule: MigrationRule | None,
    prompt: np.ndarray,
    answer: np.ndarray,
    ttft: np.ndarray,
    generated: np.ndarray,
    source_gap: np.ndarray,
    consumption_rate: float,
) -> tuple[np.ndarray, np.ndarray]:
    """(n0 [R], 0 where the stream never qualifies; unread tokens then [R])."""
    if rule is None:
        return np.zeros(len(prompt), dtype=int), np.zeros(len(prompt))
    steps = np.arange(generated.shape[1])
    shown = np.minimum(steps + 1, np.floor((generated - ttft[:, None]) * consumption_rate + 1e-9).astype(int) + 1)
    ready = rule.should_migrate(prompt[:, None], steps + 1, shown) & (steps + 1 < answer[:, None])
    first = ready.argmax(axis=1)
    found = ready.any(axis=1)
    unread = (first + 1 - shown[np.arange(len(first)), first]).astype(float)
    return np.where(found, first + 1, 0), np.where(found, unread, 0.0)
