"""How the next token is chosen from the model's logits: greedily, or drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Choice = Callable[[Tensor], int]  # a token id from logits [V]; called once for every emitted token, in order


def greedy(logits: Tensor) -> int:
    """The likeliest token; of equals the one with the lowest id, as `torch.argmax` and `generate` have it."""
    return int(logits.argmax())


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
        if not self.temperature > 0:
            raise ValueError(f"A temperature is positive, not {self.temperature}; for greedy decoding use `greedy`.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is a share in (0, 1], not {self.top_p}.")
        if self.top_k < 0:
            raise ValueError(f"top_k is a number of tokens, 0 for all, not {self.top_k}.")
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
