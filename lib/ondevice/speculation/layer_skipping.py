"""Self-speculation: the target without some of its sublayers drafts for the whole target (SWIFT, Xia et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ondevice.causal_lm import TokenTree
from ondevice.speculation.draft import EMPTY, Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.follower import Follower
from ondevice.speculation.skip_search import SkipSearch
from ondevice.speculation.skipped_layers import skipped, sublayers

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ondevice.causal_lm import CausalLM, Session

LONGEST = 25  # drafted tokens
WINDOW = 50  # generated tokens that a set of skipped sublayers is scored on
SIDE = ((0.95, 3), (0.8, 5), (0.5, 8), (0.0, 10))  # above this confidence, so many candidates at a depth


class LayerSkipping(Drafter):
    """The target drafts for itself with a share of its attention and MLP sublayers skipped.

    Drafts are greedy and end after the first token whose probability is below `confidence`. `branches` adds the
    likeliest alternatives at each depth as leaves, the fewer the more confident (it needs a model that verifies trees).
    The set of sublayers is searched while decoding, one try a step, once the output has `window` + 1 tokens: its score
    is the share of these that the skipped model, fed with the output, says. The search goes on over the requests.

    The original shares the target's KV cache. Here the drafter has a session of its own on the same weights: its prompt
    rows come from the whole model, as there, which costs a second prefill; its rows of the output come from the skipped
    model, and are computed anew when the set changes. All of it is charged to this drafter's own time.

    search: by default SWIFT's; `SkipSearch(...)` for other ratios and stop rules.
    Raises ValueError for models without Llama-like layers, or with fewer than three.
    """

    name = "layer skipping"

    def __init__(
        self, lm: CausalLM, confidence: float = 0.8, *, longest: int = LONGEST, window: int = WINDOW,
        branches: bool = False, search: SkipSearch | None = None,
    ) -> None:  # fmt: skip
        if longest < 1 or window < 1:
            raise ValueError(f"Draft and window have at least one token, not {longest} and {window}.")
        self._parts = sublayers(lm)
        self.search = search or SkipSearch(len(self._parts))
        if self.search.parts != len(self._parts):
            raise ValueError(f"The search is over {self.search.parts} sublayers; {len(self._parts)} can be skipped.")
        self.lm = lm
        self.vocabulary = lm.vocabulary
        self.drafts_trees = branches
        self._confidence, self._longest, self._window = confidence, longest, window
        self._follower: Follower | None = None
        self._judge: Session | None = None
        self._prompt = 0
        self._output: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self._follower = Follower(self.lm, prompt)
        self._prompt, self._output, self._judge = len(prompt), [], None

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        if self._follower is None:
            return EMPTY
        if not self._output:
            self._output = [tokens[-1]]  # the first token comes from the prefill, which is not observed
            if not self.search.is_over and self._follower.session.length:
                self._judge = self._follower.session.fork()  # the prompt alone
        chain: list[int] = []
        leaves: list[tuple[int, int, int]] = []
        with skipped([self._parts[place] for place in self.search.best]):
            logits = self._follower.follow(tokens)
            while logits is not None:
                likely, sure = _likeliest(logits)
                leaves += [(token, len(chain) - 1, rank) for rank, token in enumerate(likely[1:], start=2)]
                chain.append(likely[0])
                if sure < self._confidence or len(chain) >= min(self._longest, budget):
                    break
                logits = self._follower.go_on(chain[-1])
        return self._tree(chain, leaves, budget) if self.drafts_trees else Draft.chain(chain)

    def observe(self, step: Verified) -> None:
        self._output += step.emitted
        if self._judge is None or self.search.is_over or len(self._output) <= self._window:
            return
        known = self._output[: self._window + 1]
        if self._judge.length + len(known) > self.lm.context:
            return
        if self.search.try_one(lambda places: self._score(places, known)) and self._follower is not None:
            self._follower.rewind(self._prompt)

    def end(self, tokens: Sequence[int]) -> None:
        self._follower = self._judge = None  # their caches are no use to the next request

    def _score(self, places: NDArray[np.int64], known: list[int]) -> float:
        """Share of the known output that the model says without these sublayers, in one forward."""
        judge = self._judge
        assert judge is not None
        try:
            with skipped([self._parts[place] for place in places]):
                said = judge.verify(TokenTree.chain(known[:-1])).argmax(-1)
        finally:
            judge.rollback(self._prompt)
        return float(np.mean(said.cpu().numpy() == np.array(known[1:])))

    @staticmethod
    def _tree(chain: list[int], leaves: list[tuple[int, int, int]], budget: int) -> Draft:
        """The chain first, then its side branches from the root downwards, within the budget."""
        nodes = [(token, place - 1, 1) for place, token in enumerate(chain)] + leaves
        tokens, parents, ranks = zip(*nodes[:budget], strict=True) if nodes else ((), (), ())
        return Draft(tokens, parents, ranks)


def _likeliest(logits: Tensor) -> tuple[list[int], float]:
    """The candidates at one depth, the likeliest first, and how likely it is."""
    shares = logits.float().softmax(-1)
    sure = float(shares.max())
    many = next(count for above, count in SIDE if sure > above)
    found: list[int] = shares.topk(min(many, len(shares))).indices.tolist()
    first = int(logits.argmax())
    return [first, *(token for token in found if token != first)], sure
