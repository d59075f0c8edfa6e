"""A model and a tokenizer known by their content, wherever their files lie."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_UNUSED = ("_name_or_path", "transformers_version", "use_cache")  # of a configuration: they change no number


def weights_digest(model: PreTrainedModel) -> str:
    """Hexadecimal sha256 of a model's configuration and of every weight with its name, dtype and shape."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _UNUSED}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hexadecimal sha256 of what a tokenizer makes ids of: its whole pipeline, or its vocabulary where it is slow."""
    state: Any
    pipeline: Any = getattr(tokenizer, "backend_tokenizer", None)
    if pipeline is None:
        state = [type(tokenizer).__name__, tokenizer.get_vocab()]
    else:  # padding and truncation are left over from the last call
        state = {k: v for k, v in json.loads(pipeline.to_str()).items() if k not in ("padding", "truncation")}
    text = json.dumps([state, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
