"""Log-probabilities of given continuations: what every teacher-forced measurement is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ondevice.batching import by_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BATCH_TOKENS = 4096  # padded


@dataclass(frozen=True)
class ScoredText:
    """A continuation of n tokens as the model sees it.

    log_probs: [n] in nats. hits: [n] whether the token is the model's first choice.
    """

    log_probs: np.ndarray
    hits: np.ndarray

    @property
    def loss(self) -> float:
        """The negative log-likelihood, summed over the tokens, in nats."""
        return -float(self.log_probs.sum())


@torch.inference_mode()
def score(
    model: PreTrainedModel, prefixes: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> list[ScoredText]:
    """Each continuation after its prefix, each pair read on its own; under autocast in its precision.

    Raises ValueError on an empty part and on a pair longer than the model's context.
    """
    rows = [[*prefix, *continuation] for prefix, continuation in zip(prefixes, continuations, strict=True)]
    longest = int(model.config.max_position_embeddings)
    for row, prefix in zip(rows, prefixes, strict=True):
        if not 0 < len(prefix) < len(row):
            raise ValueError("A prefix and its continuation need at least one token each.")
        if len(row) > longest:
            raise ValueError(f"A text of {len(row)} tokens does not fit the model's context of {longest}.")
    scores: dict[int, ScoredText] = {}
    for batch in by_length([len(row) for row in rows], _BATCH_TOKENS):
        ids = torch.zeros(len(batch), max(len(rows[index]) for index in batch), dtype=torch.long)
        for line, index in enumerate(batch):  # padded on the right, where a causal model does not look
            ids[line, : len(rows[index])] = torch.tensor(rows[index])
        first = min(len(prefixes[index]) for index in batch) - 1  # logits before it are of no use
        logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=ids.shape[1] - first).logits
        for line, index in enumerate(batch):
            start = len(prefixes[index])
            end = len(rows[index])
            scores[index] = _scored(logits[line, start - 1 - first : end - 1 - first], ids[line, start:end])
    return [scores[index] for index in range(len(rows))]


def _scored(logits: torch.Tensor, targets: torch.Tensor) -> ScoredText:
    targets = targets.to(logits.device)
    log_probs = torch.log_softmax(logits.float(), dim=-1).gather(1, targets[:, None])[:, 0]
    return ScoredText(log_probs.double().cpu().numpy(), (logits.argmax(dim=-1) == targets).cpu().numpy())
