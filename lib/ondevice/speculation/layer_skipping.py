"""Self-speculation: the target without the odd ones of its inner layers drafts for the whole target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ondevice.causal_lm import CausalLM
from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.follower import Follower
from ondevice.speculation.largest import likeliest

LONGEST = 25  # drafted tokens
SIDE = ((0.95, 3), (0.8, 5), (0.5, 8), (0.0, 10))  # above this confidence, so many candidates at a depth
Sublayer = tuple[Module, Callable[..., Any]]  # a part of a decoder layer, and what its forward is while it is skipped


class LayerSkipping(Drafter):
    """The target drafts for itself with the attention and MLP of every odd layer skipped, but for the last layer's.

    This is the drafting of SWIFT (Xia et al., 2025; arXiv 2410.06916, code hemingkx/SWIFT) without SWIFT's search, so
    it is not called SWIFT. The search begins with this set and tries one other per pass from the 51st token of an
    output on. In recorded requests, whose outputs have 12 tokens in the median, it tried a set in 119 of 3,458 passes,
    and 71 of 72 requests were the same without it. Long outputs would give it more to do.

    Drafts are greedy and end after the first token whose probability is below `confidence`, with the likeliest
    alternatives at each depth as leaves, the fewer the more confident.
    The original shares the target's KV cache. Here the drafter has a session of its own on the same weights: its prompt
    rows come from the whole model, as there, which costs a second prefill; its rows of the output come from the skipped
    model. All of it is charged to this drafter's own time.

    longest: tokens of a chain. Raises ValueError for models without Llama-like layers, or with fewer than three.
    """

    name = "layer skipping"
    drafts_trees = True

    def __init__(self, lm: CausalLM, confidence: float = 0.8, *, longest: int = LONGEST) -> None:
        self.lm, self.vocabulary, self.forwards = lm, lm.vocabulary, 0
        parts = sublayers(lm)
        self._skipped = [parts[index] for index in odd_layers(len(parts))]
        self._confidence = confidence
        self._longest = longest

    def begin(self, prompt: Sequence[int]) -> None:
        """Prefill the prompt in the drafter's own session."""
        self._follower = Follower(self.lm, prompt)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The chain first, then its side branches from the root downwards."""
        chain: list[int] = []
        leaves: list[tuple[int, int]] = []  # and the node above
        with skipped(self._skipped):
            logits = self._follower.follow(tokens)
            while logits is not None:
                self.forwards += 1
                likely, sure = _likeliest(logits)
                leaves += [(token, len(chain) - 1) for token in likely[1:]]
                chain.append(likely[0])
                if sure < self._confidence or len(chain) >= min(self._longest, budget):
                    break
                logits = self._follower.go_on(chain[-1])
        drafted = [*chain, *(token for token, _ in leaves)]
        parents = [*range(-1, len(chain) - 1), *(node for _, node in leaves)]
        return Draft(drafted[:budget], parents[:budget])


def _likeliest(logits: Tensor) -> tuple[list[int], float]:
    """The candidates at one depth, the likeliest first, and how likely it is."""
    shares = logits.float().softmax(-1)
    sure = float(shares.max())
    first = int(likeliest(logits))
    many = next(count for above, count in SIDE if sure > above)
    likely: list[int] = shares.topk(min(many, len(shares))).indices.tolist()
    return [first, *(token for token in likely if token != first)], sure


# Skipping


def sublayers(lm: CausalLM) -> list[Sublayer]:
    """What may be skipped: attention and MLP of every layer but the first and the last, in their order: [2(L - 2)].

    Raises ValueError where the decoder layers are not built as Llama's are, or where there is none to skip.
    """
    layers = list(getattr(lm.model.base_model, "layers", ()))[1:-1]
    if not layers or not all(hasattr(layer, "self_attn") and hasattr(layer, "mlp") for layer in layers):
        raise ValueError(f"{type(lm.model).__name__} has no inner layers with self_attn and mlp: none can be skipped.")
    return [part for layer in layers for part in ((layer.self_attn, _no_attention), (layer.mlp, _no_mlp))]


def odd_layers(parts: int) -> list[int]:
    """Which of so many `sublayers` are of odd layers: the fixed set that is skipped, and SWIFT's first."""
    return [part for part in range(parts) if part // 2 % 2 == 0]  # the first two parts are of layer 1


def _no_attention(hidden_states: Tensor, *args: object, **options: object) -> tuple[Tensor, None]:
    return torch.zeros_like(hidden_states), None


def _no_mlp(hidden_states: Tensor, *args: object, **options: object) -> Tensor:
    return torch.zeros_like(hidden_states)


@contextmanager
def skipped(parts: Sequence[Sublayer]) -> Iterator[None]:
    """These sublayers add nothing to the residual stream inside; the model is as it was after, errors included.

    A hook would run after the work is done, so `forward` itself is replaced. The norms before them still run.
    """
    before = [module.__dict__.get("forward") for module, _ in parts]
    try:
        for module, nothing in parts:
            module.forward = nothing
        yield
    finally:
        for (module, _), forward in zip(parts, before, strict=True):
            module.__dict__.pop("forward", None)
            if forward is not None:  # what another wrapper had put there
                module.forward = forward
