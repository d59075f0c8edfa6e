"""Prompts as a chat model was trained to read them, by its own template."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a user's message, up to where the answer begins.

    The template is the model's own, with the system text that it has by default. A model without a template gets the
    plain text, and a warning says so. Raises ValueError on an empty text and a template that cannot render it.
    """
    if not text.strip():
        raise ValueError("A prompt needs at least one character that is not a space.")
    if tokenizer.chat_template is None:
        warnings.warn("This model has no chat template: it reads prompts as plain text.", stacklevel=2)
        return list(tokenizer(text, verbose=False).input_ids)
    return list(_rendered(tokenizer, text, return_dict=False))


def prompt_text(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text of the same prompt, with its special tokens written out. Raises ValueError without a template."""
    if tokenizer.chat_template is None:
        raise ValueError("This model has no chat template.")
    return str(_rendered(tokenizer, text, tokenize=False))


def _rendered(tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, **options)
    except TemplateError as error:
        raise ValueError(f"The model's chat template cannot render a user's message ({error}).") from None
