"""A low-rank adapter on a decoder's attention (LoRA): all that is trained of a large parent, beside the new head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ondevice import adapters, assets
from ondevice.corpus.pairs import CHAT_TEMPLATE
from ondevice.precision import bfloat16_pays

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
_PROGRESS = "progress.json"
SCALE = 2.0  # of what the adapter adds: peft's lora_alpha over its r


class LowRank(nn.Module):
    """A frozen linear layer W, and beside it what is learnt: W x + SCALE B A x, with B = 0 at the start.

    rank: rows of A [rank, in] and columns of B [out, rank], both in float32.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, given: Tensor) -> Tensor:
        added = given @ self.a.to(given.dtype).T @ self.b.to(given.dtype).T
        output: Tensor = self.base(given) + SCALE * added
        return output


def adapt(model: Any, rank: int, seed: int = 0) -> None:
    """Put adapters on every attention matrix; only these and the head are trained. The trunk goes to bfloat16 where
    that pays, and attention takes plain products, whose gradient is several times as fast on a CPU as the fused one's.
    """
    torch.manual_seed(seed)
    model.requires_grad_(False)
    if bfloat16_pays(model.device.type):
        model.base_model.to(torch.bfloat16)
    model.set_attn_implementation("eager")
    for layer in model.base_model.layers:
        for name in MATRICES:
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name), rank))
    model.score.requires_grad_(True)


def save(model: Any, rank: int, parent: str, folder: Path, progress: dict[str, Any]) -> None:
    """Write the adapter and the head, in bfloat16, in peft's form, how a pair is read, and how far training is."""
    stored = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in _trained(model).items()}
    facts = {
        "peft_type": "LORA",
        "task_type": adapters.SCORE,
        "base_model_name_or_path": parent,
        "r": rank,
        "lora_alpha": SCALE * rank,
        "target_modules": list(MATRICES),
        "modules_to_save": ["score"],
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    with assets.writing(folder / adapters.WEIGHTS) as temporary:
        safetensors.torch.save_file(stored, temporary, {"format": "pt"})
    assets.write_text(folder / "chat_template.jinja", CHAT_TEMPLATE + "\n")
    assets.write_text(folder / adapters.CONFIG, json.dumps(facts, indent=1) + "\n")
    assets.write_text(folder / _PROGRESS, json.dumps(progress, indent=1) + "\n")


def load(model: Any, folder: Path) -> dict[str, Any] | None:
    """Put a saved adapter and its head into an adapted model; the progress, or None where there is none.

    Raises ValueError where the adapter is damaged or of another rank or model.
    """
    path = folder / _PROGRESS
    if not path.is_file():
        return None
    try:
        progress: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        stored = safetensors.torch.load_file(folder / adapters.WEIGHTS)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"The adapter in {folder.name} is damaged: {error}") from None
    trained = _trained(model)
    if {name: value.shape for name, value in stored.items()} != {name: value.shape for name, value in trained.items()}:
        raise ValueError(f"The adapter in {folder.name} belongs to another model, or has another rank.")
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(stored[name])
    return progress


def _trained(model: Any) -> dict[str, Tensor]:
    """What is trained, by its name in peft's form."""
    tensors = {"base_model.model.score.weight": model.score.weight}
    for path, module in model.named_modules():
        if isinstance(module, LowRank):
            tensors[f"base_model.model.{path}.lora_A.weight"] = module.a
            tensors[f"base_model.model.{path}.lora_B.weight"] = module.b
    return tensors
