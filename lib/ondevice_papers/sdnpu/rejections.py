"""Why drafts are rejected (Table 2), from all rejections instead of thirteen labelled by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ondevice.speculation import Draft

CASES = ("missing", "synonym", "redundant")
SHORTEST = 2  # tokens that count as reusable; the paper's epsilon >= 1


class Rejection(NamedTuple):
    """A rejection and its case. All lengths are in tokens.

    rejected: of the draft's tail x_e .. x_n. inserted: delta + 1, output before the reusable tokens.
    skipped: gamma, rejected tokens before them; 0 is `missing`. reusable: the tokens that came after all.
    The last three are 0 where nothing came, `redundant`.
    """

    case: str
    rejected: int
    inserted: int = 0
    skipped: int = 0
    reusable: int = 0


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


def classify(tail: Sequence[int], output: Sequence[int], shortest: int = SHORTEST) -> Rejection:
    """The case of a rejected tail x_e .. x_n, from the output z_e .. that came instead, by the paper's patterns.

    A part of the tail, `shortest` tokens or longer, is looked for in the output behind at least one token of it, but no
    further in than the tail is long, as longer texts have more chance matches. From x_e on it is `missing`, from a
    later token on `synonym`. Of several parts the longest counts, of equals the one that skips, then inserts, least.
    """
    best = Rejection("redundant", len(tail))
    for skipped in range(len(tail) - shortest + 1):
        for inserted in range(1, min(len(tail), len(output) - shortest) + 1):
            length = 0
            for drafted, came in zip(tail[skipped:], output[inserted:], strict=False):
                if drafted != came:
                    break
                length += 1
            if length >= max(shortest, best.reusable + 1):
                best = Rejection("synonym" if skipped else "missing", len(tail), inserted, skipped, length)
    return best
