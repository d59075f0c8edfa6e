"""When to hand a running answer to the cheaper endpoint: the rule the router asks after every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

Handoff = Literal["stop", "overlap"]


class HandoffRule(Protocol):
    """What the router needs of a migration rule; `migration.MigrationRule` is one, StatedOverhead a simple other.

    handoff: `stop` halts the source at the trigger; `overlap` lets it run until the target's first token.
    """

    @property
    def handoff(self) -> Handoff: ...

    def should_migrate(self, prompt: int, generated: int, shown: int, /) -> Any:
        """Whether to migrate now (true or false), with n0 = generated tokens of which k = shown have been shown."""


@dataclass(frozen=True)
class StatedOverhead:
    """Migrate at the first n0 with n0 - k >= B = r_c t_m and saving > overhead (Sun et al. 2025, Eqs. 4-5).

    pace: r_c, tokens/s. overhead_s: t_m, seconds. answer_tokens: expected length of an answer. Prices are per token:
    source_output = c_src^d, target_output = c_tgt^d, target_prompt = c_tgt^p (prompt and prefix are prefilled again).
    """

    pace: float
    overhead_s: float
    answer_tokens: float
    source_output: float
    target_output: float
    target_prompt: float = 0.0
    handoff: Handoff = "stop"

    def __post_init__(self) -> None:
        if self.handoff not in ("stop", "overlap"):
            raise ValueError(f"A hand-off is 'stop' or 'overlap', not {self.handoff!r}.")
        if not self.pace > 0 or self.overhead_s < 0:
            raise ValueError("A migration needs a pace above 0 tokens/s and an overhead of at least 0 s.")

    @property
    def buffer_tokens(self) -> float:
        """B: tokens that are held back when a migration starts."""
        return self.pace * self.overhead_s

    def should_migrate(self, prompt: int, generated: int, shown: int) -> bool:
        if generated - shown < self.buffer_tokens:
            return False
        saving = (self.source_output - self.target_output) * max(0.0, self.answer_tokens - generated)
        return saving > (prompt + generated) * self.target_prompt
