"""The lists of a training step: one positive and seven negatives a query, a function of the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ondevice.corpus.pairs import Row, rows
from ondevice_training.reranking.examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEGATIVES = {"sparse": 3, "dense": 2, "module": 1, "random": 1}  # of a list, by where they come from
CANDIDATES = 1 + sum(NEGATIVES.values())
QUERIES = 8  # of a step


class Lists:
    """Rows of each step from examples, which are shuffled each epoch; examples with too few negatives are left out."""

    def __init__(self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
        self.examples = [e for e in examples if sum(map(len, e.negatives.values())) >= CANDIDATES - 1]
        self.tokenizer = tokenizer
        self.seed = seed
        if len(self.examples) < QUERIES:
            raise ValueError(f"A step needs {QUERIES} queries with passages; there are {len(self.examples)}.")

    def __call__(self, step: int) -> list[Row]:
        """[queries * candidates] rows; the first of each query's candidates is the positive one."""
        batch: list[Row] = []
        for number in range(step * QUERIES, (step + 1) * QUERIES):
            epoch, position = divmod(number, len(self.examples))
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.examples))
            example = self.examples[order[position]]
            texts = chosen(example, np.random.default_rng([self.seed, 1, number]))
            batch += rows(self.tokenizer, example.query.text, texts)
        return batch


def chosen(example: Example, rng: np.random.Generator) -> list[str]:
    """A positive, then seven different negatives; where a source has too few, others stand in."""
    given = {source: example.negatives.get(source, ()) for source in NEGATIVES}  # a source that was not mined is empty
    shuffled = {source: [texts[i] for i in rng.permutation(len(texts))] for source, texts in given.items()}
    picked = [text for source, count in NEGATIVES.items() for text in shuffled[source][:count]]
    rest = [text for source, count in NEGATIVES.items() for text in shuffled[source][count:]]
    positive = example.positives[rng.integers(len(example.positives))]
    return [positive, *(picked + rest)[: CANDIDATES - 1]]
