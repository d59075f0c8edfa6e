"""What the verification of n rows takes, measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from ondevice.causal_lm import CausalLM, TokenTree


def verifications(lm: CausalLM, length: int, sizes: Sequence[int]) -> Callable[[], list[float]]:
    """What each call times anew: the verification of a tree of each of `sizes` rows behind `length` tokens, in seconds.

    Nothing is kept of them, and ids do not matter.
    """
    session = lm.start(min(lm.context, length + max(sizes)))
    session.prefill(np.arange(length) % lm.vocabulary)
    trees = [TokenTree(np.arange(n) % lm.vocabulary, np.r_[-1, np.arange(n - 1) // 2]) for n in sizes]

    def turn() -> list[float]:
        seconds = []
        for tree in trees:
            for _ in range(2):  # the second is behind one of its own size, as passes of an answer are
                started = perf_counter()
                session.verify(tree)[-1, 0].item()  # waits for an accelerator
                spent = perf_counter() - started
                session.rollback(length)
            seconds.append(spent)
        return seconds

    turn()  # the first builds the masks
    return turn
