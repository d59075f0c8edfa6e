"""A hard budget: the constrained endpoint never processes more than its share of all input tokens."""

from __future__ import annotations

from ondevice.disco.policy import check_budget


class TokenBucket:
    """Accrues `budget` tokens per input token; a request is admitted only if the bucket holds all its tokens.

    burst: most tokens the bucket can hold, which bounds how far unused allowance can be saved up; a longer request
    fills it to its own length at most.
    """

    def __init__(self, budget: float, burst: float = 2000.0) -> None:
        check_budget(budget)
        if not burst > 0:
            raise ValueError(f"A bucket's burst is a positive number of tokens, not {burst!r}.")
        self.budget, self.burst, self.level = budget, burst, 0.0

    def arrive(self, tokens: int) -> bool:
        """Credit a request of `tokens` and say whether the constrained endpoint may be started on it."""
        self.level = min(max(self.burst, tokens), self.level + self.budget * tokens)
        return self.level >= tokens * (1 - 1e-12)

    def spend(self, tokens: int) -> None:
        """Charge a request that did start the constrained endpoint."""
        self.level -= tokens
