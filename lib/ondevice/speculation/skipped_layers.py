"""Running a model without some of its sublayers, for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from ondevice.causal_lm import CausalLM


class Sublayer(NamedTuple):
    """A part of a decoder layer, and what its forward is while it is skipped."""

    module: Module
    nothing: Callable[..., Any]


def sublayers(lm: CausalLM) -> list[Sublayer]:
    """What may be skipped: attention and MLP of every layer but the first and the last, in their order: [2(L - 2)].

    Raises ValueError where the decoder layers are not built as Llama's are, or where there is none to skip.
    """
    kind = type(lm.model).__name__
    layers = list(getattr(lm.model.base_model, "layers", ()))
    if not layers or not all(hasattr(layer, "self_attn") and hasattr(layer, "mlp") for layer in layers):
        raise ValueError(f"{kind} has no decoder layers with self_attn and mlp, the sublayers that can be skipped.")
    if len(layers) < 3:
        raise ValueError(f"{kind} has {len(layers)} layers; the first and the last are kept, so none can be skipped.")
    found = [
        part
        for layer in layers[1:-1]
        for part in (Sublayer(layer.self_attn, _no_attention), Sublayer(layer.mlp, _no_mlp))
    ]
    try:
        with skipped(found):
            lm.start().extend([0, 1 % lm.vocabulary])
    except Exception as error:  # whatever a foreign layer does with a zero
        raise ValueError(f"{kind} cannot run with sublayers skipped ({error}).") from error
    return found


def _no_attention(hidden_states: Tensor, *args: object, **options: object) -> tuple[Tensor, None]:
    return torch.zeros_like(hidden_states), None


def _no_mlp(hidden_states: Tensor, *args: object, **options: object) -> Tensor:
    return torch.zeros_like(hidden_states)


@contextmanager
def skipped(parts: Sequence[Sublayer]) -> Iterator[None]:
    """These sublayers add nothing to the residual stream inside; the model is as it was after, errors included.

    A hook would run after the work is done, so `forward` itself is replaced. The norms before them still run.
    """
    before = [part.module.__dict__.get("forward") for part in parts]
    try:
        for part in parts:
            part.module.forward = part.nothing
        yield
    finally:
        for part, forward in zip(parts, before, strict=True):
            part.module.__dict__.pop("forward", None)
            if forward is not None:  # what another wrapper had put there
                part.module.forward = forward
