"""GGUF files: what the `gguf` package writes of a tiny model is read as it was, and wrong files are refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ondevice import assets, models, shapes
from ondevice.causal_lm import TokenTree
from ondevice.causal_lm.lean import Lean, engine
from ondevice.causal_lm.session import Session
from ondevice.gguf_file import _MODULES, _OUTER, opened
from ondevice_programs.reranker.folder import prepare

pytestmark = pytest.mark.usefixtures("one_thread")
HIDDEN = 64
V = 261  # bytes, three marks, "ab", as a file has merges, and the mark that GPT-2's tokenizer adds
SIZES = dict(
    hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=96, bos_token_id=0, eos_token_id=2, pad_token_id=1,
)  # fmt: skip
IDS = [5, 17, 3, 44, 8, 29, 2, 101, 77]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))


def tiny(kind: str, tied: bool) -> torch.nn.Module:
    config = AutoConfig.for_model(kind, vocab_size=V, tie_word_embeddings=tied, head_dim=16, **SIZES)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def turned(name: str, weight: np.ndarray, config) -> np.ndarray:
    """Llama's queries and keys as its files have them: the halves of a head interleaved."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
    if config.model_type != "llama" or heads is None:
        return weight
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def written(
    folder: Path, kind: str = "llama", tied: bool = True, forms: tuple[str, ...] = ("Q4_1", "Q8_0"), *,
    architecture: str = "", tokens: int = V, extra: str = "", scaled: bool = False, pieces: str = "smollm",
) -> tuple[Path, dict[str, np.ndarray]]:  # fmt: skip
    """A file of a tiny model, and its weights by their names in transformers, as the formats round them."""
    model = tiny(kind, tied)
    architecture = architecture or kind
    path = folder / "tiny.gguf"
    file = gguf.GGUFWriter(path, architecture)
    file.add_block_count(2)
    file.add_context_length(96)
    file.add_embedding_length(HIDDEN)
    file.add_feed_forward_length(96)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_key_length(16)
    file.add_value_length(16)
    file.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    file.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    file.add_vocab_size(tokens)
    if scaled:
        file.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    tokenizer = shapes.byte_tokenizer()
    vocabulary = [*sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get), "ab", "<|endoftext|>"]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(pieces)
    file.add_token_list(vocabulary)
    file.add_token_merges(["a b"])
    file.add_token_types([3, 3, 3] + [1] * 257 + [3])
    file.add_bos_token_id(0)
    file.add_eos_token_id(2)
    short = {long: name for name, long in _OUTER.items()}
    inner = {long: name for name, long in _MODULES.items()}
    weights = {}
    for number, (name, parameter) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and tied:
            continue
        module, _, part = name.rpartition(".")
        layer = module.split(".")[2] if module.startswith("model.layers.") else ""
        label = inner[module.split(".", 3)[3]] if layer else short[module]
        weight = parameter.numpy()
        if weight.ndim == 2:
            form = GGMLQuantizationType[forms[number % len(forms)]]
            data = quants.quantize(turned(label, weight, model.config), form)
            back = quants.dequantize(data, form)
            weights[name] = _untwisted(label, back, model.config)
            if label == "token_embd" and tokens != V:
                data = data[:tokens]
            file.add_tensor(f"{f'blk.{layer}.' if layer else ''}{label}.{part}", data, raw_dtype=form)
        else:
            weights[name] = weight
            file.add_tensor(f"{f'blk.{layer}.' if layer else ''}{label}.{part}", weight)
    if extra:
        file.add_tensor(extra, np.zeros(4, np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path, weights


def _untwisted(name: str, weight: np.ndarray, config) -> np.ndarray:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
    if config.model_type != "llama" or heads is None:
        return weight
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize(
    ("kind", "tied", "forms"),
    [
        ("llama", True, ("Q4_1", "Q8_0")),
        ("llama", False, ("Q5_1", "Q5_0")),
        ("qwen2", True, ("Q4_0", "Q5_1", "Q8_0")),
        ("qwen3", False, ("Q4_1", "Q8_0")),
    ],
)
def test_weights_and_logits_are_those_that_were_written(tmp_path, kind, tied, forms):
    path, weights = written(tmp_path, kind, tied, forms)
    loaded = models.load(str(path))
    state = loaded.model.state_dict()
    assert loaded.origin == "file" and all((state[name].numpy() == weight).all() for name, weight in weights.items())
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        right = loaded.model(ids).logits[0]
    for weights_format in ("float32", "4bit", "8bit"):
        lm = engine(loaded, weights=weights_format)
        assert type(lm) is Lean and torch.allclose(lm.start().extend(IDS), right, atol=2e-4 * float(right.std()))


def test_the_model_of_transformers_brings_its_own_blocks(tmp_path):
    loaded = models.load(str(written(tmp_path)[0]))
    blocks = engine(loaded, weights="4bit").start().extend(IDS)
    assert torch.equal(engine(loaded.model, weights="4bit").start().extend(IDS), blocks)
    with torch.no_grad():
        loaded.model.model.norm.weight.mul_(2)
    assert not torch.equal(engine(loaded.model, weights="4bit").start().extend(IDS), blocks)


def test_tokenizer_and_configuration_are_kept(tmp_path):
    path, _ = written(tmp_path)
    loaded = models.load(str(path))
    assert loaded.tokenizer("abc").input_ids == [V - 2, *shapes.byte_tokenizer()("c").input_ids]
    assert loaded.eos_token_ids == {2} and loaded.config.num_hidden_layers == 2
    assert opened(path).sha256 == loaded.gguf.sha256


@pytest.mark.parametrize(
    ("pieces", "split"),
    [
        ("smollm", ["a", "1", "2", "ĊĊ", "3", "Â½"]),
        ("llama-bpe", ["a", "12", "ĊĊ", "3Â½"]),
        ("default", ["a", "12", "Ċ", "Ċ", "3Â½"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path, pieces, split):
    tokenizer = models.load(str(written(tmp_path, pieces=pieces)[0])).tokenizer
    every = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a12\n\n3½")
    assert [piece for piece, _ in every] == split


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_folder_that_can_be_streamed_is_made_once(tmp_path, capsys, dtype):
    path = written(tmp_path)[0]
    folder = prepare(str(path), dtype)
    said = capsys.readouterr().err
    assert f"as {'bfloat16' if dtype else 'float32'}" in said and "0 MB" in said
    again, loaded = AutoModelForCausalLM.from_pretrained(folder), models.load(str(path))
    assert again.dtype == (dtype or torch.float32)
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(again.dtype)), name
    capsys.readouterr()
    assert prepare(str(path), dtype) == folder and not capsys.readouterr().err
    assert isinstance(AutoTokenizer.from_pretrained(folder).eos_token_id, int)


def test_no_gguf_is_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no file .*none\.gguf"):
        prepare(str(tmp_path / "none.gguf"))


def cut(path: Path, share: float) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    return path


WRONG = {
    "another architecture": (lambda folder: written(folder, architecture="gemma")[0], "gemma.*llama, qwen2, qwen3"),
    "another quantisation": (lambda folder: written(folder, forms=("MXFP4", "Q8_0"))[0], "MXFP4.*Q4_1"),
    "weights that end early": (lambda folder: cut(written(folder)[0], 0.9), "truncated"),
    "a header that ends early": (lambda folder: cut(written(folder)[0], 0.01), "truncated"),
    "a vocabulary that does not fit": (lambda folder: written(folder, tokens=200)[0], "261.*200"),
    "scaled rotary angles": (lambda folder: written(folder, scaled=True)[0], "yarn"),
    "a way to split text that is not known": (lambda folder: written(folder, pieces="tekken")[0], "tekken.*smollm"),
    "a tensor that is not known": (lambda folder: written(folder, extra="rope_freqs.weight")[0], "rope_freqs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused(tmp_path, case):
    make, sentence = WRONG[case]
    with pytest.raises(ValueError, match=sentence):
        models.load(str(make(tmp_path)))
    assert not list(assets.cache_folder("gguf").iterdir())


def test_what_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ValueError, match=r"text\.gguf is no GGUF"):
        models.load(str(tmp_path / "text.gguf"))
    with pytest.raises(FileNotFoundError, match="no file"):
        models.load(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize("forms", [("Q4_1", "Q8_0"), ("Q5_1", "Q5_0")])
@pytest.mark.parametrize("weights", ["4bit", "8bit"])
def test_integers_are_near_float32(tmp_path, weights, forms):
    loaded = models.load(str(written(tmp_path, forms=forms)[0]))
    exact, rounded = (
        engine(loaded, weights=weights, arithmetic=arithmetic, drafts=False).start().extend(IDS)
        for arithmetic in ("float32", "int8")
    )
    assert float((rounded - exact).std() / exact.std()) < 0.1


def test_a_file_is_read_in_float32_on_the_cpu_alone(tmp_path):
    with pytest.raises(ValueError, match=r"float32 on the CPU, not in torch\.bfloat16"):
        models.load(str(written(tmp_path)[0]), torch.bfloat16)


def in_integers(loaded, weights):
    """An engine that verifies drafts in int8, where the processor has the kernels for it; elsewhere it is refused."""
    try:
        return engine(loaded, weights=weights, arithmetic="int8")
    except ValueError as error:
        assert "how many rows" in str(error)
        pytest.skip(str(error))


@pytest.mark.parametrize("weights", ["4bit", "8bit"])
def test_chains_in_integers_are_plain_decoding_bit_for_bit(tmp_path, weights):
    lm = in_integers(models.load(str(written(tmp_path)[0])), weights)
    alone = lm.start()
    rows = [alone.prefill(IDS)] + [alone.extend([token])[-1] for token in (11, 23, 7, 50)]
    session = lm.start()
    first = session.prefill(IDS)
    logits = session.verify(TokenTree.chain([11, 23, 7, 50, 9]))
    assert torch.equal(torch.stack(rows), torch.cat([first[None], logits[:4]]))
    session.keep([0, 1])
    alone.rollback(len(IDS) + 2)
    assert torch.equal(session.extend([7])[-1], alone.extend([7])[-1])
    with pytest.raises(ValueError, match="only chains"):
        session.verify(TokenTree([11, 23], [-1, -1]))


def test_drafts_in_integers_are_refused_where_rows_behind_a_cache_differ(tmp_path, monkeypatch):
    verify = Session.verify
    monkeypatch.setattr(Session, "verify", lambda session, tree: verify(session, tree) + 1e-6 * (len(tree) > 2))
    with pytest.raises(ValueError, match="how many rows"):
        engine(models.load(str(written(tmp_path)[0])), weights="8bit", arithmetic="int8")


def test_a_lone_row_without_drafts_is_near_the_padded_one(tmp_path):
    loaded = models.load(str(written(tmp_path)[0]))
    engines = engine(loaded, weights="4bit", arithmetic="int8", drafts=False), in_integers(loaded, "4bit")
    plain, padded = (lm.start().extend([5])[-1] for lm in engines)
    assert float((plain - padded).abs().max() / padded.std()) < 0.5
