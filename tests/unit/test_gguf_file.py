"""GGUF files: what the `gguf` package writes of a tiny model is read as it was, and wrong files are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import RopeScalingType
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_model, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from ondevice import assets, chat, models, shapes
from ondevice.causal_lm import TokenTree
from ondevice.causal_lm.lean import Lean, engine
from ondevice.causal_lm.session import Session
from ondevice.gguf_file import opened
from ondevice_programs.reranker.folder import prepare

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 0}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}  # for blocks of K types
BIASED = {"attention_bias": True, "mlp_bias": True}
IDS = [5, 17, 3, 44, 8, 29, 2, 101, 77]
BYTES = {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_merges": ["a b"], "bos_token_id": 0}
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
ARCHITECTURES = ("llama", "qwen2", "qwen3")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))


def byte_entries() -> list[str]:
    """Three marks, bytes, and "ab", as a file has merges."""
    entries = shapes.byte_tokenizer().get_vocab()
    return [*sorted(entries, key=entries.__getitem__), "ab"]


def written(
    folder: Path, kind: str = "llama", tied: bool = True, forms: tuple[str, ...] = ("Q4_1", "Q8_0"), *,
    values: Mapping[str, Any] | None = None, marks: Sequence[str] = (), **facts: Any,
) -> tuple[Path, Any]:  # fmt: skip
    """A file of a tiny model with a tokenizer, and transformers' own model of what the file holds.

    values: of the configuration. marks: more control tokens. facts: as of `write_gguf`.
    """
    entries = [*byte_entries(), *marks]
    own = SIZES | {"pad_token_id": 1, "tie_word_embeddings": tied} | dict(values or {})
    model = random_model(kind, torch.float32, vocabulary=len(entries), context=96, vectors=0.15, **own)
    types = [3] * 3 + [1] * (len(entries) - len(marks) - 3) + [3] * len(marks)
    facts = BYTES | {"token_list": entries, "token_types": types, "eos_token_id": 2} | facts
    held = write_gguf(model, folder / "tiny.gguf", forms, **facts)
    if not facts.get("rows"):
        model.load_state_dict({name: torch.from_numpy(weight) for name, weight in held.items()}, strict=False)
    return folder / "tiny.gguf", model.eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


def require_equal(path: Path, model: Any, formats: Sequence[str] = ("float32", "4bit", "8bit")) -> None:
    """The file's model has the logits of transformers', and so has the lean engine in these formats, nearly."""
    loaded, right = models.load(str(path)), logits_of(model)
    state = loaded.model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    assert torch.equal(logits_of(loaded.model), right)
    for weights in formats:
        lm = engine(loaded, weights=weights)
        assert type(lm) is Lean and torch.allclose(lm.start().extend(IDS), right, atol=1e-4 * float(right.std()))


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("form", TYPES)
def test_each_type_gives_the_logits_of_transformers(tmp_path, kind, form):
    path, model = written(tmp_path, kind, TYPES.index(form) % 2 == 0, (form,), values=WIDE)
    require_equal(path, model)


SCALED = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
    },
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALED)
def test_rotary_scaling_is_read(tmp_path, scaling):
    rope = {"rope_type": scaling, "rope_theta": 500_000.0, **SCALED[scaling]}
    path, model = written(tmp_path, forms=("F16",), values={"rope_parameters": rope})
    require_equal(path, model, ["float32"])
    assert models.load(str(path)).config.rope_parameters["rope_type"] == scaling


@pytest.mark.parametrize(("kind", "values"), [("llama", BIASED), ("qwen3", {"attention_bias": True})])
def test_biases_are_read_in_the_order_of_the_rows(tmp_path, kind, values):
    path, model = written(tmp_path, kind, forms=("Q8_0", "F16"), values=values)
    assert any(name.endswith("q_proj.bias") for name, _ in model.named_parameters())
    require_equal(path, model)


@given(data=st.data())
@settings(max_examples=4)
def test_any_file_gives_the_logits_of_transformers(tmp_path_factory, data):
    any_file(tmp_path_factory.mktemp("file"), data)


@pytest.mark.long
@given(data=st.data())
@settings(max_examples=40)
def test_many_files_give_the_logits_of_transformers(tmp_path_factory, data):
    any_file(tmp_path_factory.mktemp("file"), data)


def any_file(folder: Path, data: st.DataObject) -> None:
    """A random architecture, storage types, sizes, biases, head, rotary scaling and vocabulary."""
    kind = data.draw(st.sampled_from(ARCHITECTURES))
    forms = data.draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=5))
    scaling = data.draw(st.sampled_from(["default", *SCALED]))
    groups, heads = data.draw(st.sampled_from([(1, 4), (2, 4), (4, 4), (2, 16)]))
    values = WIDE | {
        "num_hidden_layers": data.draw(st.integers(1, 2)), "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": data.draw(st.sampled_from([16, 64])) if heads < 16 else 16,
        "rms_norm_eps": data.draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "rope_parameters": {
            "rope_theta": data.draw(st.sampled_from([1e4, 5e5, 1e6])), "rope_type": scaling, **SCALED.get(scaling, {})
        },
    }  # fmt: skip
    if values["head_dim"] * heads % 256:  # rows of the output's matrix are no blocks of the K types
        forms = [form.replace("_K", "_0").replace("Q6_0", "Q8_0") for form in forms]
    if kind != "qwen2" and data.draw(st.booleans()):
        values |= BIASED if kind == "llama" else {"attention_bias": True}
    marks = data.draw(st.lists(st.sampled_from(["<|eot_id|>", "<|endoftext|>", "<x>"]), unique=True))
    path, model = written(folder, kind, data.draw(st.booleans()), tuple(forms), values=values, marks=marks)
    require_equal(path, model)


def test_the_model_of_transformers_brings_its_own_blocks(tmp_path):
    loaded = models.load(str(written(tmp_path)[0]))
    blocks = engine(loaded, weights="4bit").start().extend(IDS)
    assert torch.equal(engine(loaded.model, weights="4bit").start().extend(IDS), blocks)
    with torch.no_grad():
        loaded.model.model.norm.weight.mul_(2)
    assert not torch.equal(engine(loaded.model, weights="4bit").start().extend(IDS), blocks)


@pytest.mark.parametrize(
    ("pieces", "split", "begins"),
    [
        ("smollm", ["I", "'m", "Ġ(", "1", "2", "3", "4", "ĊĊ", "5", "Â½"], False),
        ("llama-bpe", ["I", "'m", "Ġ(", "123", "4", "ĊĊ", "5Â½"], True),
        ("default", ["I", "'", "m", "Ġ", "(", "123", "4", "Ċ", "Ċ", "5Â½"], False),
        ("gpt-2", ["I", "'m", "Ġ(", "1234", "Ċ", "Ċ", "5Â½"], False),
        ("qwen2", ["I", "'m", "Ġ(", "1", "2", "3", "4", "ĊĊ", "5", "Â½"], False),
    ],
)
def test_the_tokenizer_is_the_files(tmp_path, pieces, split, begins):
    path, _ = written(tmp_path, tokenizer_pre=pieces)
    loaded = models.load(str(path))
    every = loaded.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("I'm (1234\n\n5½")
    assert [piece for piece, _ in every] == split
    entries = byte_entries()
    assert loaded.tokenizer("abc</s>").input_ids == [0] * begins + [entries.index("ab"), entries.index("c"), 2]
    assert len(loaded.tokenizer) == len(entries) and opened(path).sha256 == loaded.gguf.sha256


@pytest.mark.parametrize(("pieces", "whole"), [("llama-bpe", True), ("gpt-2", False)])
def test_an_entry_that_no_merges_make_is_taken_whole_by_llama_3(tmp_path, pieces, whole):
    path, _ = written(tmp_path, marks=["cab"], token_types=[3] * 3 + [1] * 258, tokenizer_pre=pieces)
    ids = models.load(str(path)).tokenizer("cab", add_special_tokens=False).input_ids
    assert ids == ([260] if whole else [byte_entries().index("c"), byte_entries().index("ab")])


ENDS = [  # of the file's own, more control tokens, all ends
    ({}, [], [2]),
    ({"eot_token_id": 1}, [], [2, 1]),
    ({"eot_token_id": 1, "eom_token_id": 0}, ["<|endoftext|>"], [2, 1, 0, 260]),
    ({"eos_token_id": 261}, ["<|im_end|>", "<|end_of_text|>", "<tool>"], [261, 2, 260]),
]


@pytest.mark.parametrize(("facts", "marks", "ends"), ENDS)
def test_every_end_token_that_the_file_names_ends_an_answer(tmp_path, facts, marks, ends):
    path, _ = written(tmp_path, marks=marks, **facts)
    loaded = models.load(str(path))
    settings = loaded.model.generation_config.eos_token_id
    assert loaded.eos_token_ids == set(ends) and loaded.tokenizer.eos_token_id == ends[0]
    assert (settings if isinstance(settings, list) else [settings]) == ends


def sentencepiece() -> dict[str, Any]:
    """Facts of a vocabulary of SentencePiece with as many entries as `byte_entries`."""
    words = ["▁", "a", "b", "▁a", "ab", "ba"]
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(251)), *words]
    scores = [0.0] * 254 + [-4.0, -5.0, -6.0, -1.0, -2.0, -3.0]
    types = [2, 3, 3] + [6] * 251 + [1] * 6
    return {
        "tokenizer_model": "llama", "tokenizer_pre": "default", "token_list": entries, "token_types": types,
        "token_scores": scores, "token_merges": None, "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "ids"),
    [
        ({}, [1, 257, 256, 13, 2, 257]),  # a begin token, and a space before a text and behind a mark
        ({"add_bos_token": False}, [257, 256, 13, 2, 257]),
        ({"add_space_prefix": False, "add_eos_token": True}, [1, 258, 13, 2, 255, 2]),
    ],
)
def test_a_vocabulary_of_sentencepiece_is_read(tmp_path, facts, ids):
    loaded = models.load(str(written(tmp_path, **sentencepiece() | facts)[0]))
    assert loaded.tokenizer("ab\n</s>a").input_ids == ids
    assert loaded.tokenizer.decode([257, 256, 13]) == "ab\n" if "add_space_prefix" not in facts else " ab\n"


def test_a_file_without_a_suffix_is_read(tmp_path):
    path, model = written(tmp_path)
    blob = path.rename(tmp_path / "b179c9523d0e6a0f98a3")
    require_equal(blob, model, ["4bit"])


@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
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


@pytest.mark.parametrize("template", ["{{ raise_exception('no user') }}", "{% for message in messages %}"])
def test_a_chat_template_that_cannot_be_rendered_is_refused(tmp_path, template):
    loaded = models.load(str(written(tmp_path, chat_template=template)[0]))
    with pytest.raises(ValueError, match="chat template"):
        chat.prompt_ids(loaded.tokenizer, "Who sings?")


def changed(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


def cut(share: float) -> Callable[[bytes], bytes]:
    return lambda data: data[: int(share * len(data))]


def unknown_type(data: bytes) -> bytes:
    """The first tensor's type, which stands behind its name, its two axes and their lengths, is 99."""
    start = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    return data[:start] + (99).to_bytes(4, "little") + data[start + 4 :]


def older(data: bytes) -> bytes:
    return data[:4] + b"\1\0\0\0" + data[8:]


def swapped(data: bytes) -> bytes:
    return data[:4] + data[7:3:-1] + data[8:]


def longer_list(data: bytes) -> bytes:
    """The list of types says that it has 2^60 of them."""
    key = b"tokenizer.ggml.token_type"
    start = data.index(key) + len(key) + 8
    return data[:start] + (1 << 60).to_bytes(8, "little") + data[start + 8 :]


def pointer(folder: Path) -> Path:
    path = folder / "tiny.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 98362432\n")
    return path


FACTOR = np.array([1, 1, 1, 2, 5, 5, 1, 9], np.float32)
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another architecture": (lambda to: written(to, architecture="gemma")[0], "gemma"),
    "another quantisation": (lambda to: written(to, forms=("MXFP4", "Q8_0"))[0], "blk.*MXFP4|token_embd.*MXFP4"),
    "an unknown type": (lambda to: changed(written(to, forms=("F32",))[0], unknown_type), "token_embd.*type 99"),
    "weights that end early": (lambda to: changed(written(to)[0], cut(0.9)), "truncated.*blk"),
    "a header that ends early": (lambda to: changed(written(to)[0], cut(0.01)), "truncated.*header"),
    "numbers the other way round": (lambda to: changed(written(to)[0], swapped), "big-endian"),
    "an older version": (lambda to: changed(written(to)[0], older), "version 1"),
    "a length that is damaged": (lambda to: changed(written(to)[0], longer_list), "damaged"),
    "a pointer of Git LFS": (pointer, "git lfs pull"),
    "a part of a split file": (lambda to: written(to, **{"split.count": 2, "split.no": 0})[0], "1 of 2.*--merge"),
    "an adapter": (lambda to: written(to, type="adapter")[0], "adapter"),
    "more entries than rows": (lambda to: written(to, rows=200)[0], "260.*200"),
    "an entry twice": (lambda to: written(to, marks=["<x>", "<x>"])[0], "<x>.*twice"),
    "an end token behind the vocabulary": (lambda to: written(to, eos_token_id=999)[0], "999.*eos.*260"),
    "merges that are no entries": (lambda to: written(to, token_merges=["a c"])[0], "'a c'"),
    "no merges": (lambda to: written(to, token_merges=None)[0], "merges"),
    "a way to split text that is not known": (lambda to: written(to, tokenizer_pre="tekken")[0], "tekken"),
    "no way to split text": (lambda to: written(to, tokenizer_pre=None)[0], "tokenizer.ggml.pre"),
    "a kind of tokenizer that is not known": (lambda to: written(to, tokenizer_model="rwkv")[0], "rwkv"),
    "other scaled angles": (lambda to: written(to, rope_scaling_type=RopeScalingType.LONGROPE)[0], "longrope"),
    "other rotary factors": (lambda to: written(to, extra={"rope_freqs.weight": FACTOR})[0], "rope_freqs"),
    "a part of each head turned": (lambda to: written(to, rope_dimension_count=8)[0], "dimension_count"),
    "a fact that is not applied": (lambda to: written(to, **{"llama.attention.scale": 0.5})[0], "attention.scale"),
    "experts": (lambda to: written(to, expert_count=8)[0], "expert_count"),
    "a projector": (lambda to: written(to, architecture="clip")[0], "clip"),
    "a reranker": (lambda to: written(to, "qwen3", **{"qwen3.pooling_type": 4})[0], "pooling_type"),
    "a fact that is missing": (lambda to: written(to, layer_norm_rms_eps=None)[0], "layer_norm_rms_epsilon"),
    "layers that are missing": (lambda to: written(to, block_count=3)[0], "2 layers.*3"),
    "heads that do not share a row": (lambda to: written(to, head_count=7)[0], "64.*7"),
    "shapes that differ": (lambda to: written(to, head_count=8)[0], "attn_q.*128"),
    "a tensor that is not known": (lambda to: written(to, extra={"cls.output.weight": FACTOR})[0], "cls.output"),
    "a tensor that is missing": (
        lambda to: written(to, extra={"blk.0.attn_q.bias": np.zeros(64, np.float32)})[0], "blk.0.attn_k.bias"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused(tmp_path, case):
    make, sentence = WRONG[case]
    with pytest.raises(ValueError, match=sentence):
        models.load(str(make(tmp_path)))
    assert not list(assets.cache_folder("gguf").iterdir())


def test_a_folder_that_holds_a_gguf_alone_names_it(tmp_path):
    path, _ = written(tmp_path)
    with pytest.raises(FileNotFoundError, match=path.name):
        models.load(str(tmp_path))


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
        assert "On this processor" in str(error)
        pytest.skip(str(error))


@pytest.mark.parametrize("weights", ["4bit", "8bit"])
def test_drafts_in_integers_are_plain_decoding_bit_for_bit(tmp_path, weights):
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
    tree = session.verify(TokenTree([11, 23, 7], [-1, -1, 1]))
    assert torch.equal(tree[2], alone.extend([23, 7])[-1])


def test_drafts_in_integers_are_refused_where_rows_behind_a_cache_differ(tmp_path, monkeypatch):
    verify = Session.verify
    monkeypatch.setattr(Session, "verify", lambda session, tree: verify(session, tree) + 1e-6 * (len(tree) > 2))
    with pytest.raises(ValueError, match="On this processor"):
        engine(models.load(str(written(tmp_path)[0])), weights="8bit", arithmetic="int8")
