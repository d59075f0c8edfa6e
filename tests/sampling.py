"""Tokens drawn from a model's distribution by a generator of their own, for the tests of the loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Sampling:
    """A token drawn from softmax(logits / temperature), cut to the top_k likeliest and to the mass top_p.

    The cuts come in the order of transformers: temperature, top-k, top-p. Speculation stays lossless: the token is
    drawn from the model's distribution, draft or none, and the draft only says where the walk can go on.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    _random: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)

    def __call__(self, logits: Tensor) -> int:
        return int(torch.multinomial(self.probabilities(logits), 1, generator=self._random))

    def probabilities(self, logits: Tensor) -> Tensor:
        """[V] float64 that sum to 1."""
        scaled = logits.detach().cpu().double() / self.temperature
        if 0 < self.top_k < len(scaled):
            scaled = scaled.masked_fill(scaled < scaled.topk(self.top_k).values[-1], -torch.inf)
        found = scaled.softmax(0)
        if self.top_p < 1:
            ordered, ids = found.sort(descending=True, stable=True)
            ordered[ordered.cumsum(0) - ordered >= self.top_p] = 0  # the first token that crosses the mass stays
            found = torch.zeros_like(found).scatter_(0, ids, ordered)
        return found / found.sum()
