"""What the verification of n rows takes, measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, sleep

import numpy as np

from ondevice.causal_lm import CausalLM, Session, TokenTree
from ondevice.speculation.loop import torch_beside_runtime

SETTLED_S = 0.1  # behind another engine's pass, whose threads spin on for a while and would slow the first pass down
SETTLING = 2  # passes that bring the weights back into a large cache, which other engines' have pushed out


def verifications(lm: CausalLM, length: int, sizes: Sequence[int]) -> Callable[[], list[float]]:
    """What each call times anew: the verification of a tree of each of `sizes` rows behind `length` tokens, in seconds.

    Where the model cannot verify a tree there it is a chain. Nothing is kept of them, and ids do not matter.
    """
    session = lm.start(min(lm.context, length + max(sizes)))
    session.prefill(np.arange(length) % lm.vocabulary)
    trees = []
    for n in sizes:
        below = np.arange(n - 1)
        chains = bool(lm.tree_refusal) or n > lm.tree_room(length)
        trees.append(TokenTree(np.arange(n) % lm.vocabulary, np.r_[-1, below if chains else below // 2]))

    _timed(lm, session, trees)  # the first builds the masks
    return lambda: _timed(lm, session, trees)


@torch_beside_runtime
def _timed(_: CausalLM, session: Session, trees: Sequence[TokenTree]) -> list[float]:
    """Seconds of the verification of each tree behind what a session has."""
    sleep(SETTLED_S)
    length = session.length

    def seconds(tree: TokenTree) -> float:
        started = perf_counter()
        session.verify(tree)[-1, 0].item()  # waits for an accelerator
        ended = perf_counter()
        session.rollback(length)
        return ended - started

    for _turn in range(SETTLING):
        seconds(trees[0])
    spent = []
    for tree in trees:
        seconds(tree)  # the timed pass is behind one of its own size, as passes of an answer are
        spent.append(seconds(tree))
    return spent
