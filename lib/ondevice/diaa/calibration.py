"""Beyond the paper: how often candidates are really accepted, against what the tables say of them."""

from __future__ import annotations

from collections.abc import Iterable

BINS = 10  # equal parts of [0, 1]


class Calibration:
    """Turns the tables' probabilities into acceptance rates, by rank and probability, learning as requests run.

    A table's probability was said in another context, so it says too much of some candidates and too little of others.
    Within a cell of rank and probability, q = p * (accepted + prior) / (sum of p + prior): p at first, and right on
    average once the cell has seen much more than `prior`. memory: what of a cell's past stays at its next step.
    """

    def __init__(self, k: int, prior: float = 4.0, memory: float = 0.999) -> None:
        if not (prior > 0 and 0 < memory <= 1):
            raise ValueError(f"A prior is positive and a memory in (0, 1], not {prior}, {memory}.")
        self.prior, self.memory = prior, memory
        self._expected = [[0.0] * BINS for _ in range(k)]
        self._accepted = [[0.0] * BINS for _ in range(k)]
        self._factors = [[1.0] * BINS for _ in range(k)]

    def __call__(self, probabilities: list[float]) -> list[float]:
        """Acceptance rates of a row's candidates, in rank order. At most one is accepted: they sum to at most 1."""
        found = [
            probability * factors[min(int(probability * BINS), BINS - 1)]
            for probability, factors in zip(probabilities, self._factors, strict=False)
        ]
        total = sum(found)
        return [value / total for value in found] if total > 1 else found

    def observe(self, outcomes: Iterable[tuple[int, float, bool]]) -> None:
        """A step's candidates whose parent was reached: rank from 1, the table's probability, whether accepted."""
        touched = set()
        for rank, probability, accepted in outcomes:
            cell = rank - 1, min(int(probability * BINS), BINS - 1)
            if cell not in touched:  # cells fade by their own steps, so that seldom ones keep what they know
                touched.add(cell)
                self._expected[cell[0]][cell[1]] *= self.memory
                self._accepted[cell[0]][cell[1]] *= self.memory
            self._expected[cell[0]][cell[1]] += probability
            self._accepted[cell[0]][cell[1]] += accepted
        for rank, part in touched:
            seen, right = self._expected[rank][part], self._accepted[rank][part]
            self._factors[rank][part] = (right + self.prior) / (seen + self.prior)
