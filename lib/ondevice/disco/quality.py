"""Answer quality when generation changes hands (Figures 8 and 10, Eq. 6): one model begins, another goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd


def answer_with_handover(first: Any, second: Any, ids: Any, handover: int, limit: int) -> list[int]:
    """Greedy answer of at most `limit` tokens, of which the first model gives at most `handover` (appendix D.2).

    ids: [1, L] prompt ids of a vocabulary that both models share. The second model takes over only if the first has not
    ended its answer by then.
    """
    import torch

    if not 0 <= handover <= limit:
        raise ValueError(f"The hand-over comes between 0 and {limit} tokens, not at {handover}.")
    if first.config.vocab_size != second.config.vocab_size:
        raise ValueError("The two models have different vocabularies; token ids cannot be handed over.")
    prefix = ids
    for model, tokens in ((first, handover), (second, limit - handover)):
        ended = prefix.shape[1] > ids.shape[1] and int(prefix[0, -1]) == model.config.eos_token_id
        if tokens and not ended:
            with torch.inference_mode():
                prefix = model.generate(
                    prefix,
                    attention_mask=torch.ones_like(prefix),
                    max_new_tokens=tokens,
                    do_sample=False,
                    pad_token_id=model.config.eos_token_id,
                )
    return prefix[0, ids.shape[1] :].tolist()


def rouge_1(answer: str, reference: str) -> float:
    """ROUGE-1 F1: overlap of lower-cased words, in [0, 1]."""
    said, wanted = (Counter(text.lower().split()) for text in (answer, reference))
    shared = sum((said & wanted).values())
    total = sum(said.values()) + sum(wanted.values())
    return 2 * shared / total if total else 0.0


def quality_by_handover(
    first: Any, second: Any, tokenizer: Any, items: Sequence[tuple[str, str]], handovers: Sequence[int], limit: int
) -> pd.DataFrame:
    """ROUGE-1 of every item at every hand-over length. items: (prompt, reference). Columns: item, handover, rouge_1.

    A hand-over of 0 is the second model alone, one of `limit` the first alone.
    """
    rows = []
    for number, (prompt, reference) in enumerate(items):
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(first.device)
        for handover in handovers:
            tokens = answer_with_handover(first, second, ids, handover, limit)
            answer = tokenizer.decode(tokens, skip_special_tokens=True)
            rows.append((number, handover, rouge_1(answer, reference)))
    return pd.DataFrame(rows, columns=["item", "handover", "rouge_1"])
