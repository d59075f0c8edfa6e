"""The tokenizer, a byte-level BPE of 8192 entries."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ondevice import assets
from ondevice.corpus import store
from ondevice.corpus.prompts import ASSISTANT, DOCUMENT, END, MARKERS, PAD, PASSAGE, USER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 8192
_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% else %}" + ASSISTANT + "{{ message['content'] }}" + END + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


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
