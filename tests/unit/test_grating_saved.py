"""Folders as sentence-transformers saves them: the Reranker's scores are CrossEncoder's, or it refuses by name."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.modules import LogitScore
from tiny import random_reranker, reranker_config, word_tokenizer
from transformers import AutoModelForCausalLM

from ondevice import shapes
from ondevice_programs.reranker import Reranker, arguments
from ondevice_programs.reranker.reading import encode

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
MODULE = "sentence_bert_config.json"
LM, ENCODER, DECODER = "Qwen3ForCausalLM", "BertForSequenceClassification", "Qwen3ForSequenceClassification"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """A folder of a random model with a token a word, as transformers saves it."""

    def save(name: str, template: str | None = None, kind: str = "qwen3", **values: Any) -> Path:
        tokenizer = word_tokenizer(WORDS, model_max_length=30)
        tokenizer.chat_template = template
        kind, own = ("bert", {}) if name == ENCODER else (kind, {"num_key_value_heads": 2, "head_dim": 8})
        sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 3}
        config = reranker_config(name, kind, **sizes | own | values)
        for part in (random_reranker(config, torch.float32, seed=1), tokenizer):
            part.save_pretrained(tmp_path / "plain")
        return tmp_path / "plain"

    return save


def again(model: CrossEncoder, folder: Path) -> Path:
    model.save_pretrained(str(folder / "saved"))
    return folder / "saved"


def alike(folder: Path, **options: Any) -> None:
    """Scores of short, empty and long pairs are CrossEncoder's, and so are orders."""
    pairs = [[QUERY, text] for text in DOCUMENTS] + [[LONG, "gamma delta"], [LONG, LONG], ["", LONG]]
    theirs = CrossEncoder(str(folder), device="cpu", **options)
    with Reranker(folder, **options) as ours:
        for prompt in (None, "please"):
            right = theirs.predict(pairs, prompt=prompt)
            assert right.std() > 1e-3
            assert np.abs(ours.predict(pairs, prompt=prompt) - right).max() < 1e-4
        ranks = [[hit["corpus_id"] for hit in model.rank(QUERY, DOCUMENTS)] for model in (ours, theirs)]
        assert ranks[0] == ranks[1]


def edited(folder: Path, name: str, **values: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | values))
    return folder


CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {  # class, template, what CrossEncoder is made with
    "a score head": (ENCODER, None, {}),
    "a decoder's": (DECODER, None, {}),
    "prompts and a default one": (
        ENCODER, None, {"prompts": {"own": "judge ", "none": ""}, "default_prompt_name": "own"}
    ),
    "a decoder's prompts": (DECODER, None, {"prompts": {"own": "judge "}, "default_prompt_name": "own"}),
    "an activation": (ENCODER, None, {"activation_fn": torch.nn.Identity()}),
    "a length": (ENCODER, None, {"max_length": 12}),
    "a system's message": (LM, ROLES, {"prompts": {"a": "please judge"}, "default_prompt_name": "a"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_folder_says_of_scores_is_read(saved: Callable[..., Path], case: str) -> None:
    name, template, options = CASES[case]
    folder = saved(name, template)
    alike(folder)  # as transformers saves it
    made = again(CrossEncoder(str(folder), device="cpu", **options), folder)
    alike(made)
    if options:  # which make a difference
        pairs = [[QUERY, text] for text in DOCUMENTS]
        with Reranker(folder) as plain, Reranker(made) as ours:
            assert np.abs(plain.predict(pairs) - ours.predict(pairs)).max() > 1e-4


@pytest.mark.parametrize(("true", "false"), [("yes", "no"), ("1", "0"), ("Yes", None)])
@pytest.mark.parametrize("template", [ROLES, PARTS])
def test_a_logit_score(saved: Callable[..., Path], template: str, true: str, false: str | None) -> None:
    folder = saved(LM, template)
    model = CrossEncoder(str(folder), device="cpu")
    first, second = (None if word is None else model.tokenizer.convert_tokens_to_ids(word) for word in (true, false))
    model = CrossEncoder(modules=[model[0], LogitScore(first, second)], device="cpu")  # type: ignore[arg-type]
    alike(again(model, folder))


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048}  # fmt: skip
QWEN = {"attention_dropout": 0.0, "hidden_act": "silu", "max_window_layers": 3, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": True, "use_cache": True,
        "use_sliding_window": False}  # fmt: skip
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {  # class, and what the publisher's config.json sets beside sizes
    "bge-reranker-v2-gemma": ("Gemma", {
        "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "gelu", "hidden_activation": None,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0, "use_cache": True}),
    "mxbai-rerank-v2": ("Qwen2", QWEN),
    "qwen3-reranker": ("Qwen3", QWEN | {"attention_bias": False, "rope_scaling": None}),
}  # fmt: skip


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_is_the_users(saved: Callable[..., Path], recipe: str) -> None:
    name, values = PUBLISHED[recipe]
    tokenizer = shapes.byte_tokenizer()  # which transformers' class for a type of model loads as it is
    tokenizer.add_tokens(["yes", "no", "Yes"])
    about = {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower(), "vocab_size": len(tokenizer)}
    folder = saved(f"{name}ForCausalLM", None, name.lower(), vocab_size=len(tokenizer), tie_word_embeddings=True)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(TINY | about | values | {"torch_dtype": "float32"}))
    with pytest.raises(ValueError, match="recipe"):
        Reranker(folder)  # its name says nothing
    with Reranker(folder, recipe=recipe, max_length=4) as ours, pytest.raises(ValueError, match="prompt"):
        ours.predict([[QUERY, "gamma"]])
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    with Reranker(folder, recipe=recipe, activation_fn=torch.nn.Identity()) as ours, torch.inference_mode():
        rows = encode(ours._form(None), [QUERY] * len(DOCUMENTS), DOCUMENTS).rows
        last = [network(torch.tensor([list(row.ids)])).logits[0, -1, list(ours.scoring.answers or ())] for row in rows]
        right = [float(logits[0] - logits[1:].sum()) for logits in last]
        assert ours.predict([[QUERY, text] for text in DOCUMENTS]).tolist() == pytest.approx(right, abs=1e-4)
        assert np.std(right) > 1e-3


@pytest.mark.parametrize(("name", "template", "file", "values", "words"), [
    (LM, NO_ROLES, None, {}, "no roles"),
    (ENCODER, NO_ROLES, None, {}, "no roles"),
    (ENCODER, None, MODULE, {"do_lower_case": True}, "do_lower_case"),
    (ENCODER, None, MODULE, {"processing_kwargs": {"text": {"stride": 2}}}, "processing_kwargs.text"),
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
    (made / "modules.json").write_text(json.dumps([*modules, modules[0] | {"type": "modules.dense.Dense"}]))
    with pytest.raises(ValueError, match="Dense"):
        Reranker(made)


# Where people run it


def ranked(reranker: Reranker) -> list[int]:
    return [hit["corpus_id"] for hit in reranker.rank(QUERY, DOCUMENTS)]


@pytest.mark.long  # other processes
def test_copies_and_other_processes_rank_as_the_first_does(saved: Callable[..., Path]) -> None:
    with Reranker(saved(ENCODER), max_length=20) as ours:
        right = ranked(ours)
        for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            with twin:
                assert ranked(twin) == right and twin.max_seq_length == 20
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(2) as pool:
                assert pool.map(ranked, [ours] * 2, 1) == [right] * 2


def test_a_fork_ranks_on_with_what_it_inherited(saved: Callable[..., Path]) -> None:
    """As behind gunicorn's --preload and in torch's DataLoader: the parent's threads and locks are gone."""
    with Reranker(saved(ENCODER)) as ours:
        right = ranked(ours)
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        with ours._turn:  # held by a thread that the child has not
            child = context.Process(target=lambda: queue.put(ranked(ours)))
            child.start()
        child.join(60)
        assert not child.is_alive() and child.exitcode == 0 and queue.get() == right
        assert ranked(ours) == right


def test_any_number_of_pairs_goes_through_in_segments(
    saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [[QUERY, text] for text in DOCUMENTS * 8]
    with Reranker(saved(ENCODER)) as ours:
        right = ours.predict(pairs)
        whole = ours.receipt
        monkeypatch.setattr(arguments, "SEGMENT", 300)
        assert np.abs(ours.predict(pairs) - right).max() < 1e-5
        parts = ours.receipt
        assert whole and parts and parts.candidates == whole.candidates == 40 and parts.active == [40] * 3
        assert parts.plan_mb["hidden"] < whole.plan_mb["hidden"] / 3 and parts.read_bytes > whole.read_bytes
        assert ours.predict(iter(pairs[:3])).tolist() == pytest.approx(right[:3].tolist(), abs=1e-5)
