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
_MARKERS = ((PASSAGE, USER, ASSISTANT), ("<|im_start|>", "<|im_end|>", "<|im_end|>"))  # what tokenizers may know


@dataclass(frozen=True)
class Row:
    """Token ids of a pair. border: where an encoder's second segment begins."""

    ids: tuple[int, ...]
    border: int


def is_causal(model: PreTrainedModel) -> bool:
    """Whether a reranker is decoder-only, that is pooled at its last token."""
    return hasattr(model, "score")


def reading_pairs(tokenizer: PreTrainedTokenizerBase, causal: bool) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer whose pairs of query and passage are what a reranker reads, cut to `LONGEST` tokens.

    A decoder-only model reads the passage first, then the query, and is pooled at the assistant's marker: the order of
    the tasks that the language models were trained on. A chat model's own markers stand in for ours, and it is pooled
    at the last. An encoder reads [CLS] query [SEP] passage [SEP]. The format is the tokenizer's own, so that
    sentence-transformers' CrossEncoder makes the same rows of a stored model.
    """
    reader: Any = copy.deepcopy(tokenizer)
    reader.backend_tokenizer.no_truncation()
    reader.backend_tokenizer.no_padding()
    reader.model_max_length = LONGEST
    if causal:
        known = reader.get_vocab()
        passage, user, assistant = next(three for three in _MARKERS if known.keys() >= set(three))
        markers = [(marker, known[marker]) for marker in sorted({passage, user, assistant})]
        reader.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="$A", pair=f"{passage} $B {user} $A {assistant}", special_tokens=markers
        )
        reader.chat_template = None  # CrossEncoder would take it for the format of a pair
    return reader


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
