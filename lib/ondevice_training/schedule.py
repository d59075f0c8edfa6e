"""The learning rate's shape: warm-up, constant, linear decay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Warm-up, constant, linear decay to zero (WSD). Lengths are in steps; decay is a share of the total.

    Until the decay begins the rate does not depend on the total, so a run can be given more steps.
    """

    total: int
    warmup: int = 50
    decay: float = 0.4

    @property
    def decay_start(self) -> int:
        """The first step of the decay."""
        return self.total - round(self.total * self.decay)

    def __call__(self, step: int) -> float:
        """Factor in (0, 1] for a step counted from 0."""
        rise = min(1.0, (step + 1) / self.warmup)
        fall = min(1.0, (self.total - step) / max(1, self.total - self.decay_start))
        return min(rise, fall)
