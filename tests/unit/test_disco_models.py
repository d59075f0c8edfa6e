"""DiSCo's measurements of language models, on tiny random ones: they are wired before the bundled models exist."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice.disco import device_probe, quality

EOS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    tiny(32).save_pretrained(path)
    return str(path)


def tiny(width: int, vocabulary: int = 64) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=width, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128, eos_token_id=EOS, bos_token_id=0,
        )
    ).eval()  # fmt: skip


def test_the_probe_times_every_prompt_in_order(folder):
    model, seconds = device_probe.load(folder)
    found = device_probe.measure(model, np.array([5, 9, 3]), 4, seed=0)
    assert seconds > 0 and found["length"].tolist() == [5, 9, 3]
    assert (found[["ttft_s", "tbt_s"]] > 0).all().all()


def test_the_probe_needs_two_tokens(folder):
    with pytest.raises(ValueError, match="at least two"):
        device_probe.measure(device_probe.load(folder)[0], np.array([5]), 1, seed=0)


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(1)
    return tiny(32), tiny(48)


def greedy(model, ids, n):
    with torch.inference_mode():
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False, pad_token_id=EOS)
    return out[0, ids.shape[1]:].tolist()


def test_a_handover_at_either_end_is_one_model_alone(pair):
    ids = torch.tensor([[3, 5, 7]])
    assert quality.answer_with_handover(*pair, ids, 0, 12) == greedy(pair[1], ids, 12)
    assert quality.answer_with_handover(*pair, ids, 12, 12) == greedy(pair[0], ids, 12)


def test_a_handover_continues_the_first_models_prefix(pair):
    ids = torch.tensor([[3, 5, 7]])
    prefix = greedy(pair[0], ids, 4)
    assert EOS not in prefix
    rest = greedy(pair[1], torch.tensor([[3, 5, 7, *prefix]]), 8)
    assert quality.answer_with_handover(*pair, ids, 4, 12) == prefix + rest


def test_models_of_different_vocabularies_are_refused(pair):
    with pytest.raises(ValueError, match="different vocabularies"):
        quality.answer_with_handover(pair[0], tiny(32, vocabulary=80), torch.tensor([[3]]), 1, 4)
    with pytest.raises(ValueError, match="between 0 and 4"):
        quality.answer_with_handover(*pair, torch.tensor([[3]]), 5, 4)


def test_rouge_1_counts_shared_words():
    assert quality.rouge_1("the cat sat", "The cat sat") == 1.0
    assert quality.rouge_1("the cat", "a dog") == 0.0
    assert quality.rouge_1("the the cat", "the cat sat on") == pytest.approx(2 * 2 / 7)
