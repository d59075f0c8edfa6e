"""Tiny models whose output is not constant, what they say without a cache, and one drafter of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ondevice.causal_lm import CausalLM
from ondevice.speculation import Drafter
from ondevice.speculation.cacheback import Cacheback
from ondevice.speculation.drafters import DRAFTERS as TABLE
from ondevice.speculation.drafters import create
from ondevice.speculation.goose import Goose
from ondevice.speculation.layer_skipping import LayerSkipping
from ondevice.speculation.loop import Choice, greedy
from ondevice.speculation.mixture import Mixture
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.racer import Racer
from ondevice.speculation.sam_decoding import SamDecoding, automaton
from ondevice.speculation.small_model import SmallModel
from ondevice.speculation.store import Store
from ondevice.speculation.suffix_decoding import SuffixDecoding
from ondevice_papers.diaa.drafter import RECYCLING, Diaa
from ondevice_papers.diaa.tables import Tables
from ondevice_papers.diaa.warmup import warm_up

V, CONTEXT = 48, 64
SHORT = 24  # the context of a small model that ends before the target's
SIZES = dict(
    vocab_size=V, hidden_size=32, intermediate_size=64, num_attention_heads=4, max_position_embeddings=CONTEXT,
    tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_neox": {},
}
CHAINS_ONLY: dict[str, dict[str, Any]] = {
    "bloom": {},  # ALiBi
    "mistral": {"num_key_value_heads": 2, "sliding_window": 8},
}
SKIPPABLE = ("llama", "qwen2", "qwen3", "mistral")  # decoder layers with self_attn and mlp
# By parts of names: outputs of attention, then output and input embeddings.
STDS = {"o_proj": 0.1, "out_proj": 0.1, "dense.weight": 0.1, "lm_head": 0.4, "embed_out": 0.4, "emb": 1.0}
SECONDS = 1 + 0.02 * np.arange(81)  # of a pass, by nodes

# Models


@cache
def tiny(kind: str, layers: int = 2) -> CausalLM:
    """A random model in fp64. Its weights are large enough for outputs that differ and go on differing; attention adds
    less than the last token does, so that texts come back to what they said and drafts are now right, now wrong."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    values = SIZES | {"num_hidden_layers": layers} | (KINDS | CHAINS_ONLY)[kind]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), dtype=torch.float64)
    inner = [f".{layer}." for layer in range(1, layers - 1)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, next((std for part, std in STDS.items() if part in name), 0.25))
            if any(part in name for part in inner) and ("o_proj" in name or "down_proj" in name):
                parameter.mul_(0.3)  # the layers that are skipped say less, so that the others say much the same
    return CausalLM(model)


def again(of: CausalLM, context: int = CONTEXT) -> CausalLM:
    """The same model, wrapped once more: what a drafter runs on it is not counted as the target's work."""
    return CausalLM(of.model, context)


@cache
def resembling(of: CausalLM) -> CausalLM:
    """A model that often says what this one says: its weights with some noise."""
    model = deepcopy(of.model)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    return CausalLM(model)


# What they say

_said: dict[tuple[CausalLM, tuple[int, ...]], list[int]] = {}


def plain(of: CausalLM, prompt: Sequence[int], limit: int) -> list[int]:
    """Greedy output, up to the context's end; kept, since every drafter is compared with it."""
    said = _said.setdefault((of, tuple(prompt)), [])
    if len(said) < limit:
        said += uncached(of, [*prompt, *said], limit - len(said), greedy)
    return said[:limit]


def uncached(of: CausalLM, text: Sequence[int], limit: int, choose: Choice) -> list[int]:
    """Token by token, each from a forward over the whole text so far: no cache, no session, no verify loop."""
    said: list[int] = []
    while len(said) < limit and len(text) + len(said) <= CONTEXT:
        said.append(choose(next_logits(of, [*text, *said])))
    return said


@torch.inference_mode()
def next_logits(of: CausalLM, text: Sequence[int]) -> torch.Tensor:
    """Logits [V] after a text, from one forward over it."""
    return of.model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0, -1]


# Drafters


@cache
def _warm(of: CausalLM) -> Tables:
    return warm_up(of, np.random.default_rng(5).integers(0, V, CONTEXT))


def warm_tables(of: CausalLM) -> Tables:
    """Tables of what the model says in a random text; a copy, as drafters write into them."""
    return _warm(of).copy()


def _named(name: str, of: CausalLM, corpus: Sequence[Sequence[int]]) -> Drafter:
    return create(name, V)


Make = Callable[[CausalLM, Sequence[Sequence[int]]], Drafter]  # from the target and a corpus
DRAFTERS: dict[str, Make] = {
    "vanilla": lambda of, corpus: Drafter(),
    **{name: partial(_named, name) for name in TABLE},
    "PLD": lambda of, corpus: PromptLookup.original(),
    "SAM, corpus": lambda of, corpus: SamDecoding(automaton(corpus)),
    "small model": lambda of, corpus: SmallModel(resembling(of)),
    "small model, heuristic": lambda of, corpus: SmallModel(resembling(of), 2, heuristic=True),
    "small model, short context": lambda of, corpus: SmallModel(again(resembling(of), SHORT)),
    "layer skipping": lambda of, corpus: LayerSkipping(again(of), 0.3, longest=6),
    "layer skipping, unsure": lambda of, corpus: LayerSkipping(again(of), 0.0, longest=4),
    "DIAA, cold": lambda of, corpus: Diaa(Tables.empty(V), stale=True),
    "DIAA, warm": lambda of, corpus: Diaa(warm_tables(of)),
    "DIAA, template": lambda of, corpus: Diaa(warm_tables(of), template=RECYCLING, stale=True),
    "DIAA, refresh": lambda of, corpus: Diaa(warm_tables(of), refresh=3, reads_prompt=True),
    "SuffixDecoding, corpus": lambda of, corpus: SuffixDecoding(automaton(corpus)),
    "Goose": lambda of, corpus: Goose(V, automaton(corpus)),
    "RACER, few nodes": lambda of, corpus: Racer(V, nodes=24),
    "Cacheback, corpus": lambda of, corpus: Cacheback(corpus),
    "mixture": lambda of, corpus: Mixture(),
    "mixture, store, sized": lambda of, corpus: Mixture(stores=[Store.from_sequences(corpus)], seconds=SECONDS),
}


def targets(kinds: Sequence[str] = tuple(KINDS), names: Sequence[str] = tuple(DRAFTERS)) -> list[tuple[str, str]]:
    """(kind, drafter) of all that go together."""
    return [(kind, name) for kind in kinds for name in names if kind in SKIPPABLE or not skips(name)]


def skips(name: str) -> bool:
    """Whether a drafter skips layers, and so needs a model with some between the first and the last."""
    return name.startswith("layer skipping")


def target(kind: str, name: str) -> CausalLM:
    """The model of a kind that a drafter is tried on."""
    return tiny(kind, 4 if skips(name) else 2)
