"""sd.npu's drafter: retrieved branches, reused runs and the calibrated tree in one trace pool (sections 3.3, 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ondevice.speculation import Draft, Drafter, Verified
from ondevice.speculation.bundled import mixture
from ondevice_papers.sdnpu.calibration import PromptCalibration
from ondevice_papers.sdnpu.history import History
from ondevice_papers.sdnpu.retrieval import Base, Pld, Sam, Suffixes, branches
from ondevice_papers.sdnpu.reuse import Reuse

if TYPE_CHECKING:
    from torch import Tensor

LMAX = 32  # rows of the decoding graph, the root included
SURE = 3  # tokens matched from which on the pool begins with the retrieved branches
BASES = ("PLD", "SAM", "SuffixDecoding")
PARTS = ("calibration", "reuse", "both")
PUBLISHED = 64  # nodes of a base's draft without sd.npu: more than SAM ever drafts
MIXTURE = "mixture"  # ours: the library's, which keys the model's fresh logits by two tokens


def pooled(branches: Sequence[Sequence[int]], budget: int) -> Draft:
    """The trace pool: the trie of several branches, the first ones first, cut to `budget` nodes."""
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

    One drafter serves one group of tasks, a request at a time; what the base has learnt stays. The pool takes reused
    runs, the retrieved branches (first after a match of three tokens) and the calibrated tree, one after the other,
    until it is full. pooled: the function above, or an experiment's.
    """

    drafts_trees = True

    def __init__(
        self,
        base: Base | None = None,
        calibration: PromptCalibration | None = None,
        reuse: Reuse | None = None,
        *,
        name: str = "sd.npu",
        pooled: Callable[..., Draft] = pooled,
    ) -> None:
        self.base, self.calibration, self.reuse, self.name = base, calibration, reuse, name
        self._pooled = pooled
        self.vocabulary = None if base is None else base.vocabulary
        self.wants_prefill = calibration is not None

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin a new request in base, calibration and reuse."""
        for part in (self.base, self.calibration, self.reuse):
            if part is not None:
                part.begin(prompt)

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Give the prompt's logits to the calibration."""
        if self.calibration is not None:
            self.calibration.prefilled(start, logits)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """A draft tree of at most Lmax - 1 nodes for the text so far."""
        room = min(budget, LMAX - 1)
        retrieved, matched = self.base.retrieve(tokens, room) if self.base is not None else ([], 0)
        runs = self.reuse.runs() if self.reuse is not None else []
        tree = branches(*self.calibration.tree(tokens[-1])) if self.calibration is not None else []
        first = [*retrieved, *runs] if matched >= SURE else [*runs, *retrieved]
        return self._pooled([*first, *tree], room)

    def observe(self, step: Verified) -> None:
        """Look for a run to reuse in a verified step."""
        if self.reuse is not None:
            self.reuse.observe(step)

    def end(self, tokens: Sequence[int]) -> None:
        """Give the finished output to the base's history."""
        if self.base is not None:
            self.base.end(tokens)


def base(name: str, vocabulary: int, history: History | None = None) -> Base:
    """A new retriever by its name in BASES."""
    if name == "PLD":
        return Pld()
    return Sam(vocabulary, history) if name == "SAM" else Suffixes()


def sdnpu(
    vocabulary: int, history: History | None = None, on: str = "SAM", part: str = "both", **functions: Any
) -> SdNpu:
    """A drafter of one of BASES with one of PARTS. functions: by name, in place of searched, agreed_run and pooled."""

    def given(name: str) -> dict[str, Any]:
        return {name: functions[name]} if name in functions else {}

    return SdNpu(
        base(on, vocabulary, history),
        PromptCalibration(**given("searched")) if part != "reuse" else None,
        Reuse(**given("agreed_run")) if part != "calibration" else None,
        name=f"{on}+{part}",
        **given("pooled"),
    )


def methods(vocabulary: int, **functions: Any) -> dict[str, tuple[Callable[[], Drafter], int]]:
    """By name what makes a new drafter, and the most nodes of its drafts. functions: of `sdnpu`."""
    drafters: dict[str, tuple[Callable[[], Drafter], int]] = {"vanilla": (Drafter, 1)}
    for on in BASES:
        drafters[on] = partial(base, on, vocabulary), PUBLISHED
        for part in PARTS:
            drafters[f"{on}+{part}"] = partial(sdnpu, vocabulary, on=on, part=part, **functions), LMAX - 1
    drafters[MIXTURE] = mixture, LMAX - 1
    return drafters
