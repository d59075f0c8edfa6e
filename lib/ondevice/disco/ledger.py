"""What every started endpoint cost, losers and cancelled work included."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ondevice.disco.endpoints import SIDES, Side

Role = Literal["race", "fallback", "migration"]
# served: it finished the answer. migrated: it handed the answer over. lost: another was first. failed: it broke off.
# cancelled: the user left or the deadline passed.
Outcome = Literal["served", "migrated", "lost", "failed", "cancelled"]
KEPT_ENTRIES = 10_000


@dataclass(frozen=True)
class Entry:
    """One start of one endpoint. Tokens are the endpoint's own count, or estimated; cost in the prices' currency.

    prompt_tokens are charged in full from the start on. output_tokens are those received: what an endpoint goes on
    to generate after its stream was closed is not known here.
    """

    side: Side
    role: Role
    outcome: Outcome
    prompt_tokens: int
    output_tokens: int
    cost: float
    estimated: bool


@dataclass
class Totals:
    starts: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    wasted_cost: float = 0.0
    estimated: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        self.starts += 1
        self.prompt_tokens += entry.prompt_tokens
        self.output_tokens += entry.output_tokens
        self.cost += entry.cost
        self.wasted_cost += entry.cost if entry.outcome not in ("served", "migrated") else 0.0
        self.estimated += entry.estimated
        self.outcomes[entry.outcome] = self.outcomes.get(entry.outcome, 0) + 1


class Ledger:
    """Totals per side since the start, and the latest entries.

    The share is measured as the budget is defined (section 5.1): input tokens of requests that started the
    constrained endpoint over all input tokens, in the router's own count.
    """

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=KEPT_ENTRIES)
        self.totals: dict[Side, Totals] = {side: Totals() for side in SIDES}
        self.requests = 0
        self.errors = 0
        self.migrations = 0
        self.input_tokens = 0
        self.started_tokens: dict[Side, int] = dict.fromkeys(SIDES, 0)

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.totals[entry.side].add(entry)

    def share(self, side: Side) -> float:
        """Input tokens of the requests that started `side`, as a share of all input tokens."""
        return self.started_tokens[side] / self.input_tokens if self.input_tokens else 0.0

    def summary(self) -> dict[str, Any]:
        sides = {side: asdict(self.totals[side]) | {"input_share": self.share(side)} for side in SIDES}
        counts = {name: getattr(self, name) for name in ("requests", "errors", "migrations", "input_tokens")}
        return counts | sides
