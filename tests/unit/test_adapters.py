"""Low-rank adapters in peft's form: merged into their base, or refused with what is wrong."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from ondevice import adapters, assets, models, shapes
from ondevice.corpus.pairs import CHAT_TEMPLATE, reader, reading_pairs, rows
from ondevice_programs.reranker import Reranker
from ondevice_training.reranking import learning, low_rank

RANK = 3


def llama(hidden: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=300, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16().float()  # training goes on in bfloat16 where that pays


def chat_tokenizer():
    tokenizer = shapes.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


@pytest.fixture
def base(tmp_path):
    """A small chat model's folder."""
    llama().save_pretrained(tmp_path / "base")
    chat_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base, tmp_path):
    """(folder, the model that it was trained in) of an adapter whose every matrix does something."""
    model = learning.warm(models.load(str(base)).model)
    low_rank.adapt(model, RANK)
    model.float()
    for module in model.modules():
        if isinstance(module, low_rank.LowRank):
            torch.nn.init.normal_(module.b, std=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.bfloat16())  # what is stored
    low_rank.save(model, RANK, str(base), tmp_path / "adapter", {"step": 1})
    return tmp_path / "adapter", model.eval()


def test_an_adapter_makes_of_its_base_the_model_that_was_trained(adapter):
    folder, trained = adapter
    loaded = models.load(str(folder))
    ids = torch.randint(1, 300, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.allclose(loaded.model(ids).logits, trained(ids).logits, atol=1e-5)
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE and not loaded.model.training
    pair = ("which?", ["A passage.\nWith a line."])  # records read it as it was trained
    assert rows(reader(loaded.model, loaded.tokenizer), *pair) == rows(reading_pairs(chat_tokenizer(), True), *pair)


def test_an_adapter_beside_its_base_is_applied_and_refused_beside_another(adapter, base):
    folder, trained = adapter
    for path in folder.glob("adapter_*"):
        shutil.copy(path, base)
    ids = torch.randint(1, 300, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.allclose(models.load(str(base)).model(ids).logits, trained(ids).logits, atol=1e-5)
    other = shutil.copytree(base, base.parent / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match="not for the model beside it"):
        models.load(str(other))


@pytest.mark.long  # a process that imports PyTorch
def test_the_reranker_scores_with_it_and_reads_the_pairs_of_the_training(adapter, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))
    folder, trained = adapter
    passages = ["A passage.\nWith a line.", "Another one.", "x"]
    pairs = rows(reading_pairs(chat_tokenizer(), causal=True), "which?", passages)
    with torch.inference_mode():
        expected = [float(trained(torch.tensor([row.ids])).logits) for row in pairs]
    for _ in range(2):
        with Reranker(str(folder), prune=False) as reranker:
            scores = reranker.predict([("which?", passage) for passage in passages], activation_fn=torch.nn.Identity())
        assert scores == pytest.approx(expected, abs=1e-4)
    assert capsys.readouterr().err.count("Writing") == 1  # the whole model, once


WRONG = {
    "dora": ({"use_dora": True}, "use_dora"),
    "a key that nobody lists": ({"use_other": 3}, "use_other"),
    "base that is changed": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "bias": ({"bias": "all"}, "bias"),
    "form": ({"peft_type": "IA3"}, "IA3"),
    "task": ({"task_type": "TOKEN_CLS"}, "TOKEN_CLS"),
    "rank": ({"r": 0}, "damaged"),
    "name": ({"base_model_name_or_path": "./nowhere"}, "nowhere"),
    "adapter": ({"base_model_name_or_path": "adapter"}, "first"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_read_is_refused_by_name(adapter, case, monkeypatch):
    folder, _ = adapter
    changed, message = WRONG[case]
    monkeypatch.chdir(folder.parent)
    facts = json.loads((folder / adapters.CONFIG).read_text())
    (folder / adapters.CONFIG).write_text(json.dumps(facts | changed))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        models.load(str(folder))


def test_an_adapter_for_another_base_is_refused(adapter, base):
    folder, _ = adapter
    llama(hidden=64).save_pretrained(base)
    with pytest.raises(ValueError, match=r"is not for .*does not fit"):
        models.load(str(folder))
    BertForMaskedLM(BertConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                               intermediate_size=32)).save_pretrained(base)  # fmt: skip
    with pytest.raises(ValueError, match="not this bert's: pooler"):
        models.load(str(folder))


@pytest.mark.parametrize("harm", ["truncated", "half of a product", "has no base_model.model.score.weight"])
def test_damaged_weights_are_refused(adapter, harm):
    path = adapter[0] / adapters.WEIGHTS
    if harm == "truncated":
        path.write_bytes(path.read_bytes()[:-50])
    else:
        tensors = safetensors.torch.load_file(path)
        del tensors[next(name for name in tensors if ("lora_A" if harm.startswith("half") else "score") in name)]
        safetensors.torch.save_file(tensors, path)
    with pytest.raises(ValueError, match=harm):
        models.load(str(adapter[0]))
