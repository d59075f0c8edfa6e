"""GGUF files of Llama, Qwen 2 and Qwen 3: configuration, tokenizer, and weights as they are stored."""

from __future__ import annotations

import json
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

from ondevice import assets, blocks, gguf_config, gguf_header, gguf_tokenizer
from ondevice.blocks import Blocks
from ondevice.gguf_header import PLAIN, Stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYOUT = "tensors.json"
_KEPT = 3  # version of what is kept in the cache; each has mended a configuration or a tokenizer


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
        turned = self._order_of_rows(name, stored.shape[0])
        if stored.format in PLAIN:
            weights = gguf_header.numbers(self.path, stored)
            return weights if turned is None else weights[turned]
        data = np.fromfile(self.path, np.uint8, stored.bytes, offset=stored.offset)  # mapped, it would stay in memory
        matrix = blocks.read(stored.format, data, stored.shape[-1])
        if len(stored.shape) == 1:
            vector = matrix.values().reshape(stored.shape)
            return vector if turned is None else vector[turned]
        return matrix if turned is None else matrix.rows(turned)

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

    Raises ValueError, with one sentence, as `gguf_header.read`, `gguf_config.configuration` and
    `gguf_tokenizer.tokenizer` do, and where the vocabulary is larger than the embedding.
    """
    with path.open("rb") as file:
        sha256 = file_digest(file, "sha256").hexdigest()
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
    header = gguf_header.read(path)
    config = gguf_config.configuration(header)
    tokenizer = gguf_tokenizer.tokenizer(header)
    rows = config.vocab_size
    if len(tokenizer) > rows:
        raise ValueError(f"The tokenizer in {path.name} has {len(tokenizer)} entries, its model only {rows}.")
    ends = gguf_tokenizer.ends(header)
    config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    layout = {
        gguf_config.in_transformers(name): [stored.format, stored.shape, stored.offset, stored.bytes]
        for name, stored in header.tensors.items()
        if name != gguf_config.ROPE_FACTORS
    }
    (folder / _LAYOUT).write_text(json.dumps(layout), encoding="utf-8")
