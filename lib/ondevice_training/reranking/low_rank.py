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


def save(model: Any, rank: int, parent: str, folder: Path) -> None:
    """Write the adapter and the head, in bfloat16, in peft's form, and how a pair is read (`ondevice.adapters`)."""
    tensors = {"base_model.model.score.weight": model.score.weight}
    for path, module in model.named_modules():
        if isinstance(module, LowRank):
            tensors[f"base_model.model.{path}.lora_A.weight"] = module.a
            tensors[f"base_model.model.{path}.lora_B.weight"] = module.b
    stored = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in tensors.items()}
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
