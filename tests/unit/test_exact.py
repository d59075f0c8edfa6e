"""The lean engine in integers: a row's logits are the same bit for bit whatever is computed beside it."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_model
from transformers import PreTrainedModel

from ondevice import assets
from ondevice.blocks import Channels
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


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """What is kept of tiny models goes with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(assets.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


def built(kind: str) -> PreTrainedModel:
    own = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16} | KINDS[kind]
    return random_model(kind.partition(",")[0], torch.float32, vocabulary=V, context=CONTEXT, vectors=0.15, **own)


@cache
def lean(kind: str, threads: int = 1, weights: Any = "8bit-rows") -> Exact:
    return Exact(built(kind), threads=threads, weights=weights)


def verifying(weights: str) -> None:
    """Skip blocks where this processor's products of them depend on other rows, which an engine finds out."""
    try:
        lean("llama", weights=weights)
    except ValueError as error:
        assert weights != "8bit-rows" and "On this processor" in str(error)
        pytest.skip(str(error))


class Imitated(torch.nn.Linear):
    """A linear layer whose weights and activations are rounded as the engine's, with sums in float64."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        scales = (given.abs().amax(-1, keepdim=True).float() / 127).double()
        return super().forward((given / scales).round() * scales)


@cache
def imitated(kind: str) -> PreTrainedModel:
    model = turned(lean(kind).model)
    kept = channels.kept(lean(kind).model)
    model.model.embed_tokens.weight.data = torch.from_numpy(kept.matrix("model.embed_tokens").values())
    for name, part in model.named_modules():
        if type(part) is torch.nn.Linear:
            part.__class__ = Imitated
            part.weight.data = torch.from_numpy(kept.matrix(name.removesuffix(".layer")).values())
    return model.double()


class Turned(torch.nn.Module):
    """A `down_proj` that rotates what it reads."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer, self.rotation = layer, channels.inner_rotation(layer.in_features)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        rotation = self.rotation.to(given.dtype)
        return self.layer((given.unflatten(-1, (-1, len(rotation))) @ rotation).flatten(-2))


def turned(model: PreTrainedModel) -> PreTrainedModel:
    """The rotated model, in transformers."""
    twin = copy.deepcopy(model)
    twin.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.inference_mode():
        parameters = channels.rotated(model)
    assert set(parameters) == set(twin.state_dict())
    twin.load_state_dict(parameters)
    for layer in twin.model.layers:
        layer.mlp.down_proj = Turned(layer.mlp.down_proj)
    return twin


@pytest.mark.parametrize("kind", KINDS)
def test_a_rotated_model_computes_the_same_from_states_without_outliers(kind: str) -> None:
    model, ids = built(kind), torch.from_numpy(np.random.default_rng(0).integers(V, size=(1, 40)))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] *= 50
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.linspace(0.5, 2, len(parameter)))
    twin = turned(model)
    with torch.inference_mode():
        right = model(ids).logits
        assert torch.allclose(twin(ids).logits, right, atol=1e-4 * float(right.std()))
        largest, smoothed = (float(each.model.embed_tokens.weight.abs().max()) for each in (model, twin))
    assert smoothed < largest / 3


@pytest.mark.parametrize("size", [1, 32, 96, 576])
def test_rotations_are_orthogonal_and_spread_a_channel(size: int) -> None:
    rotation = channels.rotation(size).double()
    assert torch.allclose(rotation @ rotation.T, torch.eye(size).double(), atol=1e-5)
    assert float(rotation.abs().max()) <= (2 / size) ** 0.5 + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_kept_weights_are_the_rotated_ones_but_for_rounding(kind: str) -> None:
    kept = channels.kept(built(kind))
    with torch.inference_mode():
        parameters = {name: weights.numpy() for name, weights in channels.rotated(built(kind)).items()}
    for name, weights in parameters.items():
        if weights.ndim == 1:
            assert np.allclose(kept.vector(name), weights, atol=1e-6)
        else:
            matrix = kept.matrix(name.removesuffix(".weight"))
            assert (abs(matrix.values() - weights) <= 0.51 * matrix.scales[:, None]).all(), name


def test_rotated_weights_are_kept_by_their_content(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path))
    model = built("llama")
    right = Exact(model).start().extend([3, 1])
    with monkeypatch.context() as patch:
        patch.setattr(channels, "rotated", None)  # is not called again
        assert torch.equal(Exact(built("llama")).start().extend([3, 1]), right)
    with torch.no_grad():
        model.model.norm.weight[0] = 2
    assert not torch.equal(Exact(model).start().extend([3, 1]), right)
    assert len(list((tmp_path / "channels").glob("*.safetensors"))) == 2


def test_a_conversion_that_is_interrupted_keeps_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path))

    def interrupted(weights: np.ndarray) -> Channels:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(channels, "per_channel", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Exact(built("llama"))
    assert not list((tmp_path / "channels").glob("*.safetensors*"))
    assert Exact(built("llama")).start().extend([3]).isfinite().all()


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


@pytest.mark.parametrize("weights", ["8bit-rows", "8bit", "4bit"])
@given(st.sampled_from(sorted(KINDS)), st.sampled_from([1, 2]), st.integers(1, 560), trees(), st.integers(0, 99))
def test_a_trees_rows_are_those_of_its_paths(
    weights: str, kind: str, threads: int, cached: int, tree: TokenTree, seed: int
) -> None:
    verifying(weights)
    session = lean(kind, threads, weights).start()
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


@pytest.mark.parametrize("weights", ["8bit-rows", "4bit"])
def test_drafted_answers_are_plain_ones_across_blocks(weights: str) -> None:
    verifying(weights)
    lm = lean("llama", weights=weights)
    prompt = np.random.default_rng(1).integers(V, size=200).tolist()
    plain, drafted = (generate(lm, drafter, prompt, 120, budget=16) for drafter in (Drafter(), TokenRecycling(V)))
    assert drafted.tokens == plain.tokens and len(drafted.steps) < len(plain.steps)
    assert any(step.drafted > step.depth for step in drafted.steps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", ["8bit", "4bit"])
def test_blocks_in_int8_are_those_of_the_engine_without_drafts(weights: Any, kind: str) -> None:
    verifying(weights)
    ids = np.random.default_rng(0).integers(V, size=40)
    logits = lean(kind, weights=weights).start().extend(ids)
    right = engine(built(kind), weights=weights, arithmetic="int8", drafts=False).start().extend(ids)
    off = (logits - right).abs().amax(-1) / right.std()
    assert float(off.min()) < 1e-3 and float(off.max()) < 0.2  # a number between two codes may take either


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
