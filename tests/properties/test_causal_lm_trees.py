"""Any tree, any path, any sequence of session calls: the next logits are those of a run without a cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_model

from ondevice.causal_lm import CausalLM, Session, TokenTree

V, CONTEXT = 23, 40
KINDS = "llama", "qwen2", "qwen3", "opt", "gpt_neox"
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
    return CausalLM(random_model(kind, vocabulary=V, context=CONTEXT, spread=0.2, seed=1))


@torch.inference_mode()
def uncached(of: CausalLM, ids: list[int]) -> torch.Tensor:
    return of.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def differs(found: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((found - right).abs().max() >= 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
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
    logits = session.verify(tree)
    for node in range(len(tree)):
        assert not differs(logits[node], uncached(session.lm, expected + tree.tokens[tree.path_to(node)].tolist())[-1])
    session.keep(path)
    return session, expected + tree.tokens[path].tolist()
