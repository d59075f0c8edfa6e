"""What a model's logits said lately: after each pair of tokens, after each token, and around the last verified tree."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import islice

from torch import Tensor

from ondevice.speculation.drafter import Verified
from ondevice.speculation.largest import estimated_likeliest

Share = dict[int, float]  # p by token

K = 8  # likeliest tokens kept of a row of logits
PAIRS = 20_000  # a row takes some 0.8 kB, the mean of a single token some 2
FADING = 0.6  # share of the old mean in the new one
WIDE = 24  # tokens of a mean beyond which those below FAINT leave it
FAINT = 0.003
RECENT = 24  # accepted rows whose candidates may still come
CANDIDATES = 12  # of these
NOTHING: Share = {}


class LogitTables:
    """The K likeliest tokens and their probabilities after the last two tokens of a verified path, and after the last.

    Every verified node is entered, accepted or not, and every token of the prompt. Such rows outlive requests. Of two
    tokens the newest row counts, of one token the newest and a mean in which older rows fade. The key that was not
    renewed for the longest time leaves. STAND (arXiv 2506.04708) keeps logits by n-grams, too, to draft for sampling.

    pairs: most keys of two tokens, and half as many of one. Raises ValueError below 2.

    siblings: the other candidates of the logits that chose the newest token, as LogitSpec guesses with. They are more
    likely to come next than at any time. after_siblings: the mean row of the drafted siblings of the newest token,
    which were verified in its place; the text often goes on after a token as it would have after its synonym.
    candidates: the likeliest in the mean of the last accepted rows. These three are of the request.
    """

    def __init__(self, pairs: int = PAIRS) -> None:
        if pairs < 2:
            raise ValueError(f"The tables have room for two pairs of tokens at least, not {pairs}.")
        self._most = pairs
        self._pairs: dict[tuple[int, int], Share] = {}  # the longest unrenewed first
        self._singles: dict[int, tuple[Share, Share]] = {}  # mean and newest row
        self.begin([])

    def __len__(self) -> int:
        return len(self._pairs)

    def begin(self, prompt: Sequence[int]) -> None:
        """A request comes: what is of the last one is forgotten."""
        self._prompt = list(prompt)
        self._accepted: deque[Share] = deque(maxlen=RECENT)
        self.siblings = self.after_siblings = self.candidates = NOTHING

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Enter the rows of the prompt's tokens from `start` on."""
        for position, row in enumerate(_rows(logits), start):
            self._enter(self._prompt[position - 1] if position else None, self._prompt[position], row)
            self._accepted.append(row)
        self.siblings = dict(islice(row.items(), 1, None))
        self._count()

    def observe(self, before: int | None, step: Verified) -> None:
        """Enter the rows of the root, whose token before it is given, and of every node."""
        rows = _rows(step.logits)
        tokens = [step.root, *step.draft.tokens.tolist()]
        parents = step.draft.parents.tolist()
        self._enter(before, step.root, rows[0])
        for parent, token, row in zip(parents, tokens[1:], rows[1:], strict=True):
            self._enter(tokens[parent + 1], token, row)
        last = step.path[-1] + 1 if step.path else 0
        self._accepted.extend([rows[0], *(rows[node + 1] for node in step.path)])
        self.siblings = {token: p for token, p in rows[last].items() if token != step.emitted[-1]}
        beside = (node for node, parent in enumerate(parents, start=1) if parent == last - 1)
        self.after_siblings = _mean((rows[last].get(tokens[node], _LEAST), rows[node]) for node in beside)
        self._count()

    def after(self, before: int, token: int) -> tuple[Share, Share, Share]:
        """The pair's row, the mean of its last token, and that one's newest row; empty where they were never seen."""
        return self._pairs.get((before, token), NOTHING), *self._singles.get(token, (NOTHING, NOTHING))

    def _enter(self, before: int | None, token: int, row: Share) -> None:
        singles = self._singles
        kept = singles.pop(token, None)
        singles[token] = row if kept is None else _faded(kept[0], row), row
        if len(singles) > self._most // 2:
            del singles[next(iter(singles))]
        if before is not None:
            pairs = self._pairs
            pairs.pop((before, token), None)
            pairs[before, token] = row
            if len(pairs) > self._most:
                del pairs[next(iter(pairs))]

    def _count(self) -> None:
        mean = _mean((1.0, row) for row in self._accepted)
        self.candidates = {token: mean[token] for token in nlargest(CANDIDATES, mean, key=mean.__getitem__)}


_LEAST = 0.01  # the chance of a drafted sibling that is not among the likeliest


def _rows(logits: Tensor) -> list[Share]:
    """The likeliest tokens of each row of logits [n, V], the likeliest first."""
    tokens, probabilities = estimated_likeliest(logits, min(K, logits.shape[1]))
    return [dict(zip(*row, strict=True)) for row in zip(tokens.tolist(), probabilities.tolist(), strict=True)]


def _faded(mean: Share, row: Share) -> Share:
    """A mean with one row more."""
    mixed = {token: FADING * p for token, p in mean.items()}
    for token, p in row.items():
        mixed[token] = mixed.get(token, 0.0) + (1 - FADING) * p
    return mixed if len(mixed) <= WIDE else {token: p for token, p in mixed.items() if p > FAINT}


def _mean(weighted: Iterable[tuple[float, Share]]) -> Share:
    """The mean of rows by their weights."""
    total = 0.0
    mean: Share = {}
    for weight, row in weighted:
        total += weight
        for token, p in row.items():
            mean[token] = mean.get(token, 0.0) + weight * p
    return {token: p / total for token, p in mean.items()} if total else NOTHING
