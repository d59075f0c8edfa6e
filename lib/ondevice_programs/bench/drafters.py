"""One request answered with one of the drafters that are compared, timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor

from ondevice.causal_lm import CausalLM
from ondevice.speculation import Drafter, generate, greedy

# Nodes of a draft, in the order in which they are tried. With the root's, 16 and 32 rows fill the tiles of AMX.
BUDGETS = (8, 4, 31, 15)


class Timed(Drafter):
    """A drafter whose calls are timed. seconds: of all of them so far."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        for name in ("name", "drafts_trees", "vocabulary"):
            setattr(self, name, getattr(drafter, name))
        for name in ("prefilled", "propose", "observe", "end"):
            setattr(self, name, partial(self._call, getattr(drafter, name)))
        self.seconds = 0.0

    def begin(self, prompt: Sequence[int]) -> None:
        """Timed; the drafter decides whether it reads this prompt."""
        self._call(self.drafter.begin, prompt)
        self.wants_prefill = self.drafter.wants_prefill

    def _call(self, method: Callable[..., Any], *given: Any) -> Any:
        began = perf_counter()
        result = method(*given)
        self.seconds += perf_counter() - began
        return result


def answered(
    lm: CausalLM, drafter: Drafter, ids: Sequence[int], limit: int, ends: frozenset[int], budget: int = 1
) -> dict[str, Any]:
    """A prompt's greedy answer of at most `limit` tokens, and what it took. ends: ids that end it.

    tokens; first, seconds: until its first and its last token; opening, drafting: of these the drafter's; rows: passes
    behind the first token by their number of rows; emitted: tokens that these gave.
    """
    timed = Timed(drafter)
    opened: list[float] = []

    def choice(logits: Tensor) -> int:
        token = greedy(logits)
        if not opened:
            opened.extend((perf_counter(), timed.seconds))
        return token

    began = perf_counter()
    log = generate(lm, timed, ids, limit, budget=budget, choice=choice, eos_token_ids=ends)
    seconds = perf_counter() - began
    times = {"first": opened[0] - began, "seconds": seconds, "opening": opened[1], "drafting": timed.seconds}
    rows = Counter(str(1 + step.drafted) for step in log.steps)
    return {"tokens": list(log.tokens), **times, "rows": dict(rows), "emitted": len(log.tokens) - 1}
