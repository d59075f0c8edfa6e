"""Keywords and inputs of the reranker, which are CrossEncoder's: what they mean, or one sentence that refuses them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from ondevice_programs.reranker.memory_plan import MB

SEGMENT = 16_384  # tokens of the pairs that `predict` takes through the model together
# What the budget decides, what one process with one score a pair has no use for.
_IGNORED = ["batch_size", "show_progress_bar", "model_card_data", "pool", "chunk_size", "num_workers", "apply_softmax",
            "convert_to_numpy", "convert_to_tensor"]  # fmt: skip


def is_number(kind: type, value: object) -> bool:
    """Whether it is a number of the kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def megabytes(given: Any) -> float | None:
    """MB of a number, or of a text such as 150MB, 150 MB or 0.2GB."""
    if isinstance(given, str) and (parts := re.fullmatch(r"\s*([0-9.]+)\s*(MB|GB|MiB|GiB)?\s*", given, re.IGNORECASE)):
        scale = {"mb": 1.0, "gb": 1e3, "mib": 2**20 / MB, "gib": 2**30 / MB}[(parts[2] or "MB").lower()]
        with contextlib.suppress(ValueError):
            given = float(parts[1]) * scale
    if given is None:
        return None
    if not is_number(Real, given):
        raise ValueError(f'A memory budget is a number of MB or a text like "150MB", not {given!r}.')
    if not 0 < given < np.inf:
        raise ValueError(f"A memory budget is above 0 MB, not {given}.")
    return float(given)


def dtype_of(given: torch.dtype | None, options: Mapping[str, Any] | None) -> torch.dtype | None:
    """The dtype, also as CrossEncoder has it, in model_kwargs."""
    left = dict(options or {})
    named = left.pop("dtype", left.pop("torch_dtype", None))
    if left:
        raise ValueError(f"model_kwargs may name a dtype, not {', '.join(left)}: weights are streamed, not loaded.")
    named = getattr(torch, named, named) if isinstance(named, str) and named != "auto" else named
    dtype = given if given is not None else None if named == "auto" else named
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"A dtype is one of torch's floating-point ones, such as torch.bfloat16, not {dtype!r}.")
    return dtype


def require_known(ignored: Mapping[str, Any], device: Any = None) -> None:
    """Refuse keywords that CrossEncoder has not, or that would need something that is not here."""
    if device is not None and str(device) != "cpu":
        raise ValueError(f"Weights are streamed to the CPU, not to {device!r}.")
    odd = [name for name in ignored if name not in _IGNORED]
    if odd:
        raise ValueError(f"{odd[0]} is not known here; the keywords of CrossEncoder that are taken stand in the help.")
    size = ignored.get("batch_size", 1)
    if not (is_number(Integral, size) and size >= 1):
        raise ValueError(f"batch_size must be a positive integer, got {size!r}.")
    if ignored.get("pool") is not None:
        raise ValueError("There is no pool of processes here: a reranker is one process with one budget.")


def pair_of(number: int, pair: Sequence[str]) -> Sequence[str]:
    """A query and a document; number: which input it is, for the error."""
    if isinstance(pair, str | Mapping) or not hasattr(pair, "__len__") or len(pair) != 2:
        raise ValueError(f"Input {number} is not a pair of a query and a document.")
    return pair


def segments(documents: Sequence[str]) -> Iterator[slice]:
    """Parts of pairs with such documents, by a guess of four characters to a token."""
    start = size = 0
    for index, text in enumerate(documents):
        size += 64 + (len(text) // 4 if isinstance(text, str) else 0)
        if size > SEGMENT:
            yield slice(start, index + 1)
            start, size = index + 1, 0
    if start < len(documents):
        yield slice(start, len(documents))
