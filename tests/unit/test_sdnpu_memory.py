"""Figure 12: what the arms are in their processes, what is counted of them, and the measurement itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice import shapes
from ondevice.causal_lm import CausalLM
from ondevice.sdnpu import findings, memory
from ondevice.speculation import Drafter, generate

V = 259  # of the byte tokenizer
TEXT = np.random.default_rng(0).integers(0, V, 200)
HISTORY = [[5, 6, 7, 8, 9], [5, 6, 3]]


def tiny(layers: int = 2, width: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=160,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def saved(model: LlamaForCausalLM, place) -> str:
    model.save_pretrained(place)
    shapes.byte_tokenizer().save_pretrained(place)
    return str(place)


@pytest.fixture
def job(tmp_path):
    np.save(tmp_path / "text.npy", TEXT)
    (tmp_path / "history.json").write_text(json.dumps(HISTORY))
    files = str(tmp_path / "text.npy"), str(tmp_path / "history.json")
    return lambda arm, context=64: memory._Job("target", arm, context, "float32", "small", *files)


# The arms


def test_every_arm_says_what_vanilla_says_in_the_rows_it_is_given(job, monkeypatch):
    lm, small = CausalLM(tiny()), CausalLM(tiny(1))
    monkeypatch.setattr(memory, "_load", lambda spec, dtype: {"small": small}[spec])
    prompt = TEXT[:64].tolist() * 2
    plain = generate(lm, Drafter(), prompt, 30).tokens
    for arm in memory.ARMS:
        assert generate(lm, memory._made(lm, job(arm)), prompt, 30, budget=memory._BUDGETS[arm]).tokens == plain


def test_budgets_are_the_arms_longest_drafts(job, monkeypatch):
    monkeypatch.setattr(memory, "_load", lambda spec, dtype: CausalLM(tiny(1)))
    lm, prompt, lengths = CausalLM(tiny()), TEXT[:64].tolist() * 2, {}
    for arm in memory.ARMS:
        drafter = memory._made(lm, job(arm))
        drafter.begin(prompt)
        lengths[arm] = len(drafter.propose(prompt, 64))
    assert lengths == memory._BUDGETS | {"vanilla": 0}  # a budget is at least one


@pytest.mark.parametrize("arm", ["SAM", "SAM+Ours"])
def test_the_history_is_drafted_from(arm, job):
    drafter = memory._made(CausalLM(tiny()), job(arm))
    assert [list(one) for one in memory._history(drafter).responses] == HISTORY
    drafter.begin([1, 5])
    assert drafter.propose([1, 5, 6], 8).tokens.tolist()[:3] == [7, 8, 9]


def test_a_draft_models_weights_and_rows_are_the_drafters(job, monkeypatch):
    lm, small = CausalLM(tiny(4)), CausalLM(tiny(1))
    monkeypatch.setattr(memory, "_load", lambda spec, dtype: {"target": lm, "small": small}[spec])
    found = {arm: memory._measure(job(arm)) for arm in ("vanilla", "SAM", "SAM+Ours", "draft model")}
    row = 2 * 32 * 4  # keys and values of a layer in float32
    assert {arm: one["weights"] for arm, one in found.items()} == dict.fromkeys(found, 4 * lm.model.num_parameters())
    assert found["vanilla"]["cache"] == 4 * row * (64 + 32 + 1)
    assert found["SAM+Ours"]["cache"] == 4 * row * (64 + 32 + 31)
    assert found["draft model"]["drafter"] == 4 * small.model.num_parameters() + row * (64 + 32)
    assert found["vanilla"]["drafter"] < 1000 < found["SAM"]["drafter"] < found["SAM+Ours"]["drafter"]


# What is counted


def test_objects_are_counted_once_with_what_they_hold():
    big = list(range(10_000, 20_000))
    alone = memory.object_bytes(big)
    assert alone == big.__sizeof__() + 16 + sum(value.__sizeof__() for value in big)  # 16: the collector's header
    assert memory.object_bytes([big, big]) - memory.object_bytes([]) == alone + 16  # two references
    assert memory.object_bytes({"a": torch.zeros(1000)}) > 4000
    assert memory.object_bytes(np.zeros(1000)) > 8000
    itself: list[object] = []
    itself.append(itself)
    assert memory.object_bytes(itself) < 200
    assert memory.object_bytes([generate, np, int]) < 200  # referred to, not owned


# The measurement


def test_each_arm_is_measured_in_a_process_of_its_own(tmp_path):
    model = tiny(4, 512)
    spec = saved(model, tmp_path / "target")
    table = memory.peaks(spec, ["vanilla", "SAM+Ours"], [64], history=HISTORY, text=TEXT).set_index("arm")
    weights = 4 * model.num_parameters() / 1e6
    assert weights > 20 and table["weights_mb"].tolist() == pytest.approx([weights] * 2)
    assert table["cache_mb"].tolist() == pytest.approx([2 * 4 * 512 * 4 * (96 + n) / 1e6 for n in (1, 31)])
    assert (table["source"] == "measured").all() and (table["model"] == "target").all()
    assert table["peak_mb"].between(0.9 * weights, weights + 200).all()
    assert (table["loading_mb"] >= table["peak_mb"]).all()
    assert table["drafter_mb"]["SAM+Ours"] > table["drafter_mb"]["vanilla"]
    ratio = table["peak_mb"]["SAM+Ours"] / table["peak_mb"]["vanilla"]
    assert findings.memory(table.reset_index())["sdnpu-c29"] == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 150}, "exceed the model's context of 160"),
        ({"text": [1, 2, 900]}, r"token id 900; the model has 259"),
    ],
)
def test_a_prompt_that_does_not_fit_the_model_is_refused(change, message, job, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_load", lambda spec, dtype: CausalLM(tiny()))
    np.save(tmp_path / "text.npy", change.get("text", TEXT))
    with pytest.raises(ValueError, match=message):
        memory._measure(job("vanilla", change.get("context", 64)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory.peaks("x", ["EAGLE"], [8], text=TEXT), "no arm 'EAGLE'"),
        (lambda: memory.peaks("x", [], [8], text=TEXT), "at least one arm and one context"),
        (lambda: memory.peaks("x", ["vanilla"], [], text=TEXT), "at least one arm and one context"),
        (lambda: memory.peaks("x", ["draft model"], [8], text=TEXT), "'draft model' needs a small model"),
        (lambda: memory.peaks("x", ["vanilla"], [8, 201], text=TEXT), "1 to 200 tokens, as many as the text, not 201"),
        (lambda: memory.peaks("x", ["vanilla"], [0], text=TEXT), "not 0"),
    ],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_shape_that_cannot_fit_is_refused():
    with pytest.raises(MemoryError, match=r"qwen2\.5-72b needs"):
        memory.peaks("random:qwen2.5-72b", ["vanilla"], [8], text=TEXT)


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="no/such/model"):
        memory.peaks("no/such/model", ["vanilla"], [8], text=TEXT)
