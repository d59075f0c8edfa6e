"""Public models against llama.cpp, where llama-cpp-python is installed: the same token ids, the same logits."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from ondevice import chat, corpus, models, prompts
from ondevice.causal_lm.lean import engine

llama_cpp: Any = pytest.importorskip("llama_cpp", reason="the extra `peers` builds llama.cpp")

HAND_MADE = [
    "1234567890 12 3.14159 0x1f 1,000,000", "  two  spaces   three\ttab", "line\n\n\nbreaks\r\n and more\n",
    "naïve café Ünïcödé ß ł 日本語 한국어 русский العربية 🙂👩‍👩‍👧", "def f(x):\n    return x[::-1]  # reversed\n",
    "don't can't I'll we've", "A", " ", "\n", "https://example.org/a?b=c&d=%20", "x=1;y=2;;z", "€£¥ ½ ² ﬁ",
]  # fmt: skip


def texts() -> list[str]:
    """200 texts: hand-made ones, our prompts, and documents with code."""
    own = [prompt.text for split in ("test", "validation") for prompt in prompts.own(split)]
    documents = [document.text[:600] for document in corpus.documents("test")[:200]]
    return [*HAND_MADE, *own, *documents][:200]


@pytest.fixture(scope="module")
def loaded() -> models.Loaded:
    return models.load(models.SMOLLM2)


class Peer:
    """llama.cpp on one GGUF file, one thread, its cache in float32."""

    def __init__(self, path: str) -> None:
        llama_cpp.llama_log_set(_SILENT, None)
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)

    def ids(self, text: str) -> list[int]:
        """Of a text, without marks around it."""
        data = text.encode()
        room = (llama_cpp.llama_token * (len(data) + 16))()
        count = llama_cpp.llama_tokenize(self.vocabulary, data, len(data), room, len(room), False, False)
        assert count >= 0
        return list(room[:count])

    def logits(self, ids: list[int]) -> np.ndarray:
        """[V] after the last token."""
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 1024
        parameters.n_threads = parameters.n_threads_batch = 1
        parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to 16 bits
        context = llama_cpp.llama_init_from_model(self.model, parameters)
        room = (llama_cpp.llama_token * len(ids))(*ids)
        assert not llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(room, len(ids)))
        size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (size,)).copy()
        llama_cpp.llama_free(context)
        return logits


@llama_cpp.llama_log_callback
def _SILENT(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drop a line of llama.cpp's log."""


def test_token_ids_are_those_of_llama_cpp(loaded):
    peer = Peer(str(loaded.gguf.path))
    differ = [text for text in texts() if peer.ids(text) != loaded.tokenizer(text, add_special_tokens=False).input_ids]
    assert not differ


def test_logits_are_those_of_llama_cpp_in_float32(loaded, tmp_path):
    path = tmp_path / "float32.gguf"
    in_float32(loaded, path)
    peer = Peer(str(path))
    lm = engine(loaded, threads=1)
    for prompt in prompts.own()[::3]:
        ids = chat.prompt_ids(loaded.tokenizer, prompt.text)
        right = peer.logits(ids)
        ours = lm.start().prefill(ids).numpy()
        assert np.abs(ours - right).max() < 1e-3 * right.std()


def in_float32(loaded: models.Loaded, path: Any) -> None:
    """Write a GGUF file again with every tensor in float32, its metadata as it is."""
    import gguf

    reader = gguf.GGUFReader(loaded.gguf.path)
    file = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        file.add_key_value(name, field.contents(), kind, field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        file.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
