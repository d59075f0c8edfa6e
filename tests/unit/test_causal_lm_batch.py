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
from ondevice_papers.dragon.batch import Batch, PaddedCache, extend_together, refusal

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


PROBED: dict[str, dict[str, Any]] = {"gemma": {"num_key_value_heads": 1, "head_dim": 8}, "phi": {}}


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS, *PROBED])
def test_a_batchs_logits_are_those_of_separate_sessions(kind: str) -> None:
    of = CausalLM(built(kind, **PROBED.get(kind, {})))
    assert refusal(of) is None
    batch = prefilled(of)
    assert worst(batch, batch.prefill(SUFFIX)[:, None], SUFFIX) < 1e-9
    assert worst(batch, batch.extend([41]), [*SUFFIX, 41]) < 1e-9
    assert worst(batch, batch.extend([7, 7, 50]), [*SUFFIX, 41, 7, 7, 50]) < 1e-9
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


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)], ids=str)
def test_other_precisions(dtype: torch.dtype, bound: float) -> None:
    batch = prefilled(CausalLM(built("qwen2", dtype)))
    assert worst(batch, batch.extend([41]), [41]) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_one_forward_packs_the_new_tokens_of_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = list[tuple[int, ...]](), lm(kind).model.forward

    def counted(*args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        calls.append(tuple(input_ids.shape))
        return forward(*args, input_ids=input_ids, **kwargs)

    one, other = prefilled(lm(kind)), prefilled(lm(kind), [PREFIXES[0], PREFIXES[0][::-1]])
    fresh = Batch(lm(kind), [3]).members[0]
    monkeypatch.setattr(lm(kind).model, "forward", counted)
    new = [[3], [8, 9], [60], [1], [4, 4, 4], [7], [5, 6, 7]]
    found = extend_together([*one.members, *other.members, fresh], new)
    assert calls == [(1, 12)]
    monkeypatch.undo()
    prefixes = [*PREFIXES, PREFIXES[0], PREFIXES[0][::-1]]
    for logits, prefix, tokens in zip(found, prefixes, new, strict=False):
        assert float((logits[0] - own(lm(kind), prefix, tokens)[-1]).abs().max()) < 1e-10
    assert float((found[-1][0] - lm(kind).start().prefill(new[-1])).abs().max()) < 1e-10
    assert lm(kind).model.config._attn_implementation == "sdpa"


# The cache


@pytest.mark.parametrize("gone", [(), (0, 2, 3), (1, 2, 3, 4, 5, 6)])
def test_batches_share_a_padded_cache_and_what_is_gone_is_overwritten(gone: tuple[int, ...]) -> None:
    """Also where few slots of a slab are in a forward, so that each sequence attends by itself."""
    cache = PaddedCache()
    batches = [Batch(lm(), [len(prefix)], cache=cache) for prefix in PREFIXES[:3] * 3]
    for batch, prefix in zip(batches, PREFIXES[:3] * 3, strict=True):
        batch.members[0].prefill([*prefix, *[8] * 20])
        batch.rollback(0)
    kept = [place for place in range(9) if place not in gone]
    members = [batches[place].members[0] for place in kept]
    del batches, batch
    assert cache.sequences == 9 - len(gone)
    joined = Batch(lm(), [2, 2], cache=cache)
    joined.members[0].prefill([1, 2]), joined.members[1].prefill([3, 4])
    assert cache.sequences == 11 - len(gone)
    found = extend_together([*members, *joined.members], [[41]] * (len(members) + 2))
    prefixes = [(PREFIXES[:3] * 3)[place] for place in kept] + [[1, 2], [3, 4]]
    for logits, prefix in zip(found, prefixes, strict=True):
        assert float((logits[0] - own(lm(), prefix, [41])[0]).abs().max()) < 1e-10
    del members, joined
    assert cache.sequences == 0 and not cache._slabs


def test_one_that_grows_moves_to_a_wider_slot() -> None:
    of, cache = CausalLM(built("llama", context=400)), PaddedCache()
    batch = Batch(of, [3, 2], cache=cache)
    batch.members[0].prefill([1, 2, 3]), batch.members[1].prefill([4, 5])
    common = [(7 * k) % V for k in range(300)]
    batch.members[0].extend(common[:200])
    assert [slab.columns for slab in cache._slabs] == [128, 256] and cache.sequences == 2
    batch.members[1].extend(common[:200])
    assert [slab.columns for slab in cache._slabs] == [256]
    assert worst(batch, batch.extend(common[200:201]), common[:201], [[1, 2, 3], [4, 5]]) < 1e-10


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


def test_rows_are_put_in_from_outside() -> None:
    batch = Batch(lm(), [len(prefix) for prefix in PREFIXES])
    for member, prefix in zip(batch.members, PREFIXES, strict=True):
        other = Batch(lm(), [len(prefix)]).members[0]
        other.prefill([*prefix, 3, 3])
        member.put(prefix, *other.first(len(prefix)))
    assert worst(batch, batch.extend(SUFFIX), SUFFIX) < 1e-10
    with pytest.raises(ValueError, match="do not fit"):
        batch.members[0].put([1], *[torch.zeros(2, 2, 1, 9, dtype=torch.float64)] * 2)
    with pytest.raises(ValueError, match=f"context of {CONTEXT}"):
        batch.members[0].put([1] * CONTEXT, *[torch.zeros(2, 2, CONTEXT, 8, dtype=torch.float64)] * 2)


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
    ("bloom", {}, "Bloom"),
    ("mistral", {"num_key_value_heads": 2, "sliding_window": 8}, "window of 8 "),
    ("qwen2", {"attention": "eager"}, "eager"),
])  # fmt: skip
def test_models_that_cannot_are_refused_with_the_reason(kind: str, values: dict[str, Any], message: str) -> None:
    of = CausalLM(built(kind, torch.float32, **values))
    with pytest.raises(ValueError, match=message):
        Batch(of, [1, 2])
    assert Batch(of, [3]).members[0].prefill([1, 2, 3]).shape == (V,)  # one sequence is a session


def test_the_probe_finds_a_model_that_counts_positions_in_the_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    of = CausalLM(built("phi"))
    forward = of.model.forward

    def careless(*args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        counted = None if position_ids is None else torch.arange(position_ids.shape[1])[None]
        return forward(*args, position_ids=counted, **kwargs)

    monkeypatch.setattr(of.model, "forward", careless)
    with pytest.raises(ValueError, match="positions"):
        Batch(of, [1, 2])


@pytest.mark.parametrize(("misuse", "message"), [
    (lambda b: Batch(b.lm, []), r"\[\]"),
    (lambda b: Batch(b.lm, [3, CONTEXT + 1]), f"{CONTEXT + 1} .* {CONTEXT}"),
    (lambda b: b.extend([1] * CONTEXT), f" {CONTEXT}"),
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
