"""A model's matrices in 8 bits by output channel, rotated first: made once, and kept in the user's cache.

Rounding a row of activations to 8 bits loses most where a few channels are far larger than the others. A rotation
spreads them over all channels. The states between the layers are rotated as a whole, values of attention by head. Every
matrix that reads or writes them is rotated with them, and norms have no weights left, as these lie in the matrices
behind them. The wide state inside a feed-forward layer is rotated in each pass, a few channels together. In real
numbers nothing changes (QuaRot, arXiv 2404.00456).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from filelock import FileLock
from numpy.typing import NDArray

from ondevice import assets
from ondevice.blocks import Channels, per_channel
from ondevice.digests import weights_digest
from ondevice.gguf_file import GGUF, source_of
from ondevice.models import Loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOGETHER = 32  # channels that are rotated together in each pass: more take longer
_VERSION = 1  # of what is kept


class StoredMatrices:
    """A model's rotated matrices and vectors, read from a file of the cache when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._file = safetensors.safe_open(path, framework="np")

    def matrix(self, name: str) -> Channels:
        """The weights of a linear layer or of the embedding, by its name."""
        return Channels(self._file.get_tensor(f"{name}.codes"), self._file.get_tensor(f"{name}.scales"))

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm's weights or a layer's bias, by the parameter's name."""
        return self._file.get_tensor(name)


def kept(model: PreTrainedModel | Loaded) -> StoredMatrices:
    """A model's rotated weights, from the cache or made for it: some seconds for 135 million weights.

    model: what `lean.Lean` takes. Raises OSError where the cache cannot be written.
    """
    source = model.source if isinstance(model, Loaded) else model
    if isinstance(source, GGUF):
        digest = source.sha256
    else:
        file = source_of(source)
        digest = file.sha256 if file else weights_digest(source)
    path = assets.cache_folder("channels") / f"{digest[:32]}-{_VERSION}.safetensors"
    with FileLock(path.with_suffix(".lock")):
        if not path.is_file():
            whole = source.model() if isinstance(source, GGUF) else source
            with torch.inference_mode(), assets.writing(path) as temporary:
                safetensors.numpy.save_file(_arrays(whole), temporary)
    return StoredMatrices(path)


def _arrays(model: Any) -> dict[str, NDArray[Any]]:
    """All arrays of `StoredMatrices`, by their names in the file."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, tensor in rotated(model).items():
        rows = np.ascontiguousarray(tensor.numpy())  # a file's array is written as it lies in memory
        if rows.ndim == 1:
            arrays[name] = rows
        else:
            channels, layer = per_channel(rows), name.removesuffix(".weight")
            arrays |= {f"{layer}.codes": channels.codes, f"{layer}.scales": channels.scales}
    return arrays


def rotated(model: Any) -> dict[str, torch.Tensor]:
    """Parameters, by their names, of a model with the same logits and rotated states.

    It rotates what each `down_proj` reads by `inner_rotation`. Embedding and head are two matrices, also where the
    model's are one.
    """
    states, heads = rotation(model.config.hidden_size), rotation(model.model.layers[0].self_attn.head_dim)
    inner = inner_rotation(model.config.intermediate_size)
    parameters = {"model.embed_tokens.weight": model.model.embed_tokens.weight @ states}
    for name, part in model.named_modules():
        layer, _, kind = name.rpartition(".")
        if isinstance(part, torch.nn.Linear):
            weight: torch.Tensor = part.weight
            bias: torch.Tensor | None = part.bias
            if kind in ("o_proj", "down_proj"):  # writes states
                weight = states.T @ _by_group(weight, heads if kind == "o_proj" else inner)
                bias = None if bias is None else bias @ states
            else:  # reads states, behind a norm
                weight = weight * _norm_before(model, layer, kind).weight @ states
            if kind == "v_proj":
                weight = _by_group(weight.T, heads).T
                bias = None if bias is None else _by_group(bias, heads)
            parameters[f"{name}.weight"] = weight
            if bias is not None:
                parameters[f"{name}.bias"] = bias
        elif kind in ("q_norm", "k_norm"):
            parameters[f"{name}.weight"] = part.weight
        elif kind.endswith("norm"):
            parameters[f"{name}.weight"] = torch.ones_like(part.weight)
    return parameters


def _norm_before(model: Any, layer: str, kind: str) -> Any:
    """The norm whose states a linear layer reads."""
    if kind == "lm_head":
        return model.model.norm
    block = model.get_submodule(layer.rpartition(".")[0])
    return block.post_attention_layernorm if kind in ("gate_proj", "up_proj") else block.input_layernorm


def _by_group(rows: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rows [..., channels] whose channels are rotated, as many at a time as the rotation has."""
    return (rows.unflatten(-1, (-1, len(rotation))) @ rotation).flatten(-2)


def inner_rotation(width: int) -> torch.Tensor:
    """That of the channels inside a feed-forward layer of this width, which are rotated by groups."""
    return rotation(math.gcd(width, _TOGETHER))


def rotation(size: int) -> torch.Tensor:
    """[size, size] an orthogonal matrix that spreads each channel over all: a cosine transform with signs at random."""
    channels = np.arange(size)
    waves = np.cos(np.pi * (2 * channels[:, None] + 1) * channels / (2 * size)) * math.sqrt(2 / size)
    waves[:, 0] /= math.sqrt(2)
    signs = np.random.default_rng(0).choice([-1, 1], size)
    return torch.from_numpy((signs[:, None] * waves).astype(np.float32))
