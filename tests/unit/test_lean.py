"""The lean engine: every logit is compared with an uncached run of transformers in float64, of the same weights."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from tiny import random_model
from transformers import PreTrainedModel

from ondevice.blocks import quantised
from ondevice.causal_lm import CausalLM, Interrupted, Session, TokenTree
from ondevice.causal_lm.lean import Lean, engine
from ondevice.speculation import generate
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.verify_cost import verifications
from ondevice_papers.dragon.batch import Batch

V, CONTEXT, NEAR = 61, 96, 2e-4
FAR = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
       "original_max_position_embeddings": 24}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "llama, biases": {"attention_bias": True, "mlp_bias": True}, "llama, scaled": {"rope_parameters": FAR},
    "llama, tied": {"tie_word_embeddings": True}, "qwen2": {}, "qwen3": {}, "qwen3, wide": {"head_dim": 64},
}  # fmt: skip
PROMPT = [5, 17, 3, 44, 8, 29, 2]
# Rows are out of step with depths, there are two branches from the last committed token, and node 6 is four deep.
TREE = TokenTree([11, 23, 7, 11, 50, 9, 31, 23, 60], [-1, 0, 0, -1, 1, 3, 4, 4, 5])

pytestmark = pytest.mark.usefixtures("one_thread")


def built(kind: str, dtype: torch.dtype = torch.float32, **values: Any) -> PreTrainedModel:
    own = {"hidden_size": 64, "num_key_value_heads": 2, "head_dim": 16} | KINDS.get(kind, {}) | values
    return random_model(kind.split(" ")[0].strip(","), dtype, vocabulary=V, context=CONTEXT, vectors=0.15, **own)


@cache
def lean(kind: str) -> Lean:
    return Lean(built(kind))


@cache
def exact(kind: str) -> PreTrainedModel:
    return copy.deepcopy(lean(kind).model).double()


@torch.inference_mode()
def uncached(kind: str, ids: list[int]) -> torch.Tensor:
    """[len(ids), V] logits of one run in float64."""
    return exact(kind)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def near(found: torch.Tensor, right: torch.Tensor) -> bool:
    return found.shape == right.shape and float((found - right).abs().max()) < NEAR


def tree_is_right(kind: str, session: Session, tree: TokenTree) -> bool:
    logits = session.verify(tree)
    paths = [session.tokens + tree.tokens[tree.path_to(row)].tolist() for row in range(len(tree))]
    return all(near(logits[row], uncached(kind, path)[-1]) for row, path in enumerate(paths))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_chains_and_trees_are_right_whatever_was_kept_and_dropped(kind: str) -> None:
    session = lean(kind).start()
    assert near(session.prefill(PROMPT), uncached(kind, PROMPT)[-1])
    assert tree_is_right(kind, session, TREE)
    session.keep([0, 1, 4, 7])
    assert tree_is_right(kind, session, TokenTree.chain([1, 2, 3]))
    session.keep([0])
    session.rollback(9)
    assert near(session.extend([4, 5]), uncached(kind, session.tokens)[-2:])
    assert tree_is_right(kind, session, TREE)


def test_rows_that_grow_stay_right() -> None:
    session = lean("llama").start()  # 64 rows at first
    session.prefill(PROMPT * 8)
    assert tree_is_right("llama", session, TREE)
    session.keep([3, 5, 8])
    session.prefill(PROMPT * 4)
    assert near(session.extend([1]), uncached("llama", session.tokens)[-1:])


def test_a_fork_and_an_export_are_sessions_of_their_own() -> None:
    lm = lean("qwen2")
    session = lm.start()
    session.prefill(PROMPT)
    twin, moved = session.fork(), lm.resume(PROMPT, *session.exported())
    session.extend([3, 4, 5])
    for other in (twin, moved, CausalLM(lm.model).resume(PROMPT, *twin.exported())):
        assert near(other.extend([9, 9]), uncached("qwen2", [*PROMPT, 9, 9])[-2:])


def test_torch_has_one_thread_beside_the_runtime_and_its_own_again_behind_it() -> None:
    seen: list[int] = []

    class Counting(PromptLookup):
        def propose(self, tokens, budget):
            seen.append(torch.get_num_threads())
            if len(seen) == 2:
                raise KeyboardInterrupt
            return super().propose(tokens, budget)

    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(lean("qwen3"), Counting.transformers(), PROMPT * 3, 60)
        assert (seen, torch.get_num_threads()) == ([1, 1], 3)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_verification_is_timed_without_torch_s_threads_beside_the_runtime_s(threads: int) -> None:
    lm = lean("llama") if threads == 1 else CausalLM(lean("llama").model)  # which has torch's
    seen: list[int] = []

    class Counting(Session):
        def verify(self, tree):
            seen.append(torch.get_num_threads())
            return super().verify(tree)

    with mock.patch.object(type(lm), "start", lambda self, capacity=0: Counting(self, capacity)):
        torch.set_num_threads(3)
        try:
            turn = verifications(lm, 5, (1, 4))
            assert len(turn()) == 2 and set(seen) == {threads} and torch.get_num_threads() == 3
        finally:
            torch.set_num_threads(1)


def test_a_tree_may_be_wider_than_what_is_left_of_the_context() -> None:
    session = lean("llama").start()
    session.prefill((PROMPT * 20)[: CONTEXT - 6])
    assert tree_is_right("llama", session, TREE)
    session.keep([0, 1, 4, 7])
    wide = TokenTree([3] * 40, [-1] * 40)
    assert tree_is_right("llama", session, wide)
    session.keep([])
    with pytest.raises(ValueError, match="1026 rows"):
        session.verify(TokenTree([3] * 1040, [-1] * 1040))


def test_it_asks_nothing_of_torchs_defaults_and_leaves_them() -> None:
    session = lean("llama").start()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_flush_denormal(True)
        assert near(session.prefill(PROMPT), uncached("llama", PROMPT)[-1])
        assert near(Lean(built("llama", torch.float32)).start().prefill(PROMPT), uncached("llama", PROMPT)[-1])
        assert float(torch.tensor(1e-40, dtype=torch.float32) * 1) == 0
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_flush_denormal(False)
    session.extend([1])
    assert float(torch.tensor(1e-40) * 1) != 0


class Adapted(torch.nn.Linear):
    """As an adapter's: its forward is not its weight's."""

    def forward(self, given):
        return 2 * super().forward(given)


def adapt(model) -> None:
    model.model.layers[1].mlp.up_proj.__class__ = Adapted


def hook(model) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda part, given, made: 2 * made)


@pytest.mark.parametrize("change", [adapt, hook])
def test_what_is_not_in_plain_weights_is_refused(change) -> None:
    model = built("llama")
    change(model)
    with pytest.raises(ValueError, match="linear layers"):
        Lean(model)


def test_two_sessions_of_one_engine_run_in_two_threads() -> None:
    lm, prompts = Lean(built("llama")), [[first, *PROMPT] for first in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        logits = pool.map(lambda prompt: lm.start().prefill(prompt), prompts)
    assert all(near(row, uncached("llama", prompt)[-1]) for row, prompt in zip(logits, prompts, strict=True))


def test_a_stopped_forward_leaves_the_session_as_it_was() -> None:
    session = lean("llama").start()
    session.prefill(PROMPT)
    session._rows.stop = threading.Event()
    session._rows.stop.set()
    with pytest.raises(Interrupted):
        session.extend([1, 2])
    session._rows.stop.clear()
    assert session.tokens == PROMPT
    assert near(session.extend([1, 2]), uncached("llama", [*PROMPT, 1, 2])[-2:])


# Weights in blocks


def rounded(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """A copy in float64 whose matrices are what blocks of so many bits hold; embedding and head always have 8."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if parameter.ndim == 2:
                own = 8 if name in ("model.embed_tokens.weight", "lm_head.weight") else bits
                parameter.copy_(torch.from_numpy(quantised(parameter.numpy(), own).values()))
    return copied.double()


@pytest.mark.parametrize("weights", ["4bit", "8bit"])
@pytest.mark.parametrize("kind", ["llama", "llama, biases", "llama, tied", "qwen2", "qwen3"])
def test_blocks_change_the_weights_and_nothing_else(kind: str, weights: Any) -> None:
    model = built(kind, intermediate_size=96)
    right = rounded(model, int(weights[0]))
    session = Lean(model, weights=weights).start()
    session.prefill(PROMPT)
    logits = session.verify(TREE)
    with torch.inference_mode():
        for row in range(len(TREE)):
            ids = torch.tensor([PROMPT + TREE.tokens[TREE.path_to(row)].tolist()])
            assert near(logits[row], right(ids).logits[0, -1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Lean(built("gpt2")), "gpt2"),
        (lambda: Lean(built("llama", torch.bfloat16)), "bfloat16"),
        (lambda: Lean(built("llama", head_dim=24)), " 24"),
        (lambda: Lean(built("llama", hidden_act="gelu")), "SiLU"),
        (lambda: Lean(built("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)), "attention"),
        (lambda: Lean(built("llama", rope_parameters=FAR | {"rope_type": "dynamic"})), "dynamic"),
        (lambda: Lean(built("llama"), weights="4bit"), r"48 .*32"),
        (lambda: Lean(built("llama"), arithmetic="int8"), "float32"),
        (lambda: engine(built("llama"), weights="3bit"), "3bit"),
        (lambda: engine(built("gpt2"), weights="4bit"), "gpt2"),
        (lambda: Batch(lean("llama"), [5, 3]), "one sequence"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def another_tensor(model: PreTrainedModel) -> None:
    part = model.model.layers[0].mlp.up_proj
    part.weight = torch.nn.Parameter(part.weight.detach().clone())


CHANGES = {
    "in place": lambda model: model.load_state_dict(built("llama").state_dict()),
    "another tensor": another_tensor,
    "another type": lambda model: model.bfloat16(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_found_out(change: str) -> None:
    model = built("llama")
    lm = Lean(model)
    CHANGES[change](model)
    with pytest.raises(ValueError, match="changed"):
        lm.start()
