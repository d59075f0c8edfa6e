"""Weights as int8 with one scale a row, so that the window reads a half or a quarter of the bytes.

A layer's matrices are stored as int8 and multiplied out into one layer of the model's own dtype when their turn comes,
once for all chunks. Kernels that multiply by int8 directly were slower on the CPUs tried, from 16 rows on: in bfloat16
`torch._weight_int8pack_mm` took 39 ms where multiplying out and a plain product took 4 (512 rows, 3,072 x 1,024).
Embeddings, heads, norms and biases are stored as they are: little of them is read, and they cost the most precision.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from ondevice.grating.checkpoint import SINGLE, Checkpoint
from ondevice.grating.weights import Streamed

SCALE = "_scale"  # behind a matrix's name: the name of its scales [rows], in the model's dtype
_STEPS = 127  # of int8, either way from zero
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int8: "I8"}


class Dequantised:
    """The layers of a folder that `save` wrote, in the model's own dtype; the rest as it is streamed. A `Weights`.

    One layer is held besides the window's: a matrix is valid until another layer is asked for.
    """

    def __init__(self, weights: Streamed) -> None:
        self.weights, self.layers = weights, weights.layers
        self._made: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes once all of it has been used."""
        return self.weights.nbytes + dequantised_bytes(self.weights.checkpoint)

    def begin(self) -> None:
        """Start to read the first layer."""
        self.weights.begin()

    def layer(self, index: int) -> dict[str, Tensor]:
        """A layer's parameters, multiplied out."""
        stored = self.weights.layer(index)
        found = {name: value for name, value in stored.items() if not name.endswith(SCALE)}
        for name in found:
            scale = stored.get(name + SCALE)
            if scale is not None:
                if name not in self._made:
                    self._made[name] = torch.empty(found[name].shape, dtype=scale.dtype)
                # Not one product of both: that would first make a copy of the matrix in the scales' dtype.
                found[name] = self._made[name].copy_(found[name]).mul_(scale[:, None])
        return found

    def rest(self) -> dict[str, Tensor]:
        """All but layers, token embedding and output head."""
        return self.weights.rest()

    def rows(self, ids: Tensor) -> Tensor:
        """[n, d] embedding rows."""
        return self.weights.rows(ids)

    def head_rows(self, ids: Tensor) -> Tensor:
        """[n, d] rows of the output head."""
        return self.weights.head_rows(ids)

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        self.weights.close()
        self._made.clear()


def is_quantised(checkpoint: Checkpoint) -> bool:
    """Whether a folder's layers have int8 matrices with scales."""
    return any(name.endswith(SCALE) for name in checkpoint.groups.layers[0])


def dequantised_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of one layer's matrices multiplied out; 0 where the folder is not quantised."""
    first, width = checkpoint.groups.layers[0], checkpoint.groups.table.dtype.itemsize
    return sum(width * tensor.length for name, tensor in first.items() if name + SCALE in first)


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """int8 steps [r, c] and scales [r], in the matrix's dtype, whose products are off by half a step at most.

    The scale is rounded to its dtype before the steps are made, so that its rounding adds no error to speak of.
    """
    wide = matrix.float()
    scale = (wide.abs().amax(1) / _STEPS).clamp(min=torch.finfo(torch.float16).tiny).to(matrix.dtype)
    steps = (wide / scale.float()[:, None]).round().clamp(-_STEPS, _STEPS)
    return steps.to(torch.int8), scale


def save(source: Path, target: Path) -> None:
    """Write the weights of a folder, its layers' matrices quantised, and its config.json into another folder.

    The tensors of a layer lie behind each other, so that it is one read; one tensor is in memory at a time.
    Raises ValueError where the folder is quantised already or has weights of an unusual dtype.
    """
    checkpoint = Checkpoint.open(source)
    if is_quantised(checkpoint):
        raise ValueError(f"{source.name} is quantised already.")
    header, end = _header(checkpoint)
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    target.mkdir(parents=True, exist_ok=True)
    with (target / SINGLE).open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, tensor in _tensors(checkpoint):
            place = header[name]["data_offsets"][0] + 8 + len(raw)
            if file.tell() != place:
                raise ValueError(f"{name} of {source.name} would be at byte {file.tell()}, not {place}.")
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if file.tell() != end + 8 + len(raw):
            raise ValueError(f"The weights of {source.name} are not as long as their header says.")
    shutil.copy(source / "config.json", target / "config.json")


def _header(checkpoint: Checkpoint) -> tuple[dict[str, Any], int]:
    """The header of the file to write, and the bytes of all tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "quantised": "int8, a scale a row"}}
    end = 0
    for name, dtype, shape in _layout(checkpoint):
        if dtype not in _NAMES:
            raise ValueError(f"{name} is {dtype}, which is not quantised or kept.")
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    return header, end


def _layout(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor to write, in the order of the file."""
    for name, halves in _order(checkpoint):
        stored = checkpoint.tensors[name]
        yield name, torch.int8 if halves else stored.dtype, stored.shape
        if halves:
            yield name + SCALE, stored.dtype, stored.shape[:1]


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The tensors to write, in the order of the file."""
    for name, halves in _order(checkpoint):
        with safetensors.safe_open(checkpoint.tensors[name].file, framework="pt") as file:
            tensor = file.get_tensor(name)
        if not halves:
            yield name, tensor
            continue
        steps, scale = quantise(tensor)
        yield name, steps
        yield name + SCALE, scale


def _order(checkpoint: Checkpoint) -> Iterator[tuple[str, bool]]:
    """Names of all tensors, the layers last and each in one piece, and whether they are quantised."""
    layers = checkpoint.groups.layers
    inside = {tensor.name for layer in layers for tensor in layer.values()}
    for name in sorted(checkpoint.tensors.keys() - inside):
        yield name, False
    for layer in layers:
        for tensor in sorted(layer.values(), key=lambda tensor: tensor.name):
            yield tensor.name, len(tensor.shape) == 2
