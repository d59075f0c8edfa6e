"""Where bfloat16 pays: on a GPU, and on a CPU with instructions for it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch


@functools.cache
def bfloat16_pays(device: str) -> bool:
    """Whether matrix products in bfloat16 are faster than in float32; a CPU without such instructions emulates them."""
    if device != "cpu":
        return True
    able = torch.cpu.get_capabilities()
    return bool(able.get("amx_bf16") or able.get("avx512_bf16"))


def mixed_precision(device: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bfloat16 where it pays, else nothing."""
    return torch.autocast(device, torch.bfloat16) if bfloat16_pays(device) else contextlib.nullcontext()
