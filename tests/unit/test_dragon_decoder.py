"""A side's decoder: every distribution is compared with uncached runs of all its documents, mixed by hand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import random_model

from ondevice import shapes
from ondevice.causal_lm import CausalLM
from ondevice_papers.dragon.aggregation import Floats, target
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
def by_hand(
    of: CausalLM,
    tokens: Sequence[int],
    temperature: float = 1.0,
    documents: Sequence[int] = (0, 1, 2),
    sampling: float = 1.0,
) -> Floats:
    """[V] probabilities: Eqs. 1 and 2 as printed, each document in a run of its own without a cache."""
    relevance = [np.exp(SCORES[index] / temperature) for index in documents]
    mixed = np.zeros(V)
    for index, weight in zip(documents, relevance, strict=True):
        ids = torch.tensor([[*PREFIXES[index], *SUFFIX, *tokens]])
        logits = of.model(input_ids=ids, use_cache=False).logits[0, -1]
        mixed += weight / sum(relevance) * (logits.double() / sampling).softmax(0).numpy()
    return mixed


def assert_next(decoder: Decoder, bound: float = 1e-12, temperature: float = 1.0, sampling: float = 1.0) -> None:
    found = np.exp(decoder.next_distribution())
    assert found.shape == (V,) and found.dtype == np.float64
    assert np.abs(found - by_hand(decoder.lm, decoder.tokens, temperature, sampling=sampling)).max() < bound


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


def test_the_bound_rejects_equal_weights_and_a_document_less() -> None:
    found = np.exp(side().next_distribution())
    assert np.abs(found - by_hand(lm(), [], temperature=1e9)).max() > 1e-3
    assert np.abs(found - by_hand(lm(), [], documents=(0, 1))).max() > 1e-3


@pytest.mark.parametrize("sampling", [0.25, 3.0])
def test_the_sampling_temperature_acts_on_each_document(sampling: float) -> None:
    decoder = side(sampling_temperature=sampling)
    decoder.commit(7)
    assert_next(decoder, sampling=sampling)
    mixed = by_hand(lm(), [7]) ** (1 / sampling)  # what it is not: the mixture, tempered
    assert np.abs(np.exp(decoder.next_distribution()) - mixed / mixed.sum()).max() > 1e-3


def test_two_sides_make_the_mixture_of_all_documents() -> None:
    one, other = Decoder(lm(), PREFIXES[:1], SUFFIX, SCORES[:1]), Decoder(lm(), PREFIXES[1:], SUFFIX, SCORES[1:])
    for decoder in (one, other):
        decoder.commit(19)
    p_one, p_other = (np.exp(decoder.next_distribution()) for decoder in (one, other))
    found = target(p_one, p_other, one.log_weight, other.log_weight)
    assert np.abs(found - by_hand(lm(), [19])).max() < 1e-12


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


@pytest.mark.parametrize(("kind", "failing"), [("llama", 0), ("opt", 0), ("mistral", 0), ("mistral", 2)])
@pytest.mark.parametrize("rolled_back", [False, True])
def test_an_interrupted_step_leaves_the_decoder_right(
    monkeypatch: pytest.MonkeyPatch, kind: str, failing: int, rolled_back: bool
) -> None:
    decoder = side(lm(kind))
    for token in (7, 50):
        decoder.commit(token)
    decoder.next_distribution()
    decoder.rollback(1) if rolled_back else decoder.commit(13)
    calls, forward = iter(range(9)), lm(kind).model.forward

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == failing:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(lm(kind).model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.next_distribution()
    assert_next(decoder)
    decoder.commit(44)
    assert_next(decoder)


# Interruption


class Paused:
    """Holds a model's forward at the nth call of a layer until `go`, so that another thread can do something there."""

    def __init__(self, patch: pytest.MonkeyPatch, of: CausalLM, layer: int, nth: int = 0) -> None:
        self.there, self.go, self.calls, self.run = threading.Event(), threading.Event(), 0, 0
        module = of.model.model.layers[layer].mlp  # after the layer's attention has written its rows
        forward = module.forward

        def held(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == nth + 1:
                self.there.set()
                assert self.go.wait(60)
            return forward(*args, **kwargs)

        patch.setattr(module, "forward", held)


def called(decoder: Decoder, results: list[Any]) -> threading.Thread:
    """A thread that asks for the next distribution."""

    def run() -> None:
        try:
            results.append(decoder.next_distribution())
        except Interrupted as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(("kind", "nth"), [("llama", 0), ("mistral", 0), ("mistral", 2)])
@pytest.mark.parametrize("begun", [False, True])
def test_a_running_call_is_interrupted_from_another_thread(
    monkeypatch: pytest.MonkeyPatch, kind: str, nth: int, begun: bool
) -> None:
    decoder, results = side(lm(kind)), list[Any]()
    if begun:
        decoder.commit(int(decoder.next_distribution().argmax()))
    with monkeypatch.context() as patch:
        paused = Paused(patch, lm(kind), layer=0, nth=nth)
        thread = called(decoder, results)
        assert paused.there.wait(60)
        lengths = [len(decoder.tokens), decoder.room]
        decoder.interrupt()
        paused.go.set()
        thread.join(60)
    assert [type(result) for result in results] == [Interrupted]
    assert paused.calls == nth + 1  # nothing ran after it
    assert lengths == [len(decoder.tokens), decoder.room]
    assert_next(decoder)
    decoder.commit(44)
    assert_next(decoder)


def test_after_an_interruption_the_text_can_go_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, other, results = side(), side(), list[Any]()
    for token in (7, 50, 9):
        decoder.commit(token)
    with monkeypatch.context() as patch:
        paused = Paused(patch, lm(), layer=0)
        thread = called(decoder, results)
        assert paused.there.wait(60)
        decoder.interrupt()
        assert_next(other)  # another decoder of the same model does not notice
        paused.go.set()
        thread.join(60)
    assert type(results[0]) is Interrupted
    decoder.rollback(1)
    decoder.commit(13)
    assert_next(decoder)


def test_an_interruption_in_the_last_layer_comes_too_late_and_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, results = side(), list[Any]()
    decoder.next_distribution()
    decoder.commit(7)
    with monkeypatch.context() as patch:
        paused = Paused(patch, lm(), layer=1)
        thread = called(decoder, results)
        assert paused.there.wait(60)
        decoder.interrupt()
        paused.go.set()
        thread.join(60)
    assert np.abs(np.exp(results[0]) - by_hand(lm(), [7])).max() < 1e-12
    decoder.commit(8)
    assert_next(decoder)


def test_an_interruption_where_nothing_runs_stops_the_next_call_and_no_other() -> None:
    decoder = side()
    decoder.interrupt()
    with pytest.raises(Interrupted):
        decoder.next_distribution()
    assert_next(decoder)
    decoder.interrupt()
    assert_next(decoder)  # is known already
    decoder.commit(7)
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


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_pieces_of_several_decoders_share_a_forward(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    decoders, forwards = [side(lm(kind)) for _ in range(3)], counted(monkeypatch, lm(kind))
    run([next(decoder.pieces()) for decoder in decoders])
    next_together(decoders)
    assert forwards == [(1, 3 * (19 + 6)), (1, 9)]
    for decoder in decoders:
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
    decoders = [side(lm(kind), bare=[1]), *(Decoder(lm(kind), *one, bare=[1]) for one in others)]
    fresh = [side(lm(kind), bare=[1]), *(Decoder(lm(kind), *one, bare=[1]) for one in others)]
    for decoder, twin, n in zip(decoders, fresh, (1, 4, 2), strict=True):
        assert not decoder.in_line  # nothing is prefilled
        for token in greedily(decoder, n):
            twin.commit(token)
        assert decoder.in_line and decoder.rows == len(decoder._prefixes)
    forwards = counted(monkeypatch, lm(kind))
    for _ in range(3):
        forwards.clear()
        next_together(decoders)
        assert forwards == [(1, 10)]
        for decoder, twin in zip(decoders, fresh, strict=True):
            assert np.abs(decoder.next_distribution() - twin.next_distribution()).max() < 1e-10
            assert np.abs(decoder.prior - twin.prior).max() < 1e-10
            token = int(decoder.next_distribution().argmax())
            decoder.commit(token), twin.commit(token)
    decoders[0].rollback(2)
    assert not decoders[0].in_line or decoders[0].position == 2
    decoders[0].commit(41), fresh[0].rollback(2), fresh[0].commit(41)
    next_together(decoders)
    assert np.abs(decoders[0].next_distribution() - fresh[0].next_distribution()).max() < 1e-10
    assert lm(kind).model.config._attn_implementation == "sdpa"


def test_a_model_that_takes_no_mask_of_ours_shares_no_forward() -> None:
    decoder = side(lm("mistral"))
    greedily(decoder, 1)
    assert not decoder.in_line


def counted(patch: pytest.MonkeyPatch, of: CausalLM) -> list[tuple[int, ...]]:
    """The shapes of the ids that the model is given from now on."""
    shapes, forward = list[tuple[int, ...]](), of.model.forward

    def counting(*args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return forward(*args, input_ids=input_ids, **kwargs)

    patch.setattr(of.model, "forward", counting)
    return shapes


@pytest.mark.parametrize(("kind", "expected"), [
    ("llama", [(1, 9), (1, 3)]), ("opt", [(1, 9), (1, 3)]),
    ("mistral", [(1, 3)] * 3 + [(1, 1)] * 3),
])  # fmt: skip
def test_stored_documents_take_the_query_in_one_forward_where_the_model_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: list[tuple[int, int]]
) -> None:
    store = KVStore(tmp_path, lm(kind), shapes.byte_tokenizer(), "{document}{query}")
    side(lm(kind), store=store).next_distribution()
    forwards = counted(monkeypatch, lm(kind))
    decoder = side(lm(kind), store=store)
    greedily(decoder, 1)
    decoder.next_distribution()
    assert forwards == expected


# Ends


def test_nothing_follows_an_end_token_until_it_is_rolled_back() -> None:
    decoder = side(end=6)
    decoder.commit(8), decoder.commit(6)
    assert decoder.ended
    for call in (decoder.next_distribution, decoder.require_open, lambda: decoder.commit(4)):
        with pytest.raises(ValueError, match=r"token 6 .* 1"):
            call()
    decoder.rollback(1)
    assert not decoder.ended
    decoder.commit(9)
    assert_next(decoder)


def test_the_context_ends_with_its_longest_document() -> None:
    decoder = side()
    room = CONTEXT - len(PREFIXES[2]) - len(SUFFIX) + 1
    assert decoder.room == room
    greedily(decoder, room - 1)
    assert decoder.room == 1
    assert np.abs(np.exp(decoder.next_distribution()) - by_hand(lm(), decoder.tokens)).max() < 1e-12
    decoder.commit(4)
    assert decoder.room == 0 and not decoder.ended
    for call in (decoder.next_distribution, lambda: decoder.commit(4)):
        with pytest.raises(ValueError, match=f"{CONTEXT} .* {room}"):
            call()
    decoder.rollback(room - 1)
    assert_next(decoder)


# Bad input


@pytest.mark.parametrize(("prefixes", "message"), [
    ([], "document, not 0"),
    ([[3], [4] * 33], "Document 1 .* 33 .* 32"),
    ([[3], [4] * 30], "query .* 3 .* 30"),
])  # fmt: skip
def test_bad_input_is_named_before_any_work(
    monkeypatch: pytest.MonkeyPatch, prefixes: list[list[int]], message: str
) -> None:
    monkeypatch.setattr("ondevice_programs.pair.decoder.Batch", None)
    with pytest.raises(ValueError, match=message):
        Decoder(lm(), prefixes, SUFFIX, np.zeros(len(prefixes)))


# Template


def test_a_templates_ids_are_cut_where_the_document_ends() -> None:
    template, tokenizer = Template("Context: {document}.\nQ: {query}\nA:"), shapes.byte_tokenizer()
    prefix, suffix = template.prefix(tokenizer, "a {query} b"), template.suffix(tokenizer, "why {document}?")
    assert tokenizer.decode(prefix) == "Context: a {query} b"
    assert tokenizer.decode(suffix) == ".\nQ: why {document}?\nA:"


def test_a_begin_token_comes_once_where_the_tokenizer_puts_one() -> None:
    from tokenizers.processors import TemplateProcessing

    template, tokenizer = Template("{document}: {query}"), shapes.byte_tokenizer()
    plain = template.prefix(tokenizer, "ab"), template.suffix(tokenizer, "c")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert (template.prefix(tokenizer, "ab"), template.suffix(tokenizer, "c")) == ([0, *plain[0]], plain[1])


@pytest.mark.parametrize("text", ["", "{document}", "{query} {document}", "{document}{document}{query}"])
def test_other_templates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="query"):
        Template(text)
