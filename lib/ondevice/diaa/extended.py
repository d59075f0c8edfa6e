"""Beyond the paper: DIAA with calibrated probabilities, a budget set by the verification's cost, and suffix matches."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.diaa.budget import Sizing
from ondevice.diaa.calibration import Calibration
from ondevice.diaa.drafter import Diaa
from ondevice.diaa.merging import Branch, Continuing, Mixed, grow
from ondevice.diaa.tables import Tables
from ondevice.diaa.updates import Rule
from ondevice.speculation import Draft, Verified
from ondevice.speculation.suffix_automaton import SuffixAutomaton

LEAST = 5e-3  # a node's least chance; Fig. 7's tau, here of acceptance


class Extended(Diaa):
    """Drafts the likeliest nodes of tables and suffix match, as many as pay.

    calibrated: whether the tables' probabilities are corrected by what was accepted.
    sizing: how many nodes pay; None drafts as many as the budget allows.
    suffixes: whether what followed the longest match of the request's text competes with the tables. reach: most
        tokens of it.
    least: nodes of a smaller chance are not drafted.
    """

    def __init__(
        self, tables: Tables, *, calibrated: bool = True, sizing: Sizing | None = None,
        suffixes: bool = True, reach: int = 16, least: float = LEAST, overlap: bool = False,
        rule: Rule | None = None, reads_prompt: bool = False, name: str = "DIAA, extended",
    ) -> None:  # fmt: skip
        super().__init__(tables, overlap=overlap, rule=rule, reads_prompt=reads_prompt, name=name)
        self.calibration = Calibration(tables.k) if calibrated else None
        self.continuing, self.sizing = Continuing(), sizing
        self._suffixes, self._reach, self._least = suffixes, reach, least
        self._text = SuffixAutomaton()
        self._drafted: tuple[Draft, Mixed] | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt; tables and what was learnt of acceptance stay."""
        super().begin(prompt)
        self._text = SuffixAutomaton(prompt if self._suffixes else ())
        self._drafted = None

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The likeliest nodes below the last token, cut to what pays."""
        branch = self._branch(tokens) if self._suffixes else Branch()
        mixed = grow(self.tables, tokens[-1], budget, self.calibration, branch, self.continuing, self._least)
        nodes = self.sizing(mixed.chances) if self.sizing else len(mixed.tokens)
        draft = mixed.draft(nodes)
        self._drafted = draft, mixed
        return draft

    def _branch(self, tokens: Sequence[int]) -> Branch:
        """What followed the earliest occurrence of the text's longest suffix, the root included, that has one."""
        self._text.extend(tokens[len(self._text) :])
        match = self._text.match
        return Branch(self._text.continuation(match, self._reach), match.length) if match.length else Branch()

    def observe(self, step: Verified) -> None:
        """Update the tables, and what is known of acceptance."""
        super().observe(step)
        if self._drafted and self._drafted[0] is step.draft:  # the loop cuts drafts near the end of the output only
            self._learn(self._drafted[1], step)
        if self.sizing:
            self.sizing.observe(len(step.draft), len(step.emitted))

    def _learn(self, mixed: Mixed, step: Verified) -> None:
        """The model's choice at every node that was reached judges all candidates there, those too that did not pay.

        So what is learnt does not depend on the size that it sets, and a tree that fell to nothing can grow again.
        """
        chosen = dict(zip([-1, *step.path], step.emitted, strict=False))  # an end token stops before the last choice
        outcomes = []
        for token, parent, rank, said, matched in zip(
            mixed.tokens, mixed.parents, mixed.ranks, mixed.said, mixed.matched, strict=True
        ):
            if parent in chosen:
                right = token == chosen[parent]
                if rank:
                    outcomes.append((rank, said, right))
                if matched:
                    self.continuing.observe(matched, right)
        if self.calibration:
            self.calibration.observe(outcomes)
