"""Figure 6's methods against sums by hand, one sequence a forward; the windows that they are computed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import random_model

from ondevice import shapes
from ondevice.corpus import Passage
from ondevice.retrieval import SparseIndex
from ondevice_papers.dragon import codec
from ondevice_studies.dragon import language_modelling as lm
from ondevice_studies.dragon.language_modelling import Retrieved, Window, passages, retrieve, windows

WORDS = ("array", "shape", "axis", "sum", "norm", "value", "index", "type", "list", "order", "number", "returns")
CONTEXT, QUERY, SCORED, BUDGET, TEMPERATURE = 420, 6, 8, 190, 3.0
COUNTS, CAPS = (2, 4), (64, codec.CAP)


def text(seed: int, words: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return shapes.byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    """Random, but with sharp distributions that depend on what was read."""
    return random_model("llama", torch.float32, vocabulary=len(tokenizer), context=CONTEXT, seed=3).eval()


@pytest.fixture(scope="module")
def retrieved(tokenizer: Any) -> list[Retrieved]:
    held_out = {f"held out {seed}": [text(300 + seed, 30), text(100 + seed, 30)] for seed in range(3)}
    passages = [Passage(f"train.n{seed}", text(200 + seed, 6 + seed % 5), 0) for seed in range(9)]
    found = windows(held_out, tokenizer, 3, query=QUERY, scored=SCORED)
    return retrieve(found, passages, SparseIndex.build(passages), 6)


@pytest.fixture(scope="module")
def frame(model: Any, tokenizer: Any, retrieved: list[Retrieved]) -> pd.DataFrame:
    """Every method on every window."""
    fronts = lm.Fronts(model, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "BUDGET", BUDGET)
        rows = [(*row, window) for window, one in enumerate(retrieved)
                for row in lm.methods(model, fronts, one, TEMPERATURE, COUNTS, caps=CAPS)]  # fmt: skip
    return pd.DataFrame(rows, columns=["method", "documents", "cap", "nats", "read", "window"])


def nats(frame: pd.DataFrame, method: str, documents: int, cap: int = 0) -> np.ndarray:
    """[W]; cap: of DRAGON's."""
    chosen = frame[(frame["method"] == method) & (frame["documents"] == documents) & (frame["cap"] == cap)]
    return chosen.sort_values("window")["nats"].to_numpy()


@torch.inference_mode()
def by_hand(model: Any, front: Sequence[int], window: Window) -> np.ndarray:
    """[n, V] probabilities of one sequence in a forward of its own."""
    ids = torch.tensor([[*front, *window.query, *window.scored]])
    logits = model(input_ids=ids, use_cache=False).logits[0, -len(window.scored) - 1 : -1]
    return logits.double().softmax(-1).numpy()


def ids_of(tokenizer: Any, passage: Passage) -> list[int]:
    return tokenizer(f"{passage.title}\n{passage.text}\n\n")["input_ids"]


def alone_and_after(model: Any, tokenizer: Any, one: Retrieved) -> tuple[np.ndarray, np.ndarray]:
    after = [by_hand(model, ids_of(tokenizer, passage), one.window) for passage in one.passages]
    return by_hand(model, [], one.window), np.stack(after)


def weights_of(scores: np.ndarray) -> np.ndarray:
    relevance = np.exp((scores - scores.max()) / TEMPERATURE)
    return relevance / relevance.sum()


def articles() -> dict[str, list[str]]:
    """Six of them, of four paragraphs; the first one that is not searched is too short in half of them."""
    return {
        f"article {seed}": [text(10 * seed + place, 1 if place == 1 and seed % 2 else 30) for place in range(4)]
        for seed in range(6)
    }


def test_a_window_of_each_article_is_of_a_paragraph_that_is_not_searched(tokenizer: Any) -> None:
    texts = articles()
    found = windows(texts, tokenizer, query=QUERY, scored=SCORED)
    assert found == windows(dict(reversed(texts.items())), tokenizer, query=QUERY, scored=SCORED)
    assert windows(texts, tokenizer, 4, query=QUERY, scored=SCORED) == found[:4]
    assert sorted(window.name for window in found) == sorted(texts) != [window.name for window in found]
    for window in found:
        place = 3 if int(window.name[-1]) % 2 else 1
        ids = tokenizer(texts[window.name][place])["input_ids"]
        assert [*window.query, *window.scored] == ids[: QUERY + SCORED]
        assert window.text == tokenizer.decode(list(window.query))


def test_passages_are_every_second_paragraph_from_the_first_on() -> None:
    texts = articles()
    found = passages(texts, 20)
    for title, paragraphs in texts.items():
        own = [passage for passage in found if passage.title == title]
        assert [passage.index for passage in own] == list(range(4))  # 20 and 10 words of each of two
        assert " ".join(passage.text for passage in own) == f"{paragraphs[0]} {paragraphs[2]}"
        assert [len(passage.text.split()) for passage in own] == [20, 10, 20, 10]


@pytest.mark.parametrize(("count", "query"), [(None, 0), (7, 4), (None, 999)])
def test_windows_that_cannot_be(tokenizer: Any, count: int | None, query: int) -> None:
    with pytest.raises(ValueError, match=r"0|7"):
        windows(articles(), tokenizer, count, query=query, scored=4)


def test_outputs_are_mixed_as_by_hand(
    model: Any, tokenizer: Any, retrieved: list[Retrieved], frame: pd.DataFrame
) -> None:
    for place, one in enumerate(retrieved):
        alone, after = alone_and_after(model, tokenizer, one)
        tokens = np.arange(SCORED), np.array(one.window.scored)
        assert nats(frame, lm.NONE, 0)[place] == pytest.approx(-np.log(alone[tokens]).sum(), abs=1e-3)
        for n in COUNTS:
            parts = {lm.WHOLE: slice(n), lm.CLOUD_OUTPUT: slice(n // 2)}
            for method, part in parts.items():
                mixed = np.tensordot(weights_of(one.scores[part]), after[part], axes=1)
                assert nats(frame, method, n)[place] == pytest.approx(-np.log(mixed[tokens]).sum(), abs=1e-3), method
            likelihoods = np.array([after[d][tokens].prod() for d in range(n)])
            whole = -np.log(weights_of(one.scores[:n]) @ likelihoods)
            assert nats(frame, lm.SEQUENCE, n)[place] == pytest.approx(whole, abs=1e-3)


def test_cut_distributions_are_mixed_as_by_hand(
    model: Any, tokenizer: Any, retrieved: list[Retrieved], frame: pd.DataFrame
) -> None:
    """Each side's weight is that of its half in one softmax over both halves' scores."""
    for place, one in enumerate(retrieved):
        prior, after = alone_and_after(model, tokenizer, one)
        for n, cap in ((4, 64), (4, codec.CAP), (2, codec.CAP)):
            whole, every = weights_of(one.scores[:n]), np.zeros((SCORED, after.shape[-1]))
            for part in (slice(n // 2), slice(n // 2, n)):
                side = np.tensordot(weights_of(one.scores[part]), after[part], axes=1)
                both = zip(side, prior, strict=True)
                every += whole[part].sum() * np.stack([codec.filled(codec.encode(p, cap, q), q) for p, q in both])
            p = every[np.arange(SCORED), np.array(one.window.scored)]
            assert nats(frame, lm.DRAGON, n, cap)[place] == pytest.approx(-np.log(p).sum(), abs=2e-2), (n, cap)
    cut, uncut = np.abs([nats(frame, lm.DRAGON, 4, cap) - nats(frame, lm.WHOLE, 4) for cap in CAPS])
    assert uncut.mean() < cut.mean() / 2


def test_contexts_hold_the_documents_they_should(
    model: Any, tokenizer: Any, retrieved: list[Retrieved], frame: pd.DataFrame
) -> None:
    def loss(ids: list[int]) -> float:
        probabilities = by_hand(model, ids, one.window)
        return float(-np.log(probabilities[np.arange(SCORED), np.array(one.window.scored)]).sum())

    def flat(parts: Sequence[list[int]]) -> list[int]:
        return [token for part in parts for token in part]

    for place, one in enumerate(retrieved):
        ids = [ids_of(tokenizer, passage) for passage in one.passages]
        assert len(flat(ids[:2])) < BUDGET < len(flat(ids[:4]))  # the budget cuts 4 documents and leaves 2 whole
        for n in COUNTS:
            expected = {
                lm.CLOUD: ids[: n // 2], lm.DEVICE: ids[n // 2 : n], lm.DRCG: ids[:n],
            } | ({lm.UNCUT: ids[:n][::-1]} if n in lm.UNCUT_COUNTS else {})  # fmt: skip
            for method, parts in expected.items():
                tokens = flat(parts) if method == lm.UNCUT else flat(parts)[:BUDGET]
                assert nats(frame, method, n)[place] == pytest.approx(loss(tokens), abs=1e-3), (method, n)
        assert nats(frame, lm.CLOUD, 2)[place] == pytest.approx(nats(frame, lm.CLOUD_OUTPUT, 2)[place], abs=1e-3)
        sides = [by_hand(model, flat(part)[:BUDGET], one.window) for part in (ids[:2], ids[2:4])]
        mixed = np.tensordot(weights_of(one.scores[:4].reshape(2, 2).mean(1)), np.stack(sides), axes=1)
        grouped = -np.log(mixed[np.arange(SCORED), np.array(one.window.scored)]).sum()
        assert nats(frame, lm.GROUPED, 4)[place] == pytest.approx(grouped, abs=1e-3)


def test_bad_windows(model: Any, tokenizer: Any, retrieved: list[Retrieved]) -> None:
    first, one = retrieved[0].window, retrieved[0]
    long = Window(first.name, first.text, first.query * CONTEXT, first.scored)
    with pytest.raises(ValueError, match=f"context of {CONTEXT}"):
        lm.read_window(model, lm.Fronts(model, tokenizer), Retrieved(long, one.passages, one.scores))
