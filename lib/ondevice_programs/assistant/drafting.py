"""A side of DRAGON that drafts ahead by a drafter of DIAA or sd.npu, verified in one pass over all its documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ondevice.speculation import Draft, Drafter, Verified
from ondevice.speculation.loop import PREFILL_CHUNK
from ondevice_papers.diaa.drafter import Diaa
from ondevice_papers.diaa.tables import Tables
from ondevice_papers.sdnpu.drafter import sdnpu
from ondevice_programs.pair.decoder import Decoder, Piece

BUDGET, NODES = 8, 32  # tokens of a chain that are verified; nodes of the tree that it is taken from


def likeliest_chain(draft: Draft, most: int) -> list[int]:
    """The path of first children: drafters put the likeliest node first. Documents share columns, so no tree fits."""
    tokens = list[int]()
    node = -1
    while len(tokens) < most and len(below := np.flatnonzero(draft.parents == node)):
        node = int(below[0])
        tokens.append(int(draft.tokens[node]))
    return tokens


def verify(side: Ahead) -> Tensor:
    """Logits [D, 1 + n, V] after what is committed and after each of n drafts, in one pass over all documents."""
    assert side._batch is not None
    common = side._suffix + side.tokens
    seen = min(side._batch.length, len(common) - 1)
    side._batch.rollback(seen)
    most = min(BUDGET, side.room - 1) if side.tokens else 0
    draft = side.drafter.propose(side.read + side.tokens, NODES) if most > 0 else Draft((), ())
    side.drafts = likeliest_chain(draft, most)
    side.taken = 0
    given = common[seen:] + side.drafts
    side.width = len(given)
    return side._batch.extend(given)[:, -1 - len(side.drafts) :] if side.drafts else side._batch.prefill(given)[:, None]


def learn(side: Ahead, verified: Tensor, token: int) -> None:
    """The drafter sees the side's mixture of its documents, as if one model had said it, and what was said at last."""
    weights = torch.from_numpy(side._log_weights)[:, None, None]
    mixed = (verified[: len(weights)].log_softmax(-1) + weights).logsumexp(0).float()
    taken = side.drafts[: side.taken]
    root = (side.read + side.tokens)[-2 - len(taken)]
    side.drafter.observe(Verified(root, Draft.chain(side.drafts), mixed, range(len(taken)), [*taken, token]))


class Ahead(Decoder):
    """A `Decoder` whose passes verify a chain of drafts; its distributions are those of a plain one.

    drafter: reads all documents and the query, `read`, as one prompt. drafts: of the last pass, of which `taken` came
    true. width: tokens of the pass that gave the last distribution, 0 where an earlier one had. verify, learn: above.
    """

    def __init__(
        self,
        *decoded: Any,
        drafter: Callable[[], Drafter],
        verify: Callable[[Ahead], Tensor] = verify,
        learn: Callable[..., None] = learn,
        **options: Any,
    ) -> None:
        super().__init__(*decoded, **options)
        self.drafter, self.verify, self.learn, self.width = drafter(), verify, learn, 0
        self.read = [*chain.from_iterable(self._prefixes), *self._suffix]
        self.drafter.begin(self.read)
        self.drafts = list[int]()
        self.taken = 0
        self._verified: Tensor | None = None  # the last pass's logits, while they are of use

    def pieces(self, query: bool = True) -> Iterator[Piece]:
        """Prefill; a drafter that reads the prompt's logits is given those of the documents."""
        start = 0
        for prefix, member in self._documents():
            if self.drafter.wants_prefill and prefix and not member.length:
                member.prefill(prefix, PREFILL_CHUNK, partial(self._prefilled, start))
                yield Piece(len(prefix), [])
            start += len(prefix)
        yield from super().pieces(query)

    def next_distribution(self) -> np.ndarray:
        """As of `Decoder`."""
        self.width = 0
        return super().next_distribution()

    def commit(self, token: int) -> None:
        """As of `Decoder`. What was verified beyond another token than the drafted one is dropped."""
        super().commit(token)
        if self._verified is None:
            return
        if self.taken < len(self.drafts) and self.drafts[self.taken] == token:
            self.taken += 1
            return
        self.learn(self, self._verified, token)
        assert self._batch is not None
        self._batch.rollback(min(self._batch.length, len(self._suffix) + self.position - 1))
        self._verified = None

    def rollback(self, position: int) -> None:
        """As of `Decoder`."""
        if position != self.position:
            self._verified = None
        super().rollback(position)

    def _logits(self) -> Tensor:
        if self._batch is None:  # documents one by one: no pass to share
            return super()._logits()
        if self._verified is None:
            self._verified = self.verify(self)
        return self._verified[:, self.taken]

    def _prefilled(self, start: int, offset: int, logits: Tensor) -> None:
        self.drafter.prefilled(start + offset, logits)


class Continued(Drafter):
    """sd.npu's chain, continued by DIAA's from its end."""

    name, wants_prefill, drafts_trees = "sd.npu, then DIAA", True, True

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.parts = first, second

    def begin(self, prompt: Sequence[int]) -> None:
        """For both."""
        for part in self.parts:
            part.begin(prompt)

    def prefilled(self, start: int, logits: Tensor) -> None:
        """For sd.npu's calibration."""
        self.parts[0].prefilled(start, logits)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """One chain."""
        first = likeliest_chain(self.parts[0].propose(tokens, budget), BUDGET)
        second = self.parts[1].propose([*tokens, *first], budget)
        return Draft.chain([*first, *likeliest_chain(second, BUDGET - len(first))])

    def observe(self, step: Verified) -> None:
        """For both."""
        for part in self.parts:
            part.observe(step)


def drafters(vocabulary: int) -> dict[str, Callable[[], Drafter]]:
    """By letters of the systems, what makes a new drafter for a session, which knows nothing of earlier ones."""

    def diaa() -> Drafter:
        return Diaa(Tables.empty(vocabulary))

    def calibrated() -> Drafter:
        return sdnpu(vocabulary)

    return {"": Drafter, "L": diaa, "S": calibrated, "LS": lambda: Continued(calibrated(), diaa())}
