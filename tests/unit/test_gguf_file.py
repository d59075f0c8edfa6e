"""GGUF files: what the `gguf` package writes of a tiny model is read as it was, and wrong files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import RopeScalingType
from tiny import random_model, turned, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from ondevice import assets, models, shapes
from ondevice.causal_lm import TokenTree
from ondevice.causal_lm.lean import Lean, engine
from ondevice.causal_lm.session import Session
from ondevice.gguf_file import opened
from ondevice_programs.reranker.folder import prepare

pytestmark = pytest.mark.usefixtures("one_thread")
V = 261  # bytes, three marks, "ab", as a file has merges, and the mark that GPT-2's tokenizer adds
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 0}
IDS = [5, 17, 3, 44, 8, 29, 2, 101, 77]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))


def written(
    folder: Path, kind: str = "llama", tied: bool = True, forms: tuple[str, ...] = ("Q4_1", "Q8_0"), *,
    pieces: str = "smollm", **facts: Any,
) -> tuple[Path, dict[str, np.ndarray]]:  # fmt: skip
    """A file of a tiny model with a tokenizer, and what it holds. facts: other ones."""
    own = SIZES | {"pad_token_id": 1, "tie_word_embeddings": tied}
    model = random_model(kind, torch.float32, vocabulary=V, context=96, vectors=0.15, **own)
    entries = shapes.byte_tokenizer().get_vocab()
    facts = {
        "tokenizer_model": "gpt2", "tokenizer_pre": pieces, "token_merges": ["a b"], "bos_token_id": 0,
        "token_list": [*sorted(entries, key=entries.__getitem__), "ab", "<|endoftext|>"],
        "token_types": [3] * 3 + [1] * 257 + [3], "eos_token_id": 2,
    } | facts  # fmt: skip
    return folder / "tiny.gguf", write_gguf(model, folder / "tiny.gguf", forms, **facts)


CASES = [  # architecture, tied, storage types in turns
    ("llama", True, ("Q4_1", "Q8_0")),
    ("llama", False, ("Q5_1", "Q5_0")),
    ("qwen2", True, ("Q4_0", "Q5_1", "Q8_0")),
    ("qwen3", False, ("Q4_1", "Q8_0")),
    ("llama", False, ("F16",)),
    ("llama", True, ("BF16", "F32")),
    ("qwen2", True, ("F32", "F16", "BF16")),
    ("qwen3", False, ("BF16", "F16")),
]


@pytest.mark.parametrize(("kind", "tied", "forms"), CASES)
def test_weights_and_logits_are_those_that_were_written(tmp_path, kind, tied, forms):
    path, held = written(tmp_path, kind, tied, forms)
    loaded = models.load(str(path))
    assert loaded.origin == "file"
    state = loaded.model.state_dict()
    for name, weight in held.items():
        assert (turned(name, state[name].numpy(), loaded.config) == weight).all(), name
    with torch.inference_mode():
        right = loaded.model(torch.tensor([IDS])).logits[0]
    for weights in ("float32", "4bit", "8bit"):
        lm = engine(loaded, weights=weights)
        assert type(lm) is Lean and torch.allclose(lm.start().extend(IDS), right, atol=2e-4 * float(right.std()))


def test_the_model_of_transformers_brings_its_own_blocks(tmp_path):
    loaded = models.load(str(written(tmp_path)[0]))
    blocks = engine(loaded, weights="4bit").start().extend(IDS)
    assert torch.equal(engine(loaded.model, weights="4bit").start().extend(IDS), blocks)
    with torch.no_grad():
        loaded.model.model.norm.weight.mul_(2)
    assert not torch.equal(engine(loaded.model, weights="4bit").start().extend(IDS), blocks)


@pytest.mark.parametrize(
    ("pieces", "split"),
    [
        ("smollm", ["a", "1", "2", "ĊĊ", "3", "Â½"]),
        ("llama-bpe", ["a", "12", "ĊĊ", "3Â½"]),
        ("default", ["a", "12", "Ċ", "Ċ", "3Â½"]),
    ],
)
def test_the_tokenizer_is_the_files(tmp_path, pieces, split):
    path, _ = written(tmp_path, pieces=pieces)
    loaded = models.load(str(path))
    every = loaded.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a12\n\n3½")
    assert [piece for piece, _ in every] == split
    assert loaded.tokenizer("abc").input_ids == [V - 2, *shapes.byte_tokenizer()("c").input_ids]
    assert loaded.eos_token_ids == {2} and opened(path).sha256 == loaded.gguf.sha256


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_folder_that_can_be_streamed_is_made_once(tmp_path, capsys, dtype):
    path = written(tmp_path)[0]
    folder = prepare(str(path), dtype)
    again, loaded = AutoModelForCausalLM.from_pretrained(folder), models.load(str(path))
    assert again.dtype == (dtype or torch.float32)
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(again.dtype)), name
    assert capsys.readouterr().err
    assert prepare(str(path), dtype) == folder and not capsys.readouterr().err
    assert isinstance(AutoTokenizer.from_pretrained(folder).eos_token_id, int)


def cut(path: Path, share: float) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    return path


WRONG = {
    "another architecture": (lambda folder: written(folder, architecture="gemma")[0], "gemma"),
    "another quantisation": (lambda folder: written(folder, forms=("MXFP4", "Q8_0"))[0], "MXFP4"),
    "weights that end early": (lambda folder: cut(written(folder)[0], 0.9), "truncated"),
    "a header that ends early": (lambda folder: cut(written(folder)[0], 0.01), "truncated"),
    "a vocabulary that does not fit": (lambda folder: written(folder, rows=200)[0], "261.*200"),
    "scaled rotary angles": (lambda folder: written(folder, rope_scaling_type=RopeScalingType.YARN)[0], "yarn"),
    "a way to split text that is not known": (lambda folder: written(folder, pieces="tekken")[0], "tekken"),
    "a tensor that is not known": (lambda folder: written(folder, extra="rope_freqs.weight")[0], "rope_freqs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused(tmp_path, case):
    make, sentence = WRONG[case]
    with pytest.raises(ValueError, match=sentence):
        models.load(str(make(tmp_path)))
    assert not list(assets.cache_folder("gguf").iterdir())


def test_what_is_no_gguf_or_asked_for_in_another_type_is_refused(tmp_path):
    with pytest.raises(ValueError, match="bfloat16"):
        models.load(str(written(tmp_path)[0]), torch.bfloat16)
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ValueError, match=r"text\.gguf"):
        models.load(str(tmp_path / "text.gguf"))
    for load in (models.load, prepare):
        with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
            load(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize("forms", [("Q4_1", "Q8_0"), ("Q5_1", "Q5_0")])
@pytest.mark.parametrize("weights", ["4bit", "8bit"])
def test_integers_are_near_float32(tmp_path, weights, forms):
    loaded = models.load(str(written(tmp_path, forms=forms)[0]))
    exact, rounded = (
        engine(loaded, weights=weights, arithmetic=arithmetic, drafts=False).start().extend(IDS)
        for arithmetic in ("float32", "int8")
    )
    assert float((rounded - exact).std() / exact.std()) < 0.1


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
