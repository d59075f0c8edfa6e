"""Rerankers on toy documents and tiny models: mining, inputs, loss, metrics, training, storage."""

from __future__ import annotations

import csv
import dataclasses
import os
import signal
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest
import safetensors.torch
import torch
from sentence_transformers import CrossEncoder
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from ondevice import assets, corpus, models, shapes
from ondevice.corpus import Query
from ondevice.corpus.modules import held_out, modules
from ondevice.corpus.pairs import Row, padded, reading_pairs, rows
from ondevice.corpus.prompts import ASSISTANT, PASSAGE, USER
from ondevice.corpus.wikitext import Paragraph
from ondevice.retrieval import pools as evaluation_data
from ondevice.retrieval.collection import Collection
from ondevice.retrieval.layer_scores import layer_scores, scores_of
from ondevice.retrieval.pools import evaluation_pools
from ondevice_training.reranking import examples, learning, low_rank
from ondevice_training.reranking.examples import clozes, training_examples
from ondevice_training.reranking.learning import TrainingRecipe
from ondevice_training.reranking.lists import CANDIDATES, QUERIES, chosen
from ondevice_training.reranking.metrics import MeanAndError, correlations, ndcg, precision, ranked
from ondevice_training.running import export
from ondevice_training.schedule import Schedule

VOCABULARY, PAD = 40, 1
SHAPE = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64)
WORDS = ("matrix", "vector", "token", "socket", "image", "colour", "thread", "signal", "string", "buffer")


pytestmark = pytest.mark.usefixtures("one_thread")  # sums are taken in one order


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "ROOT", tmp_path)
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))


@dataclasses.dataclass
class Counting:
    """An embedder of word counts."""

    key: str = "counting"
    size = 64

    def __call__(self, texts):
        out = np.full((len(texts), self.size), 1e-3, np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().replace("\n", " ").split():
                out[row, sum(word.encode()) % self.size] += 1
        return out / np.linalg.norm(out, axis=1, keepdims=True)


@dataclasses.dataclass
class WordTokenizer:
    """A token every two characters, so that a docstring has several passages of 96."""

    def __call__(self, texts, **_):
        pairs = [[(i, min(i + 2, len(t))) for i in range(0, len(t), 2)] for t in texts]
        return {"offset_mapping": pairs}


def document(index: int, split: int = 0) -> corpus.Document:
    """A function about two of the words, with two described parameters and a long second paragraph."""
    first, second = WORDS[index % 10], WORDS[(index // 10 + 1 + index) % 10]
    body = " ".join(f"Case {n} of {first} {index} treats the {second} as {WORDS[(index + n) % 10]}." for n in range(8))
    docstring = (
        f"Convert a {first} number {index} into another {second} kind.\n\nParameters\n----------\n"
        f"first : int\n    The {first} that call {index} reads before anything else.\n"
        f"second : int\n    The {second} that call {index} writes when it is done.\n\nNotes\n-----\n{body}\n"
    )
    return corpus.Document(f"pack.m{index % 12}{split}.call{index}", "pack", "function", "(x)", docstring, "")


DOCUMENTS = [document(index) for index in range(60)]


@pytest.fixture
def collection() -> Collection:
    return Collection.from_documents(DOCUMENTS, WordTokenizer())  # type: ignore[arg-type]


def decoder(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(**SHAPE, vocab_size=VOCABULARY, pad_token_id=PAD, bos_token_id=0, eos_token_id=0)
    return LlamaForCausalLM(config).eval()


def encoder(seed: int = 0) -> BertModel:
    torch.manual_seed(seed)
    return BertModel(BertConfig(**SHAPE, vocab_size=VOCABULARY, pad_token_id=0, max_position_embeddings=160)).eval()


PARENTS = {"decoder": decoder, "encoder": encoder}


def marked() -> PreTrainedTokenizerFast:
    """The byte tokenizer with the markers that a decoder's pairs are made with."""
    tokenizer = shapes.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [USER, ASSISTANT, PASSAGE]})
    return tokenizer


def letters() -> PreTrainedTokenizerFast:
    """An encoder's tokenizer with a token a letter."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    entries = [*special, "?", *ascii_lowercase, *("##" + letter for letter in ascii_lowercase)]
    return BertTokenizerFast(vocab={entry: index for index, entry in enumerate(entries)})


def toy_lists(step: int) -> list[Row]:
    """Only the positive has token 7 in its third place."""
    rng = np.random.default_rng(step)
    found = []
    for _ in range(QUERIES):
        third = [7, *rng.integers(10, 20, CANDIDATES - 1).tolist()]
        found += [Row((int(rng.integers(20, 30)), 3, token, 4), 2) for token in third]
    return found


def trained(folder: Path, kind: str = "decoder", lists=toy_lists, **values):
    model = learning.warm(PARENTS[kind]())
    if rank := values.get("rank"):
        low_rank.adapt(model, rank)
    recipe = TrainingRecipe(12 * QUERIES, 0.01, 1e-2, warmup=2, log_every=4, validate_every=100)
    recipe = dataclasses.replace(recipe, **values)
    return learning.train(recipe, model, lists, lambda _: 0.5, folder), model


def test_no_training_example_leaks(collection):
    queries = list(corpus.queries(DOCUMENTS))
    assert {query.kind for query in queries} == {"parameter", "summary"}
    examples = training_examples(collection, queries, Counting(), modules(DOCUMENTS))  # type: ignore[arg-type]
    assert len(examples) > 40
    by_text = dict(zip(collection.texts, collection.passages, strict=True))
    for example in examples:
        negatives = [text for texts in example.negatives.values() for text in texts]
        assert len(set(negatives)) == len(negatives) and {"sparse", "dense"} <= set(example.negatives)
        assert all(example.query.relevant(by_text[text]) for text in example.positives)
        for passage in (by_text[text] for text in negatives):
            assert not example.query.relevant(passage)
            if example.query.kind == "summary":
                assert (passage.title, passage.index) != (example.query.name, 0)
                assert example.query.text not in passage.text
            else:
                assert example.query.answer not in passage.text


def test_a_sentence_asks_for_the_rest_of_its_paragraph():
    sentences = ["begins with an alpha", "goes on to a beta at last", "then has some gamma rays", "ends in a delta"]
    texts = [f"Article {n % 3}\n" + ". ".join(f"Row {n} {words}" for words in sentences) for n in range(30)]
    examples = clozes([Paragraph(10 * n, text) for n, text in enumerate(texts)])
    assert len(examples) == 30
    for text, example in zip(texts, examples, strict=True):
        (answer,) = example.positives
        heading, _, rest = answer.partition("\n")
        assert example.query.text in text and example.query.text not in answer
        assert text.startswith(heading) and all(part in text for part in rest.split(". "))
        negatives = [negative for group in example.negatives.values() for negative in group]
        assert text not in negatives and len(set(negatives)) == len(negatives) > 7


def test_pools_of_paragraphs_have_the_one_that_answers(monkeypatch):
    animals = ["cats", "dogs", "owls", "hens"]
    every = [Paragraph(n, f"Heading\nparagraph {n} about {animals[n % 4]} and {n}") for n in range(40)]
    questions = [(7, "paragraph 7 about hens"), (8, "paragraph 8")]
    monkeypatch.setattr(evaluation_data.wikitext, "paragraphs", lambda split: every)
    monkeypatch.setattr(evaluation_data.wikitext, "questions", lambda: questions)
    evaluation = evaluation_data.paragraph_pools(Counting())  # type: ignore[arg-type]
    assert evaluation.answerable == 2 and len(evaluation.pools) == 2
    for pool, row in zip(evaluation.pools, (7, 8), strict=True):
        assert len(pool.passages) == 20 and pool.relevant.sum() == 1
        assert pool.passages[int(pool.relevant.argmax())] == every[row].text


def test_training_sees_no_held_out_module_and_evaluation_asks_of_no_other(monkeypatch):
    splits = {name: tuple(document(i, n) for i in range(60)) for n, name in enumerate(("train", "validation", "test"))}
    monkeypatch.setattr(corpus, "documents", splits.__getitem__)
    monkeypatch.setattr(corpus, "tokenizer", WordTokenizer)
    monkeypatch.setattr(evaluation_data.retrieval, "embedder", Counting)
    groups = [group for one in examples.for_training() for group in (one.positives, *one.negatives.values())]
    titles = {text.partition("\n")[0] for group in groups for text in group}
    module_of = modules(document for split in splits.values() for document in split)
    assert titles and not any(held_out(module_of[title]) for title in titles)
    pools = evaluation_data.for_evaluation("test").pools
    assert pools and all(held_out(module_of[pool.query.name]) for pool in pools)
    read = {passage.partition("\n")[0] for pool in pools for passage in pool.passages}
    assert read <= {document.name for document in splits["test"]}


def test_pools_have_twenty_candidates_with_their_baselines_scores_in_no_telling_order(collection):
    queries = list(corpus.queries(DOCUMENTS))
    pools = evaluation_pools(collection, queries, Counting())  # type: ignore[arg-type]
    again = evaluation_pools(collection, queries, Counting())  # type: ignore[arg-type]
    assert [pool.passages for pool in pools] == [pool.passages for pool in again]
    places = set()
    for pool in pools:
        assert len(set(pool.passages)) == 20 and pool.relevant.any()
        assert {pool.relevant.shape, pool.bm25.shape, pool.cosine.shape} == {(20,)}
        vectors = Counting()([pool.query.text, *pool.passages])
        assert pool.cosine == pytest.approx(vectors[1:] @ vectors[0], abs=1e-5)
        places.update(np.flatnonzero(pool.relevant).tolist())
    assert len(places) > 10


CHAT = ["<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("special", "most", "right"),
    [
        ([USER, ASSISTANT, PASSAGE], 160, "<|passage|>{passage}<|user|>which?<|assistant|>"),
        (CHAT, 256, "<|im_start|>user\nwhich?\nPassage:\n{passage}<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_long_passage_is_cut_and_the_query_is_not(special, most, right):
    tokenizer = shapes.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    reader = reading_pairs(tokenizer, causal=True)
    short, long = (list(row.ids) for row in rows(reader, "which?", ["a title\ntext", "x" * 900]))
    assert tokenizer.decode(short) == right.format(passage="a title\ntext")
    assert len(long) == most and tokenizer.decode(long).endswith("x" + right.partition("}")[2])
    if special == CHAT:
        messages = [{"role": "query", "content": "which?"}, {"role": "document", "content": "a title\ntext"}]
        assert reader.apply_chat_template(messages, return_dict=False) == short


# An encoder's positions are absolute: it is padded on the right.
@pytest.mark.parametrize(("kind", "side"), [("decoder", "left"), ("decoder", "right"), ("encoder", "right")])
def test_scores_are_the_models_own_whichever_side_is_padded(kind, side):
    model = learning.warm(PARENTS[kind]())
    group = [Row((5, 6, 7, 8, 9), 2), Row((5, 6, 7), 2), Row((9, 3, 4, 4), 3)]
    batch = padded(group, model.config.pad_token_id, side)
    every = layer_scores(model, batch)
    assert every.shape == (3, 3) and not torch.allclose(every[0], every[-1])
    own = model(**{key: value for key, value in batch.items() if kind == "encoder" or "type" not in key}).logits[:, 0]
    assert torch.allclose(every[-1], own, atol=1e-5)
    assert torch.allclose(layer_scores(model, batch, every=False)[0], own, atol=1e-5)
    alone = torch.cat([layer_scores(model, padded([row], 0)) for row in group], dim=1)
    assert torch.allclose(every, alone, atol=1e-5)
    assert torch.allclose(scores_of(model, group), every, atol=1e-5)


def test_the_loss_is_a_lists_cross_entropy_and_the_positive_is_strictly_first(monkeypatch):
    model = learning.warm(encoder())
    scores = torch.zeros(1, 2 * CANDIDATES)
    scores[0, 0] = np.log(3.0 * (CANDIDATES - 1))  # of the second list all are equal
    monkeypatch.setattr(learning, "scores_of", lambda *_, **__: scores.clone().requires_grad_())
    recipe = TrainingRecipe(QUERIES, 0.0, 0.0)
    loss, first = learning._step(model, learning.optimizer_of(model, recipe), [Row((5,), 1)] * (2 * CANDIDATES))
    assert loss == pytest.approx((np.log(4 / 3) + np.log(CANDIDATES)) / 2) and first == 0.5


def test_the_rate_rises_stays_and_falls():
    schedule = Schedule(total=100, warmup=10)
    factors = [schedule(step) for step in range(100)]
    assert schedule.decay_start == 60
    assert factors[:2] == pytest.approx([0.1, 0.2])
    assert set(factors[9:61]) == {1.0}
    assert factors[99] == pytest.approx(1 / 40)
    assert np.diff(factors[60:]) == pytest.approx(-1 / 40)
    assert [Schedule(200, 10)(step) for step in range(60)] == factors[:60]


def test_metrics_by_hand_with_ties_against_the_ranker():
    relevant = np.array([True, False, False, True])
    order = ranked(np.array([2.0, 2.0, 1.0, 0.5]), relevant)
    assert order.tolist() == [False, True, False, True]
    assert ndcg(order) == pytest.approx((1 / np.log2(3) + 1 / np.log2(5)) / (1 + 1 / np.log2(3)))
    assert [precision(order, k) for k in (1, 2)] == [0, 0.5]
    assert MeanAndError.from_values([0, 1, 1, 0]) == MeanAndError(0.5, pytest.approx(np.sqrt(1 / 3) / 2))
    assert correlations(np.arange(4), np.array([0, 1, 3, 2])) == pytest.approx((0.8, 2 / 3))
    with pytest.raises(ValueError, match="finite"):
        ranked(np.array([1, np.nan]), relevant[:2])
    with pytest.raises(ValueError, match="no nDCG"):
        ndcg(np.zeros(3, bool))


def losses(folder: Path) -> tuple[float, float]:
    """The first and the last of a log."""
    with (folder / "log.csv").open() as file:
        log = list(csv.DictReader(file))
    return float(log[0]["loss"]), float(log[-1]["loss"])


def equal(model, other) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_a_reranker_learns_a_toy_task_and_its_embeddings_stay(tmp_path):
    _, model = trained(tmp_path, "encoder", queries=60 * QUERIES, rate=1e-3)
    first, last = losses(tmp_path)
    assert first > 1.5 > 0.5 > last
    assert torch.equal(model.get_input_embeddings().weight, encoder().get_input_embeddings().weight)


class _StopAt:
    """Lists that send SIGTERM to this process when a step is read."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, step: int) -> list[Row]:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        return toy_lists(step)


def test_a_stopped_and_resumed_run_ends_as_an_unbroken_one(tmp_path):
    _, unbroken = trained(tmp_path / "unbroken", "encoder")
    stopped, _ = trained(tmp_path / "broken", "encoder", _StopAt(5))
    assert (stopped.step, stopped.stopped) == (6, True)
    reached, resumed = trained(tmp_path / "broken", "encoder")
    assert (reached.step, reached.stopped) == (12, False)
    assert equal(unbroken, resumed)
    path = tmp_path / "broken" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors"):
        trained(tmp_path / "broken", "encoder")


def test_a_run_is_lengthened_before_its_rate_falls_and_not_later(tmp_path):
    longer = 20 * QUERIES
    _, unbroken = trained(tmp_path / "longer", "encoder", queries=longer)
    trained(tmp_path / "run", "encoder", _StopAt(4))  # of 12 steps, the last five of which slow down
    assert equal(trained(tmp_path / "run", "encoder", queries=longer)[1], unbroken)
    trained(tmp_path / "late", "encoder", _StopAt(9))
    with pytest.raises(ValueError, match="cannot become one of 160: its rate"):
        trained(tmp_path / "late", "encoder", queries=longer)


@pytest.mark.long  # trains
def test_an_adapter_learns_is_resumed_and_is_all_that_is_stored(tmp_path):
    start = learning.warm(decoder())
    _, model = trained(tmp_path / "whole", queries=60 * QUERIES, rate=0.02, rank=4)
    first, last = losses(tmp_path / "whole")
    assert first > 1.5 > 0.8 > last
    kept = dict(model.named_parameters())
    for name, value in start.named_parameters():
        there = kept[name.replace("_proj.weight", "_proj.base.weight") if "self_attn" in name else name]
        assert name == "score.weight" or torch.equal(there, value.to(there.dtype)), name
    stored = safetensors.torch.load_file(tmp_path / "whole" / "adapter" / "adapter_model.safetensors")
    assert len(stored) == 1 + 3 * 4 * 2 and {value.dtype for value in stored.values()} == {torch.bfloat16}

    trained(tmp_path / "broken", lists=_StopAt(5), rank=4)
    _, resumed = trained(tmp_path / "broken", rank=4)
    assert equal(resumed, trained(tmp_path / "unbroken", rank=4)[1])
    with pytest.raises(ValueError, match="another shape"):
        trained(tmp_path / "broken", rank=2)


def test_lists_without_the_embedders_negatives_are_as_long():
    """A run that mines by keywords alone broke off at its first step."""
    negatives = {"sparse": tuple("abcdef"), "module": ("g", "h"), "random": ("i",)}
    example = examples.Example(Query("parameter", "which?", "name", ""), ("yes",), negatives)
    texts = chosen(example, np.random.default_rng(0))
    assert texts[0] == "yes" and len(set(texts)) == CANDIDATES and {"i"} < set(texts)


def test_an_adapter_alone_goes_on_where_its_training_stopped(tmp_path):
    reached, stopped = trained(tmp_path, lists=_StopAt(5), rank=4)
    assert (reached.step, reached.stopped) == (6, True)
    (tmp_path / "checkpoint.safetensors").unlink()
    weights = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")

    def stops(step: int) -> list[Row]:
        assert step == 6  # the step behind those that the adapter has seen
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, lists=stops, rank=4)
    model = learning.warm(decoder())
    low_rank.adapt(model, 4)
    progress = low_rank.load(model, tmp_path / "adapter")
    assert progress is not None and progress["step"] == 6
    assert torch.equal(model.score.weight, weights["base_model.model.score.weight"].float())
    for (name, value), (_, other) in zip(model.named_parameters(), stopped.named_parameters(), strict=True):
        assert torch.allclose(value, other, rtol=0.01, atol=1e-5), name
    assert trained(tmp_path, rank=4)[0].step == 12
    (tmp_path / "checkpoint.safetensors").unlink()
    with pytest.raises(ValueError, match="another rank"):
        trained(tmp_path, rank=2)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="damaged"):
        trained(tmp_path, rank=4)


@pytest.mark.parametrize("kind", PARENTS)
def test_a_stored_reranker_scores_in_sentence_transformers_as_here(kind, tmp_path):
    """From the folder alone: the format of a pair, its longest row, the head, and float32."""
    tokenizer = {"decoder": marked, "encoder": letters}[kind]()
    parent = PARENTS[kind]()
    parent.resize_token_embeddings(300)
    model, pairs = learning.warm(parent), reading_pairs(tokenizer, kind == "decoder")
    export(model, pairs, tmp_path / "model", torch.float16)
    query, passages = "what is it?", ["x" * 40, "y and z", "a b c " * 200]
    theirs = CrossEncoder(str(tmp_path / "model"), device="cpu")
    loaded = models.load(str(tmp_path / "model"))
    ours = scores_of(loaded.model, rows(loaded.tokenizer, query, passages), every=False)[-1]
    scores = theirs.predict([(query, passage) for passage in passages])
    assert scores == pytest.approx(ours.sigmoid().tolist(), abs=1e-6)
    assert [len(row.ids) for row in rows(loaded.tokenizer, query, passages)][2] == 160
