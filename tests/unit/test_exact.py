"""The lean engine in integers: a row's logits are the same bit for bit whatever is computed beside it."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_model
from transformers import PreTrainedModel

from ondevice.blocks import quantised
from ondevice.causal_lm import TokenTree, channels, exact
from ondevice.causal_lm.exact import Exact
from ondevice.causal_lm.lean import engine
from ondevice.speculation import Drafter, generate
from ondevice.speculation.token_recycling import TokenRecycling

V, CONTEXT = 61, 600
KINDS = {
    "llama": {"num_attention_heads": 8}, "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, heads alone": {"num_key_value_heads": 4}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {"head_dim": 32},
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


def built(kind: str) -> PreTrainedModel:
    own = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16} | KINDS[kind]
    return random_model(kind.partition(",")[0], torch.float32, vocabulary=V, context=CONTEXT, vectors=0.15, **own)


@cache
def lean(kind: str, threads: int = 1) -> Exact:
    return Exact(built(kind), threads=threads)


class Imitated(torch.nn.Linear):
    """A linear layer whose weights and activations are rounded as the engine's, with sums in float64."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        scales = (given.abs().amax(-1, keepdim=True).float() / 127).double()
        return super().forward((given / scales).round() * scales)


@cache
def imitated(kind: str) -> PreTrainedModel:
    model = copy.deepcopy(lean(kind).model)
    kept = channels.kept(model)
    table = model.model.embed_tokens.weight.data
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # rounded otherwise than the table
    table.copy_(torch.from_numpy(quantised(table.float().numpy(), 8).values()))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data = torch.from_numpy(kept.vector(name))
    for name, part in model.named_modules():
        if type(part) is torch.nn.Linear:
            part.__class__ = Imitated
            part.weight.data = torch.from_numpy(kept.matrix(name).values())
    return model.double()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_rounded_weights_and_activations(kind: str) -> None:
    ids = np.random.default_rng(0).integers(V, size=40)
    logits = lean(kind).start().extend(ids)
    with torch.inference_mode():
        right = imitated(kind)(torch.from_numpy(ids)[None]).logits[0]
    off = (logits - right).abs().amax(-1) / right.std()
    assert float(off.median()) < 1e-3 and float(off.max()) < 0.2  # a number between two codes may take either


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    parents = [-1, *(draw(st.integers(-1, row)) for row in range(draw(st.integers(0, 31))))]
    return TokenTree(draw(st.lists(st.integers(0, V - 1), min_size=len(parents), max_size=len(parents))), parents)


@given(st.sampled_from(sorted(KINDS)), st.sampled_from([1, 2]), st.integers(1, 560), trees(), st.integers(0, 99))
def test_a_trees_rows_are_those_of_its_paths(kind: str, threads: int, cached: int, tree: TokenTree, seed: int) -> None:
    session = lean(kind, threads).start()
    session.prefill(np.random.default_rng(seed).integers(V, size=cached), chunk=1 + seed)
    if not tree.topology.is_chain and len(tree) > session.lm.tree_room(cached):
        with pytest.raises(ValueError, match="rows"):
            session.verify(tree)
        return
    logits = session.verify(tree)
    for row in range(len(tree)):
        session.rollback(cached)
        singly = [session.extend([token]) for token in tree.tokens[tree.path_to(row)]]
        assert torch.equal(singly[-1][0], logits[row])


def test_drafted_answers_are_plain_ones_across_blocks() -> None:
    lm = lean("llama")
    prompt = np.random.default_rng(1).integers(V, size=200).tolist()
    plain, drafted = (generate(lm, drafter, prompt, 120, budget=16) for drafter in (Drafter(), TokenRecycling(V)))
    assert drafted.tokens == plain.tokens and len(drafted.steps) < len(plain.steps)
    assert any(step.drafted > step.depth for step in drafted.steps)


def test_products_that_saturate_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of product give the same logits, if this processor has both."""
    ids = np.arange(20)
    logits = lean("llama").start().extend(ids)
    monkeypatch.setattr(exact, "signed_products_are_exact", lambda: False)
    assert torch.equal(Exact(built("llama")).start().extend(ids), logits)


def test_a_row_of_zeros_and_a_channel_of_zeros_are_zeros() -> None:
    model = built("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3] = 0
        model.model.layers[1].self_attn.v_proj.weight[:] = 0
        model.model.embed_tokens.weight[7] = 0
    assert Exact(model).start().extend([7, 7, 3]).isfinite().all()


@pytest.mark.parametrize(("words", "arguments"), [("int8", {}), ("SiLU", {"arithmetic": "int8"})])
def test_what_does_not_fit_is_refused(words: str, arguments: dict[str, str]) -> None:
    model = random_model("llama", torch.float32, vocabulary=V, context=64, hidden_size=64, hidden_act="gelu")
    with pytest.raises(ValueError, match=words):
        engine(model, weights="8bit-rows", **arguments)
