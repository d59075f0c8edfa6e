"""Greedy outputs, and whether they run in circles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST = 256  # new tokens
LOOP = 8  # tokens: an n-gram of this length that stands for the third time is a loop
TIMES = 3
_ROWS = 32  # prompts of a batch


@dataclass(frozen=True)
class Output:
    """Generated ids without the end token, and whether that came."""

    ids: tuple[int, ...]
    ended: bool


def loops(ids: Sequence[int], length: int = LOOP, times: int = TIMES) -> bool:
    """Whether some n-gram of that length occurs so many times; occurrences may overlap."""
    return max(Counter(_ngrams(ids, length)).values(), default=0) >= times


def loop_start(ids: Sequence[int]) -> int | None:
    """Where a loop begins, or None: the second place of the n-gram that is first to stand for the third time.

    What is before it holds no loop. Occurrences may overlap, so a loop of a short period begins with its second period.
    """
    starts: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - LOOP + 1):
        seen = starts.setdefault(tuple(ids[start : start + LOOP]), [])
        seen.append(start)
        if len(seen) == TIMES:
            return seen[1]
    return None


def repeated(ids: Sequence[int], length: int = 4) -> tuple[int, int]:
    """How many n-grams occurred before in the sequence, and how many there are."""
    grams = _ngrams(ids, length)
    return len(grams) - len(set(grams)), len(grams)


def greedy(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], eos_token_id: int | None, max_new_tokens: int = LONGEST
) -> list[Output]:
    """The likeliest token each time, until the end token (None: never) or `max_new_tokens`, it included.

    Raises ValueError on an empty prompt, and where prompt and output would not fit the model's context.
    """
    room = int(model.config.max_position_embeddings) - max_new_tokens
    for prompt in prompts:
        if not 0 < len(prompt) <= room:
            raise ValueError(f"A prompt needs 1 to {room} tokens, not {len(prompt)}.")
    outputs: dict[int, Output] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), _ROWS):
        batch = order[start : start + _ROWS]
        texts = [prompts[index] for index in batch]
        outputs.update(zip(batch, _batch(model, texts, eos_token_id, max_new_tokens), strict=True))
    return [outputs[index] for index in range(len(prompts))]


@torch.inference_mode()
def _batch(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], eos_token_id: int | None, max_new_tokens: int
) -> list[Output]:
    """One batch, padded on the left; positions count from each row's first token and the padding is masked.

    Rows that have ended leave the batch, as a few rows of the longest outputs take most of the steps.
    """
    width = max(map(len, prompts))
    device = model.device
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    ids = ids.to(device)
    mask = mask.to(device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = DynamicCache()
    rows = list(range(len(prompts)))
    outputs: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for _ in range(max_new_tokens):
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        tokens = logits[:, -1].argmax(dim=-1)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if token == eos_token_id:
                ended[row] = True
            else:
                outputs[row].append(token)
        kept = [column for column, row in enumerate(rows) if not ended[row]]
        if not kept:
            break
        if len(kept) < len(rows):
            cache.batch_select_indices(torch.tensor(kept, device=device))
        rows = [rows[column] for column in kept]
        ids = tokens[kept][:, None]
        positions = positions[kept][:, -1:] + 1
        mask = torch.cat([mask[kept], mask.new_ones(len(kept), 1)], dim=1)
    return [Output(tuple(output), done) for output, done in zip(outputs, ended, strict=True)]


def _ngrams(ids: Sequence[int], length: int) -> list[tuple[int, ...]]:
    return [tuple(ids[start : start + length]) for start in range(len(ids) - length + 1)]
