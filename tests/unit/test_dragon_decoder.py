"""A side's decoder: every distribution is compared with uncached runs of all its documents, mixed by hand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import random_model

from ondevice import shapes
from ondevice.causal_lm import CausalLM
from ondevice_papers.dragon.aggregation import Floats
from ondevice_papers.dragon.kv_store import KVStore
from ondevice_programs.pair.decoder import Decoder, Interrupted, Template, next_together, run
from ondevice_programs.pair.prefixes import Prefixes

# The last takes no mask of ours: its documents run one by one.
KINDS: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {}, "opt": {}, "mistral": {"sliding_window": 12}}
V, CONTEXT = 61, 32
PREFIXES = [[5, 17, 3, 44, 8, 29, 2], [11, 4], [23, 23, 50, 31, 9, 31, 40, 60, 12, 7]]
SUFFIX, SCORES = [9, 33, 14], [1.0, 2.5, -0.5]


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def lm(kind: str = "llama", dtype: torch.dtype = torch.float64) -> CausalLM:
    return CausalLM(random_model(kind, dtype, vocabulary=V, context=CONTEXT, **KINDS[kind]))


def side(of: CausalLM | None = None, **options: Any) -> Decoder:
    return Decoder(of or lm(), PREFIXES, SUFFIX, SCORES, **options)


def greedily(decoder: Decoder, count: int) -> list[int]:
    """Commit the likeliest token so many times."""
    for _ in range(count):
        decoder.commit(int(decoder.next_distribution().argmax()))
    return decoder.tokens


@torch.inference_mode()
def by_hand(of: CausalLM, tokens: Sequence[int], sampling: float = 1.0) -> Floats:
    """[V] probabilities: Eqs. 1 and 2 as printed, each document in a run of its own without a cache."""
    mixed, relevance = np.zeros(V), np.exp(SCORES)
    for prefix, weight in zip(PREFIXES, relevance / relevance.sum(), strict=True):
        logits = of.model(input_ids=torch.tensor([[*prefix, *SUFFIX, *tokens]]), use_cache=False).logits[0, -1]
        mixed += weight * (logits.double() / sampling).softmax(0).numpy()
    return mixed


def assert_next(decoder: Decoder, bound: float = 1e-12, sampling: float = 1.0) -> None:
    p = np.exp(decoder.next_distribution())
    assert p.shape == (V,) and p.dtype == np.float64
    assert np.abs(p - by_hand(decoder.lm, decoder.tokens, sampling)).max() < bound


# Mixture


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("stored", [False, True])
def test_the_mixture_is_that_of_brute_force(
    tmp_path: Path, kind: str, dtype: torch.dtype, bound: float, stored: bool
) -> None:
    of, store = lm(kind, dtype), None
    if stored:
        store = KVStore(tmp_path, of, shapes.byte_tokenizer(), "{document}{query}")
        side(of, store=store).next_distribution()
    decoder = side(of, store=store)
    for piece in decoder.pieces():
        run([piece])
    assert store is None or (store.hits, store.misses) == (3, 3)
    for token in (7, 50, 7, 2, 33):
        assert_next(decoder, bound)
        decoder.commit(token)
    assert_next(decoder, bound)
    assert decoder.tokens == [7, 50, 7, 2, 33] and decoder.position == 5


@pytest.mark.parametrize("sampling", [0.25, 3.0])
def test_the_sampling_temperature_acts_on_each_document(sampling: float) -> None:
    decoder = side(sampling_temperature=sampling)
    decoder.commit(7)
    assert_next(decoder, sampling=sampling)


# Rollback


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_gives_what_the_tokens_alone_give(seed: int) -> None:
    random, decoder, model = np.random.default_rng(seed), side(), list[int]()
    for _ in range(60):
        call = random.integers(3)
        if call == 0 and decoder.room > 1:
            model.append(int(random.integers(V)))
            decoder.commit(model[-1])
        elif call == 1:
            del model[int(random.integers(len(model) + 1)) :]
            decoder.rollback(len(model))
        else:
            assert_next(decoder)
        assert decoder.tokens == model


# Interruption


class Paused:
    """Holds a model's forward at the nth call of a layer until `go`, so that another thread can do something there."""

    def __init__(self, patch: pytest.MonkeyPatch, of: CausalLM, layer: int, nth: int = 0) -> None:
        self.there, self.go, self.calls = threading.Event(), threading.Event(), 0
        module = of.model.model.layers[layer].mlp  # after the layer's attention has written its rows
        forward = module.forward

        def held(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == nth + 1:
                self.there.set()
                assert self.go.wait(60)
            return forward(*args, **kwargs)

        patch.setattr(module, "forward", held)


@pytest.mark.parametrize(("kind", "layer", "nth"), [("llama", 0, 0), ("llama", 1, 0), ("mistral", 0, 2)])
@pytest.mark.parametrize("begun", [False, True])
def test_a_running_call_is_interrupted_from_another_thread(
    monkeypatch: pytest.MonkeyPatch, kind: str, layer: int, nth: int, begun: bool
) -> None:
    """In the last layer of a token's forward it comes too late and is forgotten."""
    decoder, other = side(lm(kind)), side(lm(kind))
    if begun:
        decoder.commit(int(decoder.next_distribution().argmax()))
    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        paused = Paused(patch, lm(kind), layer, nth)
        running = pool.submit(decoder.next_distribution)
        assert paused.there.wait(60)
        lengths = [len(decoder.tokens), decoder.room]
        decoder.interrupt()
        assert_next(other)  # another decoder of the same model does not notice
        calls = paused.calls
        paused.go.set()
        assert isinstance(running.exception(60), Interrupted) == (layer == 0 or not begun)
    assert paused.calls == calls  # nothing ran after it
    assert lengths == [len(decoder.tokens), decoder.room]
    assert_next(decoder)
    decoder.rollback(0)
    decoder.commit(44)
    assert_next(decoder)


def test_an_interruption_where_nothing_runs_stops_the_next_call_and_no_other() -> None:
    decoder = side()
    decoder.interrupt()
    with pytest.raises(Interrupted):
        decoder.next_distribution()
    assert_next(decoder)


# Documents in pieces, sessions in one forward


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_prefilled_in_pieces(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("ondevice_programs.pair.decoder._PIECE", 4)
    forwards, decoder = counted(monkeypatch, lm(kind)), side(lm(kind))
    assert not forwards
    sizes = []
    for piece in decoder.pieces():
        run([piece])
        sizes.append(piece.tokens)
    tokens = sum(map(len, PREFIXES)) + (0 if kind == "mistral" else 3 * (len(SUFFIX) - 1))  # all but the last
    assert sum(sizes) == tokens and max(sizes) == 4
    if kind != "mistral":
        assert forwards == [(1, size) for size in sizes] and decoder.in_line
    assert list(decoder.pieces()) == []
    assert_next(decoder)
    assert_next(decoder)


def test_a_document_is_prefilled_once_for_all_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, questions = Prefixes(), [[9, 33, 14], [9, 33, 50], [9, 33, 14, 8]]
    for question in questions:
        decoder = Decoder(lm(), PREFIXES, question, SCORES, memory=memory, common=2)
        with monkeypatch.context() as patch:
            forwards = counted(patch, lm())
            for piece in decoder.pieces():
                run([piece])
            found = decoder.next_distribution()
        alone = Decoder(lm(), PREFIXES, question, SCORES).next_distribution()
        assert np.abs(np.exp(found) - np.exp(alone)).max() < 1e-12
        new = 3 * len(question) + (sum(map(len, PREFIXES)) if question is questions[0] else -6)
        assert sum(tokens for _, tokens in forwards) == new
    assert (memory.hits, memory.misses) == (6, 3)


def test_memory_of_documents_is_bounded_and_the_longest_unused_go_first() -> None:
    bytes_a_token = 2 * 2 * 2 * 8 * 8  # keys and values, layers, heads, width, float64
    memory = Prefixes(size=12 * bytes_a_token)

    def prefill(prefix: list[int]) -> int:
        before = memory.hits
        Decoder(lm(), [prefix], SUFFIX, [0.0], bare=[1], memory=memory).next_distribution()
        return memory.hits - before

    assert prefill([3] * 6) == 0 and prefill([4] * 5) == 1
    assert prefill([3] * 6) == 2  # used last, so that it stays
    assert prefill([5] * 5) == 1
    assert prefill([3] * 6) == 2 and prefill([4] * 5) == 1
    assert prefill([7] * 13) == 1 and prefill([7] * 13) == 0  # larger than all of it


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_decoders_of_unlike_documents_share_a_forward(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    others = [([[3, 5]], [7, 8], [0.0]), ([[40, 2, 2, 9], [1], [5, 6, 7]], [30], [1.0, 0.0, -1.0])]
    decoders, fresh = (
        [side(lm(kind), bare=[1]), *(Decoder(lm(kind), *other, bare=[1]) for other in others)] for _ in range(2)
    )
    forwards = counted(monkeypatch, lm(kind))
    run([next(decoder.pieces()) for decoder in decoders])
    assert len(forwards) == 1
    for decoder, twin, n in zip(decoders, fresh, (1, 4, 2), strict=True):
        for token in greedily(decoder, n):
            twin.commit(token)
        assert decoder.in_line and decoder.rows == len(decoder._prefixes)
    for token in (4, 9):
        forwards.clear()
        next_together(decoders)
        assert forwards == [(1, 10)]
        for decoder, twin in zip(decoders, fresh, strict=True):
            assert np.abs(decoder.next_distribution() - twin.next_distribution()).max() < 1e-10
            assert np.abs(decoder.prior - twin.prior).max() < 1e-10
            decoder.commit(token), twin.commit(token)
    decoders[0].rollback(2), fresh[0].rollback(2)
    decoders[0].commit(41), fresh[0].commit(41)
    next_together(decoders)
    assert np.abs(decoders[0].next_distribution() - fresh[0].next_distribution()).max() < 1e-10
    assert lm(kind).model.config._attn_implementation == "sdpa"


def counted(patch: pytest.MonkeyPatch, of: CausalLM) -> list[tuple[int, ...]]:
    """The shapes of the ids that the model is given from now on."""
    shapes, forward = list[tuple[int, ...]](), of.model.forward

    def counting(*args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return forward(*args, input_ids=input_ids, **kwargs)

    patch.setattr(of.model, "forward", counting)
    return shapes


# Ends


def test_nothing_follows_an_end_token_until_it_is_rolled_back() -> None:
    decoder = side(ends={6})
    decoder.commit(8), decoder.commit(6)
    assert decoder.ended
    for call in (decoder.next_distribution, decoder.require_open, lambda: decoder.commit(4)):
        with pytest.raises(ValueError, match="token 6"):
            call()
    decoder.rollback(1)
    assert not decoder.ended
    assert_next(decoder)


def test_the_context_ends_with_its_longest_document() -> None:
    decoder = side()
    room = CONTEXT - len(PREFIXES[2]) - len(SUFFIX) + 1
    assert decoder.room == room
    greedily(decoder, room - 1)
    assert decoder.room == 1
    assert_next(decoder)
    decoder.commit(4)
    assert decoder.room == 0 and not decoder.ended
    for call in (decoder.next_distribution, lambda: decoder.commit(4)):
        with pytest.raises(ValueError, match=str(CONTEXT)):
            call()
    decoder.rollback(room - 1)
    assert_next(decoder)


# Bad input


@pytest.mark.parametrize(
    ("prefixes", "named"), [([], "document"), ([[3], [4] * 33], "Document 1"), ([[3], [4] * 30], "query")]
)
def test_bad_input_is_named(prefixes: list[list[int]], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Decoder(lm(), prefixes, SUFFIX, np.zeros(len(prefixes)))


# Template


def test_a_templates_ids_are_cut_where_the_document_ends() -> None:
    template, tokenizer = Template("Context: {document}.\nQ: {query}\nA:"), shapes.byte_tokenizer()
    prefix, suffix = template.prefix(tokenizer, "a {query} b"), template.suffix(tokenizer, "why {document}?")
    assert tokenizer.decode(prefix) == "Context: a {query} b"
    assert tokenizer.decode(suffix) == ".\nQ: why {document}?\nA:"


@pytest.mark.parametrize("text", ["{document}", "{query} {document}", "{document}{document}{query}"])
def test_other_templates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="query"):
        Template(text)
