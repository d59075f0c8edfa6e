"""Sessions over a causal LM: every logit is compared with a run without a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny import KINDS, SHAPE, random_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

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


@pytest.mark.parametrize("kind", PAPERS)
@pytest.mark.parametrize(("dtype", "attention", "bound"), [
    (torch.float64, "eager", 1e-5),  # transformers takes its eager softmax in fp32
    (torch.float32, "sdpa", 1e-4), (torch.bfloat16, "eager", 0.5),
])  # fmt: skip
def test_other_precisions_and_eager_attention_verify_trees_too(
    kind: str, dtype: torch.dtype, attention: str, bound: float
) -> None:
    session = started(CausalLM(built(kind, dtype, attention)))
    logits = session.verify(TREE)
    assert logits.dtype == dtype
    assert worst_row(session, TREE, logits) < bound  # a tree that is taken for a chain: over 1


OTHERS: dict[str, dict[str, Any]] = {  # probed, and then right
    "phi": {}, "gemma": {"num_key_value_heads": 1, "head_dim": 8}, "stablelm": {"num_key_value_heads": 2},
    "minicpm3": {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
}  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_a_trees_logits_are_those_of_its_paths_and_a_kept_path_continues_as_a_fresh_run(kind: str) -> None:
    session = started(CausalLM(built(kind, **OTHERS.get(kind, {}))))
    for path in ([], [3, 5, 8], [0, 1, 4, 7]):
        logits = session.verify(TREE)
        assert logits.shape == (len(TREE), V) and logits.dtype == torch.float64
        assert worst_row(session, TREE, logits) < 1e-9
        kept = session.tokens + TREE.tokens[path].tolist()
        session.keep(path)
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
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_prefill_in_chunks_gives_every_logit_once_and_the_same_session(kind: str, chunk: int) -> None:
    right, seen = uncached(lm(kind), PROMPT), {}
    session = lm(kind).start()
    last = session.prefill(PROMPT, chunk, lambda start, logits: seen.update({start: logits}))
    assert list(seen) == list(range(0, len(PROMPT), chunk))
    assert float((torch.cat(list(seen.values())) - right).abs().max()) < 1e-9
    assert float((last - right[-1]).abs().max()) < 1e-9
    assert_continues(session)


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
    for change in (lambda rows: rows[:, :, 1:], lambda rows: rows.half()):
        with pytest.raises(ValueError, match="keys"):
            of.resume(PROMPT, change(keys), values)


@pytest.mark.parametrize("capacity", [0, 10_000])
def test_the_cache_grows_past_its_first_allocation(capacity: int) -> None:
    of = CausalLM(built("llama", context=400))
    session, ids = of.start(capacity), [(11 * k) % V for k in range(300)]
    for start in range(0, 300, 7):
        last = session.extend(ids[start : start + 7])[-1]
    assert float((last - uncached(of, ids)[-1]).abs().max()) < 1e-9
    assert_continues(session)


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
    ([], [], "tree"), ([1, 2], [-1], "1 for 2"), ([1, 2], [-1, 1], "row 1 "), ([1.0], [-1], "tokens.*float64"),
    ([[1]], [[-1]], r"tokens.*\(1, 1\)"),
])  # fmt: skip
def test_malformed_trees_are_refused(tokens: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(tokens, parents)


@pytest.mark.parametrize("path", [[1], [0, 3], [5, 3], [-1]])
def test_what_is_no_path_is_not_kept(path: list[int]) -> None:
    session = started(lm("llama"))
    session.verify(TREE)
    with pytest.raises(ValueError, match=f"row {path[0] if path != [0, 3] else 3} "):
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


WINDOW = {"sliding_window": 8}
REFUSING = {
    "bloom": ({}, "Bloom"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT}, "Mpt"),
    "falcon": ({"alibi": True, "new_decoder_architecture": False}, "Falcon"),
    "mistral": ({"num_key_value_heads": 2} | WINDOW, "window of 8"),
    "qwen2": ({"use_sliding_window": True, "max_window_layers": 1} | WINDOW, "window of 8"),
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


def test_the_probe_finds_a_model_that_does_not_obey_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown architecture that ignores position_ids, as MPT does, is refused without being listed."""
    values = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
    model = built("gpt_neo", torch.float32, "eager", **values)
    forward = type(model).forward

    def careless(self: PreTrainedModel, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr("ondevice.causal_lm.support._BY_ROW", frozenset())
    monkeypatch.setattr(type(model), "forward", careless)
    with pytest.raises(ValueError, match=r"position|tree"):
        CausalLM(model).require_trees()


def test_what_is_no_causal_lm_with_rows_is_refused_at_once() -> None:
    small = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    for model in (
        AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **SIZES)),
        AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **small)),
    ):
        with pytest.raises(ValueError, match=type(model).__name__):
            CausalLM(model)
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = built("phi3", rope_parameters=long, original_max_position_embeddings=16)
    with pytest.raises(ValueError, match="context=16"):
        CausalLM(phi)
    assert CausalLM(phi, context=16).context == 16
    for context in (0, CONTEXT + 1):
        with pytest.raises(ValueError, match=f"{CONTEXT} .* {context}"):
            CausalLM(built("llama"), context)


def test_trees_of_one_shape_share_its_topology_and_know_depths_and_paths() -> None:
    assert TokenTree(TREE.tokens + 0, TREE.parents + 0).topology is TREE.topology
    paths = [TREE.path_to(row) for row in range(len(TREE))]
    assert paths[7] == [0, 1, 4, 7] and TREE.depths.tolist() == [len(path) for path in paths]
    assert [np.flatnonzero(row).tolist() for row in TREE.topology.sees] == paths
    assert TokenTree.chain([3, 4, 5]).topology.is_chain and not TokenTree([1, 2], [-1, -1]).topology.is_chain
