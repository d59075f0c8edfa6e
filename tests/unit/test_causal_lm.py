"""Sessions over a causal LM: every logit is compared with a run without a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny import KINDS, SHAPE, random_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from ondevice.causal_lm import CausalLM, Session, TokenTree

V, CONTEXT = 61, 32
SIZES = SHAPE | {"vocab_size": V, "max_position_embeddings": CONTEXT}
PAPERS = ("llama", "qwen2", "qwen3", "opt", "gpt_neox")
PROMPT = [5, 17, 3, 44, 8, 29, 2]
# Rows are out of step with depths, there are two branches from the last committed token, and node 6 is four deep.
TREE = TokenTree([11, 23, 7, 11, 50, 9, 31, 23, 60], [-1, 0, 0, -1, 1, 3, 4, 4, 5])


pytestmark = pytest.mark.usefixtures("one_thread")


built = partial(random_model, vocabulary=V, context=CONTEXT)


@cache
def lm(kind: str) -> CausalLM:
    return CausalLM(built(kind))


@torch.inference_mode()
def uncached(of: CausalLM, ids: list[int]) -> torch.Tensor:
    """[len(ids), V] logits of one run without a cache."""
    return of.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def started(of: CausalLM, prompt: list[int] = PROMPT) -> Session:
    session = of.start()
    session.prefill(prompt)
    return session


def worst_row(session: Session, tree: TokenTree, logits: torch.Tensor) -> float:
    """Largest difference of a tree's logits to an uncached run of each path."""
    paths = [session.tokens + tree.tokens[tree.path_to(row)].tolist() for row in range(len(tree))]
    return max(float((logits[row] - uncached(session.lm, path)[-1]).abs().max()) for row, path in enumerate(paths))


@pytest.mark.parametrize("kind", KINDS)
def test_a_trees_logits_are_those_of_its_paths(kind: str) -> None:
    session = started(lm(kind))
    logits = session.verify(TREE)
    assert logits.shape == (len(TREE), V) and logits.dtype == torch.float64
    assert worst_row(session, TREE, logits) < 1e-9


@pytest.mark.parametrize("kind", PAPERS)
@pytest.mark.parametrize(("dtype", "attention", "bound"), [
    (torch.float64, "eager", 1e-5),  # transformers takes its eager softmax in fp32
    (torch.float32, "sdpa", 1e-4), (torch.float32, "eager", 1e-4),
    (torch.bfloat16, "sdpa", 0.5), (torch.bfloat16, "eager", 0.5),
])  # fmt: skip
def test_other_precisions_and_eager_attention_verify_trees_too(
    kind: str, dtype: torch.dtype, attention: str, bound: float
) -> None:
    session = started(CausalLM(built(kind, dtype, attention)))
    logits = session.verify(TREE)
    assert logits.dtype == dtype
    assert worst_row(session, TREE, logits) < bound  # a wrong mask or position: over 1, as the next test shows


@pytest.mark.parametrize("kind", PAPERS)
def test_the_bounds_of_these_tests_reject_a_tree_taken_for_a_chain(kind: str) -> None:
    session = started(lm(kind))
    assert worst_row(session, TREE, session.verify(TokenTree.chain(TREE.tokens))) > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [[], [0], [0, 1], [3, 5, 8], [0, 1, 4, 7]], ids=str)
def test_a_kept_path_continues_as_a_fresh_run(kind: str, path: list[int]) -> None:
    session = started(lm(kind))
    session.verify(TREE)
    session.keep(path)
    kept = PROMPT + TREE.tokens[path].tolist()
    assert session.tokens == kept and session.length == len(kept)
    assert_continues(session)


def assert_continues(session: Session) -> None:
    """The next extension and the tree after it are those of a fresh run."""
    before = list(session.tokens)
    found = session.extend([13, 4])
    assert float((found - uncached(session.lm, [*before, 13, 4])[-2:]).abs().max()) < 1e-9
    assert worst_row(session, TREE, session.verify(TREE)) < 1e-9
    session.keep([])


@pytest.mark.parametrize("kind", PAPERS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_prefill_in_chunks_gives_every_logit_once_and_the_same_session(kind: str, chunk: int) -> None:
    right, seen = uncached(lm(kind), PROMPT), {}
    session = lm(kind).start()
    last = session.prefill(PROMPT, chunk, lambda start, logits: seen.update({start: logits}))
    assert list(seen) == list(range(0, len(PROMPT), chunk))
    assert float((torch.cat(list(seen.values())) - right).abs().max()) < 1e-9
    assert float((last - right[-1]).abs().max()) < 1e-9
    assert_continues(session)
    silent = lm(kind).start().prefill(PROMPT, chunk)
    assert silent.shape == (V,) and float((silent - right[-1]).abs().max()) < 1e-9


@pytest.mark.parametrize("kind", PAPERS)
def test_the_context_can_be_filled_to_its_end_and_no_further(kind: str) -> None:
    prompt = [(7 * k) % V for k in range(CONTEXT - 4)]
    session = started(lm(kind), prompt)
    wide = TokenTree([*range(20), 21, 22, 23], [-1] * 20 + [3, 20, 21])  # 23 rows, but only four deep
    assert worst_row(session, wide, session.verify(wide)) < 1e-9
    session.keep([3, 20, 21, 22])
    assert session.length == CONTEXT
    with pytest.raises(ValueError, match=f"extension.* {CONTEXT + 1} .* {CONTEXT}"):
        session.extend([1])
    session.rollback(CONTEXT - 3)
    with pytest.raises(ValueError, match=f"tree.* {CONTEXT + 1} .* {CONTEXT}"):
        session.verify(TREE)
    with pytest.raises(ValueError, match=f"prompt.* {CONTEXT + 1} .* {CONTEXT}"):
        lm(kind).start().prefill([1] * (CONTEXT + 1))
    assert float((session.extend([1, 2, 3])[-1] - uncached(lm(kind), session.tokens)[-1]).abs().max()) < 1e-9


@pytest.mark.parametrize("kind", PAPERS)
def test_an_exported_session_goes_on_in_another(kind: str) -> None:
    of = lm(kind)
    session = started(of)
    keys, values = session.exported()
    resumed = of.resume(session.tokens, keys, values)
    assert resumed.tokens == session.tokens and resumed.tokens is not session.tokens
    session.extend([1, 2, 3])  # copies: what the old session does is not seen
    assert_continues(resumed)
    assert_continues(of.resume(resumed.tokens, *resumed.exported(), capacity=CONTEXT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda keys: keys[:, :, 1:], r"keys.* \[2, heads, 7, width\]"),
        (lambda keys: keys.half(), r"keys.*torch\.float16"),
    ],
)
def test_rows_that_are_not_the_models_are_refused(change, message: str) -> None:
    of = lm("llama")
    keys, values = started(of).exported()
    with pytest.raises(ValueError, match=message):
        of.resume(PROMPT, change(keys), values)


@pytest.mark.parametrize("capacity", [0, 10_000])
def test_the_cache_grows_past_its_first_allocation(capacity: int) -> None:
    of = CausalLM(built("llama", context=400))
    session, ids = of.start(capacity), [(11 * k) % V for k in range(300)]
    for start in range(0, 300, 7):
        last = session.extend(ids[start : start + 7])[-1]
    assert float((last - uncached(of, ids)[-1]).abs().max()) < 1e-9
    assert_continues(session)


def test_a_chain_runs_without_our_mask_and_a_tree_in_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    session = started(lm("llama"))
    calls: list[set[str]] = []
    forward = session.lm.model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(set(kwargs))
        return forward(*args, **kwargs)

    monkeypatch.setattr(session.lm.model, "forward", counted)
    session.verify(TokenTree.chain([4, 5, 6]))
    session.keep([0, 1])
    session.verify(TREE)
    assert len(calls) == 2
    assert not calls[0] & {"attention_mask", "position_ids"} and calls[1] >= {"attention_mask", "position_ids"}


def test_a_failed_forward_leaves_the_session_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    session = started(lm("llama"))

    def failing(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session.lm.model.model.norm, "forward", failing)  # after every layer has written its rows
        for run in (lambda: session.extend([1, 2]), lambda: session.verify(TREE), lambda: session.prefill([3])):
            with pytest.raises(KeyboardInterrupt):
                run()
    with pytest.raises(ZeroDivisionError):
        session.prefill([1, 2, 3], chunk=1, on_logits=lambda start, _: 1 // (start - len(PROMPT)))
    assert session.tokens == PROMPT
    assert_continues(session)


@pytest.mark.parametrize(("tokens", "parents", "message"), [
    ([], [], "tree"),
    ([1, 2], [-1], "1 for 2"),
    ([1, 2], [-1, 1], "row 1 .*not 1"),
    ([1.0], [-1], "tokens.*float64"),
    ([[1]], [[-1]], r"tokens.*\(1, 1\)"),
])  # fmt: skip
def test_malformed_trees_are_refused(tokens: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(tokens, parents)


@pytest.mark.parametrize(("path", "message"), [
    ([1], "row 1 .*last"),
    ([0, 3], "row 3 .*row 0"),
    ([5, 3], "row 5 .*last"),
    ([-1], "row -1 "),
])  # fmt: skip
def test_what_is_no_path_is_not_kept(path: list[int], message: str) -> None:
    session = started(lm("llama"))
    session.verify(TREE)
    with pytest.raises(ValueError, match=message):
        session.keep(path)
    session.keep([0, 1])  # the tree is still there


@pytest.mark.parametrize(("misuse", "message"), [
    (lambda s: s.keep([0]), "verified tree"),
    (lambda s: s.rollback(8), "7 .*8"),
    (lambda s: s.extend([]), "extension"),
    (lambda s: s.extend([V]), f" {V}.* {V}"),
    (lambda s: s.prefill([1], chunk=0), "chunk.* 0"),
    (lambda s: s.prefill("text"), "prompt's ids"),
    (lambda s: (s.verify(TREE), s.extend([1])), "verified tree"),
    (lambda s: TREE.path_to(9), "9.*9"),
])  # fmt: skip
def test_bad_input_gets_one_clear_error(misuse: Callable[[Session], object], message: str) -> None:
    session = started(lm("llama"))
    with pytest.raises(ValueError, match=message):
        misuse(session)
    session.rollback(len(PROMPT))
    assert_continues(session)


REFUSING = {
    "bloom": ({}, "BloomForCausalLM.*position_ids"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT}, "MptForCausalLM.*position_ids"),
    "falcon": ({"alibi": True, "new_decoder_architecture": False}, "FalconForCausalLM.*position_ids"),
    "mistral": ({"num_key_value_heads": 2, "sliding_window": 8}, "window of 8 .*context=8"),
    "qwen2": ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "window of 8 .*context=8"),
}


@pytest.mark.parametrize("kind", REFUSING)
def test_models_that_cannot_verify_trees_say_so_and_still_verify_chains(kind: str) -> None:
    values, message = REFUSING[kind]
    of = CausalLM(built(kind, torch.float32, **values))
    with pytest.raises(ValueError, match=message):
        of.require_trees()
    session = started(of)
    with pytest.raises(ValueError, match=message):
        session.verify(TREE)
    chain = TokenTree.chain([11, 23, 7, 11, 50, 9])
    logits = session.verify(chain)
    session.keep([0, 1, 2])
    found = torch.cat([logits[:3], session.extend([3, 4])])
    right = uncached(of, [*PROMPT, 11, 23, 7, 3, 4])[-5:]
    assert float((found - right).abs().max()) < 1e-4 * float(right.std())


def test_a_sliding_window_that_the_context_never_leaves_is_no_obstacle() -> None:
    of = CausalLM(built("mistral", sliding_window=11), context=11)
    session = started(of)
    assert worst_row(session, TREE, session.verify(TREE)) < 1e-9  # its deepest node is token 11
    with pytest.raises(ValueError, match="context of 11"):
        session.rollback(len(PROMPT)), session.extend([1] * 5)


@pytest.mark.parametrize(("kind", "values"), [
    ("phi", {}), ("gemma", {"num_key_value_heads": 1, "head_dim": 8}), ("stablelm", {"num_key_value_heads": 2}),
    ("minicpm3", {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}),
])  # fmt: skip
def test_other_architectures_are_probed_and_then_right(kind: str, values: dict[str, Any]) -> None:
    session = started(CausalLM(built(kind, **values)))
    assert worst_row(session, TREE, session.verify(TREE)) < 1e-9
    session.keep([3, 5, 8])
    assert_continues(session)


@pytest.mark.parametrize("kind", ["gpt_neo", "codegen"])
def test_the_probe_finds_a_model_that_does_not_obey_positions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown architecture that ignores position_ids, as MPT does, is refused without being listed."""
    values = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]} if kind == "gpt_neo" else {}
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "n_ctx": CONTEXT, "rotary_dim": 4}
    model = built(kind, torch.float32, "eager", **values if kind == "gpt_neo" else sizes)
    forward = type(model).forward

    def careless(self: PreTrainedModel, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr("ondevice.causal_lm.support._BY_ROW", frozenset())
    monkeypatch.setattr(type(model), "forward", careless)
    with pytest.raises(ValueError, match=r"does not obey the positions and mask|cannot verify a tree"):
        CausalLM(model).require_trees()


def test_what_is_no_causal_lm_with_rows_is_refused_at_once() -> None:
    small = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    bert = AutoConfig.for_model("bert", **SIZES)
    for encoder in (AutoModel.from_config(bert), AutoModelForMaskedLM.from_config(bert)):
        with pytest.raises(ValueError, match=type(encoder).__name__):
            CausalLM(encoder)
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        CausalLM(AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **small)))
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = built("phi3", rope_parameters=long, original_max_position_embeddings=16)
    with pytest.raises(ValueError, match="context=16"):
        CausalLM(phi)
    assert CausalLM(phi, context=16).context == 16


@pytest.mark.parametrize("context", [0, -1, CONTEXT + 1])
def test_a_context_that_the_model_has_not_is_refused(context: int) -> None:
    with pytest.raises(ValueError, match=f"{CONTEXT} .*LlamaForCausalLM.* {context}"):
        CausalLM(built("llama"), context)


def test_trees_of_one_shape_share_its_topology_and_know_depths_and_paths() -> None:
    other = TokenTree(TREE.tokens + 0, TREE.parents + 0)
    assert other.topology is TREE.topology
    assert TREE.depths.tolist() == [1, 2, 2, 1, 3, 2, 4, 4, 3] and TREE.topology.depth == 4
    assert TREE.path_to(7) == [0, 1, 4, 7]
    assert [np.flatnonzero(row).tolist() for row in TREE.topology.sees] == [TREE.path_to(r) for r in range(9)]
    assert TokenTree.chain([3, 4, 5]).topology.is_chain and not TREE.topology.is_chain
    assert TokenTree([1], [-1]).topology.is_chain and not TokenTree([1, 2], [-1, -1]).topology.is_chain
