"""What DIAA's notebook computes while one watches, along answers of `ondevice_studies.speculation.live`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ondevice import evidence, prompts
from ondevice.speculation import Draft, Drafter, Verified
from ondevice.speculation.largest import Likeliest
from ondevice.speculation.mixture import Mixture
from ondevice_papers.diaa.tables import Fresh, K, Tables, likeliest
from ondevice_studies.speculation import live

Update = Callable[[Tables, Sequence[int], Fresh], None]
SOURCES = (  # of a mixture without stores, in the order of its weights
    "request: counts",
    "request: first match",
    "request: newest match",
    "earlier answers",
    "logits: last two tokens",
    "logits: last two, their first",
    "logits: last token, mean",
    "logits: last token, newest",
    "siblings",
    "behind siblings",
    "recent candidates",
)


class FromTables(Drafter):
    """Drafts what `draft` makes of the tables, which every step overwrites as `update` says.

    draft: of (tables, root, budget).
    """

    def __init__(self, tables: Tables, draft: Callable[[Tables, int, int], Draft], update: Update) -> None:
        self.tables, self.draft, self.update = tables, draft, update
        self._find = Likeliest(tables.k)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The draft below the last token."""
        return self.draft(self.tables, tokens[-1], budget)

    def observe(self, step: Verified) -> None:
        """Update the root's row."""
        self.update(self.tables, [step.root], likeliest(step.logits[:1], self._find))


def coverage(tables: Tables, answers: Sequence[live.PlainAnswer], update: Update | None = None) -> pd.DataFrame:
    """How far down the row of a token its next token stands: name and rank, 1 to K, or K + 1 where it is missing.

    update: what the model's fresh likeliest tokens do to the tables on the way; None leaves them as they are.
    """
    rows = []
    for answer in answers:
        fresh = likeliest(answer.logits[1:], Likeliest(K))  # behind each token of the answer but the last
        for position, (token, following) in enumerate(zip(answer.tokens, answer.tokens[1:], strict=False)):
            ranks = np.flatnonzero(tables.tokens[token] == following)
            rows.append((answer.name, int(ranks[0]) + 1 if len(ranks) else tables.k + 1))
            if update is not None:
                now = slice(position, position + 1)
                update(tables, [token], Fresh(fresh.tokens[now], fresh.probabilities[now]))
    return evidence.born(pd.DataFrame(rows, columns=["name", "rank"]), "measured")


def warm_up_text(tokenizer: PreTrainedTokenizerBase, tokens: int) -> NDArray[np.int64]:
    """At most so many ids of a text to warm up tables: the repository's prompts for fitting, a task after the other.

    No notebook asks these prompts.
    """
    others = prompts.own("validation")
    of_task = len(others) // len(prompts.TASKS)
    text = [prompt.text for number in range(of_task) for prompt in others[number::of_task]]
    ids = [tokenizer(one, verbose=False, add_special_tokens=False).input_ids for one in text]
    return np.concatenate(ids)[:tokens].astype(np.int64)


def by_source(drafter: Mixture, answers: Sequence[live.PlainAnswer]) -> tuple[pd.DataFrame, NDArray[np.float64]]:
    """A mixture along the answers: (name, source, rank of the next token) and the sources' chances of it, [n, sources].

    Of the ranks the last source is `mixture`; a token that a source does not have gets rank 99.
    """
    rows = []
    chances = []
    for answer, position, tokens in live.steps(drafter, answers):
        drafter.propose(tokens, 1)  # reads the text up to here
        following = answer.tokens[position + 1]
        (seen, below_root, kind, order), _, shares = drafter.sources(tokens[-drafter.text.longest :], True)
        chances.append([share.get(following, 0.0) for share in shares])
        mixed = dict(drafter.mix(drafter.weights[seen][below_root][kind][order], shares))
        for source, share in zip((*SOURCES, "mixture"), (*shares, mixed), strict=True):
            likelier = [p for p in share.values() if p > share.get(following, 0.0)]
            rows.append((answer.name, source, len(likelier) + 1 if following in share else 99))
    return evidence.born(pd.DataFrame(rows, columns=["name", "source", "rank"]), "measured"), np.array(chances)
