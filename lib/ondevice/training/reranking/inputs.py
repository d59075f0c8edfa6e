"""What a reranker reads: one query-passage pair as a row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.corpus.prompts import ASSISTANT, PASSAGE, USER

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST = 160  # tokens of a pair; the passage's end is cut, not the query
_LONGEST_QUERY = 64


@dataclass(frozen=True)
class Row:
    """Token ids of a pair. border: where an encoder's second segment begins."""

    ids: tuple[int, ...]
    border: int


def is_causal(model: PreTrainedModel) -> bool:
    """Whether a reranker is decoder-only, that is pooled at its last token."""
    return hasattr(model, "score")


def rows(
    tokenizer: PreTrainedTokenizerBase, causal: bool, query: str, passages: Sequence[str], longest: int = LONGEST
) -> list[Row]:
    """Pairs of a query with passages, each a title, a line break and a text.

    A decoder-only model reads the passage first, then the query, and is pooled at the assistant's marker: the order of
    the tasks that the language models were trained on. An encoder reads [CLS] query [SEP] passage [SEP].
    """
    if causal:
        end = tokenizer(f"{USER}{query}", verbose=False)["input_ids"][:_LONGEST_QUERY]
        end = end + tokenizer(ASSISTANT, verbose=False)["input_ids"]
        starts = tokenizer([PASSAGE + passage for passage in passages], verbose=False)["input_ids"]
        return [Row((*start[: longest - len(end)], *end), longest) for start in starts]
    plain = {"add_special_tokens": False, "verbose": False}
    asked = tokenizer(query, **plain)["input_ids"][:_LONGEST_QUERY]
    first = [tokenizer.cls_token_id, *asked, tokenizer.sep_token_id]
    texts = tokenizer(list(passages), **plain)["input_ids"]
    return [Row((*first, *text[: longest - len(first) - 1], tokenizer.sep_token_id), len(first)) for text in texts]


def padded(group: Sequence[Row], pad: int, side: str = "right") -> dict[str, Tensor]:
    """input_ids, attention_mask and token_type_ids, each [n, longest row] int64."""
    width = max(len(row.ids) for row in group)
    ids = torch.full((len(group), width), pad)
    mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
    for index, row in enumerate(group):
        length = len(row.ids)
        start = 0 if side == "right" else width - length
        ids[index, start : start + length] = torch.tensor(row.ids)
        mask[index, start : start + length] = 1
        types[index, start + row.border : start + length] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
