"""Draft reuse (section 3.4): parts of rejected drafts that may still come, offered again in the next steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ondevice.speculation import Draft, Verified
from ondevice.speculation.largest import likeliest

if TYPE_CHECKING:
    from torch import Tensor

LIFETIME = 2  # steps for which a rejected part is offered; the paper says at least one
SHORTEST = 2  # tokens of it
RUNS = 2  # at a time


def agreed_run(draft: Draft, path: Sequence[int], logits: Tensor) -> list[int]:
    """Eq. 3: the longest run of rejected tokens x_i that are what the model said in their place, y_i.

    logits: [1 + n, V], after the root and every node. Of a tree, the longest on any path; the first of equals.
    x_e itself is never y_e, so that no run holds it.
    """
    parents, tokens, kept = draft.parents.tolist(), draft.tokens.tolist(), {-1, *path}
    choices = likeliest(logits).tolist()
    runs: list[list[int]] = []  # that end with each node
    for node, parent in enumerate(parents):
        agrees = node not in kept and parent not in kept and choices[parent + 1] == tokens[node]
        runs.append([*runs[parent], tokens[node]] if agrees else [])
    return max(runs, key=len, default=[])


class Reuse:
    """Rejected runs that the model agreed with (Eq. 3), for LIFETIME steps; one whose first tokens come goes on."""

    def __init__(self, *, agreed_run: Callable[..., list[int]] = agreed_run) -> None:
        self._agreed_run = agreed_run

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the runs of the last request."""
        self._runs: list[tuple[int, list[int]]] = []  # age, tokens

    def runs(self) -> list[list[int]]:
        """Tokens that may follow the newest one, the newest rejection's first."""
        return [run for _, run in reversed(self._runs)]

    def observe(self, step: Verified) -> None:
        """Age the kept runs by a verified step, and add the run that Eq. 3 finds in it."""
        emitted = list(step.emitted)
        kept = []
        for age, run in self._runs:
            if run[: len(emitted)] == emitted:
                kept.append((age, run[len(emitted) :]))
            elif age + 1 < LIFETIME:
                kept.append((age + 1, run))
        if len(run := self._agreed_run(step.draft, step.path, step.logits)) >= SHORTEST:
            kept.append((0, run))
        self._runs = [(age, run) for age, run in kept if run][-RUNS:]
