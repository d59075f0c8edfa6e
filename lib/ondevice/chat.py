"""Prompts as a chat model was trained to read them, by its own template."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a user's message, up to where the answer begins.

    The template is the model's own, with the system text that it has by default. A model without a template gets the
    plain text, and a warning says so. Raises ValueError on an empty text.
    """
    if not text.strip():
        raise ValueError("A prompt needs at least one character that is not a space.")
    if tokenizer.chat_template is None:
        warnings.warn("This model has no chat template: it reads prompts as plain text.", stacklevel=2)
        return list(tokenizer(text, verbose=False).input_ids)
    messages = [{"role": "user", "content": text}]
    ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return list(ids)
