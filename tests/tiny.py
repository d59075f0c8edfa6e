"""Random models of two small layers: their attention is far from uniform, so that wrong masks and positions show."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SHAPE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "gpt2": {},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "phi3": {"sliding_window": None},
}


def random_model(
    kind: str, dtype: torch.dtype = torch.float64, attention: str | None = None, *, vocabulary: int, context: int,
    spread: float = 0.15, seed: int = 0, **values: Any,
) -> PreTrainedModel:  # fmt: skip
    """spread: of each matrix's numbers. values: of the configuration."""
    sizes = SHAPE | {"vocab_size": vocabulary, "max_position_embeddings": context}
    config = AutoConfig.for_model(kind, **sizes | KINDS.get(kind, {}) | values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, spread)
    return model
