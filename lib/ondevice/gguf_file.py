"""GGUF files of Llama, Qwen 2 and Qwen 3: configuration, tokenizer, and weights as they are stored."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ondevice import assets, blocks
from ondevice.blocks import Blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_PLAIN: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_MODULES = {  # of transformers, by GGUF's name behind the layer's number
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
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYOUT = "tensors.json"
_KEPT = 2  # version of what is kept in the cache; the first one split digits from a space before them in other places
_DIGITS_APART = ("smollm", "refact", "codeshell", "command-r")  # how texts are split, by the file's own word
_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")
_BY_TRANSFORMERS = ("default", "gpt-2", "qwen2")
_LLAMA_3_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in the file. format: its GGUF type. shape: outer axis first. offset, bytes: in the file."""

    format: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class GGUF:
    """An opened file. path: its own. folder: configuration and tokenizer, as transformers reads them. sha256: of it.

    tensors: by their names in transformers (`model.layers.0.mlp.up_proj.weight`).
    """

    path: Path
    folder: Path
    sha256: str
    tensors: Mapping[str, Stored]

    @cached_property
    def config(self) -> Any:
        """The configuration, of transformers."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder, trust_remote_code=False)

    def parameter(self, name: str) -> NDArray[np.float32] | Blocks:
        """A weight by its name in transformers: in blocks where the file has it so, else in float32."""
        stored = self.tensors[name]
        data = np.fromfile(self.path, np.uint8, stored.bytes, offset=stored.offset)  # mapped, it would stay in memory
        turned = self._order_of_rows(name, stored.shape[0])
        if stored.format not in _PLAIN:
            matrix = blocks.read(stored.format, data, stored.shape[-1])
            return matrix if turned is None else matrix.rows(turned)
        numbers = data.view(_PLAIN[stored.format]).reshape(stored.shape)
        if turned is not None:
            numbers = numbers[turned]
        if stored.format == "BF16":
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers.astype(np.float32)

    def array(self, name: str) -> NDArray[np.float32]:
        """A weight in float32."""
        weight = self.parameter(name)
        return weight.values() if isinstance(weight, Blocks) else weight

    def skeleton(self) -> PreTrainedModel:
        """The model without its matrices, which take no memory; norms, biases and rotary angles are there."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        model.model.rotary_emb = type(model.model.rotary_emb)(self.config)
        vectors = {name: self.array(name) for name, stored in self.tensors.items() if len(stored.shape) == 1}
        _assign(model, vectors)
        return model.eval()

    def model(self) -> PreTrainedModel:
        """The model with all weights in float32."""
        model: Any = self.skeleton()
        _assign(model, {name: self.array(name) for name in self.tensors})
        model.tie_weights()
        empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if empty:
            raise ValueError(f"{self.path.name} has no {empty[0]}, which its architecture needs.")
        model.requires_grad_(False)
        model._gguf = self, weights_state(model)
        return model

    def _order_of_rows(self, name: str, rows: int) -> NDArray[np.int64] | None:
        """The file's rows in transformers' order: those of Llama's queries and keys are stored as pairs that turn."""
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        part = name.rpartition(".")[0].rpartition(".")[2]
        if self.config.model_type != "llama" or part not in heads:
            return None
        return np.arange(rows).reshape(heads[part], -1, 2).swapaxes(1, 2).reshape(-1)


def _assign(model: PreTrainedModel, weights: Mapping[str, NDArray[np.float32]]) -> None:
    """Give a model these weights, which are copied."""
    tensors = {name: torch.from_numpy(np.array(weight)) for name, weight in weights.items()}
    model.load_state_dict(tensors, strict=False, assign=True)


def weights_state(model: PreTrainedModel) -> tuple[tuple[int, int, torch.dtype], ...]:
    """What changes when a model's weights do: of each parameter its address, version and type."""
    # Tensors made under inference mode count no versions.
    return tuple(
        (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version, parameter.dtype)
        for parameter in model.parameters()
        if not parameter.is_meta
    )


def source_of(model: PreTrainedModel) -> GGUF | None:
    """The file that a model was read from, where its weights are still those."""
    file, state = getattr(model, "_gguf", (None, None))
    return file if file and state == weights_state(model) else None


def opened(path: Path) -> GGUF:
    """A file whose header was checked. Its configuration and tokenizer are kept in the cache, a few megabytes.

    Raises ValueError, with one sentence, on what is no GGUF, truncated, of another architecture than `ARCHITECTURES`,
    in formats that are not read, or with a vocabulary that does not fit.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path.name} is no GGUF file.")
        sha256 = file_digest(file, "sha256").hexdigest() if file.seek(0) == 0 else ""
    folder = assets.cache_folder("gguf") / f"{sha256[:24]}-{_KEPT}"
    if not (folder / _LAYOUT).is_file():
        with TemporaryDirectory(dir=folder.parent) as temporary:
            partial = Path(temporary) / "partial"
            partial.mkdir()
            _unpack(path, partial)
            try:
                partial.rename(folder)
            except OSError:
                if not (folder / _LAYOUT).is_file():  # else another process was first
                    raise
    layout = json.loads((folder / _LAYOUT).read_text(encoding="utf-8"))
    tensors = {name: Stored(form, tuple(shape), *where) for name, (form, shape, *where) in layout.items()}
    return GGUF(path, folder, sha256, tensors)


def _unpack(path: Path, folder: Path) -> None:
    """Write a file's configuration, tokenizer and layout of tensors into a folder. Raises ValueError as `opened`."""
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoTokenizer

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, struct.error) as error:
        raise ValueError(f"{path.name} is damaged or truncated ({str(error)[:80]}).") from None
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{path.name} is of {architecture}; {', '.join(ARCHITECTURES)} can be read.")
    scaling = reader.fields.get(f"{architecture}.rope.scaling.type")
    if scaling and scaling.contents() != "none":  # transformers' reader would leave it out
        raise ValueError(f"{path.name} has {scaling.contents()} rotary scaling, which this reader does not know.")
    layout: dict[str, Any] = {}
    for tensor in reader.tensors:
        form = tensor.tensor_type.name
        if form not in blocks.FORMATS and form not in _PLAIN:
            readable = ", ".join([*blocks.FORMATS, *_PLAIN])
            raise ValueError(f"{path.name} has {tensor.name} in {form}; {readable} can be read.")
        if tensor.data_offset + tensor.n_bytes > path.stat().st_size:
            raise ValueError(f"{path.name} is truncated: {tensor.name} ends behind the file's end.")
        shape = [int(length) for length in reversed(tensor.shape)]
        layout[_name(path, tensor.name)] = [form, shape, int(tensor.data_offset), int(tensor.n_bytes)]
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    pieces = reader.fields.get("tokenizer.ggml.pre")
    _split_as(path, tokenizer, pieces.contents() if pieces else "default")
    rows = layout["model.embed_tokens.weight"][1][0]
    if len(tokenizer) > rows:
        raise ValueError(f"The tokenizer in {path.name} has {len(tokenizer)} entries, its model only {rows}.")
    config.vocab_size = rows
    if width := reader.fields.get(f"{architecture}.attention.key_length"):
        config.head_dim = int(width.contents())
    config.tie_word_embeddings = "lm_head.weight" not in layout
    config.architectures = [ARCHITECTURES[architecture]]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / _LAYOUT).write_text(json.dumps(layout), encoding="utf-8")


def _split_as(path: Path, tokenizer: Any, pieces: str) -> None:
    """Have a tokenizer split a text before merging bytes as its file says, which transformers' reader does not look at.

    Raises ValueError for a way to split that is not known.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if pieces in _DIGITS_APART:
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    elif pieces in _LLAMA_3:
        steps = [Split(Regex(_LLAMA_3_PIECES), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    elif pieces in _BY_TRANSFORMERS:
        return
    else:
        supported = ", ".join([*_BY_TRANSFORMERS, *_DIGITS_APART, *_LLAMA_3])
        raise ValueError(f"{path.name} splits text as {pieces!r}, which this reader does not know, only {supported}.")
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)


def _name(path: Path, stored: str) -> str:
    """A tensor's name in transformers."""
    head, _, kind = stored.rpartition(".")
    if head.startswith("blk."):
        _, number, part = head.split(".", 2)
        if part in _MODULES:
            return f"model.layers.{number}.{_MODULES[part]}.{kind}"
    elif head in _OUTER:
        return f"{_OUTER[head]}.{kind}"
    raise ValueError(f"{path.name} has {stored}, which this reader does not know.")
