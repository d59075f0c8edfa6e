"""Random models of small layers: their attention is far from uniform, so that wrong masks and positions show; pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ondevice import shapes
from ondevice.gguf_config import MODULES, OUTER
from ondevice.models import Loaded
from ondevice_papers.grating.pools import Pool

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
    spread: float = 0.15, vectors: float = 0.0, seed: int = 0, **values: Any,
) -> PreTrainedModel:  # fmt: skip
    """spread: of each matrix's numbers. vectors: of what is added to biases and norms. values: of the configuration."""
    sizes = SHAPE | {"vocab_size": vocabulary, "max_position_embeddings": context}
    config = AutoConfig.for_model(kind, **sizes | KINDS.get(kind, {}) | values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, spread)
            elif vectors:
                parameter.add_(torch.randn_like(parameter) * vectors)
    return model


def loaded_model(
    width: int = 128, layers: int = 6, spread: float = 0.1, vocabulary: int = 512, context: int = 1024
) -> Loaded:
    """A random Llama in float32 as `models.load` gives one: a tied head, a token per byte, a chat template."""
    sizes = dict(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_key_value_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = random_model("llama", torch.float32, vocabulary=vocabulary, context=context, spread=spread, **sizes)
    tokenizer = shapes.byte_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(vocabulary - len(tokenizer))])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    return Loaded("tiny", "folder", model.eval(), tokenizer)


def turned(name: str, rows: np.ndarray, config: Any) -> np.ndarray:
    """Rows of Llama's queries and keys as its files have them, the halves of a head interleaved; others as they are."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type != "llama" or heads is None:
        return rows
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def packed(weight: np.ndarray, form: str) -> np.ndarray:
    """[rows, bytes] a matrix in a storage type. Of a K type, which nobody quantises in Python, random blocks."""
    import gguf

    kind = gguf.GGMLQuantizationType[form]
    if not form.endswith("_K"):
        return gguf.quants.quantize(np.ascontiguousarray(weight), kind)
    size, width = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(weight.size)
    blocks = rng.integers(0, 256, (len(weight), weight.shape[1] // size, width), np.uint8)
    scales = {"Q6_K": [1e-4]}.get(form, [4e-4, 3e-3])
    halves = (np.array(scales) * rng.uniform(0.5, 1.5, (*blocks.shape[:2], len(scales)))).astype(np.float16)
    blocks[..., slice(-2, None) if form == "Q6_K" else slice(0, 4)] = halves.view(np.uint8)
    return blocks.reshape(len(weight), -1)


def rotary_facts(config: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(facts, tensors) by which llama.cpp's converter says how rotary frequencies are scaled."""
    import gguf

    rope = config.rope_parameters
    facts = {"rope_freq_base": rope["rope_theta"]}
    if rope["rope_type"] in ("linear", "yarn"):
        kind = gguf.RopeScalingType(rope["rope_type"])
        facts |= {"rope_scaling_type": kind, "rope_scaling_factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        facts["rope_scaling_orig_ctx_len"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] != "llama3":
        return facts, {}
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    part = ((rope["original_max_position_embeddings"] / waves - low) / (high - low)).clip(0, 1)
    return facts, {"rope_freqs.weight": (1 / ((1 - part) / factor + part)).astype(np.float32)}


def write_gguf(
    model: PreTrainedModel, path: Path, forms: Sequence[str] = ("F32",), *, architecture: str = "",
    rows: int | None = None, extra: Mapping[str, np.ndarray] | None = None, **facts: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    """A file with a model's matrices in these storage types in turns; what it holds, by the names in transformers.

    rows: of the vocabulary that are written. extra: more tensors. facts: more of them, by gguf's names or whole keys;
    None is left out.
    """
    import gguf

    config = model.config
    scaling, factors = rotary_facts(config)
    own = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "key_length": config.head_dim, "value_length": config.head_dim, "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": rows or config.vocab_size,
    }  # fmt: skip
    file, held = gguf.GGUFWriter(path, architecture or config.model_type), {}
    for fact, value in (own | scaling | facts).items():
        if "." in fact:
            file.add_key_value(fact, value, gguf.GGUFValueType.get_type(value))
        elif value is not None:
            getattr(file, f"add_{fact}")(value)
    names = {long: short for short, long in (OUTER | MODULES).items()}
    for number, (name, parameter) in enumerate(model.named_parameters()):  # a tied head is none of its own
        module, _, part = name.removeprefix("model.layers.").rpartition(".")
        layer, _, inner = module.partition(".")
        short = f"blk.{layer}.{names[inner]}" if name.startswith("model.layers.") else names[module]
        held[name] = weight = parameter.detach().numpy()
        form = forms[number % len(forms)] if weight.ndim == 2 else "F32"
        kind = gguf.GGMLQuantizationType[form]
        if form != "F32":
            weight = packed(weight, form)
            held[name] = gguf.quants.dequantize(weight, kind)
        file.add_tensor(f"{short}.{part}", turned(name, weight, config)[:rows], raw_dtype=kind)
    for name, weight in (factors | dict(extra or {})).items():
        file.add_tensor(name, weight)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return held


def reranker_config(name: str, kind: str, **values: Any) -> Any:
    """Of a class with one score, or of a causal LM. kind: the configuration's type."""
    sizes = dict(vocab_size=97, num_hidden_layers=5, max_position_embeddings=64, pad_token_id=1, cls_token_id=2)
    labels = {} if name.endswith("CausalLM") else {"num_labels": 1}
    return AutoConfig.for_model(kind, **SHAPE | sizes | labels | values, architectures=[name])


def random_reranker(config: Any, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """Its scores differ, so that wrong states show."""
    torch.manual_seed(seed)
    model = getattr(transformers, config.architectures[0])(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.to(dtype)


def word_tokenizer(words: str, **options: Any) -> PreTrainedTokenizerFast:
    """A token a word; pairs as BERT has them."""
    entries = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *words.split()]
    made = Tokenizer(models.WordLevel({entry: index for index, entry in enumerate(entries)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 0), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, cls_token="[CLS]", pad_token="[PAD]", sep_token="[SEP]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"], **options,
    )  # fmt: skip


def random_pools(
    pools: int, seed: int, noise: float = 1.0, split: str = "validation", layers: int = 5, n: int = 8
) -> list[Pool]:
    """Exchangeable pools; some are harder, and one layer's error stays for the next ones."""
    rng = np.random.default_rng(seed)
    final = rng.normal(0, 2, (pools, 1, n))
    errors = noise * rng.gamma(2, 0.5, (pools, 1, 1)) * rng.normal(size=(pools, layers, n)).cumsum(1)[:, ::-1]
    scores = final + errors * (np.arange(layers)[::-1] / layers)[:, None] / 2
    return [Pool(str(number), split, each, np.zeros(n, bool)) for number, each in enumerate(scores)]
