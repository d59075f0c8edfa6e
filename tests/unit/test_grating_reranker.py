"""The reranker on tiny saved models: transformers' scores under every budget, pruning, int8, files, wrong input."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, PreTrainedTokenizerFast

from ondevice import models, shapes
from ondevice.grating import hidden_states, quantised, replay, streamable
from ondevice.grating import reranker as reranker_module
from ondevice.grating.architectures import Architecture, encode
from ondevice.grating.checkpoint import Checkpoint
from ondevice.grating.engine import Engine
from ondevice.grating.guarantee import Guarantee, MarginRule
from ondevice.grating.pruning import ClusterRule
from ondevice.grating.quantised import SCALE, Dequantised
from ondevice.grating.reranker import Report, Reranker
from ondevice.grating.weights import InMemory, Streamed

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("bert", {}),
    "RobertaForSequenceClassification": ("roberta", {"type_vocab_size": 1}),
    "XLMRobertaForSequenceClassification": ("xlm-roberta", {"type_vocab_size": 1}),
    "LlamaForSequenceClassification": ("llama", {"num_key_value_heads": 2}),
    "Qwen2ForSequenceClassification": ("qwen2", {"num_key_value_heads": 2}),
    "Qwen3ForSequenceClassification": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "Qwen3ForCausalLM": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
}
BERT, QWEN3 = "BertForSequenceClassification", "Qwen3ForSequenceClassification"
WORDS = "yes no what is alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi"
LAYERS, CONTEXT = 4, 80
QUERY = "what is alpha"
_DRAWN = np.random.default_rng(5)
DOCUMENTS = [" ".join(_DRAWN.choice(WORDS.split()[4:], size)) for size in (4, 30, 9, 17, 1, 9, 40, 12, 25, 6)]
N = len(DOCUMENTS)


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def tokenizer(words: str = WORDS) -> PreTrainedTokenizerFast:
    """A token a word; pairs as BERT has them."""
    entries = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *words.split()]
    made = Tokenizer(WordLevel({entry: index for index, entry in enumerate(entries)}, "[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 0), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, cls_token="[CLS]", pad_token="[PAD]", sep_token="[SEP]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"], model_max_length=CONTEXT,
    )  # fmt: skip


@cache
def built(name: str) -> Any:
    """A random model whose scores differ, so that wrong states show."""
    kind, values = KINDS[name]
    labels = {} if "Causal" in name else {"num_labels": 1}
    config = AutoConfig.for_model(
        kind, vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=CONTEXT + 2, pad_token_id=1, architectures=[name], tie_word_embeddings=True,
        **labels, **values,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def saved(folder: Path, name: str = BERT, called: str = "tiny-reranker", **options: Any) -> Path:
    folder = folder / called
    built(name).save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, saved(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path)


@torch.no_grad()
def expected(name: str, documents: Sequence[str] = DOCUMENTS, longest: int | None = None) -> NDArray[np.float64]:
    """[N] logits of transformers' model for one document at a time, without padding."""
    model = built(name)
    answers = (4, 5) if "Causal" in name else None
    found = []
    for row in encode(Architecture(model.config, answers), tokenizer(), QUERY, documents, longest).rows:
        ids = torch.tensor([row.ids])
        types = {"token_type_ids": (torch.arange(len(row.ids)) >= row.border).long()[None]} if "Bert" in name else {}
        logits = model(ids, **(types if name == BERT else {})).logits
        found.append(logits[0, -1, 4] - logits[0, -1, 5] if answers else logits[0, 0])
    return torch.stack(found).double().numpy()


def by_place(found: Sequence[dict[str, Any]]) -> NDArray[np.float64]:
    """Scores in the documents' order."""
    return np.array([one["score"] for one in sorted(found, key=lambda one: one["corpus_id"])])


def report(reranker: Reranker) -> Report:
    assert reranker.report is not None
    return reranker.report


# Scores


@pytest.mark.parametrize("budget", [None, "least", 200.0])
def test_scores_and_order_are_those_of_transformers(
    each: tuple[str, Path], budget: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, folder = each
    # transformers has a fixed class of tokenizers for some of the models, which cannot be of words.
    monkeypatch.setattr(reranker_module, "_tokenizer", lambda *_: tokenizer())
    right = expected(name)
    assert right.std() > 0.05  # the documents differ
    if budget == "least":
        budget = least(folder) + 3  # what a tokenizer takes differs a little from time to time
    with Reranker(folder, budget, folder=tmp_path) as reranker:
        found = reranker.rank(QUERY, DOCUMENTS, activation_fn=torch.clone)
        assert [one["corpus_id"] for one in found] == np.argsort(-right).tolist()
        assert np.abs(by_place(found) - right).max() < 1e-4
        told = report(reranker)
        assert told.exact and told.saved == 0 and told.truncated == ("Causal" in name)  # of a long prompt
        assert budget is None or told.plan.total <= budget * 1e6


def least(folder: Path) -> float:
    """The smallest budget that ranks the documents; it leaves room for less than all in memory."""
    with Reranker(folder, 1000) as reranker:
        reranker.budget = 0.1
        with pytest.raises(ValueError, match="smallest budget") as told:
            reranker.rank(QUERY, DOCUMENTS)
    return float(str(told.value).split()[-2])


def test_results_are_as_a_cross_encoders(folder: Path) -> None:
    logits = expected(BERT)
    order = np.argsort(-logits)
    with Reranker(folder) as reranker:
        found = reranker.rank(QUERY, DOCUMENTS, top_k=3, return_documents=True)
        assert [list(one) for one in found] == [["corpus_id", "score", "text"]] * 3
        assert [one["text"] for one in found] == [DOCUMENTS[place] for place in order[:3]]
        assert [one["score"] for one in found] == pytest.approx(1 / (1 + np.exp(-logits[order[:3]])), abs=1e-5)
        assert len(reranker.rank(QUERY, DOCUMENTS)) == N
        assert reranker.rank(QUERY, tuple(DOCUMENTS[:1]), 1)[0].keys() == {"corpus_id", "score"}
        doubled = reranker.rank(QUERY, DOCUMENTS, activation_fn=lambda logits: 2 * logits)
        assert by_place(doubled) == pytest.approx(2 * logits, abs=1e-4)


def test_a_config_may_ask_for_logits(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (folder / "config.json").write_text(json.dumps(config))
    with Reranker(folder) as reranker:
        assert by_place(reranker.rank(QUERY, DOCUMENTS)) == pytest.approx(expected(BERT), abs=1e-4)
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"activation\.Tanh, which is not Sigmoid or Identity"):
        Reranker(folder)


def test_the_report_counts_bytes_rows_and_layers(folder: Path) -> None:
    words = " ".join([QUERY, *DOCUMENTS]).split()  # and two marks
    with Reranker(folder) as reranker:
        for again in range(2):
            reranker.rank(QUERY, DOCUMENTS, 3)
            told = report(reranker)
            assert (told.candidates, told.layers, told.layers_run) == (N, LAYERS, LAYERS)
            assert told.seconds.shape == told.stalls.shape == (LAYERS,)
            layers = sum(tensor.length for layer in reranker.checkpoint.groups.layers for tensor in layer.values())
            assert told.read == layers + told.misses * 32 * 4
            assert (told.misses, told.hits > 0) == ((0, True) if again else (len(set(words)) + 2, False))
    with Reranker(folder, 200) as reranker:  # all layers stay
        for expected_bytes in (layers, 0):
            reranker.rank(QUERY, DOCUMENTS)
            assert report(reranker).read - report(reranker).misses * 128 == expected_bytes


def test_sharded_weights_and_another_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamable, "_cache", lambda: tmp_path)
    folder = saved(tmp_path, QWEN3, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    with Reranker(folder) as reranker:
        assert by_place(reranker.rank(QUERY, DOCUMENTS, activation_fn=torch.clone)) == pytest.approx(
            expected(QWEN3), abs=1e-4
        )
    with Reranker(folder, dtype=torch.bfloat16) as reranker:
        gap = np.abs(by_place(reranker.rank(QUERY, DOCUMENTS, activation_fn=torch.clone)) - expected(QWEN3)).max()
        assert 1e-4 < gap < 0.3


def test_two_rerankers_do_not_disturb_each_other(tmp_path: Path) -> None:
    first = Reranker(saved(tmp_path, BERT, "first"), 200)
    second = Reranker(saved(tmp_path, QWEN3, "second"))
    for _ in range(2):
        assert by_place(first.rank(QUERY, DOCUMENTS, activation_fn=torch.clone)) == pytest.approx(
            expected(BERT), abs=1e-4
        )
        assert by_place(second.rank(QUERY, DOCUMENTS, activation_fn=torch.clone)) == pytest.approx(
            expected(QWEN3), abs=1e-4
        )
    first.close()
    first.close()
    assert len(second.rank(QUERY, DOCUMENTS)) == N
    second.close()
    with pytest.raises(ValueError, match="closed"):
        first.rank(QUERY, DOCUMENTS)


def test_a_larger_pool_takes_the_memory_of_layers(folder: Path) -> None:
    many = DOCUMENTS * 200
    with Reranker(folder, 1000) as reranker:
        budget = reranker._planned([60] * len(many)).total / 1e6 - 0.2
        reranker.budget = budget
        for texts, buffers in ((DOCUMENTS, LAYERS), (many, None), (DOCUMENTS, None)):
            found = reranker.rank(QUERY, texts, 4, activation_fn=torch.clone)
            assert [one["score"] for one in found] == pytest.approx(
                np.sort(np.resize(expected(BERT), len(texts)))[::-1][:4], abs=1e-4
            )
            plan = report(reranker).plan
            assert plan.total <= budget * 1e6 and (buffers is None or plan.buffers == buffers)


# Pruning


@pytest.mark.parametrize("mode", ["set", "order"])
@pytest.mark.parametrize("rule", [0.3, ClusterRule(0.2, "std"), ClusterRule(np.inf)], ids=["cv", "std", "never"])
def test_live_pruning_is_the_replay_of_the_recorded_scores(folder: Path, mode: Any, rule: Any) -> None:
    whole = encode(Architecture(built(BERT).config), tokenizer(), QUERY, DOCUMENTS)
    recorded = Engine(Architecture(built(BERT).config), InMemory(built(BERT))).score(whole.rows).by_layer
    wanted = rule if isinstance(rule, ClusterRule) else ClusterRule(rule)
    right = replay.replay(recorded, 3, wanted, mode == "order")
    with Reranker(folder, threshold=rule, mode=mode) as reranker:
        found = reranker.rank(QUERY, DOCUMENTS, 3, activation_fn=torch.clone)
        told = report(reranker)
    assert [one["corpus_id"] for one in found] == right.chosen.tolist()
    assert [one["score"] for one in found] == pytest.approx(right.score[right.chosen], abs=1e-4)
    assert told.saved == pytest.approx(1 - right.work / (LAYERS * N)) and told.layers_run == right.ended
    assert told.exact == (right.work == LAYERS * N)


def test_nothing_is_pruned_where_all_are_asked_for(folder: Path) -> None:
    with Reranker(folder, threshold=0.0) as reranker:
        for k in (None, N):
            found = reranker.rank(QUERY, DOCUMENTS, k)
            assert report(reranker).exact
            assert [one["corpus_id"] for one in found] == np.argsort(-expected(BERT)).tolist()
        reranker.rank(QUERY, DOCUMENTS, 2)
        assert not report(reranker).exact


def test_a_guarantee_decides_by_its_rule(folder: Path) -> None:
    last = np.tril(np.ones((LAYERS - 1, LAYERS - 1))) * np.eye(LAYERS - 1)
    bold, shy = (MarginRule(last, np.full(LAYERS - 1, margin)) for margin in (1e-6, np.inf))
    for rule, exact in ((bold, False), (shy, True), (None, True)):
        with Reranker(folder, recall=Guarantee(rule, 0.1, 0.01, 100)) as reranker:
            reranker.rank(QUERY, DOCUMENTS, 3)
            assert report(reranker).exact == exact
    with pytest.raises(ValueError, match="not by both"):
        Reranker(folder, threshold=0.3, recall=Guarantee(bold, 0.1, 0.01, 100))
    wrong = MarginRule(np.eye(2), np.zeros(2))
    with pytest.raises(ValueError, match="for a model of 3 layers, not of 4"):
        Reranker(folder, recall=Guarantee(wrong, 0.1, 0.01, 100))


# int8


def test_int8_weights_are_within_half_a_step(folder: Path, tmp_path: Path) -> None:
    quantised.save(folder, tmp_path / "small")
    whole, small = (safetensors.torch.load_file(f / "model.safetensors") for f in (folder, tmp_path / "small"))
    matrices = [name for name in whole if ".layer." in name and whole[name].ndim == 2]
    assert len(matrices) == 6 * LAYERS
    assert small.keys() == whole.keys() | {name + SCALE for name in matrices}
    for name, value in whole.items():
        if name not in matrices:
            assert torch.equal(small[name], value)
            continue
        assert small[name].dtype == torch.int8
        steps, scale = small[name].float(), small[name + SCALE][:, None]
        assert ((steps * scale - value).abs() <= scale * 0.5001).all() and steps.abs().max() == 127
    with pytest.raises(ValueError, match="quantised already"):
        quantised.save(tmp_path / "small", tmp_path / "smaller")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_matrices_are_multiplied_out_in_the_models_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    built(QWEN3).to(dtype).save_pretrained(tmp_path / "whole")
    built(QWEN3).float()
    built.cache_clear()
    quantised.save(tmp_path / "whole", tmp_path / "small")
    streamed, whole = Dequantised(Streamed(tmp_path / "small")), Streamed(tmp_path / "whole")
    assert Checkpoint.open(tmp_path / "small").groups.layers[1].keys() > whole.checkpoint.groups.layers[1].keys()
    for index in (0, 1, 3, 1):
        found, right = streamed.layer(index), whole.layer(index)
        assert found.keys() == right.keys()
        for name, value in right.items():
            assert found[name].dtype == dtype
            bound = value.float().abs().amax(-1, keepdim=True) * (0.008 if value.ndim == 2 else 0)
            assert ((found[name].float() - value.float()).abs() <= bound).all(), name
    streamed.close()
    whole.close()


@pytest.mark.parametrize("name", [BERT, "Qwen3ForCausalLM"])
def test_int8_reads_a_quarter_and_scores_nearly_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamable, "_cache", lambda: tmp_path)
    folder = saved(tmp_path, name)
    for _ in range(2):  # the second finds the quantised copy
        with Reranker(folder, 200, int8=True) as small, Reranker(folder, 200) as whole:
            found, right = (one.rank(QUERY, DOCUMENTS, activation_fn=torch.clone) for one in (small, whole))
            kept = small.checkpoint.folder
            assert report(small).read < 0.45 * report(whole).read  # norms and biases of so small a model are many
    gap = np.abs(by_place(found) - by_place(right)).max()
    assert 0 < gap < 0.25 * expected(name).std()
    with Reranker(kept) as again:  # a quantised folder is a spec, too
        assert again.rank(QUERY, DOCUMENTS, activation_fn=torch.clone) == found


# Files


def test_a_file_cut_short_between_passes_is_an_error_and_no_ranking(folder: Path) -> None:
    with Reranker(folder) as reranker:
        reranker.rank(QUERY, DOCUMENTS)
        whole = (folder / "model.safetensors").read_bytes()
        os.truncate(folder / "model.safetensors", len(whole) - 20_000)
        with pytest.raises(ValueError, match="truncated"):
            reranker.rank(QUERY, DOCUMENTS)
        assert reranker.report is None
        (folder / "model.safetensors").write_bytes(whole)  # in place
        assert by_place(reranker.rank(QUERY, DOCUMENTS, activation_fn=torch.clone)) == pytest.approx(
            expected(BERT), abs=1e-4
        )
    os.truncate(folder / "model.safetensors", 20_000)
    with pytest.raises(ValueError, match="truncated"):
        Reranker(folder)


def test_a_full_disk_is_an_error_that_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = tmp_path / "states"
    states.mkdir()
    many = DOCUMENTS * 60
    with Reranker(folder, 1000, folder=states) as reranker:
        reranker.budget = reranker._planned([80] * len(many)).parts["fixed"] / 1e6 + 5
        right = reranker.rank(QUERY, many)
        assert report(reranker).plan.offload

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(hidden_states, "_pwritev", full)
            with pytest.raises(OSError, match="hidden states could not be kept in states: No space left"):
                reranker.rank(QUERY, many)
        assert list(states.iterdir()) == []
        assert reranker.rank(QUERY, many) == right
    assert list(states.iterdir()) == []


def test_a_bundled_reranker_ranks_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamable, "_cache", lambda: tmp_path)
    query = "How is a tensor moved to another device?"
    texts = [
        "Tensor.to\nReturns a tensor on another device.", "os.path.join\nJoins parts of a path.",
        "Module.to\nMoves the parameters of a module to a device.", "json.loads\nParses a text.",
        "Tensor.cpu\nReturns a copy in the memory of the CPU.", "list.sort\nSorts in place.",
    ]  # fmt: skip
    loaded = models.load("minilm-reranker")
    with torch.no_grad():
        batch = loaded.tokenizer([query] * len(texts), texts, padding=True, return_tensors="pt")
        right = loaded.model(**batch).logits[:, 0]
    with Reranker("minilm-reranker", 60) as reranker:
        found = reranker.rank(query, texts, activation_fn=torch.clone)
        assert [one["corpus_id"] for one in found] == right.argsort(descending=True).tolist()
        assert np.abs(by_place(found) - right.numpy()).max() < 1e-4
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("loaded again"))
    Reranker("minilm-reranker").close()
    assert [folder.name.split("-")[0] for folder in tmp_path.iterdir()] == ["minilm"]


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamable, "_cache", lambda: tmp_path)

    def half(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        streamable._written("name", half)
    assert list(tmp_path.iterdir()) == []


def test_random_shapes_are_saved_once_and_read_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamable, "_cache", lambda: tmp_path)
    tiny = shapes._decoder("qwen3", 32, 48, 3, 4, 2, 300, 0, max_position_embeddings=900, head_dim=8)
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny)
    with Reranker("random:tiny") as reranker:
        assert reranker.checkpoint.groups.table.dtype == torch.bfloat16
        assert len(reranker.rank("a", ["bc", "def"])) == 2
        assert reranker.architecture.answers is not None and len(set(reranker.architecture.answers)) == 2


# Wrong input


@pytest.mark.parametrize(("query", "documents", "k", "words"), [
    ("", ["a"], None, "The query is a text that is not empty, not ''"),
    (7, ["a"], None, "not 7"),
    ("a", [], None, "at least one document"),
    ("a", "alpha", None, "a list of at least one document"),
    ("a", ["a", " "], None, "Document 1 is a text that is not empty, not ' '"),
    ("a", ["a", None], None, "Document 1 .* not None"),
    ("a", ["a", "b"], 0, "top_k is from 1 to the 2 documents, not 0"),
    ("a", ["a", "b"], 3, "top_k is from 1 to the 2 documents, not 3"),
    ("alpha " * 100, ["a"], None, "no room is left for a document"),
])  # fmt: skip
def test_what_cannot_be_ranked_is_refused(query: Any, documents: Any, k: Any, words: str, folder: Path) -> None:
    with Reranker(folder) as reranker, pytest.raises(ValueError, match=words):
        reranker.rank(query, documents, k)


def test_long_documents_are_cut_and_counted_or_refused(folder: Path) -> None:
    texts = [*DOCUMENTS, "beta " * 100, "gamma " * 74]
    with Reranker(folder) as reranker:
        found = by_place(reranker.rank(QUERY, texts, activation_fn=torch.clone))
        assert report(reranker).truncated == 1  # three words and three marks leave 74 of 80 places
        assert found == pytest.approx(expected(BERT, texts), abs=1e-4)
    with Reranker(folder, max_length=20) as reranker:
        reranker.rank(QUERY, texts)
        assert report(reranker).truncated == 6
    with Reranker(folder, truncate=False) as reranker, pytest.raises(ValueError, match="1 of 12 documents are longer"):
        reranker.rank(QUERY, texts)


@pytest.mark.parametrize(("options", "words"), [
    ({"mode": "best"}, "set or order, not 'best'"),
    ({"memory_budget": 1}, "1 MB of memory are too few .* the smallest budget that works is [0-9]+ MB"),
    ({"memory_budget": -5}, "above 0 MB, not -5"),
    ({"max_length": 0}, "from 1 to 82 tokens, not 0"),
    ({"max_length": 83}, "from 1 to 82 tokens, not 83"),
    ({"threshold": float("nan")}, "not a number"),
    ({"throttle": 0.0}, "above 0 bytes"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused_at_once(options: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=words):
        Reranker(folder, **options)


def test_a_spec_must_be_a_reranker(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no model 'nonsense'; there are"):
        Reranker("nonsense")
    with pytest.raises(FileNotFoundError, match=r"no folder '\./nowhere'"):
        Reranker("./nowhere")
    with pytest.raises(ValueError, match=r"pydocs-lm-small is a causal language model .* it is no reranker"):
        Reranker("pydocs-lm-small")
    with pytest.raises(ValueError, match="BertModel cannot be run layer by layer"):
        Reranker(models.MINILM)
    language_model = saved(tmp_path, "Qwen3ForCausalLM", "tiny-lm")
    with pytest.raises(ValueError, match="it is no reranker"):
        Reranker(language_model)
    Reranker(language_model, instruction="Judge").close()
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        Reranker(tmp_path / "empty")
