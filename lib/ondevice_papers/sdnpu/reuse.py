"""Draft reuse (section 3.4): parts of rejected drafts that may still come, offered again in the next steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ondevice.speculation import Draft, Verified

if TYPE_CHECKING:
    from torch import Tensor

LIFETIME = 2  # steps for which a rejected part is offered; the paper says at least one
SHORTEST = 2  # tokens of it
RUNS = 2  # at a time


class Segment(NamedTuple):
    """Tokens that may follow the newest one. kind: why they may."""

    kind: str
    tokens: Sequence[int]


class Rejected(NamedTuple):
    """The longest rejected tail of a draft.

    tokens: x_e, x_e+1 .. down one path of the draft. accepted: how many tokens of the draft are above it, e - 1.
    """

    tokens: Sequence[int]
    accepted: int


def rejected(draft: Draft, path: Sequence[int]) -> Rejected | None:
    """A draft's longest path below or beside the accepted `path`, the first of equals; None where all is used."""
    parents, tokens, kept = draft.parents.tolist(), draft.tokens.tolist(), set(path)
    tails: list[list[int]] = []  # of each node: the rejected tokens down to it
    for node, parent in enumerate(parents):
        above = tails[parent] if parent >= 0 else []
        tails.append([] if node in kept else [*above, tokens[node]])
    longest = max(tails, key=len, default=[])
    if not longest:
        return None
    node = tails.index(longest)
    for _ in longest:
        node = parents[node]
    return Rejected(longest, list(path).index(node) + 1 if node >= 0 else 0)


def agreed_run(draft: Draft, path: Sequence[int], logits: Tensor) -> list[int]:
    """Eq. 3: the longest run of rejected tokens x_i that are what the model said in their place, y_i.

    logits: [1 + n, V], after the root and every node. Of a tree, the longest on any path; the first of equals.
    x_e itself is never y_e, so that no run holds it.
    """
    parents, tokens, kept = draft.parents.tolist(), draft.tokens.tolist(), {-1, *path}
    choices = logits.argmax(-1).tolist()
    runs: list[list[int]] = []  # that end with each node
    for node, parent in enumerate(parents):
        agrees = node not in kept and parent not in kept and choices[parent + 1] == tokens[node]
        runs.append([*runs[parent], tokens[node]] if agrees else [])
    return max(runs, key=len, default=[])


def resumed(tail: Sequence[int], emitted: Sequence[int]) -> list[Segment]:
    """How a rejected tail x_e, x_e+1 .. may go on after what was emitted in its place, z_e .. (at least one token).

    redundant: where the tail has the last tokens of z, behind them. synonym: as many tokens further as were emitted;
    longer synonym: one more. missing: from x_e on, as z was only put in between.
    """
    segments = [
        Segment("redundant", tail[_behind(tail, emitted) :]),
        Segment("synonym", tail[len(emitted) :]),
        Segment("longer synonym", tail[len(emitted) + 1 :]),
        Segment("missing", tail),
    ]
    return [segment for segment in segments if segment.tokens]


def _behind(tail: Sequence[int], emitted: Sequence[int]) -> int:
    """Where the tail goes on after its longest part that ends `emitted`; its end where it lacks even the last token."""
    best = len(tail)
    length = 0
    for end in range(1, len(tail) + 1):
        same = 0
        while same < min(end, len(emitted)) and tail[end - 1 - same] == emitted[-1 - same]:
            same += 1
        if same > length:
            best = end
            length = same
    return best


class Printed:
    """The paper's reuse: runs by Eq. 3, offered for LIFETIME steps; one whose first tokens come goes on."""

    def __init__(self, *, agreed_run: Callable[..., list[int]] = agreed_run) -> None:
        self._agreed_run = agreed_run

    def begin(self) -> None:
        """Forget the runs of the last request."""
        self._runs: list[tuple[int, list[int]]] = []  # age, tokens

    def segments(self) -> list[Segment]:
        """What may follow the newest token, the newest rejection's first."""
        return [Segment("run", run) for _, run in reversed(self._runs)]

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


class Reuse:
    """Ours: the rejected tail, aligned with what was emitted in its place, which needs no logits.

    Eq. 3 compares x_i with y_i at the same place. Wherever the output has one token more than the draft the tail is
    shifted, and x_e is in no run: so it misses the paper's own pattern `missing`.
    """

    def __init__(
        self, *, rejected: Callable[..., Rejected | None] = rejected, resumed: Callable[..., list[Segment]] = resumed
    ) -> None:
        self._rejected = rejected
        self._resumed = resumed

    def begin(self) -> None:
        """Forget the rejected tail of the last request."""
        self._age, self._tail, self._emitted = 0, Rejected((), 0), list[int]()

    def segments(self) -> list[Segment]:
        """How the rejected tail may go on behind the newest token (`resumed`)."""
        return self._resumed(self._tail.tokens, self._emitted) if self._tail.tokens else []

    def observe(self, step: Verified) -> None:
        """Keep a verified step's rejected tail, or age the one there is."""
        tail = self._rejected(step.draft, step.path)
        if tail is not None and len(tail.tokens) >= SHORTEST:
            self._age, self._tail, self._emitted = 0, tail, list(step.emitted[tail.accepted :])
        elif self._age + 1 < LIFETIME:
            self._age, self._emitted = self._age + 1, [*self._emitted, *step.emitted]
        else:
            self._tail = Rejected((), 0)
