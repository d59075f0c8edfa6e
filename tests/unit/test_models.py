"""Models by spec: what loads, what is refused, and in what words."""

from __future__ import annotations

import json
import re
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import transformers

from ondevice import assets, models, shapes

SMALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=320)
GATED = SMALL | dict(intermediate_size=32, num_key_value_heads=1)
ENCODER = SMALL | dict(intermediate_size=32, max_position_embeddings=64, num_labels=1)
TINY = {
    "llama": shapes.Shape("llama", "LlamaForCausalLM", 0, GATED),
    "qwen2": shapes.Shape("qwen2", "Qwen2ForCausalLM", 0, GATED | dict(tie_word_embeddings=True)),
    "qwen3": shapes.Shape("qwen3", "Qwen3ForCausalLM", 0, GATED | dict(head_dim=8)),
    "opt": shapes.Shape("opt", "OPTForCausalLM", 0, SMALL | dict(ffn_dim=32, word_embed_proj_dim=16)),
    "bloom": shapes.Shape("bloom", "BloomForCausalLM", 0, dict(hidden_size=16, n_layer=2, n_head=2, vocab_size=320)),
    "bert": shapes.Shape("bert", "BertForSequenceClassification", 0, ENCODER),
    "xlm-roberta": shapes.Shape("xlm-roberta", "XLMRobertaForSequenceClassification", 0, ENCODER),
}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "ROOT", tmp_path)
    monkeypatch.setattr(shapes, "_BLOCK", 4099)  # as many random numbers as tiny models need
    for name, tiny in TINY.items():
        monkeypatch.setitem(shapes.SHAPES, f"tiny-{name}", tiny)
    return tmp_path


def trained(kind: str = "llama") -> transformers.PreTrainedModel:
    """A tiny model that counts as trained."""
    model = models.load(f"random:tiny-{kind}").model
    delattr(model.config, shapes.MARK)
    return model


def saved(folder: Path, kind: str = "llama") -> Path:
    for part in (trained(kind), shapes.byte_tokenizer()):
        part.save_pretrained(folder)
    return folder


def logits(model, text: str = "sum of squares") -> torch.Tensor:
    with torch.no_grad():
        return model(**shapes.byte_tokenizer()([text], return_tensors="pt", return_token_type_ids=False)).logits


def equal(model, other) -> bool:
    """Whether two models have the same weights under the same names."""
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


PUBLISHED = [name for name in shapes.SHAPES if not name.startswith("tiny")]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_published_number_of_parameters(name):
    assert shapes.SHAPES[name].empty().num_parameters() == shapes.SHAPES[name].parameters


def test_random_weights_follow_the_seed_and_run():
    first, again, other = (models.load("random:tiny-llama", seed=seed) for seed in (0, 0, 1))
    assert not first.model.training and logits(first.model).isfinite().all()
    assert torch.equal(logits(first.model), logits(again.model))
    assert not torch.equal(logits(first.model), logits(other.model))


def test_random_weights_are_as_drawn_and_tied_where_the_shape_ties():
    model = models.load("random:tiny-qwen2", torch.bfloat16).model
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.norm.weight.eq(1).all()
    assert model.model.layers[0].self_attn.q_proj.bias.eq(0).all()
    assert model.model.layers[1].mlp.up_proj.weight.float().std().item() == pytest.approx(0.02, rel=0.2)


def test_random_weights_are_marked_also_when_saved_and_refused_for_results(tmp_path):
    loaded = models.load("random:tiny-llama")
    assert loaded.random
    loaded.model.save_pretrained(tmp_path / "copy")
    loaded.tokenizer.save_pretrained(tmp_path / "copy")
    copy = models.load(str(tmp_path / "copy"))
    assert copy.random
    with pytest.raises(ValueError, match="perplexity"):
        models.require_trained(copy.model, "perplexity")
    models.require_trained(trained(), "perplexity")


@pytest.mark.parametrize("kind", TINY)
def test_a_folder_loads_with_its_own_class_and_weights(tmp_path, kind):
    folder = saved(tmp_path / kind, kind)
    loaded = models.load(str(folder))
    assert (loaded.origin, loaded.random) == ("folder", False)
    assert type(loaded.model).__name__ == TINY[kind].architecture
    assert equal(loaded.model, trained(kind))
    assert models.load(str(folder), torch.float64).model.dtype == torch.float64


@pytest.fixture
def bundle(root):
    folder = saved(root / "data" / "models" / "tiny-bundled")
    (folder / "README.md").write_text("A card.")
    models.write_manifest()
    return folder


def test_a_bundled_model_loads_by_name_whatever_its_card_says(bundle):
    (bundle / "README.md").write_text("A better card.")
    loaded = models.load(bundle.name)
    assert models.bundled() == [bundle.name] and loaded.origin == "bundled" and equal(loaded.model, trained())


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("model.safetensors", flip),
        ("extra.json", lambda path: path.write_text("{}")),
        ("model.safetensors", lambda path: path.unlink()),
    ],
    ids=["changed", "unlisted", "missing"],
)
def test_bundled_files_that_differ_from_the_manifest_are_refused(bundle, name, harm):
    harm(bundle / name)
    with pytest.raises((ValueError, FileNotFoundError), match=f"tiny-bundled/{name}"):
        models.load("tiny-bundled")


@pytest.mark.parametrize("keep", [5, -1])
def test_a_truncated_weight_file_is_refused(tmp_path, keep):
    weights = saved(tmp_path / "m") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        models.load(str(tmp_path / "m"))


def test_a_missing_shard_is_named(tmp_path):
    folder = saved(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    trained().save_pretrained(folder, max_shard_size="10KB")
    assert equal(models.load(str(folder)).model, trained())
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        models.load(str(folder))


def test_weights_only_as_pickle_are_refused(tmp_path):
    folder = saved(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickle"):
        models.load(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_missing_file_is_named(tmp_path, name):
    (saved(tmp_path / "m") / name).unlink()
    for other in tmp_path.glob("m/tokenizer*") if name == "tokenizer.json" else ():
        other.unlink()
    with pytest.raises(FileNotFoundError, match=name):
        models.load(str(tmp_path / "m"))


def edit(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("values", [{"num_hidden_layers": 3}, {"intermediate_size": 48}])
def test_weights_that_do_not_fit_the_config_are_refused_instead_of_drawn_at_random(tmp_path, values):
    edit(saved(tmp_path / "m"), **values)
    with pytest.raises(ValueError, match=r"config\.json.*model\.layers"):
        models.load(str(tmp_path / "m"))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    tokenizer = shapes.byte_tokenizer()
    tokenizer.add_tokens([f"<{n}>" for n in range(100)])
    tokenizer.save_pretrained(saved(tmp_path / "m"))
    with pytest.raises(ValueError, match=r"359.*320"):
        models.load(str(tmp_path / "m"))


def test_a_model_that_needs_code_of_its_own_is_refused(tmp_path):
    folder = saved(tmp_path / "m")
    edit(folder, model_type="minicpm", auto_map={"AutoConfig": "configuration.C", "AutoModel": "modeling.M"})
    (folder / "configuration.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(ValueError, match="code of its own"):
        models.load(str(folder))


QUANTISED = {  # what a config.json says of the weights, and what the sentence names
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "bitsandbytes, as it once was": ({"load_in_8bit": True}, "bitsandbytes"),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "damp_percent": 0.01}, "gptq"),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}, "awq"),
    "FP8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    "compressed tensors": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "compressed-tensors"),
    "MXFP4": ({"quant_method": "mxfp4"}, "mxfp4"),
    "a method that nobody knows": ({"quant_method": "ours-v9"}, "ours-v9"),
    "no method": ({"bits": 4}, "unnamed"),
}


@pytest.mark.parametrize("case", QUANTISED)
def test_quantised_weights_are_refused_by_their_method(tmp_path, case):
    settings, words = QUANTISED[case]
    folder = saved(tmp_path / "m")
    edit(folder, quantization_config=settings)
    with pytest.raises(ValueError, match=f"quantised by .*{words}.*GGUF"):
        models.load(str(folder))


DAMAGED = {  # a file, what it holds, and what the sentence names
    "settings of answers, cut": ("generation_config.json", '{"eos_token_id": [2, ', "generation_config.json"),
    "settings of answers, a list": ("generation_config.json", "[2]", "generation_config.json"),
    "a configuration, cut": ("config.json", '{"model_type": ', "config.json"),
    "an index without names": ("model.safetensors.index.json", '{"weight_map": null}', "index.json"),
    "an index of numbers": ("model.safetensors.index.json", '{"weight_map": {"a": 3}}', "index.json"),
    "an index of nothing": ("model.safetensors.index.json", "[]", "index.json"),
    "settings of a tokenizer, cut": ("tokenizer_config.json", '{"bos_token": "', "tokenizer"),
    "a tokenizer without entries": ("tokenizer.json", "{}", "tokenizer"),
    "a tokenizer that is a number": ("tokenizer.json", "3", "tokenizer"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, case):
    name, text, words = DAMAGED[case]
    folder = saved(tmp_path / "m")
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{words} of .*/m"):
        models.load(str(folder))


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [(7, {2, 7}), ([7, 8], {2, 7, 8}), ([], {2}), (None, {2}), ("7", None), ([7, "8"], None), ({}, None), (7.5, None),
     (True, None)],
)  # fmt: skip
def test_end_tokens_are_ids_or_refused(tmp_path, tokens, ends):
    folder = saved(tmp_path / "m")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": tokens}))
    loaded = models.load(str(folder))
    if ends is None:
        with pytest.raises(ValueError, match="no token id"):
            _ = loaded.eos_token_ids
    else:
        assert loaded.eos_token_ids - {loaded.tokenizer.eos_token_id} == ends - {loaded.tokenizer.eos_token_id}


def test_an_unknown_spec_lists_what_exists(bundle):
    with pytest.raises(ValueError, match=r"'tiny'.*tiny-bundled"):
        models.load("tiny")
    with pytest.raises(ValueError, match=r"'gpt-5'.*opt-1\.3b"):
        models.load("random:gpt-5")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        models.load("./nowhere")
    with pytest.raises(ValueError, match=r"no longer part.*smollm2-135m-instruct takes its place"):
        models.load("pydocs-lm-small")


def hub_at(address: str, tmp_path, monkeypatch) -> None:
    """Put the hub at another address, with an empty cache."""
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(transformers.utils.hub.hf_api(), "endpoint", address)  # kept from its first use
    monkeypatch.setenv("NO_PROXY", "*")


def test_a_hub_id_needs_no_network_once_it_is_in_the_cache(tmp_path, monkeypatch):
    hub_at("http://127.0.0.1:9", tmp_path, monkeypatch)
    with pytest.raises(ConnectionError, match="acme/tiny"):
        models.load("acme/tiny")
    place = tmp_path / "hub" / "models--acme--tiny"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    weights = saved(place / "snapshots" / ("0" * 40), "qwen3") / "model.safetensors"
    loaded = models.load("acme/tiny")
    assert loaded.origin == "hub" and equal(loaded.model, trained("qwen3"))
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(ValueError, match="acme/tiny"):
        models.load("acme/tiny")


class Hub(BaseHTTPRequestHandler):
    """A hub with one folder; every other id does not exist, and acme/gated asks for its licence to be accepted."""

    folder: Path

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        file = self.folder / re.sub("^/acme/tiny/resolve/(main|0{40})/", "", path)  # other revisions do not exist
        known = path in ("/api/models/acme/tiny", "/api/models/acme/tiny/revision/main")
        if "/acme/gated/" in path:
            self.answer(403, "GatedRepo")
        elif known:
            self.answer(200, body=json.dumps({"id": "acme/tiny", "sha": "0" * 40, "siblings": []}).encode())
        elif path != "/" and "/acme/tiny/" not in path:
            self.answer(404, "RepoNotFound")
        elif path == "/" or file.is_file():
            self.answer(200, body=file.read_bytes() if path != "/" else b"")
        else:
            self.answer(404, "RevisionNotFound" if "v9" in path else "EntryNotFound")

    do_HEAD = do_GET

    def answer(self, status: int, code: str = "", body: bytes = b"") -> None:
        self.send_response(status)
        headers = {"X-Error-Code": code} if code else {"ETag": sha256(body).hexdigest(), "X-Repo-Commit": "0" * 40}
        for header, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on this machine that serves acme/tiny from the folder that the fixture is."""
    folder = tmp_path / "served"
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Hub,), {"folder": folder}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub_at(f"http://127.0.0.1:{server.server_port}", tmp_path, monkeypatch)
    yield folder
    server.shutdown()
    server.server_close()


def test_a_hub_id_is_downloaded_or_refused_by_name(hub):
    saved(hub)
    loaded = models.load("acme/tiny")
    assert loaded.origin == "hub" and equal(loaded.model, trained())
    for spec, words in (("acme/tiny@v9", "'v9'"), ("acme/none", "'acme/none'")):
        with pytest.raises(ValueError, match=words):
            models.load(spec)
    with pytest.raises(PermissionError, match=r"acme/gated.*licence"):
        models.load("acme/gated")


def test_a_hub_id_with_its_weights_only_as_pickle_is_refused(hub):
    saved(hub)
    (hub / "model.safetensors").rename(hub / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"acme/tiny.*pickle"):
        models.load("acme/tiny")


def test_the_packaged_minilm_is_refused_when_its_checksum_differs_or_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(models, "MINILM_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"model\.safetensors.*sha256"):
        models.load("all-minilm-l6-v2")
    monkeypatch.setattr(models, "_MINILM_PACKAGE", "no-such-package")
    with pytest.raises(ModuleNotFoundError, match=r"ondevice\[pair\]"):
        models.load("all-minilm-l6-v2")


def test_the_first_layers_of_a_model_are_a_model_of_their_own(tmp_path):
    loaded = models.load(str(saved(tmp_path / "whole")))
    shorter = models.first_layers(loaded, 1)
    parts = dict(loaded.model.named_parameters())
    assert shorter.config.num_hidden_layers == 1 < loaded.config.num_hidden_layers
    for name, value in shorter.model.named_parameters():
        assert torch.equal(value, parts[name]) and value.data_ptr() != parts[name].data_ptr(), name
    with pytest.raises(ValueError, match=r"layers, not 9"):
        models.first_layers(loaded, 9)
