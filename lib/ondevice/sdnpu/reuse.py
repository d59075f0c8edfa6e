"""Draft reuse (section 3.4): parts of rejected drafts that may still come, offered again in the next steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from ondevice.speculation import Draft, Verified
from ondevice.speculation.largest import largest

if TYPE_CHECKING:
    from torch import Tensor

_RULES = ("both", "shifted", "printed")


class Segment(NamedTuple):
    """Tokens that may follow the newest one. kind: why they may; see `agreed_run` and `resumed`."""

    kind: str
    tokens: Sequence[int]


@dataclass(frozen=True)
class Rejected:
    """The longest rejected tail of a draft.

    tokens: x_e, x_e+1 .. down one path of the draft. accepted: how many tokens of the draft are above it, e - 1.
    """

    tokens: tuple[int, ...]
    accepted: int


def rejected(draft: Draft, path: Sequence[int]) -> Rejected | None:
    """A draft's longest path below or beside the accepted `path`, the first of equals; None where all is used."""
    parents, on_path = draft.parents.tolist(), set(path)
    lengths: list[int] = []  # of the rejected path that ends with each node
    for node, parent in enumerate(parents):
        lengths.append(0 if node in on_path else 1 + (lengths[parent] if parent >= 0 else 0))
    length = max(lengths, default=0)
    if not length:
        return None
    nodes = [lengths.index(length)]
    while len(nodes) < length:
        nodes.append(parents[nodes[-1]])
    tokens = draft.tokens.tolist()
    above = parents[nodes[-1]]
    return Rejected(tuple(tokens[node] for node in reversed(nodes)), list(path).index(above) + 1 if above >= 0 else 0)


def agreed_run(draft: Draft, path: Sequence[int], logits: Tensor) -> list[int]:
    """Eq. 3: the longest run of rejected tokens x_i that are what the model said there, y_i.

    logits: [1 + n, V], after the root and every node. Of a tree, the longest on any path; the first of equals.
    The first rejected token, x_e, never is y_e, so that no run holds it.
    """
    parents, tokens, on_path = draft.parents.tolist(), draft.tokens.tolist(), {-1, *path}
    inner = set(parents) - on_path
    if not inner:
        return []
    first, last = min(inner) + 1, max(inner) + 2  # rows
    said = largest(logits[first:last], 1)[1].flatten().tolist()
    runs: list[int] = []  # length of the one that ends with each node
    for token, parent in zip(tokens, parents, strict=True):
        runs.append(1 + runs[parent] if parent in inner and said[parent + 1 - first] == token else 0)
    if not any(runs):
        return []
    node, run = runs.index(max(runs)), []
    for _ in range(runs[node]):
        run.append(tokens[node])
        node = parents[node]
    return run[::-1]


def resumed(tail: Sequence[int], said: Sequence[int]) -> list[Segment]:
    """How a rejected tail x_e, x_e+1 .. may go on after what was said in its place, z_e .. (at least one token).

    redundant: where the tail has the last tokens of z, behind them; the longest such match, the first of equals.
    synonym: as many tokens further as were said; longer synonym: one more.
    missing: from x_e on, as z was only put in between.
    """
    found = []
    if place := _behind(tail, said):
        found.append(Segment("redundant", tail[place:]))
    found.append(Segment("synonym", tail[len(said) :]))
    found.append(Segment("longer synonym", tail[len(said) + 1 :]))
    found.append(Segment("missing", tail))
    return [segment for segment in found if segment.tokens]


def _behind(tail: Sequence[int], said: Sequence[int]) -> int:
    """Where the tail goes on after its longest part that ends `said`; 0 where it has not even the last token."""
    best, length = 0, 0
    for place in range(1, len(tail) + 1):
        if tail[place - 1] == said[-1]:
            same = 1
            while same < min(place, len(said)) and tail[place - 1 - same] == said[-1 - same]:
                same += 1
            if same > length:
                best, length = place, same
    return best


class Reuse:
    """What to offer again of rejected drafts.

    rule: `printed`: Eq. 3's run of tokens that the model itself said at their places. Wherever the output has one token
        more than the draft, the tail is shifted and x_i is compared with the wrong y_i, and x_e is never in the run, so
        this rule misses the paper's own pattern `missing`.
        `shifted`: the tail is aligned with what was said in its place instead (`resumed`), which needs no logits.
        `both`: the runs and the aligned tail.
    lifetime: steps for which a rejected tail or a run is offered; the paper says at least one. A run whose first tokens
        come goes on with the others, whatever its age.
    shortest: tokens of a tail or a run that is kept. runs: most runs at a time, the newest ones.
    Raises ValueError on other settings.
    """

    def __init__(
        self,
        rule: Literal["both", "shifted", "printed"] = "both",
        lifetime: int = 2,
        shortest: int = 2,
        runs: int = 2,
    ) -> None:
        if rule not in _RULES:
            raise ValueError(f"There is no reuse {rule!r}; there are {', '.join(_RULES)}.")
        if min(lifetime, shortest, runs) < 1:
            raise ValueError(
                f"A segment lives for at least one step, has one token and is one of one, not {lifetime}, {shortest} "
                f"and {runs}."
            )
        self.rule, self.lifetime, self.shortest, self.most = rule, lifetime, shortest, runs
        self.begin()

    def begin(self) -> None:
        """A request comes."""
        self._runs: list[tuple[int, list[int]]] = []  # age, tokens
        self._tail: tuple[int, Sequence[int], list[int]] | None = None  # age, tail, what was said in its place

    def segments(self) -> list[Segment]:
        """What may follow the newest token, the newest rejection's first."""
        found = [Segment("run", run) for _, run in reversed(self._runs)]
        if self._tail:
            _, tail, said = self._tail
            found += resumed(tail, said)
        return found

    def observe(self, step: Verified) -> None:
        """A step was verified."""
        said = list(step.emitted)
        self._age(said)
        tail = rejected(step.draft, step.path)
        if tail is None or len(tail.tokens) < self.shortest:
            return
        if self.rule != "printed":
            self._tail = 0, tail.tokens, said[tail.accepted :]
        if self.rule != "shifted":
            run = agreed_run(step.draft, step.path, step.logits)
            if len(run) >= self.shortest:
                self._runs = [*self._runs, (0, run)][-self.most :]

    def _age(self, said: list[int]) -> None:
        """What is offered now has seen one more step, and what that said."""
        kept = []
        for age, run in self._runs:
            if run[: len(said)] == said:
                kept.append((age, run[len(said) :]))
            elif age + 1 < self.lifetime:
                kept.append((age + 1, run))
        self._runs = [(age, run) for age, run in kept if run]
        if self._tail:
            age, tail, before = self._tail
            self._tail = (age + 1, tail, before + said) if age + 1 < self.lifetime else None
