"""Beyond the paper: how often candidates are really accepted, against what tables and matches say of them."""

from __future__ import annotations

from collections import defaultdict

BINS = 10  # equal parts of [0, 1]
LONGEST = 16  # longer matches are taken together
MEMORY = 0.999  # what of a cell's past stays at its next entry


class Calibration:
    """Turns the tables' probabilities into acceptance rates, by rank and probability, learning as requests run.

    A table's probability was said in another context, so it says too much of some candidates and too little of others.
    In a cell of rank and probability, q = p * (accepted + prior) / (sum of p + prior): p at first, and right on
    average once the cell has seen much more than `prior`.
    """

    def __init__(self, prior: float = 4.0) -> None:
        self.prior = prior
        self.cells: defaultdict[tuple[int, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def __call__(self, probabilities: list[float]) -> list[float]:
        """Acceptance rates of a row's candidates, in rank order. At most one is accepted: they sum to at most 1."""
        rates = []
        for rank, p in enumerate(probabilities, 1):
            said, accepted = self.cells[rank, int(p * BINS)]
            rates.append(p * (accepted + self.prior) / (said + self.prior))
        return [rate / max(1.0, sum(rates)) for rate in rates]

    def observe(self, rank: int, p: float, accepted: bool) -> None:
        """A candidate whose parent was reached: its rank from 1, the table's probability, whether it was accepted."""
        said, right = self.cells[rank, int(p * BINS)]
        self.cells[rank, int(p * BINS)] = MEMORY * said + p, MEMORY * right + accepted


class Continuing:
    """How often the text goes on as a suffix match says, by the match's length, learning as requests run."""

    def __init__(self) -> None:
        self.cells = [(1.0, 2.0)] * (LONGEST + 1)  # (hits, tries) by length

    def __call__(self, length: int) -> float:
        """Chance that the next token is the one that followed the match."""
        hits, tries = self.cells[min(length, LONGEST)]
        return hits / tries

    def observe(self, length: int, right: bool) -> None:
        """The token after a match of `length` was, or was not, the text's."""
        hits, tries = self.cells[min(length, LONGEST)]
        self.cells[min(length, LONGEST)] = MEMORY * hits + right, MEMORY * tries + 1
