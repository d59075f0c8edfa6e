"""sd.npu's drafter: what a look-up retrieves, with calibrated and reused branches in one trace pool (3.3, 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from ondevice.speculation import Draft, Drafter, Verified
from ondevice_papers.sdnpu import calibration, reuse
from ondevice_papers.sdnpu.calibration import NOTHING, Calibration, Row
from ondevice_papers.sdnpu.history import History
from ondevice_papers.sdnpu.retrieval import Base, Pld, Sam, Suffixes
from ondevice_papers.sdnpu.reuse import Reuse

if TYPE_CHECKING:
    from torch import Tensor

LMAX = 32  # tokens of the decoding graph, the root included
LEAST = 1e-3  # a node's least chance: less gained nothing on the validation tasks
PRIOR = 4.0  # imagined tries of a source, so that a new drafter does not follow its first accidents
MEMORY = 0.999  # what of the past stays at a source's next try
SURE = 3  # tokens matched from which on a printed pool begins with the retrieved branch
LONG = 16  # longer matches are taken together


class Branch(NamedTuple):
    """Tokens that may follow the root. kind: `match`, or a reused segment's. matched: tokens before it that agree."""

    kind: str
    tokens: Sequence[int]
    matched: int = 0


On = tuple[tuple[Branch, int], ...]  # branches that go on at a node, each with how many of its tokens lie above
Source = tuple[str, int, int]  # kind; tokens that agree before it, or the row's order; how it stands to the row


class Rates:
    """How often each source was right where it was asked: hits over promises, learnt as requests run."""

    def __init__(self) -> None:
        self._counts: dict[Source, list[float]] = {}
        self._rates: dict[Source, float] = {}

    def __getitem__(self, source: Source) -> float:
        rate = self._rates.get(source)
        return first_guess(*source) if rate is None else rate

    def observe(self, source: Source, promised: float, right: bool) -> None:
        """The source promised a token with this probability, and was right or not."""
        counts = self._counts.setdefault(source, [PRIOR * first_guess(*source), PRIOR])
        counts[0] = MEMORY * counts[0] + right
        counts[1] = MEMORY * counts[1] + promised
        self._rates[source] = min(1.0, counts[0] / counts[1])


# How the first guess of a retrieved token changes by its standing, below; a token that is sure there is nearly sure.
STANDINGS = (1.0, 0.5, 0.7, 1.0, 1.2)
SURE_TOKEN = 0.97


def first_guess(kind: str, number: int, standing: int) -> float:
    """A source's rate before anything is known; set on the validation tasks."""
    if kind == "calibrated":
        return 0.8 if number == 2 else 0.4
    alone = min(0.95, 0.2 + 0.1 * number) if kind == "match" else min(0.6, 0.1 + 0.05 * number)
    return min(0.95, STANDINGS[standing] * alone) if standing < len(STANDINGS) else SURE_TOKEN


def standing(token: int, row: Row) -> int:
    """How a token stands to the calibrated ones: 0 no row, 1 not among them, then by its probability there."""
    if not row.order:
        return 0
    if token not in row.tokens:
        return 1
    return 2 + int(4 * row.chances[row.tokens.index(token)])


def offered(row: Row, on: On, rates: Rates) -> Iterator[tuple[int, float, On]]:
    """(token, chance, branches below it) of what may follow a node.

    Children exclude each other: what branches give their tokens is taken from the calibrated ones.
    """
    chances, below, left = dict[int, float](), dict[int, On](), 1.0
    for branch, index in on:
        token = branch.tokens[index]
        rate = rates[branch.kind, min(LONG, branch.matched + index), standing(token, row)]
        chances[token] = max(rate, chances.get(token, 0.0))
        if index + 1 < len(branch.tokens):
            below[token] = (*below.get(token, ()), (branch, index + 1))
    for chance in chances.values():
        left *= 1 - chance
    for rank, (token, p) in enumerate(zip(row.tokens, row.chances, strict=True)):
        if token not in chances:
            chances[token] = left * p * rates["calibrated", row.order, rank]
    return ((token, chance, below.get(token, ())) for token, chance in chances.items())


class Pool(NamedTuple):
    """A draft as it grows. tokens, parents: of its nodes. offers: by node (-1: root) its row and branches."""

    tokens: list[int]
    parents: list[int]
    offers: dict[int, tuple[Row, On]]


def grow(
    tail: tuple[int, int], budget: int, table: Calibration | None, branches: Sequence[Branch], rates: Rates
) -> Pool:
    """The trace pool: the `budget` nodes that are likeliest to be accepted.

    tail: the last two tokens of the text, the root second. A path's chance is the product of its nodes'.
    """
    pool = Pool([], [], {})
    queue: list[tuple[float, int, int, int, On]] = []  # the path's chance, negative; the turn; parent; token; branches
    (before, token), node, reach, on = tail, -1, 1.0, tuple((branch, 0) for branch in branches)
    while len(pool.tokens) < budget:
        row = table.row(before, token) if table else NOTHING
        pool.offers[node] = row, on
        for child, chance, below in offered(row, on, rates):
            if reach * chance >= LEAST:
                heappush(queue, (-reach * chance, len(pool.offers) * 64 + len(queue), node, child, below))
        if not queue:
            break
        negative, _, parent, child, on = heappop(queue)
        before = pool.tokens[parent] if parent >= 0 else tail[1]
        token = child
        node = len(pool.tokens)
        reach = -negative
        pool.tokens.append(child)
        pool.parents.append(parent)
    return pool


def observe(pool: Pool, step: Verified, rates: Rates) -> None:
    """The model's choice at every node that was reached judges all that was offered there, drafted or not."""
    for node, emitted in zip([-1, *step.path], step.emitted, strict=False):  # an end token stops before the last choice
        row, on = pool.offers.get(node, (NOTHING, ()))
        for rank, (token, p) in enumerate(zip(row.tokens, row.chances, strict=True)):
            rates.observe(("calibrated", row.order, rank), p, token == emitted)
        for branch, index in on:
            token = branch.tokens[index]
            source = branch.kind, min(LONG, branch.matched + index), standing(token, row)
            rates.observe(source, 1.0, token == emitted)


def merged(branches: Sequence[Sequence[int]], budget: int) -> Draft:
    """The paper's pool: the trie of several branches, the first ones first, cut to `budget` nodes."""
    nodes: dict[tuple[int, int], int] = {}
    for branch in branches:
        node = -1
        for token in branch:
            if (node, token) not in nodes and len(nodes) == budget:
                break
            node = nodes.setdefault((node, token), len(nodes))
    return Draft([token for _, token in nodes], [parent for parent, _ in nodes])


class SdNpu(Drafter):
    """Context-aligned drafts of a base, a calibration of the context and a reuse of rejected drafts, each optional.

    One drafter serves one task group, a request at a time; what base, calibration and rates have learnt stays.
    With the paper's parts (`calibration.Printed`, `reuse.Printed`) the pool is the paper's: reused segments, the
    retrieved branch (first after a match of three tokens), the calibrated tree, one after the other until it is full.
    grow, observe, merged: the functions above, or an experiment's. Raises ValueError on parts of other vocabularies.
    """

    drafts_trees = True

    def __init__(
        self, base: Base | None = None, calibration: Calibration | calibration.Printed | None = None,
        reuse: Reuse | reuse.Printed | None = None, *, name: str = "sd.npu", grow: Callable[..., Pool] = grow,
        observe: Callable[..., None] = observe, merged: Callable[..., Draft] = merged,
    ) -> None:  # fmt: skip
        sizes = {part.vocabulary for part in (base, calibration) if part is not None and part.vocabulary is not None}
        if len(sizes) > 1:
            raise ValueError(f"The base and the calibration have {min(sizes)} and {max(sizes)} token ids.")
        rules = {type(part).__name__ == "Printed" for part in (calibration, reuse) if part is not None}
        if len(rules) > 1:
            raise ValueError("Calibration and reuse are both ours or both the paper's.")
        self.printed = True in rules
        self.base, self.calibration, self.reuse, self.name = base, calibration, reuse, name
        self._grow, self._observe, self._merged = grow, observe, merged
        self.vocabulary = next(iter(sizes), None)
        self.wants_prefill = calibration is not None
        self.rates = Rates()

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin a new request in base, calibration and reuse."""
        self._pool: tuple[Draft, Pool] | None = None
        for part in (self.base, self.calibration):
            if part is not None:
                part.begin(prompt)
        if self.reuse is not None:
            self.reuse.begin()

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Give the prompt's logits to the calibration."""
        if self.calibration is not None:
            self.calibration.prefilled(start, logits)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A draft tree of at most Lmax - 1 nodes for the text so far."""
        room = min(budget, LMAX - 1)
        retrieved, matched = self.base.retrieve(tokens, room) if self.base is not None else ([], 0)
        segments = self.reuse.segments() if self.reuse is not None else []
        if self.printed:
            table: Any = self.calibration
            tree = table.tree(tokens[-1]).branches() if table is not None else []
            reused = [segment.tokens for segment in segments]
            return self._merged([*retrieved, *reused, *tree] if matched >= SURE else [*reused, *retrieved, *tree], room)
        branches = [Branch("match", branch, matched) for branch in retrieved]
        branches += [Branch(segment.kind, segment.tokens) for segment in segments]
        tail = tokens[-2] if len(tokens) > 1 else -1, tokens[-1]
        pool = self._grow(tail, room, self.calibration, branches, self.rates)
        self._pool = Draft(pool.tokens, pool.parents), pool
        return self._pool[0]

    def observe(self, step: Verified) -> None:
        """Learn rates, calibration and rejected tails from a verified step."""
        if self._pool and self._pool[0] is step.draft:  # the loop cuts drafts near the end of the output only
            self._observe(self._pool[1], step, self.rates)
        for part in (self.calibration, self.reuse):
            if part is not None:
                part.observe(step)

    def end(self, tokens: Sequence[int]) -> None:
        """Give the finished output to the base's history."""
        if self.base is not None:
            self.base.end(tokens)


BASES = ("PLD", "SAM", "SuffixDecoding")
PARTS = ("calibration", "reuse", "both")
PUBLISHED = 64  # nodes a draft of a base alone: more than SAM ever drafts


def base(name: str, vocabulary: int, history: History | None = None) -> Pld | Sam | Suffixes:
    """A new retriever by its name in BASES."""
    if name == "PLD":
        return Pld()
    return Sam(vocabulary, history) if name == "SAM" else Suffixes()


def sdnpu(
    vocabulary: int, history: History | None = None, on: str = "SAM", part: str = "both", printed: bool = False,
    **functions: Any,
) -> SdNpu:  # fmt: skip
    """A drafter of one of BASES with one of PARTS, by our rules or as printed.

    functions: by name, in place of those of `calibration`, `reuse` and this module.
    """
    parts = (calibration.Printed, reuse.Printed) if printed else (Calibration, Reuse)

    def given(*names: str) -> dict[str, Any]:
        return {name: functions[name] for name in names if name in functions}

    own = given("learn", "look_up"), given("rejected", "resumed")
    if printed:
        own = given("searched"), given("agreed_run")
    return SdNpu(
        base(on, vocabulary, history),
        parts[0](vocabulary, **own[0]) if part != "reuse" else None,
        parts[1](**own[1]) if part != "calibration" else None,
        name=f"{on}+{part}{', printed' if printed else ''}",
        **given("grow", "observe", "merged"),
    )


def methods(vocabulary: int, **functions: Any) -> dict[str, tuple[Callable[[], Drafter], int]]:
    """By name what makes a new drafter, and the most nodes of its drafts. functions: of `sdnpu`."""
    drafters: dict[str, tuple[Callable[[], Drafter], int]] = {"vanilla": (Drafter, 1)}
    for on in BASES:
        drafters[on] = partial(base, on, vocabulary), PUBLISHED
        for printed, part in product((False, True), PARTS):
            make = partial(sdnpu, vocabulary, on=on, part=part, printed=printed, **functions)
            drafters[f"{on}+{part}{', printed' if printed else ''}"] = make, LMAX - 1
    return drafters
