"""The verify loop: draft, verify in one forward, emit what the model agrees with, keep its rows, tell the drafter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from ondevice.speculation.choice import Choice, Greedy
from ondevice.speculation.draft import EMPTY, Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.log import Generation, Step

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.causal_lm import CausalLM, Session

BUDGET = 64  # nodes a draft
PREFILL_CHUNK = 256  # tokens a forward where a drafter reads the prompt's logits, which are never kept whole


def generate(
    lm: CausalLM, drafter: Drafter, prompt: Sequence[int], limit: int, *,
    budget: int = BUDGET, choice: Choice | None = None, ends: Collection[int] = (),
) -> Generation:  # fmt: skip
    """Continue a prompt by at most `limit` tokens, as the model alone would: the draft changes only the speed.

    budget: most nodes a draft. choice: Greedy() by default. ends: ids that end the output, the first of them included.
    The output also ends where the model's context does. Raises ValueError before any work on a prompt, limit or budget
    that cannot be, and on a drafter that does not fit the model.
    """
    check(lm, drafter, prompt, limit, budget)
    choose = choice or Greedy()
    started = perf_counter()
    session = lm.start(min(lm.context, len(prompt) + limit + budget))
    drafter.begin(prompt)
    chunk = PREFILL_CHUNK if drafter.wants_prefill else None
    logits = session.prefill(prompt, chunk, drafter.prefilled if drafter.wants_prefill else None)
    tokens = [*map(int, prompt), choose(logits)]
    prefilled = perf_counter()
    steps: list[Step] = []
    last = min(len(prompt) + limit, lm.context + 1)  # the last token needs no row in the cache
    while len(tokens) < last and tokens[-1] not in ends:
        steps.append(_step(session, drafter, tokens, budget, last - len(tokens) - 1, choose, ends))
    finished = perf_counter()
    drafter.end(tokens)
    output = tokens[len(prompt) :]
    return Generation(len(prompt), output, output[-1] in ends, prefilled - started, finished - prefilled, steps)


def check(lm: CausalLM, drafter: Drafter, prompt: Sequence[int], limit: int, budget: int) -> None:
    """Raise ValueError where `generate` could not begin."""
    if budget < 1:
        raise ValueError(f"A draft's budget is at least one node, not {budget}; to draft nothing, use Drafter().")
    if limit < 1:
        raise ValueError(f"At least one token is to be generated, not {limit}.")
    if not 1 <= len(prompt) <= lm.context:
        raise ValueError(f"A prompt has 1 to {lm.context} tokens, the model's context, not {len(prompt)}.")
    if drafter.vocabulary is not None and drafter.vocabulary != lm.vocabulary:
        raise ValueError(f"{drafter.name} was made for {drafter.vocabulary} token ids; this model has {lm.vocabulary}.")
    if drafter.drafts_trees:
        lm.require_trees()


def accepted(draft: Draft, logits: Tensor, choose: Choice, ends: Collection[int] = ()) -> tuple[list[int], list[int]]:
    """(path, tokens): the walk down the draft while the model's choice is a child, and the choices made.

    logits: [1 + n, V], after the root and every node. The last choice is the model's own and no node of the path, but
    for one of `ends`, behind which nothing is chosen.
    """
    children = {(parent, token): node for node, (parent, token) in
                reversed(list(enumerate(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))))}  # fmt: skip
    path: list[int] = []
    tokens: list[int] = []
    node: int | None = -1
    while node is not None:
        tokens.append(choose(logits[node + 1]))
        node = children.get((node, tokens[-1]))
        if node is not None:
            path.append(node)
        if tokens[-1] in ends:
            break
    return path, tokens


def _step(
    session: Session, drafter: Drafter, tokens: list[int], budget: int, room: int, choose: Choice,
    ends: Collection[int],
) -> Step:  # fmt: skip
    """One step; appends what it emits to `tokens`. room: the deepest draft that keeps within limit and context."""
    root, length = tokens[-1], session.length
    times = [perf_counter()]

    def lap() -> None:
        times.append(perf_counter())

    draft = drafter.propose(tokens, budget).within(budget, room) if room > 0 else EMPTY
    lap()
    tree = draft.below(root)
    logits = session.verify(tree)
    _wait(logits)
    lap()
    path, emitted = accepted(draft, logits, choose, ends)
    lap()
    session.keep([0, *(node + 1 for node in path)])
    lap()
    tokens += emitted
    drafter.observe(Verified(root, draft, logits, path, emitted))
    lap()
    spent = np.diff(times).tolist()
    depths = draft.depths
    width = int(np.bincount(depths).max()) if len(draft) else 0
    return Step(len(draft), len(path), len(emitted), int(depths.max(initial=0)), width, length, *spent)


def _wait(logits: Tensor) -> None:
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
