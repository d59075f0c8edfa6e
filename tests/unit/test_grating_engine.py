"""The engine on tiny models: transformers' scores at every layer, pruning, inputs, and what is kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PreTrainedTokenizerFast

from ondevice import models as bundled
from ondevice import shapes
from ondevice.corpus import pairs
from ondevice.grating import replay
from ondevice.grating.architectures import Architecture, Batch, Row, answer_ids, encode
from ondevice.grating.engine import Engine, Scores
from ondevice.grating.hidden_states import Offloaded, Resident
from ondevice.grating.pruning import ClusterRule, Selection
from ondevice.grating.weights import InMemory, Streamed
from ondevice.retrieval import layer_scores

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("bert", {}),
    "RobertaForSequenceClassification": ("roberta", {"type_vocab_size": 1}),
    "XLMRobertaForSequenceClassification": ("xlm-roberta", {"type_vocab_size": 1}),
    "LlamaForSequenceClassification": ("llama", {"num_key_value_heads": 2}),
    "Qwen2ForSequenceClassification": ("qwen2", {"num_key_value_heads": 2}),
    "Qwen3ForSequenceClassification": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "Qwen3ForCausalLM": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
}
V, LAYERS, CONTEXT, PAD, YES, NO = 97, 4, 64, 1, 5, 9
LENGTHS = (5, 17, 9, 33, 9, 1, 40, 12)


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def built(name: str, dtype: torch.dtype = torch.float64, vocabulary: int = V, tied: bool = True) -> Any:
    """A random model whose scores differ, so that wrong states show."""
    kind, values = KINDS[name]
    labels = {} if "Causal" in name else {"num_labels": 1}
    config = AutoConfig.for_model(
        kind, vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, max_position_embeddings=CONTEXT, pad_token_id=PAD, architectures=[name],
        tie_word_embeddings=tied, **labels, **values,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.to(dtype)


def architecture(name: str) -> Architecture:
    return Architecture(built(name).config, (YES, NO) if "Causal" in name else None)


def engine(name: str = "Qwen3ForSequenceClassification", dtype: torch.dtype = torch.float64, **options: Any) -> Engine:
    return Engine(architecture(name), InMemory(built(name, dtype)), **options)


def some_rows(lengths: Sequence[int] = LENGTHS, vocabulary: int = V) -> list[Row]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(2, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return [Row(tuple(ids), len(ids) // 2) for ids in drawn]


@torch.no_grad()
def expected(model: Any, rows: Sequence[Row], side: str = "right") -> NDArray[np.float64]:
    """[layers, N] the model's own head on the hidden states of one padded forward of transformers'."""
    batch = pairs.padded([pairs.Row(row.ids, row.border) for row in rows], PAD, side)
    mask = batch["attention_mask"]
    causal = hasattr(model, "model")
    extra = {"token_type_ids": batch["token_type_ids"]} if hasattr(model, "bert") else {}
    found = model.base_model(batch["input_ids"], attention_mask=mask, output_hidden_states=True, **extra)
    read = (mask * torch.arange(mask.shape[1])).argmax(1) if causal else torch.zeros(len(mask), dtype=torch.long)
    scores = []
    for index, state in enumerate([*found.hidden_states[1:-1], found.last_hidden_state]):
        one = state[torch.arange(len(rows)), read]
        if causal:
            one = one if index == LAYERS - 1 else model.model.norm(one)
        if hasattr(model, "lm_head"):
            logits = model.lm_head(one)
            scores.append(logits[:, YES] - logits[:, NO])
        elif causal:
            scores.append(model.score(one)[:, 0])
        else:
            pooled = model.bert.pooler(one[:, None]) if hasattr(model, "bert") else one[:, None]
            scores.append(model.classifier(pooled)[:, 0])
    return torch.stack(scores).double().numpy()


def distance(found: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Largest difference; NaN anywhere is as far as can be."""
    gap = np.abs(found - right).max()
    return float("inf") if np.isnan(gap) else float(gap)


def keeping(*kept: Sequence[int]) -> Callable[[NDArray[np.float64]], NDArray[np.int64]]:
    """A `prune` that keeps these candidates after each layer, and all of them after the last given."""
    left = iter(kept)
    last: list[NDArray[np.int64]] = []

    def prune(scores: NDArray[np.float64]) -> NDArray[np.int64]:
        last[:] = [np.array(next(left, last[0] if last else range(len(scores))), np.int64)]
        return last[0]

    return prune


# Scores


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("chunk", [1, 40, 10_000])
def test_every_layers_scores_are_those_of_transformers(name: str, chunk: int) -> None:
    found = engine(name, chunk=chunk).score(some_rows())
    right = expected(built(name), some_rows())
    assert right.std(1).min() > 0.01  # the candidates differ
    assert distance(found.by_layer, right) < 1e-10
    assert found.ran.tolist() == [LAYERS] * len(LENGTHS) and found.work == LAYERS * len(LENGTHS)
    assert (found.last == found.by_layer[-1]).all()


@pytest.mark.parametrize("name", [name for name in KINDS if "Bert" not in name and "Roberta" not in name])
def test_the_side_of_padding_makes_no_difference_to_a_decoder(name: str) -> None:
    found = engine(name).score(some_rows()).by_layer
    assert distance(found, expected(built(name), some_rows(), "left")) < 1e-5  # transformers' rotations are of float32


@pytest.mark.parametrize("name", KINDS)
def test_the_last_layers_scores_are_the_models_logits(name: str) -> None:
    rows, model = some_rows((12, 12, 12)), built(name)
    with torch.no_grad():
        logits = model(torch.tensor([row.ids for row in rows])).logits
    whole = [Row(row.ids, len(row.ids)) for row in rows]  # one segment, as transformers assumes
    right = logits[:, -1, YES] - logits[:, -1, NO] if logits.ndim == 3 else logits[:, 0]
    assert distance(engine(name).score(whole).by_layer[-1], right.double().numpy()) < 1e-10


def test_an_untied_output_head_is_read_in_place_of_the_embedding(tmp_path: Path) -> None:
    model = built("Qwen3ForCausalLM", tied=False)
    model.save_pretrained(tmp_path)
    right = expected(model, some_rows())
    streamed = Streamed(tmp_path)
    for weights in (InMemory(model), streamed):
        assert distance(Engine(architecture("Qwen3ForCausalLM"), weights).score(some_rows()).by_layer, right) < 1e-10
    streamed.close()
    assert distance(engine("Qwen3ForCausalLM").score(some_rows()).by_layer, right) > 0.1


@pytest.mark.parametrize("change", [
    lambda rows: [Row((*row.ids[:-1], 2), row.border) if len(row.ids) == 40 else row for row in rows],
    lambda rows: [Row(row.ids, 0) for row in rows],
], ids=["token", "segment"])  # fmt: skip
def test_the_bound_rejects_another_token_and_another_segment(change: Callable[[list[Row]], list[Row]]) -> None:
    right = expected(built("BertForSequenceClassification"), some_rows())
    assert distance(engine("BertForSequenceClassification").score(change(some_rows())).by_layer, right) > 1e-3


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "Qwen3ForCausalLM"])
def test_in_bfloat16_chunks_differ_by_less_than_bfloat16_from_float64(name: str) -> None:
    runs = [engine(name, torch.bfloat16, chunk=chunk).score(some_rows()).by_layer for chunk in (1, 40, 512)]
    right = expected(built(name), some_rows())
    rounding = distance(runs[0], right)
    assert 0 < rounding < 0.2 * right.std()
    assert max(distance(run, runs[0]) for run in runs[1:]) <= rounding


@pytest.mark.parametrize("spec", ["minilm-reranker", "pydocs-reranker"])
def test_bundled_rerankers_score_as_their_evaluation_does(spec: str) -> None:
    loaded = bundled.load(spec)
    built_on = Architecture(loaded.model.config)
    query = "How is a tensor moved to another device?"
    documents = [f"torch.Tensor.to\nReturns a tensor on another device, case {n}. " * (1 + 3 * n) for n in range(6)]
    found = encode(built_on, loaded.tokenizer, query, documents)
    rows = pairs.rows(loaded.tokenizer, query, documents)
    assert [row.ids for row in found.rows] == [row.ids for row in rows]
    assert 0 < found.truncated < 6
    with torch.inference_mode():
        right = layer_scores.scores_of(loaded.model, rows).double().numpy()
    scores = Engine(built_on, InMemory(loaded.model), chunk=200).score(found.rows)
    assert distance(scores.by_layer, right) < 1e-4 < right[-1].std()


# Pruning


@pytest.mark.parametrize("hidden", [Resident, Offloaded], ids=["resident", "offloaded"])
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "Qwen3ForSequenceClassification"])
def test_those_that_go_on_score_as_if_nobody_had_been_dropped(name: str, hidden: Any, tmp_path: Path) -> None:
    places = {"hidden": Resident if hidden is Resident else lambda: Offloaded(tmp_path)}
    right = expected(built(name), some_rows())
    found = engine(name, chunk=40, **places).score(some_rows(), keeping(range(8), [0, 2, 3, 6, 7], [2, 6]))
    ran = np.array([3, 2, 4, 3, 2, 2, 4, 3])
    assert found.ran.tolist() == ran.tolist() and found.active.tolist() == [8, 8, 5, 2]
    for candidate, layers in enumerate(ran):
        assert distance(found.by_layer[:layers, candidate], right[:layers, candidate]) < 1e-10
        assert np.isnan(found.by_layer[layers:, candidate]).all()
        assert found.last[candidate] == found.by_layer[layers - 1, candidate]
    assert found.work == ran.sum()


@pytest.mark.parametrize("places", [Resident, Offloaded], ids=["resident", "offloaded"])
def test_a_chunk_made_of_many_has_the_states_of_each(places: Any, tmp_path: Path) -> None:
    rows = some_rows((10,) * 36)
    name = "Qwen3ForSequenceClassification"
    run = engine(name, chunk=60, hidden=Resident if places is Resident else lambda: Offloaded(tmp_path))
    kept = list(range(2, 36, 6))  # one of each of the six chunks, so more than there are buffers
    found = run.score(rows, keeping(kept)).by_layer
    assert distance(found[:, kept], expected(built(name), [rows[candidate] for candidate in kept])) < 1e-10


def test_an_end_is_early_and_the_next_pass_is_whole(tmp_path: Path) -> None:
    built("Qwen3ForSequenceClassification").save_pretrained(tmp_path)
    right = expected(built("Qwen3ForSequenceClassification"), some_rows())
    weights = Recording(Streamed(tmp_path))
    run = Engine(architecture("Qwen3ForSequenceClassification"), weights, chunk=40)
    for _ in range(2):  # a layer is being read when the first pass ends
        found = run.score(some_rows(), keeping(range(8), []))
        assert len(found.active) == len(found.seconds) == len(found.stalls) == 2
        assert distance(found.by_layer[:2], right[:2]) < 1e-10 and np.isnan(found.by_layer[2:]).all()
    assert distance(run.score(some_rows()).by_layer, right) < 1e-10
    weights.close()
    assert weights.asked == [0, 1, 0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize("exact", [False, True])
def test_live_decisions_are_those_of_a_replay(exact: bool) -> None:
    run = engine(chunk=40)
    recorded = run.score(some_rows()).by_layer
    decided = 0
    for threshold in (0.0, 0.2, 0.5, np.inf):
        selection = Selection(len(LENGTHS), LAYERS, 3, ClusterRule(threshold), exact)
        found = run.score(some_rows(), selection.step)
        live, replayed = selection.outcome(), replay.replay(recorded, 3, ClusterRule(threshold), exact)
        assert live.chosen.tolist() == replayed.chosen.tolist()
        assert live.layer.tolist() == replayed.layer.tolist() == found.ran.tolist()
        decided += int((found.ran < LAYERS).sum())
    assert decided


@pytest.mark.parametrize("kept", [[8], [-1], [0, 7]])
def test_only_active_candidates_can_go_on(kept: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot go on"):
        engine().score(some_rows(), keeping([0, 1, 2], kept))


# Order of what is asked for, and memory


class Recording:
    """Weights that note which layers are asked for, and spoil a layer's buffer once another is asked for."""

    def __init__(self, weights: Any) -> None:
        self._weights, self.layers = weights, weights.layers
        self.asked: list[int] = []
        self._given: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def layer(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        for value in self._given.values():
            value.fill_(float("nan"))
        self._given = {name: value.clone() for name, value in self._weights.layer(index).items()}
        return self._given


def test_a_layer_is_asked_for_once_and_never_used_after_the_next() -> None:
    model = built("Qwen3ForSequenceClassification")
    weights = Recording(InMemory(model))
    found = Engine(architecture("Qwen3ForSequenceClassification"), weights, chunk=8).score(some_rows())
    assert weights.asked == list(range(LAYERS))
    assert distance(found.by_layer, expected(model, some_rows())) < 1e-10


class Largest(TorchDispatchMode):
    """The most numbers of any tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, tuple) else (found,):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                self.numbers = max(self.numbers, value.numel())
        return found


def test_no_temporary_is_larger_than_a_chunk_and_no_vocabulary_of_logits_exists() -> None:
    vocabulary, lengths = 5000, (16,) * 12
    rows = some_rows(lengths, vocabulary)
    run = Architecture(built("Qwen3ForCausalLM", vocabulary=vocabulary).config, (YES, NO))
    weights = InMemory(built("Qwen3ForCausalLM", vocabulary=vocabulary))
    sizes = {}
    for chunk in (32, 64, 192):
        prepared = Engine(run, weights, chunk=chunk)
        with Largest() as largest:
            prepared.score(rows)
        sizes[chunk] = largest.numbers
    assert sizes == {chunk: chunk * 48 for chunk in sizes}  # its tokens by the feed-forward's width


class Counted(Resident):
    """Resident states that note the most tokens held, and those held when the last was put."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.held: list[int] = []
        self.closed = False

    def put(self, chunk: int, hidden: Tensor) -> None:
        super().put(chunk, hidden)
        self.sizes[chunk] = hidden.shape[0] * hidden.shape[1]
        self.held.append(sum(self.sizes.values()))

    def close(self) -> None:
        super().close()
        self.closed = True


def test_states_of_those_who_left_are_given_back_and_none_are_kept_of_the_last_layer() -> None:
    made: list[Counted] = []

    def states() -> Counted:
        made.append(Counted())
        return made[-1]

    rows = some_rows((10,) * 12)
    run = engine(chunk=20, hidden=states)
    run.score(rows, keeping([0, 5, 6]))
    assert max(made[0].held) == 120 and made[0].held[-1] == 30 and made[0].closed
    run.score(rows)
    assert len(made[1].held) == 6 * LAYERS  # six chunks: embedded, then put after all layers but the last


def test_states_are_given_back_after_a_failure() -> None:
    made = Counted()
    with pytest.raises(ValueError, match="cannot go on"):
        engine(hidden=lambda: made).score(some_rows(), keeping([9]))
    assert made.closed


def test_times_are_told_layer_by_layer() -> None:
    found = engine(chunk=40).score(some_rows())
    assert isinstance(found, Scores) and found.embedding > 0
    assert found.seconds.shape == found.stalls.shape == (LAYERS,)
    assert (found.seconds >= found.stalls).all() and (found.stalls >= 0).all()


# Wrong input


@pytest.mark.parametrize(("rows", "words"), [
    ([], "no candidates"),
    ([Row((), 0)], "Candidate 0 has 0 tokens"),
    ([Row((4,), 1), Row((4,) * (CONTEXT + 1), 1)], "Candidate 1 has 65 tokens; the model takes 1 to 64"),
    ([Row((4, V), 2)], "96, not 97"),
])  # fmt: skip
def test_wrong_rows_are_refused(rows: list[Row], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine().score(rows)


def test_roberta_has_fewer_places_than_positions() -> None:
    assert architecture("RobertaForSequenceClassification").longest == CONTEXT - PAD - 1
    assert architecture("BertForSequenceClassification").longest == CONTEXT


def test_scores_that_are_no_numbers_are_an_error() -> None:
    weights = InMemory(built("Qwen3ForSequenceClassification"))
    run = Engine(architecture("Qwen3ForSequenceClassification"), Spoiled(weights, lambda name, value: value * np.nan))
    with pytest.raises(ValueError, match="candidate 0 after layer 2 is not a finite number"):
        run.score(some_rows())


class Spoiled:
    """Weights whose second layer is changed."""

    def __init__(self, weights: Any, change: Callable[[str, Tensor], Tensor | None]) -> None:
        self._weights, self._change, self.layers = weights, change, weights.layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def layer(self, index: int) -> dict[str, Tensor]:
        found = self._weights.layer(index)
        changed = {name: self._change(name, value) if index == 1 else value for name, value in found.items()}
        return {name: value for name, value in changed.items() if value is not None}


@pytest.mark.parametrize(("change", "words"), [
    (lambda name, value: None if "down" in name else value, "Layer 1 .* mlp.down_proj.weight is missing"),
    (lambda name, value: value[:5] if "down" in name else value, r"mlp.down_proj.weight is \[5, 48\], not \[32, 48\]"),
    (lambda name, value: value.float() if "down" in name else value, "is torch.float32, the embeddings are .*float64"),
])  # fmt: skip
def test_layers_that_do_not_fit_are_refused(change: Callable[[str, Tensor], Tensor | None], words: str) -> None:
    weights = Spoiled(InMemory(built("Qwen3ForSequenceClassification")), change)
    with pytest.raises(ValueError, match=words):
        Engine(architecture("Qwen3ForSequenceClassification"), weights).score(some_rows())


def test_an_engine_needs_weights_of_its_architecture() -> None:
    with pytest.raises(ValueError, match="at least one token, not 0"):
        engine(chunk=0)
    weights = InMemory(built("BertForSequenceClassification"))
    with pytest.raises(ValueError, match=r"lack model\.norm\.weight"):
        Engine(architecture("Qwen3ForSequenceClassification"), weights)
    with pytest.raises(ValueError, match="3 layers, its weights 4"):
        Engine(Architecture(changed("BertForSequenceClassification", num_hidden_layers=3)), weights)


def changed(name: str, **values: Any) -> Any:
    kept = built(name).config.to_dict() | {"architectures": [name]} | values
    return type(built(name).config).from_dict(kept)


@pytest.mark.parametrize(("config", "answers", "words"), [
    (lambda: AutoConfig.for_model("opt", architectures=["OPTForCausalLM"]), None, "OPTForCausalLM cannot be run"),
    (lambda: AutoConfig.for_model("llama"), None, "without an architecture"),
    (lambda: changed("Qwen3ForCausalLM"), None, 'logits of "yes" and "no"'),
    (lambda: changed("Qwen3ForCausalLM"), (3, 3), r"\(3, 3\) are not two different ones"),
    (lambda: changed("Qwen3ForCausalLM"), (3, V), "below 97"),
    (lambda: changed("LlamaForSequenceClassification"), (3, 4), "head of its own"),
    (lambda: changed("BertForSequenceClassification", num_labels=2, id2label=None), None, "gives 2 numbers a row"),
    (lambda: changed("BertForSequenceClassification", is_decoder=True), None, "configured as a decoder"),
    (lambda: changed("Qwen2ForSequenceClassification", use_sliding_window=True, sliding_window=8,
                     layer_types=["full_attention", "sliding_attention"] * 2), None, "sliding_attention"),
    (lambda: changed("LlamaForSequenceClassification", rope_parameters={
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), None, "positions of type 'dynamic'"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused_by_name(
    config: Callable[[], Any], answers: tuple[int, int] | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Architecture(config(), answers)


# What a model reads


def word_tokenizer(words: str, pair: bool = True, **options: Any) -> PreTrainedTokenizerFast:
    """A token a word; pairs as BERT has them."""
    entries = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *words.split()]
    made = Tokenizer(models.WordLevel({entry: index for index, entry in enumerate(entries)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pair:
        made.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 0), ("[SEP]", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, cls_token="[CLS]", pad_token="[PAD]", sep_token="[SEP]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"], **options,
    )  # fmt: skip


def test_a_causal_lm_reads_the_published_prompt() -> None:
    roomy = Architecture(changed("Qwen3ForCausalLM", max_position_embeddings=1000, vocab_size=300), (YES, NO))
    tokenizer = shapes.byte_tokenizer()
    found = encode(roomy, tokenizer, "a query", ["short", "long " * 50], longest=420, instruction="Do it")
    assert tokenizer.decode(found.rows[0].ids) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Do it\n<Query>: a query\n<Document>: short<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    assert found.truncated == 1 and len(found.rows[1].ids) == 420
    cut = tokenizer.decode(found.rows[1].ids)
    assert cut.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n") and "<Document>: long long" in cut
    assert "Given a web search query" in tokenizer.decode(encode(roomy, tokenizer, "q", ["d"]).rows[0].ids)


def test_yes_and_no_are_a_token_each() -> None:
    assert answer_ids(word_tokenizer("no maybe yes")) == (6, 4)
    with pytest.raises(ValueError, match="are not a token each"):
        answer_ids(shapes.byte_tokenizer())


def test_other_models_read_the_tokenizers_pair() -> None:
    tokenizer = word_tokenizer("a b c d e f")
    bert, roberta = architecture("BertForSequenceClassification"), architecture("RobertaForSequenceClassification")
    found = encode(bert, tokenizer, "a b", ["c", "c d e f"], longest=7)
    assert found.rows == [Row((0, 4, 5, 2, 6, 2), 4), Row((0, 4, 5, 2, 6, 7, 2), 4)]
    assert found.truncated == 1
    plain = word_tokenizer("a b c d e f", model_max_length=8)
    assert len(encode(roberta, plain, "a b", ["c d e f " * 9]).rows[0].ids) == 8
    assert encode(bert, tokenizer, "a", []).rows == []
    batch = Batch(found.rows)
    assert batch.segments.tolist() == [[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize(("query", "documents", "longest", "words"), [
    (" ", ["a"], None, "The query is empty"),
    ("a", ["a", "\n"], None, "Document 1 is empty"),
    ("a", ["a"], CONTEXT + 1, "Rows of 65 tokens exceed the 64"),
    ("a b c", ["a"], 6, "take 6 of 6 tokens: no room"),
    ("a", ["a"], 0, "take 4 of 0 tokens: no room"),
])  # fmt: skip
def test_pairs_that_make_no_sense_are_refused(
    query: str, documents: list[str], longest: int | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        encode(architecture("BertForSequenceClassification"), word_tokenizer("a b c"), query, documents, longest)
