"""Scores of pairs at every layer: the model's own head put on each layer's hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ondevice.corpus.pairs import Row, is_causal, padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GROUP = 8  # rows of a forward pass, of like lengths


def layer_scores(model: PreTrainedModel, batch: dict[str, Tensor], every: bool = True) -> Tensor:
    """[layers, n] float32 scores of a padded batch; [1, n], the last layer's, unless `every` layer is asked for.

    A decoder-only model's head is the final norm and the score at the last real token, whichever side is padded; an
    encoder's is pooler and classifier at the first. The last row is what the model's own forward pass gives.
    """
    causal = is_causal(model)
    inputs = {key: value for key, value in batch.items() if not (causal and key == "token_type_ids")}
    extra: dict[str, Any] = {"use_cache": False} if causal else {}
    output = model.base_model(**inputs, output_hidden_states=every, **extra)
    hidden = list(output.hidden_states[1:-1]) if every else []  # without the embeddings and the last layer's
    mask = batch["attention_mask"]
    lists = torch.arange(len(mask), device=mask.device)
    read = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1) if causal else torch.zeros_like(lists)
    states = [state[lists, read].float() for state in [*hidden, output.last_hidden_state]]
    with torch.autocast(model.device.type, enabled=False):  # bf16 scores would tie
        head: Any = model
        if causal:
            normed = [head.model.norm(state) for state in states[:-1]]
            return torch.stack([head.score(state).squeeze(-1) for state in [*normed, states[-1]]])
        pooled = [head.bert.pooler(state.unsqueeze(1)) for state in states]
        return torch.stack([head.classifier(state).squeeze(-1) for state in pooled])


def scores_of(model: PreTrainedModel, pairs: Sequence[Row], every: bool = True) -> Tensor:
    """`layer_scores` of any number of rows, in their order: read in groups of like lengths, so little is padding."""
    order = sorted(range(len(pairs)), key=lambda index: len(pairs[index].ids))
    pad = int(model.config.pad_token_id or 0)
    parts = []
    for start in range(0, len(order), _GROUP):
        batch = padded([pairs[index] for index in order[start : start + _GROUP]], pad)
        parts.append(layer_scores(model, {key: value.to(model.device) for key, value in batch.items()}, every))
    return torch.cat(parts, dim=1)[:, torch.tensor(order).argsort()]
