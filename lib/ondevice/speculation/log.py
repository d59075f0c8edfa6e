"""What every step did and cost: the one record from which all tables come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import pandas as pd


@dataclass(frozen=True)
class Step:
    """A step after prefill. Times in seconds; `forward_s` is the model, the rest is overhead.

    drafted: nodes verified, without the root. accepted: of these. emitted: tokens that came out, at least one.
    depth, width: of the draft: its longest path, its most nodes at one depth.
    length: tokens in the cache before it.
    """

    drafted: int
    accepted: int
    emitted: int
    depth: int
    width: int
    length: int
    draft_s: float
    forward_s: float
    choose_s: float
    keep_s: float
    observe_s: float

    @property
    def overhead_s(self) -> float:
        """Everything that is not the model's forward pass."""
        return self.draft_s + self.choose_s + self.keep_s + self.observe_s


@dataclass(frozen=True)
class Generation:
    """What one request gave.

    prompt: how many tokens. tokens: the output, the end token included where it came. ended: whether it came.
    prefill_s: until the first token is chosen, drafter's work on the prompt included. decode_s: wall time after that.
    """

    prompt: int
    tokens: Sequence[int]
    ended: bool
    prefill_s: float
    decode_s: float
    steps: Sequence[Step] = field(repr=False)

    @property
    def mean_accepted(self) -> float:
        """Tokens a verification (MAT), the model's own token included; the first token, from prefill, is not counted.

        1 for vanilla decoding, NaN when nothing was decoded after the prefill.
        """
        return (len(self.tokens) - 1) / len(self.steps) if self.steps else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted nodes; NaN when nothing was drafted."""
        drafted = sum(step.drafted for step in self.steps)
        return sum(step.accepted for step in self.steps) / drafted if drafted else float("nan")

    @property
    def overhead_share(self) -> float:
        """Share of the decoding time that is not the model's forward pass."""
        forward = sum(step.forward_s for step in self.steps)
        return 1 - forward / self.decode_s if self.steps else float("nan")

    def table(self) -> pd.DataFrame:
        """One row a step, with the columns of `Step`."""
        return pd.DataFrame([asdict(step) for step in self.steps], columns=list(Step.__dataclass_fields__))
