"""A model's matrices in 8 bits by output channel, smoothed: made once, and kept in the user's cache by their content.

Activations in 8 bits lose most where a few of their channels are far larger than the others. So each channel is divided
by a factor, and the weights that read it are multiplied with it. The factors of a normalised state lie in the norm's
weights, those of attention's output in the values' rows, those of the feed-forward's inner state in the rows of
`up_proj`. In real numbers nothing changes (SmoothQuant, arXiv 2211.10438). How much of a channel's size moves is chosen
for each product by what it loses, on texts that the model says itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from filelock import FileLock
from numpy.typing import NDArray
from tqdm import tqdm

from ondevice import assets
from ondevice.blocks import LARGEST, Channels, per_channel
from ondevice.digests import weights_digest
from ondevice.gguf_file import GGUF, source_of
from ondevice.models import Loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXTS, TOKENS = 16, 64  # that the model says of itself, and their length
TRIED = 256  # of their states, with which shares are compared
SHARES = (0.0, 0.4, 0.5, 0.6, 0.7, 0.8)  # of a channel's size that may move into the weights; 0: factors of 1
_LEAST = 1e-5  # of a channel's size
_VERSION = 1  # of what is kept


class Kept:
    """A model's matrices and vectors, read from a file of the cache when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._file = safetensors.safe_open(path, framework="np")

    def matrix(self, name: str) -> Channels:
        """A linear layer's weights, by the layer's name."""
        return Channels(self._file.get_tensor(f"{name}.codes"), self._file.get_tensor(f"{name}.scales"))

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm's weights or a layer's bias, by the parameter's name."""
        return self._file.get_tensor(name)


def kept(model: PreTrainedModel | Loaded) -> Kept:
    """A model's smoothed weights, from the cache or made for it: a quarter of a minute for 135 million weights.

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
    return Kept(path)


def _arrays(model: Any) -> dict[str, NDArray[Any]]:
    """All arrays of `Kept`, by their names in the file."""
    reads, scaled = smoothing(model), dict(model.named_parameters())
    for number in range(model.config.num_hidden_layers):
        layer = f"model.layers.{number}"
        groups = model.config.num_key_value_heads
        output = reads[f"{layer}.self_attn.o_proj"].view(groups, -1, model.model.layers[number].self_attn.head_dim)
        for writer, factors in (
            ("input_layernorm", reads[f"{layer}.self_attn.q_proj"]),
            ("post_attention_layernorm", reads[f"{layer}.mlp.gate_proj"]),
            ("self_attn.v_proj", output[:, 0].flatten()),
            ("mlp.up_proj", reads[f"{layer}.mlp.down_proj"]),
        ):
            for name in (f"{layer}.{writer}.weight", f"{layer}.{writer}.bias"):
                if name in scaled:
                    tensor = scaled[name]
                    scaled[name] = tensor / (factors if tensor.ndim == 1 else factors[:, None])
    arrays: dict[str, NDArray[Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = scaled.get(f"{name}.weight", module.weight)  # a tied head is no parameter of its own
            channels = per_channel((weight * reads[name] if name in reads else weight).numpy())
            arrays |= {f"{name}.codes": channels.codes, f"{name}.scales": channels.scales}
    return arrays | {name: tensor.numpy() for name, tensor in scaled.items() if tensor.ndim == 1}


def smoothing(model: Any) -> dict[str, torch.Tensor]:
    """Factors of the channels that a linear layer reads, by the layer's name; layers that read one state share them.

    They are powers of 2, so that nothing is rounded by them.
    """
    ids = _own_text(model)  # before the hooks, which each forward calls
    factors: dict[str, torch.Tensor] = {}
    hooks: list[Any] = []

    def watch(prefix: str, part: Any, names: Sequence[str], groups: int = 0) -> None:
        layers = [getattr(part, name) for name in names]

        def choose(_: Any, given: tuple[torch.Tensor]) -> None:
            weights = torch.cat([layer.weight for layer in layers])
            chosen = _factors(given[0].flatten(0, -2), weights, groups, part.head_dim if groups else 1)
            factors.update({f"{prefix}.{name}": chosen for name in names})

        hooks.append(layers[0].register_forward_pre_hook(choose))

    for number, layer in enumerate(model.model.layers):
        attention = f"model.layers.{number}.self_attn"
        watch(attention, layer.self_attn, ("q_proj", "k_proj", "v_proj"))
        watch(attention, layer.self_attn, ("o_proj",), model.config.num_key_value_heads)
        watch(f"model.layers.{number}.mlp", layer.mlp, ("gate_proj", "up_proj"))
        watch(f"model.layers.{number}.mlp", layer.mlp, ("down_proj",))
    try:
        model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return factors


def _factors(states: torch.Tensor, weights: torch.Tensor, groups: int, size: int) -> torch.Tensor:
    """[channels] those of `SHARES` with which the product of states [n, channels] loses least.

    weights: [out, channels]. groups: of heads of a size that share factors, as they read the same values; 0: none.
    """
    given, read = (each.abs().amax(0).clamp_min(_LEAST) for each in (states, weights))
    if groups:
        shape = groups, len(given) // groups // size, size
        given, read = (each.view(shape).amax(1, keepdim=True).expand(shape).flatten() for each in (given, read))
    states = states[:: max(len(states) // TRIED, 1)]
    right = states @ weights.T
    best = torch.ones_like(given)
    least = float("inf")
    for share in SHARES:
        factors = given**share / read ** (1 - share) if share else best
        factors = 2.0 ** (factors.log2() - factors.log2().mean()).round()
        loss = float((_rounded(states / factors) @ _rounded(weights * factors).T - right).square().sum())
        if loss < least:
            best, least = factors, loss
    return best


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    """Rows in 8 bits, each with a scale of its own."""
    scales = (rows.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(1e-30)
    return (rows / scales).round() * scales


def _own_text(model: Any) -> torch.Tensor:
    """[TEXTS, TOKENS] ids that the model says, drawn from its own chances behind its first token."""
    draws = torch.Generator().manual_seed(0)
    begins = [model.config.bos_token_id, model.config.eos_token_id, 0]
    first = next(number for number in begins if isinstance(number, int))
    ids = torch.full((TEXTS, 1), first)
    cache = None
    for _ in tqdm(range(TOKENS - 1), "8-bit weights, once", leave=False, unit="token", disable=None):
        output = model(ids[:, -1:], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        chances = output.logits[:, -1].float().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=draws)], dim=1)
    return ids
