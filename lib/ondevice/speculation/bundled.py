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
    """[kinds, orders, sources] of a mixture with the stores, or without; `make record PAPER=speculation` fits them."""
    return models.load_arrays("mixture")["with stores" if stored else "without stores"]


def mixture(stored: bool = True, **options: Any) -> Mixture:
    """A new mixture. stored: whether it reads the stores, whose tokens are the bundled models'; any model goes without.

    options: of `Mixture`.
    """
    drafter = Mixture(weights(stored), stores() if stored else (), **options)
    drafter.vocabulary = len(corpus.tokenizer()) if stored else None
    return drafter
