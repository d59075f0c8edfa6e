"""Held-out perplexity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ondevice.causal_lm.scoring import score
from ondevice_training.evaluation import estimates
from ondevice_training.evaluation.estimates import Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT = 512  # tokens


def perplexity(model: PreTrainedModel, windows: np.ndarray) -> Estimate:
    """Over windows [n, context], each read on its own, its first token given; resampled over windows."""
    rows = windows.tolist()
    scored = score(model, [row[:1] for row in rows], [row[1:] for row in rows])
    return estimates.perplexity([window.loss for window in scored], [len(row) - 1 for row in rows])
