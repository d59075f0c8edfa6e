"""The tokenizer (byte-level BPE, 8192 entries) and the token arrays that training reads."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ondevice import assets
from ondevice.corpus import store
from ondevice.corpus.prompts import ASSISTANT, DOCUMENT, END, MARKERS, PAD, PASSAGE, USER, after_passage, pick, tasks
from ondevice.corpus.reading import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 8192
_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% else %}" + ASSISTANT + "{{ message['content'] }}" + END + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)
# Relative number of tasks of each family in training; retrieval most, since copying from a passage is the hardest.
_WEIGHTS = {
    "rag": 4,
    "question": 2,
    "summary": 2,
    "parameters": 2,
    "doctest": 1,
    "see_also": 1,
    "turns": 1,
    "continuation": 2,
}


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the corpus's markers, ready for `save_pretrained`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=list(MARKERS), initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=[USER, ASSISTANT, PASSAGE, DOCUMENT],
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the bundled language models; without them, that of this corpus, trained on its train split."""
    from transformers import PreTrainedTokenizerFast

    path = assets.data("models", "pydocs-lm-base")
    if not path.is_dir():
        path = store.folder() / "tokenizer"
    if not path.is_dir():
        trained = train_tokenizer(document.text for document in store.documents("train"))
        part = path.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        trained.save_pretrained(part)
        part.rename(path)
    return PreTrainedTokenizerFast.from_pretrained(path)


def document_tokens(split: str) -> np.ndarray:
    """[n] uint16, memory-mapped: a split's documents in order of their names, each ended by the end token.

    Neighbours stand side by side, so that a context of training holds related documents (in-context pretraining).
    """
    return _cached(f"{split}-documents", lambda: (document.text + END for document in store.documents(split)))


def task_tokens(split: str) -> np.ndarray:
    """[n] uint16, memory-mapped: a split's task texts, families mixed by their weights, in an order set by hash."""
    return _cached(f"{split}-tasks", lambda: task_mixture(store.documents(split)))


def task_mixture(documents: Sequence[Document]) -> Iterator[str]:
    """Task texts, and documents after a passage, in proportion to the weights until the retrieval tasks run out."""
    groups: dict[str, list[str]] = {family: [] for family in _WEIGHTS}
    for task in sorted(tasks(documents), key=lambda task: pick(task.name, f"order {task.family}", 2**62)):
        groups[task.family].append(task.text)
    order = sorted(range(len(documents)), key=lambda index: pick(documents[index].name, "order continuation", 2**62))
    groups["continuation"] = [after_passage(documents, index) for index in order]
    # The i-th text of a family stands at time (i + 1/2) / weight, so that merging by time keeps the proportions.
    timed = [((i + 0.5) / _WEIGHTS[family], family, i) for family in groups for i in range(len(groups[family]))]
    last = (len(groups["rag"]) + 0.5) / _WEIGHTS["rag"]
    for _, family, i in sorted(entry for entry in timed if entry[0] < last):
        yield groups[family][i]


def _cached(name: str, texts: Callable[[], Iterable[str]]) -> np.ndarray:
    encoder = tokenizer()
    key = pick("".join(sorted(encoder.get_vocab())), "tokenizer", 2**48)
    path: Path = store.folder() / f"{name}-{key:012x}.npy"
    if not path.is_file():
        with assets.writing(path) as temporary:
            np.save(temporary, encode(texts(), encoder))
    return assets.array(path, mapped=True)


def encode(texts: Iterable[str], encoder: PreTrainedTokenizerFast) -> np.ndarray:
    """[n] uint16: the texts' tokens, one after the other."""
    parts: list[list[int]] = []
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == 2000:
            parts += encoder(batch, verbose=False)["input_ids"]
            batch = []
    parts += encoder(batch, verbose=False)["input_ids"] if batch else []
    if not parts:
        raise ValueError("There is no text to encode.")
    return np.concatenate([np.array(part, dtype=np.uint16) for part in parts])
