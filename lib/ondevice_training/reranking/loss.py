"""The listwise loss, on the last layer or on all of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def listwise(scores: Tensor) -> Tensor:
    """Mean over layers, weighted, of the softmax cross-entropy whose right answer is each list's first candidate.

    scores: [layers, lists, candidates]. A layer's weight rises in proportion to its depth, so deep supervision is this
    loss on all layers and the usual one is this loss on the last.
    """
    layers, lists, candidates = scores.shape
    first = torch.zeros(layers * lists, dtype=torch.long, device=scores.device)
    each = F.cross_entropy(scores.reshape(-1, candidates), first, reduction="none").view(layers, lists).mean(1)
    weights = torch.arange(1, layers + 1, device=scores.device, dtype=scores.dtype)
    return (each * weights).sum() / weights.sum()
