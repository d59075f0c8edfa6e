"""The published shapes of the models that the five papers use, and models of those shapes with random weights.

Values are those of each model's published config.json; `parameters` is the published count, which a test compares with
the model that transformers builds. Random weights are for timing and memory only: `random_model` marks its config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

MARK = "random_weights"  # the attribute of a model's config; save_pretrained keeps it
_BLOCK = 4_194_301  # random values drawn; prime, so that rows of a matrix do not repeat each other
_DEVIATION = 0.02


@dataclass(frozen=True)
class Shape:
    """A published model. kind: transformers' model type. architecture: its class. parameters: the published count."""

    kind: str
    architecture: str
    parameters: int
    values: dict[str, Any]

    def config(self) -> PreTrainedConfig:
        """The transformers configuration, marked as one for random weights."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.kind, architectures=[self.architecture], **{MARK: True}, **self.values)

    def empty(self) -> PreTrainedModel:
        """The model on torch's meta device: names and shapes without memory."""
        import transformers

        with torch.device("meta"):
            return getattr(transformers, self.architecture)(self.config())


def _decoder(
    kind: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    parameters: int,
    **values: Any,
) -> Shape:
    """A Llama-like decoder: rotary positions, gated feed-forward of width `inner`, grouped key-value heads."""
    sizes = dict(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
    )
    architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    return Shape(kind, architecture, parameters, sizes | values)


def _rope(theta: float, **scaling: float | str) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | scaling}


def _llama3(factor: float) -> dict[str, Any]:
    scaling = dict(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    other = dict(max_position_embeddings=131_072, rms_norm_eps=1e-5, bos_token_id=128_000, eos_token_id=128_001)
    return _rope(500_000.0, rope_type="llama3", **scaling) | other


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
_QWEN15 = _rope(1e6) | {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6}
_QWEN25 = _rope(1e6) | {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6}
_QWEN3 = _rope(1e6) | {"max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "head_dim": 128}
_LLAMA1 = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
_MINILM = dict(
    hidden_size=384,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=12,
    vocab_size=30_522,
    max_position_embeddings=512,
    type_vocab_size=2,
)

SHAPES: dict[str, Shape] = {
    # DRAGON
    "opt-1.3b": Shape("opt", "OPTForCausalLM", 1_315_758_080, dict(
        hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32, vocab_size=50_272,
        word_embed_proj_dim=2048, max_position_embeddings=2048)),
    "contriever": Shape("bert", "BertModel", 109_482_240, dict(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, vocab_size=30_522,
        max_position_embeddings=512, type_vocab_size=2)),
    "ms-marco-minilm-l6-v2": Shape("bert", "BertForSequenceClassification", 22_713_601, _MINILM | dict(num_labels=1)),
    # sd.npu, and DRAGON's Qwen2.5-1.5B; DiSCo's quality study has 0.5B to 7B, and its judge 72B
    "qwen2.5-0.5b": _decoder("qwen2", 896, 4864, 24, 14, 2, 151_936, 494_032_768, **_TIED, **_QWEN25),
    "qwen2.5-1.5b": _decoder("qwen2", 1536, 8960, 28, 12, 2, 151_936, 1_543_714_304, **_TIED, **_QWEN25),
    "qwen2.5-3b": _decoder("qwen2", 2048, 11_008, 36, 16, 2, 151_936, 3_085_938_688, **_TIED, **_QWEN25),
    "qwen2.5-7b": _decoder("qwen2", 3584, 18_944, 28, 28, 4, 152_064, 7_615_616_512, **_UNTIED, **_QWEN25),
    "qwen2.5-72b": _decoder("qwen2", 8192, 29_568, 80, 64, 8, 152_064, 72_706_203_648, **_UNTIED, **_QWEN25),
    "all-minilm-l6-v2": Shape("bert", "BertModel", 22_713_216, _MINILM),
    # sd.npu and DIAA
    "llama-3.2-1b": _decoder("llama", 2048, 8192, 16, 32, 8, 128_256, 1_235_814_400, **_TIED, **_llama3(32.0)),
    "llama-3.2-3b": _decoder("llama", 3072, 8192, 28, 24, 8, 128_256, 3_212_749_824, **_TIED, **_llama3(32.0)),
    "vicuna-7b-v1.5": _decoder(
        "llama", 4096, 11_008, 32, 32, 32, 32_000, 6_738_415_616, **_UNTIED,
        **_LLAMA1 | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    "vicuna-160m": _decoder("llama", 768, 3072, 12, 12, 12, 32_000, 162_417_408, **_UNTIED, **_LLAMA1),
    # DiSCo
    "llama-3.1-8b": _decoder("llama", 4096, 14_336, 32, 32, 8, 128_256, 8_030_261_248, **_UNTIED, **_llama3(8.0)),
    "llama-3-70b": _decoder(
        "llama", 8192, 28_672, 80, 64, 8, 128_256, 70_553_706_496, **_UNTIED, **_rope(500_000.0),
        max_position_embeddings=8192, rms_norm_eps=1e-5),
    "bloom-560m": Shape("bloom", "BloomForCausalLM", 559_214_592, dict(
        hidden_size=1024, n_layer=24, n_head=16, vocab_size=250_880)),
    "bloom-1b1": Shape("bloom", "BloomForCausalLM", 1_065_314_304, dict(
        hidden_size=1536, n_layer=24, n_head=16, vocab_size=250_880)),
    "qwen1.5-0.5b": _decoder("qwen2", 1024, 2816, 24, 16, 16, 151_936, 463_987_712, **_TIED, **_QWEN15),
    # GRATING
    "qwen3-reranker-0.6b": _decoder("qwen3", 1024, 3072, 28, 16, 8, 151_669, 595_776_512, **_TIED, **_QWEN3),
    "qwen3-reranker-4b": _decoder("qwen3", 2560, 9728, 36, 32, 8, 151_669, 4_021_784_576, **_TIED, **_QWEN3),
    "qwen3-reranker-8b": _decoder("qwen3", 4096, 12_288, 36, 32, 8, 151_669, 8_188_548_096, **_UNTIED, **_QWEN3),
    "qwen3-embedding-0.6b": Shape("qwen3", "Qwen3Model", 595_776_512, dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=151_669) | _TIED | _QWEN3 | {"max_position_embeddings": 32_768}),
    "qwen3-0.6b": _decoder("qwen3", 1024, 3072, 28, 16, 8, 151_936, 596_049_920, **_TIED, **_QWEN3),
    "qwen3-4b": _decoder("qwen3", 2560, 9728, 36, 32, 8, 151_936, 4_022_468_096, **_TIED, **_QWEN3),
    "qwen3-32b": _decoder("qwen3", 5120, 25_600, 64, 64, 8, 151_936, 32_762_123_264, **_UNTIED, **_QWEN3),
    "bge-reranker-v2-m3": Shape("xlm-roberta", "XLMRobertaForSequenceClassification", 567_755_777, dict(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, vocab_size=250_002,
        max_position_embeddings=8194, type_vocab_size=1, layer_norm_eps=1e-5, num_labels=1)),
    # Transformers has no MiniCPM-2B. A Llama of the same sizes has the same matrices and cost; MiniCPM's own constants
    # (scaled embeddings and residuals) and the layerwise reranker's heads (40 x 2,304) are left out.
    "bge-reranker-v2-minicpm": _decoder(
        "llama", 2304, 5760, 40, 36, 36, 122_753, 2_724_880_896, **_TIED, max_position_embeddings=2048,
        rms_norm_eps=1e-5),
}  # fmt: skip


def shape(name: str) -> Shape:
    """The shape of that name, in any case; raises ValueError with the names that exist."""
    named = SHAPES.get(name.lower())
    if named is None:
        raise ValueError(f"There is no shape {name!r}; there are {', '.join(SHAPES)}.")
    return named


def random_model(shape: Shape, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """A model with random weights on the CPU, in about the time that writing them takes; equal seeds, equal weights."""
    import transformers

    empty = shape.empty()
    numbers = _Ring(dtype, seed)
    state = {name: numbers.like(name, parameter) for name, parameter in empty.named_parameters()}
    # from_pretrained adopts the tensors as they are, ties what is tied and builds the buffers that meta has not.
    return getattr(transformers, shape.architecture).from_pretrained(
        None, config=empty.config, state_dict=state, dtype=dtype
    )


class _Ring:
    """Normal numbers out of one block, read round and round: drawing each anew takes minutes for billions."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        drawn = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(seed))
        self._block = (drawn * _DEVIATION).to(dtype)
        self._next = 0

    def like(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor of a parameter's shape: biases 0, scales of norms 1, matrices normal."""
        if parameter.ndim < 2:
            return torch.full(parameter.shape, float(name.endswith("weight")), dtype=self._block.dtype)
        tensor = torch.empty(parameter.shape, dtype=self._block.dtype)
        flat = tensor.view(-1)
        for start, stop in self._pieces(flat.numel()):
            flat[start:stop] = self._block[self._next : self._next + stop - start]
            self._next = (self._next + stop - start) % _BLOCK
        return tensor

    def _pieces(self, count: int) -> Iterator[tuple[int, int]]:
        start = 0
        while start < count:
            stop = min(count, start + _BLOCK - self._next)
            yield start, stop
            start = stop


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of random shapes: a token a byte, so that any text runs on any of them. Ids 0 to 258."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = ["<s>", "<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({entry: index for index, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **marks)
