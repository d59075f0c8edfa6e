"""In-context copying: how much a text's loss falls when the same text stands before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ondevice.causal_lm.scoring import score
from ondevice_training.evaluation import estimates
from ondevice_training.evaluation.estimates import Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH = 128  # tokens of a copy


def copying_ratio(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], before: Sequence[int], between: Sequence[int]
) -> Estimate:
    """Loss on the second copy over the loss on the first, summed over texts of token ids.

    before, between: marker tokens in front of the first copy and of the second; they are not scored.
    """
    prefixes = [list(before) for _ in texts]
    scored = score(model, prefixes, [[*text, *between, *text] for text in texts])
    first = [-continuation.log_probs[: len(text)].sum() for continuation, text in zip(scored, texts, strict=True)]
    second = [-continuation.log_probs[-len(text) :].sum() for continuation, text in zip(scored, texts, strict=True)]
    return estimates.ratio(second, first)
