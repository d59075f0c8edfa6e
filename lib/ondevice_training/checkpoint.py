"""Checkpoints of a training run: weights, optimizer state and position in one safetensors file, written whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from ondevice import assets


def save(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    progress: dict[str, Any],
    trained: bool = False,
) -> None:
    """Write a checkpoint in one step. progress: anything JSON holds. trained: without the weights that are frozen."""
    tensors = {}
    for name, parameter in _parameters(model, trained).items():
        tensors[f"model/{name}"] = parameter.detach().contiguous()
        for index, optimizer in enumerate(optimizers):
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{index}/{name}/{key}"] = value.detach().contiguous()
    with assets.writing(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, {"progress": json.dumps(progress)})


def load(
    path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], trained: bool = False
) -> dict[str, Any]:
    """Put a checkpoint into a model and its optimizers; returns the progress. Raises ValueError on a damaged file."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            progress = json.loads((file.metadata() or {})["progress"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path.name} is not a checkpoint of this program, or is damaged: {error}") from None
    parameters = _parameters(model, trained)
    shapes = {key.removeprefix("model/"): value.shape for key, value in tensors.items() if key.startswith("model/")}
    if shapes != {name: parameter.shape for name, parameter in parameters.items()}:
        raise ValueError(f"{path.name} belongs to a model of another shape.")
    for key, value in tensors.items():
        owner, rest = key.split("/", 1)
        if owner == "model":
            with torch.no_grad():
                parameters[rest].copy_(value)
        else:
            name, slot = rest.rsplit("/", 1)
            parameter = parameters[name]
            optimizers[int(owner)].state[parameter][slot] = value.to(parameter.device) if value.ndim else value
    return progress


def _parameters(model: nn.Module, trained: bool) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad or not trained}
