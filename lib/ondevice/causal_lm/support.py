"""What a model can do in a session, by its configuration: chains, token trees, and for how many tokens."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from transformers import GenerationMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Compared in our tests with uncached runs of each path. Any other architecture is probed when it is wrapped.
TESTED = frozenset({"llama", "qwen2", "qwen3", "opt", "gpt_neox", "gpt2", "mistral", "phi3"})
_BY_ROW = frozenset({"bloom", "mpt", "gpt_neo"})  # GPT-Neo: its own causal and local masks
_MASKABLE = ("sdpa", "eager")
_CACHED = ("full_attention", "sliding_attention", "chunked_attention")
_ENDS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


def name(model: PreTrainedModel) -> str:
    """What an error calls the model: its architecture."""
    return type(model).__name__


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of the language model, in a model that has others too."""
    return model.config.get_text_config(decoder=True)


def require_causal(model: PreTrainedModel) -> None:
    """Raise ValueError, which says what the model is, where its cache has not one row per token that can be dropped."""
    config: Any = text_config(model)
    if model.config.is_encoder_decoder or config.is_encoder_decoder:  # of some the decoder's own part says otherwise
        raise ValueError(f"{name(model)} is an encoder-decoder; sessions, and so speculation, are for decoders alone.")
    encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if encoder or not isinstance(model, GenerationMixin):
        raise ValueError(f"{name(model)} is no causal language model.")
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - set(_CACHED))
    kinds = ["a recurrent state"] if getattr(model, "_is_stateful", False) else []
    if odd:
        kinds.append(f"layers of type {', '.join(odd)}")
    if kinds:
        kind = " in ".join(kinds)
        raise ValueError(f"{name(model)} has {kind}, whose cache cannot be rolled back to an earlier token.")


def context_of(model: PreTrainedModel, requested: int | None) -> int:
    """Tokens that a session may hold: what is asked for, else all that the model was built for.

    Raises ValueError for more than the model has, or more than one rotary scaling covers.
    """
    config: Any = text_config(model)
    end = next((int(length) for key in _ENDS if (length := getattr(config, key, None))), sys.maxsize)
    context = end if requested is None else requested
    if not 1 <= context <= end:
        raise ValueError(f"The context must be from 1 to the {end} tokens of {name(model)}, not {context}.")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        first: Any = rope.get("original_max_position_embeddings")
        first = first or getattr(config, "original_max_position_embeddings", None)
        if first is not None and context > first:
            raise ValueError(
                f"{name(model)} changes its rotary scaling after {first} tokens, which would leave the cached ones "
                f"wrong: pass context={first} or less."
            )
    return context


def tree_refusal(model: PreTrainedModel, context: int) -> str | None:
    """Why this model cannot verify trees in a context of that many tokens, in a sentence; None when it can."""
    config: Any = text_config(model)
    only = "only chains can be verified"
    if config.model_type in _BY_ROW or getattr(config, "alibi", False):
        return f"{name(model)} places tokens by their row in the cache (as ALiBi does), not by position_ids: {only}."
    if config._attn_implementation not in _MASKABLE:
        kind = config._attn_implementation
        return f"{name(model)} runs {kind} attention, which takes no mask of a tree: load it with sdpa or eager."
    window = _window(config)
    if window < context:
        return (
            f"{name(model)} attends to a sliding window of {window} tokens, which a mask of a tree would lift: {only}, "
            f"unless the session is bounded by context={window}."
        )
    return None


def _window(config: Any) -> int:
    """The narrowest window of any layer, in tokens; without one, more than any context."""
    types = set(getattr(config, "layer_types", None) or ())
    windows = [getattr(config, "sliding_window", None) if not types or "sliding_attention" in types else None]
    windows += [getattr(config, "attention_chunk_size", None) if "chunked_attention" in types else None]
    return min([int(window) for window in windows if window], default=sys.maxsize)
