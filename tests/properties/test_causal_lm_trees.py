"""Any tree, any path, any sequence of session calls: the next logits are those of a run without a cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from ondevice.causal_lm import CausalLM, Session, TokenTree

V, CONTEXT = 23, 40
SIZES = dict(
    vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=CONTEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 8},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "gpt_neox": {},
}
token = st.integers(0, V - 1)
tokens = st.lists(token, min_size=1, max_size=6)


@st.composite
def trees(draw: st.DrawFn, most: int = 10) -> TokenTree:
    """Any parents that come before their children; chains and siblings of one token among them."""
    n = draw(st.integers(1, most))
    return TokenTree(draw(st.lists(token, min_size=n, max_size=n)), [draw(st.integers(-1, k - 1)) for k in range(n)])


calls = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), tokens),
        st.tuples(st.just("prefill"), tokens),
        st.tuples(st.just("verify"), trees(), st.integers(-1, 9)),
        st.tuples(st.just("rollback"), st.floats(0, 1)),
        st.tuples(st.just("fork")),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@cache
def lm(kind: str) -> CausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | KINDS[kind]), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return CausalLM(model)


@torch.inference_mode()
def uncached(of: CausalLM, ids: list[int]) -> torch.Tensor:
    return of.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def differs(found: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((found - right).abs().max() >= 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(prompt=tokens, tree=trees())
def test_every_node_is_verified_as_its_path_would_be(kind: str, prompt: list[int], tree: TokenTree) -> None:
    session = lm(kind).start()
    session.prefill(prompt)
    logits = session.verify(tree)
    for row in range(len(tree)):
        path = prompt + tree.tokens[tree.path_to(row)].tolist()
        assert not differs(logits[row], uncached(session.lm, path)[-1])


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(script=calls)
def test_any_calls_leave_the_session_of_a_fresh_run(kind: str, script: list[tuple[Any, ...]]) -> None:
    session, expected = lm(kind).start(), list[int]()
    for call in script:
        session, expected = after(session, expected, call)
        assert session.tokens == expected
    found = session.extend([5])
    assert not differs(found[-1], uncached(session.lm, [*expected, 5])[-1])


def after(session: Session, expected: list[int], call: tuple[Any, ...]) -> tuple[Session, list[int]]:
    """The session and the tokens it should hold, after one call."""
    name, *arguments = call
    if name == "fork":
        return session.fork(), expected
    if name == "rollback":
        length = int(arguments[0] * len(expected))
        session.rollback(length)
        return session, expected[:length]
    depth = arguments[0].topology.depth if name == "verify" else len(arguments[0])
    if len(expected) + depth >= CONTEXT:
        return session, expected
    if name != "verify":
        logits = getattr(session, name)(arguments[0])
        assert not differs(logits.reshape(-1, V)[-1], uncached(session.lm, expected + arguments[0])[-1])
        return session, expected + arguments[0]
    tree, row = arguments
    path = tree.path_to(min(row, len(tree) - 1)) if row >= 0 else []
    session.verify(tree)
    session.keep(path)
    return session, expected + tree.tokens[path].tolist()
