"""What a reranker reads: one query-passage pair as a row of tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import processors
from torch import Tensor

from ondevice.corpus.prompts import ASSISTANT, PASSAGE, USER

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST = 160  # tokens of a pair
LONGEST_CHAT = 256  # of a chat model's, whose markers are words
_CHAT = ("<|im_start|>user\n", "\nPassage:\n", "<|im_end|>\n<|im_start|>assistant\n")  # around query and passage
_MESSAGE = (
    "{{% for message in messages if message['role'] == '{role}' %}}"
    "{{{{ {before!r} + message['content'] + {behind!r} }}}}{{% endfor %}}"
)
# The same row, for messages of the roles query and document.
CHAT_TEMPLATE = _MESSAGE.format(role="query", before=_CHAT[0], behind=_CHAT[1]) + _MESSAGE.format(
    role="document", before="", behind=_CHAT[2]
)


@dataclass(frozen=True)
class Row:
    """Token ids of a query-document pair. border: where an encoder's second segment begins, else its length."""

    ids: Sequence[int]
    border: int


def is_causal(model: PreTrainedModel) -> bool:
    """Whether a reranker is decoder-only, that is pooled at its last token."""
    return hasattr(model, "score")


def reading_pairs(tokenizer: PreTrainedTokenizerBase, causal: bool) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer whose pairs of query and passage are what a reranker reads, cut to `LONGEST` tokens.

    A decoder-only model of ours reads the passage first, then the query, and is pooled at the assistant's marker: the
    order of the tasks that the language models were trained on. A chat model reads a user's message of query and
    passage, and is pooled where its answer would begin. An encoder reads [CLS] query [SEP] passage [SEP]. The format is
    the tokenizer's own, so that sentence-transformers' CrossEncoder makes the same rows of a stored model.
    """
    reader: Any = copy.deepcopy(tokenizer)
    reader.backend_tokenizer.no_truncation()
    reader.backend_tokenizer.no_padding()
    vocabulary = reader.get_vocab()
    ours = {PASSAGE, USER, ASSISTANT} <= vocabulary.keys()
    reader.model_max_length = LONGEST if ours or not causal else LONGEST_CHAT
    if causal:
        # CrossEncoder takes a chat template for the format of a pair.
        reader.chat_template = None if ours else CHAT_TEMPLATE
        parts = (PASSAGE, USER, ASSISTANT) if ours else _CHAT
        ids = [reader(part, add_special_tokens=False)["input_ids"] for part in parts]
        names = [
            {"id": f"part{n}", "ids": part, "tokens": reader.convert_ids_to_tokens(part)} for n, part in enumerate(ids)
        ]
        pair = "part0 $B part1 $A part2" if ours else "part0 $A part1 $B part2"
        processor = processors.TemplateProcessing(single="$A", pair=pair, special_tokens=names)
        reader.backend_tokenizer.post_processor = processor
    return reader


def reader(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer whose pairs a loaded reranker reads: its own, or one for an adapter's chat template."""
    return tokenizer if tokenizer.chat_template is None else reading_pairs(tokenizer, is_causal(model))


def rows(tokenizer: PreTrainedTokenizerBase, query: str, passages: Sequence[str]) -> list[Row]:
    """Pairs of a query with passages, each a title, a line break and a text; the longer one loses its end."""
    encoded = tokenizer([query] * len(passages), list(passages), truncation=True, verbose=False)
    types = encoded["token_type_ids"] if "token_type_ids" in encoded else [[]] * len(passages)
    return [
        Row(tuple(ids), kinds.index(1) if kinds else len(ids))
        for ids, kinds in zip(encoded["input_ids"], types, strict=True)
    ]


def padded(group: Sequence[Row], pad: int, side: str = "right") -> dict[str, Tensor]:
    """input_ids, attention_mask and token_type_ids, each [n, longest row] int64."""
    width = max(len(row.ids) for row in group)
    ids = torch.full((len(group), width), pad)
    mask = torch.zeros_like(ids)
    types = torch.zeros_like(ids)
    for index, row in enumerate(group):
        length = len(row.ids)
        start = 0 if side == "right" else width - length
        ids[index, start : start + length] = torch.tensor(row.ids)
        mask[index, start : start + length] = 1
        types[index, start + row.border : start + length] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
