"""What a record keeps of prompts and answers: hashes of their tokens, and by how much a choice was right."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from torch import Tensor

from ondevice.speculation.loop import Choice, greedy


def digest(ids: Sequence[int]) -> str:
    """12 hex digits of token ids."""
    return sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()[:12]


def noting(margins: list[float]) -> Choice:
    """Greedy choice, noting by how much the likeliest token's logit leads."""

    def choice(logits: Tensor) -> int:
        first, second = logits.topk(2).values.tolist()
        margins.append(first - second)
        return greedy(logits)

    return choice
