"""The stores and weights of the bundled models: train text, answers to train prompts, and fits on validation ones."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice import assets, corpus, models
from ondevice.speculation.mixture import Mixture
from ondevice.speculation.store import Store

TOKENS = 1_500_000  # of train text, in windows from all over it
WINDOW = 512  # tokens


def text() -> list[NDArray[np.int64]]:
    """Windows of the train tasks: prompts and the answers that people wrote."""
    every = corpus.task_tokens("train")
    starts = np.linspace(0, len(every) - WINDOW, TOKENS // WINDOW).astype(int)
    return [every[start : start + WINDOW].astype(np.int64) for start in starts]


def answers() -> list[NDArray[np.int64]]:
    """The model's answers to train prompts, each behind the end of its prompt."""
    from ondevice import evidence

    table = evidence.load("speculation", "answered")
    return [np.asarray(tokens, np.int64) for tokens in table.loc[table["split"] == "train", "tokens"]]


def stores() -> list[Store]:
    """The store of the train text and that of the answers, kept in the cache."""
    loaded = []
    for sequences in (text(), answers()):
        key = sha256(b"".join(sequence.tobytes() for sequence in sequences)).hexdigest()[:24]
        folder = assets.cache_folder("speculation") / f"store-{key}"
        if not folder.is_dir():
            try:
                Store.from_sequences(sequences).save(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
        loaded.append(Store.load(folder))
    return loaded


def weights(stored: bool) -> NDArray[np.float64]:
    """[*SHAPE, sources] for the bundled models, of texts alone, with the stores or without them.

    `make record PAPER=speculation` fits them.
    """
    return models.load_arrays("mixture")["with stores" if stored else "without stores"]


def weights_for_any_model() -> NDArray[np.float64]:
    """[*LOGITS_SHAPE, sources] of texts and logits, without stores.

    They were fitted by `fitting.fit` on SmolLM2's answers to our own validation prompts, in six tasks.
    """
    return models.load_arrays("mixture")["any model"]


def mixture(stored: bool = False, **options: Any) -> Mixture:
    """A new mixture. stored: of texts, with the stores, whose tokens are the bundled models'; else of texts and logits.

    Without stores it drafts for any model. options: of `Mixture`.
    """
    drafter = Mixture(weights(True), stores(), **options) if stored else Mixture(weights_for_any_model(), **options)
    drafter.vocabulary = len(corpus.tokenizer()) if stored else None
    return drafter
