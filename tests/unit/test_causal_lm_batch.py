"""Several sequences in one forward: every logit is compared with that of a session of its own."""

from __future__ import annotations

import threading
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny import random_model

from ondevice.causal_lm import CausalLM, Interrupted, TokenTree
from ondevice.causal_lm.batch import Batch, refusal

V, CONTEXT = 61, 48
KINDS = "llama", "qwen2", "qwen3", "opt"
OTHERS = "gpt_neox", "gpt2", "phi3"
PREFIXES = [[5, 17, 3, 44, 8, 29, 2], [11, 4], [23, 23, 50, 31, 9, 31, 40, 60, 12, 7], [6]]
SUFFIX = [9, 33, 14]


pytestmark = pytest.mark.usefixtures("one_thread")


built = partial(random_model, vocabulary=V, context=CONTEXT)


@cache
def lm(kind: str = "llama") -> CausalLM:
    return CausalLM(built(kind))


def prefilled(of: CausalLM, prefixes: list[list[int]] = PREFIXES, **options: Any) -> Batch:
    batch = Batch(of, [len(prefix) for prefix in prefixes], **options)
    for member, prefix in zip(batch.members, prefixes, strict=True):
        member.prefill(prefix)
    return batch


def own(of: CausalLM, prefix: list[int], tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V] logits of a session of batch one."""
    session = of.start()
    session.prefill(prefix)
    return session.extend(tokens)


def worst(batch: Batch, found: torch.Tensor, common: list[int], prefixes: list[list[int]] = PREFIXES) -> float:
    """Largest difference of logits [D, n, V] after the last n common tokens to those of separate sessions."""
    right = torch.stack([own(batch.lm, prefix, common)[-found.shape[1] :] for prefix in prefixes])
    assert found.shape == right.shape and found.dtype == right.dtype
    return float((found - right).abs().max())


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_a_batchs_logits_are_those_of_separate_sessions(kind: str) -> None:
    batch = prefilled(lm(kind))
    assert batch.length == 0
    assert worst(batch, batch.prefill(SUFFIX)[:, None], SUFFIX) < 1e-10
    assert worst(batch, batch.extend([41]), [*SUFFIX, 41]) < 1e-10
    assert worst(batch, batch.extend([7, 7, 50]), [*SUFFIX, 41, 7, 7, 50]) < 1e-10
    assert batch.length == 7
    assert [member.tokens for member in batch.members] == [[*prefix, *SUFFIX, 41, 7, 7, 50] for prefix in PREFIXES]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("same", [False, True], ids=["any length", "one length"])
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_calls_gives_what_the_tokens_alone_give(kind: str, same: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = [6] * 3 if same else random.integers(1, 12, 3).tolist()
    prefixes = [random.integers(V, size=size).tolist() for size in sizes]
    batch, common = prefilled(lm(kind), prefixes), list[int]()
    for _ in range(16):
        tokens = random.integers(V, size=random.integers(1, 5)).tolist()
        if random.random() < 0.4 or len(common) + 4 > CONTEXT - 12:
            length = int(random.integers(len(common) + 1))
            batch.rollback(length)
            del common[length:]
        else:
            common += tokens
            found = batch.extend(tokens) if random.random() < 0.5 else batch.prefill(tokens)[:, None]
            assert worst(batch, found, common, prefixes) < 1e-10
        assert batch.length == len(common)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_rejects_padding_that_is_seen_and_positions_of_the_buffer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, forward = prefilled(lm(kind)), lm(kind).model.forward
    for wrong in ("attention_mask", "position_ids"):
        with monkeypatch.context() as patch:

            def careless(*args: Any, wrong: str = wrong, **kwargs: Any) -> Any:
                value = kwargs[wrong]
                kwargs[wrong] = torch.zeros_like(value) if wrong == "attention_mask" else value[2:3].expand(4, -1)
                return forward(*args, **kwargs)

            patch.setattr(lm(kind).model, "forward", careless)
            found = batch.extend([41])
        assert worst(batch, found, [41]) > 1e-2
        batch.rollback(0)
    assert worst(batch, batch.extend([41]), [41]) < 1e-10


@pytest.mark.parametrize(("dtype", "attention", "bound"), [
    (torch.float64, "eager", 1e-5),  # transformers takes its eager softmax in fp32
    (torch.float32, "sdpa", 1e-4), (torch.float32, "eager", 1e-4), (torch.bfloat16, "sdpa", 0.5),
])  # fmt: skip
def test_other_precisions_and_eager_attention(dtype: torch.dtype, attention: str, bound: float) -> None:
    batch = prefilled(CausalLM(built("qwen2", dtype, attention)))
    batch.prefill(SUFFIX)
    assert worst(batch, batch.extend([41]), [*SUFFIX, 41]) < bound


def test_one_forward_serves_all_and_equal_lengths_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = list[tuple[tuple[int, ...], bool]](), lm().model.forward

    def counted(*args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        calls.append((tuple(input_ids.shape), bool({"attention_mask", "position_ids"} & set(kwargs))))
        return forward(*args, input_ids=input_ids, **kwargs)

    different, same = prefilled(lm()), prefilled(lm(), [PREFIXES[0], PREFIXES[0][::-1]])
    monkeypatch.setattr(lm().model, "forward", counted)
    different.prefill(SUFFIX), different.extend([3]), same.prefill(SUFFIX), same.extend([3])
    assert calls == [((4, 3), True), ((4, 1), True), ((2, 3), False), ((2, 1), False)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_buffer_grows_for_all(kind: str) -> None:
    of = CausalLM(built(kind, context=400))
    prefixes = [[(7 * k) % V for k in range(size)] for size in (3, 62, 40)]
    batch = Batch(of, [3, 62, 40])
    batch.members[0].prefill(prefixes[0])
    batch.members[0].verify(TokenTree.chain([8, 9]))  # its rows do not count yet when the others make the buffer grow
    batch.members[1].prefill(prefixes[1] + [1, 2, 3])
    batch.members[0].keep([0, 1])
    batch.members[0].extend([3]), batch.members[1].rollback(62), batch.members[1].extend([8, 9, 3])
    batch.members[2].prefill([*prefixes[2], 8, 9, 3])
    common = [8, 9, 3]
    for _ in range(40):
        common += [len(common) % V] * 5
        found = batch.extend(common[-5:])
    assert worst(batch, found, common, prefixes) < 1e-10


def test_a_member_goes_its_own_way_and_comes_back_in_line() -> None:
    batch = prefilled(lm())
    batch.extend([1, 2])
    member = batch.members[1]
    member.extend([3])
    with pytest.raises(ValueError, match=r"\[2, 3, 2, 2\]"):
        batch.extend([3])
    member.verify(TokenTree([5, 6, 7], [-1, -1, 1]))
    member.keep([1, 2])
    twin = member.fork()
    assert float((twin.extend([8]) - own(lm(), PREFIXES[1], [1, 2, 3, 6, 7, 8])[-1]).abs().max()) < 1e-10
    member.rollback(len(PREFIXES[1]) + 2)
    assert worst(batch, batch.extend([40, 50]), [1, 2, 40, 50]) < 1e-10


def test_rows_are_filled_from_outside() -> None:
    batch = Batch(lm(), [len(prefix) for prefix in PREFIXES])
    for member, prefix in zip(batch.members, PREFIXES, strict=True):
        session = lm().start()
        session.prefill(prefix)
        rows = session.exported()
        shapes = [(part.shape[1], part.shape[3]) for part in rows]
        for view, part in zip(member.window(len(prefix), *shapes), rows, strict=True):
            view.copy_(part)
        assert member.length == 0
        member.filled(prefix)
    assert worst(batch, batch.extend(SUFFIX), SUFFIX) < 1e-10
    with pytest.raises(ValueError, match="do not fit"):
        batch.members[0].window(1, (2, 9), (2, 9))
    with pytest.raises(ValueError, match=f"context of {CONTEXT}"):
        batch.members[0].window(CONTEXT, (2, 8), (2, 8))


def test_released_memory_takes_another_shape_where_nothing_is_committed() -> None:
    batch = Batch(lm(), [2, 3])
    batch.members[1].window(3, (7, 5), (7, 5))
    batch.members[1].release()
    batch.members[0].prefill([1, 2])
    batch.members[0].release()  # something is committed: nothing happens
    batch.members[1].prefill([1, 2, 3])
    assert worst(batch, batch.extend([41]), [41], [[1, 2], [1, 2, 3]]) < 1e-10


def test_the_context_can_be_filled_to_its_end_and_no_further() -> None:
    batch, common = prefilled(lm()), [(7 * k) % V for k in range(CONTEXT - 10)]
    assert worst(batch, batch.extend(common), common) < 1e-10
    with pytest.raises(ValueError, match=f" {CONTEXT + 1} .* {CONTEXT}"):
        batch.extend([1])
    assert batch.length == len(common)


# Interruption


class At(threading.Event):
    """Is set from the nth time on that it is looked at."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def is_set(self) -> bool:
        self.n -= 1
        return self.n < 0


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_forward_leaves_the_batch_as_it_was(kind: str, layer: int) -> None:
    stop = At(1000)
    batch = prefilled(lm(kind), stop=stop)
    batch.extend([1, 2])
    for run in (lambda: batch.extend([3, 4]), lambda: batch.prefill([3]), lambda: batch.members[1].extend([3])):
        stop.n = layer
        with pytest.raises(Interrupted):
            run()
        stop.n = 1000
        assert batch.length == 2
    assert worst(batch, batch.extend([40]), [1, 2, 40]) < 1e-10
    stop.n = layer
    with pytest.raises(Interrupted):
        batch.members[0].prefill([5, 6, 7], chunk=2)
    stop.n = 1000
    assert worst(batch, batch.extend([50]), [1, 2, 40, 50]) < 1e-10


# Bad input


@pytest.mark.parametrize(("kind", "values", "message"), [
    ("bloom", {}, "BloomForCausalLM.*position_ids"),
    ("mistral", {"num_key_value_heads": 2, "sliding_window": 8}, "window of 8 "),
])  # fmt: skip
def test_models_that_cannot_are_refused_with_the_reason(kind: str, values: dict[str, Any], message: str) -> None:
    of = CausalLM(built(kind, torch.float32, **values))
    with pytest.raises(ValueError, match=f"Several sequences.* {message}"):
        Batch(of, [1, 2])
    assert Batch(of, [3]).members[0].prefill([1, 2, 3]).shape == (V,)  # one sequence is a session


@pytest.mark.parametrize(("kind", "values"), [("gemma", {"num_key_value_heads": 1, "head_dim": 8}), ("phi", {})])
def test_other_architectures_are_probed_and_then_right(kind: str, values: dict[str, Any]) -> None:
    of = CausalLM(built(kind, **values))
    assert refusal(of) is None
    batch = prefilled(of)
    batch.prefill(SUFFIX)
    assert worst(batch, batch.extend([41]), [*SUFFIX, 41]) < 1e-9


def test_the_probe_finds_a_model_that_gives_all_sequences_the_firsts_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = CausalLM(built("phi"))
    forward = of.model.forward

    def careless(*args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        first = None if position_ids is None else position_ids[:1]
        return forward(*args, position_ids=first, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(of.model, "forward", careless)
        for _ in range(2):
            with pytest.raises(ValueError, match="does not obey the positions and masks of several sequences"):
                Batch(of, [1, 2])

    def failing(*args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if len(input_ids) > 1:
            raise RuntimeError("one sequence only")
        return forward(*args, input_ids=input_ids, **kwargs)

    other = CausalLM(built("phi"))
    forward = other.model.forward
    monkeypatch.setattr(other.model, "forward", failing)
    with pytest.raises(ValueError, match="one sequence only"):
        Batch(other, [1, 2])


@pytest.mark.parametrize(("misuse", "message"), [
    (lambda b: Batch(b.lm, []), r"\[\]"),
    (lambda b: Batch(b.lm, [3, CONTEXT + 1]), f"{CONTEXT + 1} .* {CONTEXT}"),
    (lambda b: Batch(b.lm, [3, 2]).extend([1]), r"\[-3, -2\]"),
    (lambda b: b.rollback(3), "2 .* 3"),
    (lambda b: (b.members[1].verify(TokenTree([1], [-1])), b.extend([1])), "verified tree"),
])  # fmt: skip
def test_bad_input_gets_one_clear_error(misuse: Any, message: str) -> None:
    batch = prefilled(lm())
    batch.extend([1, 2])
    with pytest.raises(ValueError, match=message):
        misuse(batch)
    batch.rollback(2)
    assert worst(batch, batch.extend([40]), [1, 2, 40]) < 1e-10
