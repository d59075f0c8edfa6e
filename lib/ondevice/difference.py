"""A model stored as its difference from another one: int8 with one scale a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ondevice import assets

FILE = "difference.safetensors"
_STEPS = 127  # of int8, either way from zero


@dataclass(frozen=True)
class Difference:
    """What was stored. parent: the spec of the model it differs from. sha256: of the parent's weights.

    tensors: `rows/NAME` [r, ...] int8 with `scale/NAME` [r] bf16, `change/NAME` bf16 for vectors, and `whole/NAME`
    bf16 for tensors that the parent does not have.
    """

    parent: str
    sha256: str
    tensors: Mapping[str, Tensor]

    @property
    def names(self) -> set[str]:
        """The tensors that are stored."""
        return {key.split("/", 1)[1] for key in self.tensors}

    def applied(self, parent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The stored model's float32 tensors that the parent lacks or that differ from it.

        Raises ValueError when the parent has no tensor to change, or one of another shape.
        """
        found = {}
        for key, value in self.tensors.items():
            part, name = key.split("/", 1)
            if part == "whole":
                found[name] = value.float()
            elif part in ("rows", "change"):
                if name not in parent or parent[name].shape != value.shape:
                    raise ValueError(f"{FILE} does not fit {self.parent}: {name} is not there or of another shape.")
                change = value.float()
                if part == "rows":
                    change = change * _by_row(self.tensors[f"scale/{name}"].float(), value)
                found[name] = parent[name].float() + change
        return found


def write(path: Path, child: Mapping[str, Tensor], parent: Mapping[str, Tensor], spec: str, sha256: str) -> None:
    """Store a child's tensors that are not its parent's. spec, sha256: name the parent and its weights."""
    tensors: dict[str, Tensor] = {}
    for name, value in child.items():
        if name not in parent:
            tensors[f"whole/{name}"] = value.detach().bfloat16().contiguous()
            continue
        change = value.detach().float() - parent[name].float()
        if not change.any():
            continue
        if change.ndim < 2:
            tensors[f"change/{name}"] = change.bfloat16()
        else:
            scale = (change.abs().flatten(1).amax(1) / _STEPS).bfloat16()
            steps = change / _by_row(scale.float().clamp(min=torch.finfo(torch.float32).tiny), change)
            tensors[f"rows/{name}"] = steps.round().clamp(-_STEPS, _STEPS).to(torch.int8)
            tensors[f"scale/{name}"] = scale
    with assets.writing(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, {"parent": spec, "sha256": sha256})


def read(path: Path) -> Difference:
    """Read what `write` wrote; raises ValueError on a damaged file."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            notes = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return Difference(notes["parent"], notes["sha256"], tensors)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path.name} of {path.parent.name} is damaged or truncated ({error}).") from None


def _by_row(scale: Tensor, like: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (like.ndim - 1))
