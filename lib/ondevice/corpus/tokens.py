"""The tokenizer that passages of the documentation are counted in: byte-level BPE of 8192 entries."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ondevice import assets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Trained on the documentation."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(assets.data("models", "documentation-tokenizer"))
