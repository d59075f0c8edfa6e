"""Every architecture on tiny models: transformers' scores after every layer, parts, and what is refused."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from ondevice.corpus import pairs
from ondevice_papers.grating.architectures import Architecture, Batch, Row
from ondevice_papers.grating.weights import BY_LAYER

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
TABLES = ("word_embeddings.weight", "tok_embeddings.weight", "embed_tokens.weight")

pytestmark = pytest.mark.usefixtures("one_thread")


def configured(kind: str, **values: Any) -> Any:
    name, model_type, own = KINDS[kind]
    labels = {} if "Causal" in name else {"num_labels": 1}
    return AutoConfig.for_model(model_type, **{
        "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "pad_token_id": PAD, "bos_token_id": 2,
        "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3, "architectures": [name], **labels, **own, **values,
    })  # fmt: skip


@cache
def built(kind: str) -> Any:
    """A random model in float64 whose scores differ, so that wrong states show."""
    torch.manual_seed(0)
    config = configured(kind)
    config._attn_implementation = "eager" if kind.startswith(("Gemma2", "Deberta", "MPNet")) else "sdpa"
    model = getattr(transformers, KINDS[kind][0])(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.double()


def architecture(kind: str) -> Architecture:
    return Architecture(built(kind).config, (YES, NO) if "Causal" in KINDS[kind][0] else None)


def some_rows(lengths: Sequence[int] = LENGTHS) -> list[Row]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(4, V, (n,), generator=generator).tolist() for n in lengths]
    return [Row(array("i", ids), len(ids) // 2) for ids in drawn]


def split(model: Any, run: Architecture) -> tuple[dict[str, Tensor], list[list[dict[str, Tensor]]], Tensor]:
    """A model's tensors: the rest, each layer's parts, and the token embedding."""
    rest, table = {}, torch.empty(0)
    layers: list[list[dict[str, Tensor]]] = [[{}, {}] for _ in range(run.layers)]
    for name, value in model.named_parameters():
        before, _, inside = name.partition(".layer." if ".layer." in name else ".layers.")
        if inside:
            index, _, inner = inside.partition(".")
            layers[int(index)][run.part_of(inner)][inner] = value.detach()
        elif before.endswith(TABLES):
            table = value.detach()
        else:
            rest[name] = value.detach()
    return rest, layers, table


@torch.no_grad()
def states_by_layer(kind: str, rows: Sequence[Row]) -> tuple[list[Tensor], Tensor]:
    """The hidden states [n, width, d] after each layer, and the scores [layers, n]."""
    run, model, batch = architecture(kind), built(kind), Batch(rows)
    rest, layers, table = split(model, run)
    run.hold(rest, None if run.answers is None else model.lm_head.weight.detach()[list(run.answers)])
    hidden = run.embed(batch, table[batch.ids])
    run.require([attention | feed_forward for attention, feed_forward in layers], hidden.dtype)
    states, scores = [], []
    for layer, parts in enumerate(layers):
        for part, parameters in enumerate(parts):
            with run.holding(layer, parameters):
                hidden = run.forward(layer, part, batch, hidden)
        states.append(hidden)
        scores.append(run.scores(run.pooled(batch, hidden)))
    return states, torch.stack(scores)


@torch.no_grad()
def transformers_scores(model: Any, rows: Sequence[Row]) -> tuple[Any, Tensor]:
    """transformers' own forward of rows padded on the right: its output, and scores [n]."""
    batch = pairs.padded([pairs.Row(tuple(row.ids), row.border) for row in rows], PAD, "right")
    types = model.config.to_dict().get("type_vocab_size", 0) > 1
    extra = {"token_type_ids": batch["token_type_ids"]} if types else {}
    mask = batch["attention_mask"]
    found = model(batch["input_ids"], attention_mask=mask, output_hidden_states=True, **extra)
    if found.logits.ndim == 2:
        return found, found.logits[:, 0]
    last = found.logits[torch.arange(len(rows)), mask.sum(1) - 1]
    return found, last[:, YES] - last[:, NO]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [LENGTHS, (12, 12, 12), (1, 1)], ids=["mixed", "even", "one token"])
def test_states_and_scores_are_those_of_transformers(kind: str, lengths: Sequence[int]) -> None:
    rows = some_rows(lengths)
    states, scores = states_by_layer(kind, rows)
    found, right = transformers_scores(built(kind), rows)
    assert right.std() > 0.01 or len(set(lengths)) == len(lengths) == 1
    assert float((scores[-1] - right).abs().max()) < 1e-10
    real = Batch(rows).real
    for mine, theirs in zip(states[:-1], found.hidden_states[1:-1], strict=True):
        assert float((mine - theirs)[real].abs().max()) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_scores_between_layers_are_those_of_a_shorter_model(kind: str) -> None:
    rows = some_rows()
    _, scores = states_by_layer(kind, rows)
    model = copy.deepcopy(built(kind))
    trunk = model.base_model
    stack = getattr(trunk, "encoder", getattr(trunk, "transformer", trunk))
    name = "layer" if hasattr(stack, "layer") else "layers"
    for layers in range(LAYERS - 1, 0, -1):
        setattr(stack, name, getattr(stack, name)[:layers])
        _, right = transformers_scores(model, rows)
        assert float((scores[layers - 1] - right).abs().max()) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_does_not_depend_on_the_rows_beside_it(kind: str) -> None:
    rows = some_rows()
    _, together = states_by_layer(kind, rows)
    alone = torch.cat([states_by_layer(kind, [row])[1] for row in rows], 1)
    assert float((together - alone).abs().max()) < (1e-5 if "Gemma2" in kind else 1e-10)  # its softmax is in float32


@torch.no_grad()
def test_gemma_scales_embeddings_in_the_models_dtype() -> None:
    model, run, batch = copy.deepcopy(built("Gemma")).bfloat16(), architecture("Gemma"), Batch(some_rows((4,)))
    run.hold({name: value.detach() for name, value in model.named_parameters()})
    table = model.model.embed_tokens
    scale = torch.tensor(32**0.5, dtype=torch.bfloat16)
    scaled = table(batch.ids) if type(table) is not torch.nn.Embedding else table(batch.ids) * scale
    assert torch.equal(run.embed(batch, table.weight[batch.ids])[0], scaled)


# Parts


@pytest.mark.parametrize("kind", KINDS)
def test_parts_share_out_a_layers_tensors(kind: str) -> None:
    run = architecture(kind)
    _, layers, _ = split(built(kind), run)
    if run.units == BY_LAYER:
        assert all(first and not second for first, second in layers)
        return
    for parts in layers:
        heads = [{name.split(".")[0] for name in part} for part in parts]
        assert all(parts) and not heads[0] & heads[1]
        assert any("att" in name for name in heads[0]) and not any("self_attn" in name for name in heads[1])
    assert run.part_of("mlp.down_proj.weight") == run.part_of("output.dense.weight") == 1
    assert run.part_of("post_attention_layernorm.weight") == (0 if "Gemma2" in kind else 1)


def test_a_layer_holds_parameters_no_longer_than_it_runs() -> None:
    """Else a closed reranker would keep its window's memory."""
    kind = next(iter(KINDS))
    run = architecture(kind)
    _, layers, _ = split(built(kind), run)
    with pytest.raises(RuntimeError, match="amid"), run.holding(0, layers[0][0]):
        assert not all(value.is_meta for value in run._stack[0].parameters())
        raise RuntimeError("amid")
    assert all(value.is_meta for value in run._stack.parameters())


def test_layers_of_modernbert_differ() -> None:
    run = architecture("Modern")
    _, layers, _ = split(built("Modern"), run)
    first, second, *others = whole = [attention | feed_forward for attention, feed_forward in layers]
    run.require(whole, torch.float64)
    with pytest.raises(ValueError, match=r"Layer 1 .* attn_norm\.weight.*\[32\]"):
        run.require([first, first, *others], torch.float64)
    with pytest.raises(ValueError, match=r"Layer 0 .* attn_norm\.weight.*\[32\]"):
        run.require([second, second, *others], torch.float64)
    with pytest.raises(ValueError, match=f"{run.layers - 1} .*{run.layers}"):
        run.require(whole[1:], torch.float64)


@pytest.mark.parametrize(("change", "words"), [
    (lambda name, value: None if "down" in name else value, "Layer 1 .* mlp.down_proj.weight"),
    (lambda name, value: value[:5] if "down" in name else value, r"mlp.down_proj.weight .*\[5, 48\].*\[32, 48\]"),
    (lambda name, value: value.float() if "down" in name else value, "torch.float32.*float64"),
])  # fmt: skip
def test_parts_that_do_not_fit_are_refused(change: Callable[[str, Tensor], Tensor | None], words: str) -> None:
    run = architecture("Qwen3")
    layers = [attention | feed_forward for attention, feed_forward in split(built("Qwen3"), run)[1]]
    layers[1] = {name: made for name, value in layers[1].items() if (made := change(name, value)) is not None}
    with pytest.raises(ValueError, match=words):
        run.require(layers, torch.float64)


@pytest.mark.parametrize(("kind", "name"), [
    ("Qwen3", "model.norm.weight"), ("Bert", "bert.embeddings.LayerNorm.bias"), ("ModernMean", "head.norm.bias"),
    ("Deberta3", "deberta.encoder.rel_embeddings.weight"), ("Roberta", "classifier.out_proj.weight"),
])  # fmt: skip
def test_weights_that_lack_a_tensor_are_refused(kind: str, name: str) -> None:
    run = architecture(kind)
    rest = {found: value for found, value in split(built(kind), run)[0].items() if found != name}
    with pytest.raises(ValueError, match=f"{run.name} .*{name}"):
        run.hold(rest)


# Configurations


def test_the_longest_row_is_within_positions() -> None:
    kinds = {"Bert": CONTEXT, "Roberta": CONTEXT - PAD - 1, "Qwen3": CONTEXT, "Gemma2": CONTEXT, "Modern": CONTEXT}
    assert {kind: architecture(kind).longest for kind in kinds} == kinds


@pytest.mark.parametrize(("config", "words"), [
    (lambda: AutoConfig.for_model("opt", architectures=["OPTForCausalLM"]), "OPTForCausalLM"),
    (lambda: AutoConfig.for_model("llama"), "architecture"),
    (lambda: configured("Llama", architectures=["LayerWiseMiniCPMForCausalLM"], auto_map={"AutoModel": "m.M"}),
     "LayerWiseMiniCPMForCausalLM .*transformers"),
    (lambda: configured("Qwen3LM"), '"yes".*"no"'),
    (lambda: configured("Bert", num_labels=2), " 2 "),
    (lambda: configured("Bert", is_decoder=True), "is_decoder"),
    (lambda: configured("Gemma", use_bidirectional_attention=True), "use_bidirectional_attention"),
    (lambda: AutoConfig.for_model("albert", architectures=["AlbertForSequenceClassification"], num_labels=1),
     "AlbertForSequenceClassification .*layers"),
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
    with torch.device("cpu"):
        model = getattr(transformers, KINDS[kind][0])._from_config(config)
    with pytest.raises(ValueError, match=words):
        run.hold({name: value.detach() for name, value in model.named_parameters()})
