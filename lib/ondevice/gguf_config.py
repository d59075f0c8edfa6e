"""The configuration of a GGUF file's model, made of the file's own facts, and its tensors' names in transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ondevice.gguf_header import PLAIN, Header, Stored, numbers

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MODULES = {  # of transformers, by GGUF's name behind the layer's number
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"  # by which each rotary frequency is divided
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
_APPLIED = frozenset({  # facts of an architecture that the configuration holds; the vocabulary is the embedding's
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
})  # fmt: skip
_NEUTRAL: Mapping[str, Any] = {  # values with which a fact changes nothing
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "pooling_type": 0,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
    "tensor_data_layout": "Meta AI original pth",
}
_LLAMA_3_CONTEXTS = [2**power for power in (13, *range(8, 13), *range(14, 21))]  # before scaling; 8192 first
_LLAMA_3_FACTORS = (8.0, 32.0, 4.0, 16.0, 2.0, 64.0)


def configuration(header: Header) -> Any:
    """The configuration, of transformers, without the ids of tokens.

    Raises ValueError, with one sentence, for another architecture than `ARCHITECTURES`, a file that is no model's,
    facts and tensors that are not applied, and tensors that are missing or of another shape.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    architecture = _architecture(header)
    key = f"{architecture}."
    hidden, heads = header.whole(f"{key}embedding_length"), header.whole(f"{key}attention.head_count")
    size = header.whole(f"{key}attention.key_length", hidden // heads)
    if header.whole(f"{key}attention.value_length", size) != size:
        raise ValueError(f"{header.name} has keys and values of different lengths, which this reader does not know.")
    context = header.whole(f"{key}context_length")
    tensors = header.tensors
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{header.name} has no token_embd.weight: it holds no whole model.")
    biases = {
        "attention_bias": any(name.endswith(tuple(f"{part}.bias" for part in _ATTENTION)) for name in tensors),
        "mlp_bias": any(name.endswith(tuple(f"{part}.bias" for part in _FEED_FORWARD)) for name in tensors),
    }
    values = dict(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=header.whole(f"{key}feed_forward_length"),
        num_hidden_layers=header.whole(f"{key}block_count"),
        num_attention_heads=heads,
        num_key_value_heads=header.whole(f"{key}attention.head_count_kv", heads),
        head_dim=size,
        max_position_embeddings=context,
        rms_norm_eps=header.real(f"{key}attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope(header, key, size, context),
        tie_word_embeddings="output.weight" not in tensors,
        architectures=[ARCHITECTURES[architecture]],
        **({} if architecture == "qwen2" else biases),
    )
    try:
        config: Any = AutoConfig.for_model(architecture, **values)
    except StrictDataclassError as error:
        why = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"{header.name} has facts of which transformers makes no {architecture} ({why}).") from None
    _require_shapes(header, config, biases)
    if ROPE_FACTORS in tensors:
        _divide_frequencies(header, config)
    return config


def in_transformers(stored: str) -> str:
    """A tensor's name in transformers, by its name in the file, which is one that `configuration` has taken."""
    head, _, kind = stored.rpartition(".")
    if head in OUTER:
        return f"{OUTER[head]}.{kind}"
    _, number, part = head.split(".", 2)
    return f"model.layers.{number}.{MODULES[part]}.{kind}"


def _architecture(header: Header) -> str:
    """The file's architecture, once it is known that the file is a model's and all of its facts can be applied."""
    kind = header.facts.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"{header.name} is a GGUF of the type {kind}, not of a model.")
    architecture = header.facts.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{header.name} is of {architecture}; {', '.join(ARCHITECTURES)} can be read.")
    pooling = header.facts.get(f"{architecture}.pooling_type", 0)
    if pooling:
        pools = f"pools its states ({architecture}.pooling_type is {str(pooling)[:40]})"
        raise ValueError(f"{header.name} {pools}, as rerankers and embedders do: only models of text can be read.")
    for key, value in header.facts.items():
        own, _, fact = key.partition(".")
        if own != architecture or fact in _APPLIED or (fact in _NEUTRAL and _NEUTRAL[fact] == value):
            continue
        raise ValueError(f"{header.name} has {str(value)[:40]} as {key}, which this reader does not apply.")
    return architecture


def _rope(header: Header, key: str, size: int, context: int) -> dict[str, Any]:
    """The rotary parameters, as transformers names them. Raises ValueError for a kind that is not known."""
    if header.whole(f"{key}rope.dimension_count", size) != size:
        raise ValueError(f"{header.name} turns a part of each head ({key}rope.dimension_count), not all of it.")
    rope: dict[str, Any] = {"rope_theta": header.real(f"{key}rope.freq_base", 10_000.0), "rope_type": "default"}
    factor = header.real(f"{key}rope.scaling.factor", header.real(f"{key}rope.scale_linear", 1.0))
    kind = header.facts.get(f"{key}rope.scaling.type", "linear")  # an old file has the factor alone
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{header.name} has {kind} rotary scaling, which this reader does not know.")
    if kind == "none" or (kind == "linear" and factor == 1):
        return rope
    if ROPE_FACTORS in header.tensors:
        raise ValueError(f"{header.name} has both {ROPE_FACTORS} and {kind} rotary scaling, which no model has.")
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        own = header.real(f"{key}rope.scaling.attn_factor", 1.0)
        rope |= {
            "original_max_position_embeddings": header.whole(f"{key}rope.scaling.original_context_length", context),
            "attention_factor": own * (0.1 * float(np.log(factor)) + 1.0),
            "beta_fast": header.real(f"{key}rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": header.real(f"{key}rope.scaling.yarn_beta_slow", 1.0),
        }
    return rope


def _require_shapes(header: Header, config: Any, biases: Mapping[str, bool]) -> None:
    """Raise ValueError unless the file has just the tensors that its facts ask for, each in its shape."""
    blocks = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if blocks != {str(number) for number in range(min(config.num_hidden_layers, len(blocks) + 1))}:
        layers = config.num_hidden_layers
        raise ValueError(f"{header.name} has tensors of {len(blocks)} layers, where its facts say {layers}.")
    shapes = dict(_shapes(config, len(blocks), biases))
    for name in header.tensors:
        if name not in shapes and name not in ("output.weight", ROPE_FACTORS):
            raise ValueError(f"{header.name} has {name}, which this reader does not apply to {config.model_type}.")
    for name, shape in shapes.items():
        if name not in header.tensors:
            raise ValueError(f"{header.name} has no {name}, which its architecture needs.")
        if header.tensors[name].shape != shape:
            raise ValueError(f"{header.name} has {name} in the shape {header.tensors[name].shape}, not {shape}.")


def _shapes(config: Any, layers: int, biases: Mapping[str, bool]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each tensor that a model has, by its name in the file, and its shape, outer axis first."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    matrices = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    vectors = {"attn_norm.weight": hidden, "ffn_norm.weight": hidden}
    biased: tuple[str, ...] = ("attn_q", "attn_k", "attn_v") if config.model_type == "qwen2" else ()
    if config.model_type != "qwen2" and biases["attention_bias"]:
        biased = _ATTENTION
    if config.model_type == "llama" and biases["mlp_bias"]:
        biased = (*biased, *_FEED_FORWARD)
    if config.model_type == "qwen3":
        vectors |= {"attn_q_norm.weight": size, "attn_k_norm.weight": size}
    vectors |= {f"{part}.bias": matrices[part][0] for part in biased}
    yield "token_embd.weight", (config.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "output.weight", (config.vocab_size, hidden)
    for number in range(layers):
        for part, shape in matrices.items():
            yield f"blk.{number}.{part}.weight", shape
        for vector, length in vectors.items():
            yield f"blk.{number}.{vector}", (length,)


def _divide_frequencies(header: Header, config: Any) -> None:
    """Give a configuration the parameters of Llama 3's rule that make the file's factors.

    The rule has thresholds at a quarter of a context and at the whole of it. Raises ValueError where no context and
    factor make them.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stored: Stored = header.tensors[ROPE_FACTORS]
    if stored.format not in PLAIN or stored.shape != (config.head_dim // 2,):
        raise ValueError(f"{header.name} has {ROPE_FACTORS} in {stored.format} and the shape {stored.shape}.")
    factors = numbers(header.path, stored)
    if (factors == 1).all():
        return
    plain = config.rope_parameters
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    divided = plain["rope_theta"] ** -exponents / factors
    for context in _LLAMA_3_CONTEXTS:
        for factor in (float(factors.max()), *_LLAMA_3_FACTORS):
            config.rope_parameters = plain | {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
            frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
            if np.allclose(frequencies.numpy(), divided, rtol=1e-5, atol=0):
                return
    raise ValueError(f"{header.name} divides rotary frequencies by other factors than Llama 3's rule ({ROPE_FACTORS}).")
