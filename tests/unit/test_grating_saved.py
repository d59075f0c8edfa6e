"""Folders as sentence-transformers saves them: the Reranker's scores are CrossEncoder's, or it refuses by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.modules import LogitScore
from test_grating_reading import word_tokenizer
from transformers import AutoConfig

from ondevice_programs.reranker import Reranker

WORDS = "alpha beta gamma delta yes no Yes 1 0 query: document: system: judge it please end"
QUERY = "alpha beta"
DOCUMENTS = ["gamma delta", "alpha", "beta beta beta gamma " * 6, "", "delta alpha yes"]
LONG = "alpha " * 40
ROLES = (
    "{% for message in messages %}{% if message.role == 'system' %}system: {{ message.content }} {% elif "
    "message.role == 'query' %}query: {{ message.content }} {% elif message.role == 'document' %}document: "
    "{{ message.content }} {% endif %}{% endfor %}judge it please"
)
PARTS = ROLES.replace("message.content", "message.content[0].text")
NO_ROLES = "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}end"
LM, ENCODER, DECODER = "Qwen3ForCausalLM", "BertForSequenceClassification", "Qwen3ForSequenceClassification"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """A folder of a random model with a token a word, as transformers saves it."""

    def save(name: str, template: str | None = None, **values: Any) -> Path:
        tokenizer = word_tokenizer(WORDS)
        tokenizer.model_max_length = 30
        tokenizer.chat_template = template
        labels = {} if name.endswith("CausalLM") else {"num_labels": 1}
        config = AutoConfig.for_model(
            "bert" if name.startswith("Bert") else "qwen3", vocab_size=len(tokenizer), hidden_size=32,
            intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            max_position_embeddings=64, pad_token_id=1, dtype="float32", **labels, **values,
        )  # fmt: skip
        torch.manual_seed(1)
        model = getattr(transformers, name)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3) if parameter.ndim > 1 else None
        folder = tmp_path / "plain"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


def again(model: CrossEncoder, folder: Path) -> Path:
    model.save_pretrained(str(folder / "saved"))
    return folder / "saved"


def alike(folder: Path, **options: Any) -> None:
    """Scores of short, empty and long pairs are CrossEncoder's, and so are orders."""
    pairs = [[QUERY, text] for text in DOCUMENTS] + [[LONG, "gamma delta"], [LONG, LONG], ["", LONG]]
    theirs = CrossEncoder(str(folder), device="cpu", **options)
    with Reranker(folder, **options) as ours:
        for more in ({}, {"prompt": "please"}):
            right = theirs.predict(pairs, **more)
            assert right.std() > 1e-3
            assert np.abs(ours.predict(pairs, **more) - right).max() < 1e-4
        ranks = [[hit["corpus_id"] for hit in model.rank(QUERY, DOCUMENTS)] for model in (ours, theirs)]
        assert ranks[0] == ranks[1]


def edited(folder: Path, name: str, **values: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | values))
    return folder


@pytest.mark.parametrize("name", [ENCODER, DECODER])
def test_a_score_head(saved: Callable[..., Path], name: str) -> None:
    folder = saved(name)
    alike(folder)
    alike(again(CrossEncoder(str(folder), device="cpu"), folder))


@pytest.mark.parametrize("name", [ENCODER, DECODER])
def test_saved_prompts_and_the_default_one(saved: Callable[..., Path], name: str) -> None:
    folder = saved(name)
    model = CrossEncoder(str(folder), device="cpu", prompts={"own": "judge ", "none": ""}, default_prompt_name="own")
    made = again(model, folder)
    alike(made)
    with Reranker(made) as ours, Reranker(made, default_prompt_name="none") as without:
        assert np.abs(ours.predict([[QUERY, "gamma"]]) - without.predict([[QUERY, "gamma"]])).max() > 1e-4
        assert ours.predict([[QUERY, "gamma"]], prompt_name="none") == without.predict([[QUERY, "gamma"]])


def test_a_saved_activation(saved: Callable[..., Path]) -> None:
    folder = saved(ENCODER)
    made = again(CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity()), folder)
    alike(made)
    with Reranker(made) as ours:
        assert np.abs(ours.predict([[QUERY, text] for text in DOCUMENTS])).max() > 1


def test_a_saved_length(saved: Callable[..., Path]) -> None:
    folder = saved(ENCODER)
    model = CrossEncoder(str(folder), device="cpu")
    model.max_seq_length = 12
    alike(again(model, folder))


@pytest.mark.parametrize(("true", "false"), [("yes", "no"), ("1", "0"), ("Yes", None)])
@pytest.mark.parametrize("template", [ROLES, PARTS])
def test_a_logit_score(saved: Callable[..., Path], template: str, true: str, false: str | None) -> None:
    folder = saved(LM, template)
    model = CrossEncoder(str(folder), device="cpu")
    ids = [None if word is None else model.tokenizer.convert_tokens_to_ids(word) for word in (true, false)]
    model = CrossEncoder(modules=[model[0], LogitScore(*ids)], device="cpu")
    alike(again(model, folder))


def test_a_chat_template_with_roles_is_enough(saved: Callable[..., Path]) -> None:
    alike(saved(LM, ROLES))


def test_a_default_prompt_is_the_systems_message(saved: Callable[..., Path]) -> None:
    folder = saved(LM, ROLES)
    alike(again(CrossEncoder(str(folder), device="cpu", prompts={"a": "please judge"}, default_prompt_name="a"), folder))


def test_a_name_says_nothing(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved(LM)
    named = folder.rename(tmp_path / "my-reranker")
    with pytest.raises(ValueError, match=r"no file of it says .* recipe .*qwen3-reranker"):
        Reranker(named)


@pytest.mark.parametrize("recipe", ["bge-reranker-v2-gemma", "mxbai-rerank-v2", "qwen3-reranker"])
def test_a_recipe_is_the_users(saved: Callable[..., Path], recipe: str) -> None:
    with Reranker(saved(LM), recipe=recipe) as ours:
        scores = ours.predict([[QUERY, text] for text in DOCUMENTS])
        assert np.isfinite(scores).all() and scores.std() > 0


@pytest.mark.parametrize(("name", "template", "file", "values", "words"), [
    (LM, NO_ROLES, None, {}, "no roles"),
    (ENCODER, NO_ROLES, None, {}, "no roles"),
    (ENCODER, None, "sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    (ENCODER, None, "sentence_bert_config.json", {"processing_kwargs": {"text": {"stride": 2}}}, "processing_kwargs.text"),
    (ENCODER, None, "config_sentence_transformers.json", {"activation_fn": "torch.nn.modules.activation.Tanh"}, "Tanh"),
])  # fmt: skip
def test_what_is_not_read_is_refused(
    saved: Callable[..., Path], name: str, template: str | None, file: str | None, values: dict[str, Any], words: str
) -> None:
    folder = saved(name, template)
    if file:
        folder = edited(again(CrossEncoder(str(folder), device="cpu"), folder), file, **values)
    with pytest.raises(ValueError, match=words):
        Reranker(folder)


def test_other_modules_are_refused_by_name(saved: Callable[..., Path]) -> None:
    folder = saved(ENCODER)
    made = again(CrossEncoder(str(folder), device="cpu"), folder)
    modules = json.loads((made / "modules.json").read_text())
    more = modules[0] | {"idx": 1, "path": "1_Dense", "type": "sentence_transformers.base.modules.dense.Dense"}
    (made / "modules.json").write_text(json.dumps([*modules, more]))
    with pytest.raises(ValueError, match="Transformer, Dense"):
        Reranker(made)
