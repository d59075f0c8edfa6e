"""Every architecture on tiny models: transformers' scores after every layer, parts, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import random_reranker, reranker_config
from torch import Tensor
from transformers import AutoConfig

from ondevice.corpus import pairs
from ondevice.corpus.pairs import Row
from ondevice_papers.grating.architectures import Architecture
from ondevice_papers.grating.engine import Engine
from ondevice_papers.grating.weights import BY_LAYER, InMemory

SIZES = {"num_key_value_heads": 2, "head_dim": 8}
DEBERTA = {"relative_attention": True, "position_biased_input": False, "norm_rel_ebd": "layer_norm",
           "type_vocab_size": 0, "position_buckets": 6, "pos_att_type": ["p2c", "c2p"],
           "share_att_key": True}  # fmt: skip
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {  # by a name: the class, the configuration's type and its values
    "Bert": ("BertForSequenceClassification", "bert", {}),
    "Roberta": ("RobertaForSequenceClassification", "roberta", {"type_vocab_size": 1}),
    "XlmRoberta": ("XLMRobertaForSequenceClassification", "xlm-roberta", {"type_vocab_size": 1}),
    "Llama": ("LlamaForSequenceClassification", "llama", {"num_key_value_heads": 2}),
    "Qwen2": ("Qwen2ForSequenceClassification", "qwen2", {"num_key_value_heads": 2}),
    "Qwen3": ("Qwen3ForSequenceClassification", "qwen3", SIZES),
    "Qwen3LM": ("Qwen3ForCausalLM", "qwen3", SIZES),
    "Gemma": ("GemmaForSequenceClassification", "gemma", SIZES),
    "GemmaLM": ("GemmaForCausalLM", "gemma", SIZES),
    "Gemma2": ("Gemma2ForSequenceClassification", "gemma2", SIZES | {"sliding_window": 40}),
    "Gemma2LM": ("Gemma2ForCausalLM", "gemma2", SIZES | {"sliding_window": 40, "final_logit_softcapping": 2.0,
                                                         "attn_logit_softcapping": 3.0}),
    "Gemma3": ("Gemma3TextForSequenceClassification", "gemma3_text", SIZES | {"sliding_window": 8}),
    "Mistral": ("MistralForSequenceClassification", "mistral", SIZES | {"sliding_window": 8}),
    "Phi3": ("Phi3ForSequenceClassification", "phi3", {"num_key_value_heads": 2}),
    "Qwen2Sliding": ("Qwen2ForSequenceClassification", "qwen2", {
        "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "SmolLM3": ("SmolLM3ForSequenceClassification", "smollm3", {"num_key_value_heads": 2}),
    "GraniteLM": ("GraniteForCausalLM", "granite", {
        "num_key_value_heads": 2, "residual_multiplier": 0.3, "embedding_multiplier": 5.0, "logits_scaling": 2.0,
        "attention_multiplier": 0.5}),
    "Olmo2LM": ("Olmo2ForCausalLM", "olmo2", {"num_key_value_heads": 2}),
    "CohereLM": ("CohereForCausalLM", "cohere", {"num_key_value_heads": 2}),
    "Electra": ("ElectraForSequenceClassification", "electra", {"embedding_size": 24}),
    "DistilBert": ("DistilBertForSequenceClassification", "distilbert", {
        "dim": 32, "hidden_dim": 48, "n_layers": 5, "n_heads": 4}),
    "MPNet": ("MPNetForSequenceClassification", "mpnet", {}),
    "Camembert": ("CamembertForSequenceClassification", "camembert", {"type_vocab_size": 1}),
    "Ernie": ("ErnieForSequenceClassification", "ernie", {}),
    "PreNorm": ("RobertaPreLayerNormForSequenceClassification", "roberta-prelayernorm", {"type_vocab_size": 1}),
    "Deberta1": ("DebertaForSequenceClassification", "deberta", {
        "relative_attention": True, "type_vocab_size": 0, "position_biased_input": False,
        "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}),
    "Modern": ("ModernBertForSequenceClassification", "modernbert", {"local_attention": 8}),
    "ModernMean": ("ModernBertForSequenceClassification", "modernbert", {
        "local_attention": 8, "classifier_pooling": "mean", "norm_bias": True, "classifier_bias": True}),
    "Deberta3": ("DebertaV2ForSequenceClassification", "deberta-v2", DEBERTA),
    "Deberta2": ("DebertaV2ForSequenceClassification", "deberta-v2", {
        "relative_attention": True, "type_vocab_size": 2, "pos_att_type": ["c2p"], "embedding_size": 24}),
    "DebertaPlain": ("DebertaV2ForSequenceClassification", "deberta-v2", {}),
}  # fmt: skip
V, LAYERS, CONTEXT, PAD, YES, NO = 97, 5, 64, 1, 5, 9
LENGTHS = (5, 17, 9, 33, 9, 1, 40, 12)

pytestmark = pytest.mark.usefixtures("one_thread")


def configured(kind: str, **values: Any) -> Any:
    name, model_type, own = KINDS[kind]
    return reranker_config(name, model_type, **own | values)


@cache
def built(kind: str) -> Any:
    config = configured(kind)
    config._attn_implementation = "eager" if kind.startswith(("Gemma2", "Deberta", "MPNet")) else "sdpa"
    return random_reranker(config)


def architecture(kind: str) -> Architecture:
    return Architecture(built(kind).config, (YES, NO) if "Causal" in KINDS[kind][0] else None)


class InParts(InMemory):
    """A layer's parts one after another, as they come from a disk."""

    def __init__(self, kind: str) -> None:
        super().__init__(built(kind))
        self.run = architecture(kind)
        self.layers = [dict(layer) for layer in self._groups.layers]

    def layer(self, index: int) -> Iterator[Any]:
        for parts in self.run.units:
            yield parts, {name: value for name, value in self.layers[index].items() if self.run.part_of(name) in parts}


def some_rows() -> list[Row]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(4, V, (n,), generator=generator).tolist() for n in LENGTHS]
    return [Row(ids, len(ids) // 2) for ids in drawn]


@torch.no_grad()
def transformers_scores(model: Any, rows: Sequence[Row]) -> Tensor:
    """[n] of transformers' own forward of rows padded on the right."""
    batch = pairs.padded([pairs.Row(tuple(row.ids), row.border) for row in rows], PAD, "right")
    types = model.config.to_dict().get("type_vocab_size", 0) > 1
    extra = {"token_type_ids": batch["token_type_ids"]} if types else {}
    mask = batch["attention_mask"]
    logits = model(batch["input_ids"], attention_mask=mask, **extra).logits
    if logits.ndim == 2:
        return logits[:, 0]
    last = logits[torch.arange(len(rows)), mask.sum(1) - 1]
    return last[:, YES] - last[:, NO]


@cache
def expected(kind: str) -> NDArray[np.float64]:
    """[layers, N] of models that have so many layers."""
    model = copy.deepcopy(built(kind))
    trunk = model.base_model
    stack = getattr(trunk, "encoder", getattr(trunk, "transformer", trunk))
    name = "layer" if hasattr(stack, "layer") else "layers"
    scores = []
    for layers in range(LAYERS, 0, -1):
        setattr(stack, name, getattr(stack, name)[:layers])
        scores.insert(0, transformers_scores(model, some_rows()))
    return torch.stack(scores).numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 40, 10_000])
def test_every_layers_scores_are_those_of_a_shorter_model_whatever_the_chunks(kind: str, chunk: int) -> None:
    found = Engine(architecture(kind), InParts(kind), chunk=chunk).score(some_rows()).outcome.history
    assert expected(kind).std(1).min() > 0.01  # the candidates differ
    bound = 1e-5 if "Gemma2" in kind else 1e-10  # its softmax is in float32
    assert np.abs(found - expected(kind)).max() < bound


def test_layers_are_in_halves_where_they_can_be() -> None:
    whole = {kind for kind in KINDS if architecture(kind).units == BY_LAYER}
    assert not whole & {"Bert", "Qwen3", "Qwen3LM", "Gemma2", "Modern", "Deberta3"}
    assert all(all(part for _, part in InParts(kind).layer(0)) for kind in KINDS)


def test_a_layer_holds_parameters_no_longer_than_it_runs() -> None:
    """Else a closed reranker would keep its window's memory."""
    run = architecture("Bert")
    with pytest.raises(RuntimeError, match="amid"), run.holding(0, InParts("Bert").layers[0]):
        assert not all(value.is_meta for value in run._stack[0].parameters())
        raise RuntimeError("amid")
    assert all(value.is_meta for value in run._stack.parameters())


def test_the_longest_row_is_within_positions() -> None:
    kinds = {"Bert": CONTEXT, "Roberta": CONTEXT - PAD - 1, "Qwen3": CONTEXT}
    assert {kind: architecture(kind).longest for kind in kinds} == kinds


# What is refused

DOWN = "mlp.down_proj.weight"
Layers = list[dict[str, Tensor]]


@pytest.mark.parametrize(("kind", "change", "words"), [
    ("Qwen3", lambda layers: layers[1].pop(DOWN), f"Layer 1 .*{DOWN}"),
    ("Qwen3", lambda layers: layers[1].update({DOWN: layers[1][DOWN][:5]}), rf"{DOWN} .*\[5, 48\].*\[32, 48\]"),
    ("Qwen3", lambda layers: layers[1].update({DOWN: layers[1][DOWN].float()}), "torch.float32.*float64"),
    ("Qwen3", lambda layers: layers.pop(), f"{LAYERS - 1} .*{LAYERS}"),
    ("Modern", lambda layers: layers[1].pop("attn_norm.weight"), r"Layer 1 .*attn_norm\.weight"),  # its layers differ
    ("Modern", lambda layers: layers[0].update(layers[1]), r"Layer 0 .*attn_norm\.weight"),
])  # fmt: skip
def test_layers_that_do_not_fit_are_refused(kind: str, change: Callable[[Layers], Any], words: str) -> None:
    layers = InParts(kind).layers
    architecture(kind).require(layers, torch.float64)
    change(layers)
    with pytest.raises(ValueError, match=words):
        architecture(kind).require(layers, torch.float64)


@pytest.mark.parametrize(("kind", "name"), [
    ("Qwen3", "model.norm.weight"), ("Deberta3", "deberta.encoder.rel_embeddings.weight"),
    ("Roberta", "classifier.out_proj.weight"),
])  # fmt: skip
def test_weights_that_lack_a_tensor_are_refused(kind: str, name: str) -> None:
    rest = InParts(kind).rest()
    del rest[name]
    with pytest.raises(ValueError, match=name):
        architecture(kind).hold(rest)


@pytest.mark.parametrize(("config", "words"), [
    (lambda: AutoConfig.for_model("opt", architectures=["OPTForCausalLM"]), "OPTForCausalLM"),
    (lambda: AutoConfig.for_model("llama"), "architecture"),
    (lambda: configured("Llama", num_labels=2), " 2 "),
    (lambda: reranker_config("LayerWiseMiniCPMForCausalLM", "llama", auto_map={"AutoModel": "m.M"}), "LayerWise"),
    (lambda: configured("Qwen3LM"), '"yes".*"no"'),
    (lambda: configured("Bert", is_decoder=True), "is_decoder"),
    (lambda: configured("Gemma", use_bidirectional_attention=True), "use_bidirectional_attention"),
    (lambda: AutoConfig.for_model("albert", architectures=["AlbertForSequenceClassification"], num_labels=1), "Albert"),
    (lambda: AutoConfig.for_model("bart", architectures=["BartForSequenceClassification"], num_labels=1), "decoder"),
    (lambda: configured("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
     "'dynamic'"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused_by_name(config: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Architecture(config())


@pytest.mark.parametrize(("kind", "values", "words"), [
    ("Deberta3", {"conv_kernel_size": 3}, "between its layers"),
    ("Qwen3", {"layer_types": ["full_attention"] * 4 + ["chunked_attention"]}, "chunked_attention"),
])  # fmt: skip
def test_what_is_more_than_layers_is_found_out_with_the_weights(kind: str, values: dict[str, Any], words: str) -> None:
    config = configured(kind, **values)
    run = Architecture(config)
    with pytest.raises(ValueError, match=words):
        run.hold(InMemory(random_reranker(config)).rest())
