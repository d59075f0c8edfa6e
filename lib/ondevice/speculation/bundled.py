"""The mixture that drafts for any model, with the weights that ship for it."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ondevice import models
from ondevice.speculation.mixture import Mixture


def weights_for_any_model() -> NDArray[Any]:
    """[*LOGITS_SHAPE, sources] of texts and logits, without stores.

    They were fitted by `fitting.fit` on SmolLM2's answers to our own validation prompts, in six tasks.
    """
    return models.load_arrays("mixture")["any model"]


def mixture(**options: Any) -> Mixture:
    """A new mixture with these weights. options: of `Mixture`."""
    return Mixture(weights_for_any_model(), **options)
