"""A training run's checkpoint: what is trained, optimizer state and position in a safetensors file, written whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from ondevice import assets


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Write a checkpoint in one step, without the weights that are frozen. progress: anything JSON holds."""
    tensors = {}
    for name, parameter in _trained(model).items():
        tensors[f"model/{name}"] = parameter.detach().contiguous()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{name}/{key}"] = value.detach().contiguous()
    with assets.writing(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, {"progress": json.dumps(progress)})


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint into a model and its optimizer; returns the progress. Raises ValueError on a damaged file."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            progress: dict[str, Any] = json.loads((file.metadata() or {})["progress"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path.name} is not a checkpoint of this program, or is damaged: {error}") from None
    parameters = _trained(model)
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
            optimizer.state[parameter][slot] = value.to(parameter.device) if value.ndim else value
    return progress


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
