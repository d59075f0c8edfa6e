"""What a format does to the text: perplexity of WikiText-2's test split, in each format, window by window.

`make record PAPER=diaa ARGS="--only quality"` records it. Windows are drawn evenly over the split and know nothing of
each other; only losses are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ondevice import evidence, models
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.lean import engine
from ondevice.corpus import wikitext
from ondevice_studies.diaa.costs import FORMATS
from ondevice_studies.speculation import plain

WINDOWS = 40
WINDOW = 512  # tokens
CHUNK = 256  # tokens per forward pass
KEYS = ["model", "weights", "arithmetic"]


def windows(loaded: models.Loaded) -> list[NDArray[np.int64]]:
    """Token ids of WINDOWS windows, spread evenly over the split."""
    encoded = loaded.tokenizer(wikitext.text("test"), verbose=False, add_special_tokens=False)
    ids = np.asarray(encoded.input_ids, np.int64)
    starts = np.linspace(0, len(ids) - WINDOW, WINDOWS).astype(int)
    return [ids[start : start + WINDOW] for start in starts]


def loss(lm: CausalLM, ids: NDArray[np.int64]) -> float:
    """The mean loss per token of a window, in nats, its first token aside."""
    losses: list[torch.Tensor] = []

    def read(start: int, logits: torch.Tensor) -> None:
        following = torch.from_numpy(ids[start + 1 : start + 1 + len(logits)])
        chances = torch.log_softmax(logits[: len(following)].float(), dim=-1)
        losses.append(-chances.gather(1, following[:, None])[:, 0])

    lm.start(len(ids)).prefill(ids, CHUNK, read)
    return float(torch.cat(losses).mean())


MADE_BY: tuple[Callable[..., Any], ...] = (windows, loss, engine, models.load)


def again(name: str) -> evidence.Again | None:
    """How two windows of a record are read again. None of another record."""
    model = {f"{label}-quality": model for model, label in plain.LABELS.items()}.get(name)
    if model is None:
        return None

    def make(rows: pd.DataFrame) -> pd.DataFrame:
        loaded = models.load(model)
        read = windows(loaded)
        made = []
        for weights, arithmetic, window in rows[["weights", "arithmetic", "window"]].itertuples(index=False):
            lm = engine(loaded, threads=1, weights=weights, arithmetic=arithmetic)
            made.append((weights, arithmetic, window, loss(lm, read[window])))
        return pd.DataFrame(made, columns=[*unit, "loss"])

    unit = ["weights", "arithmetic", "window"]
    return evidence.Again(MADE_BY, unit, evidence.some(unit, 2), make, ["loss"], tolerance=0.01)


def record(model: str) -> None:
    """Record what is missing, a format at a time."""
    parameters = {"windows": WINDOWS, "tokens": WINDOW, "threads": 1}
    name = f"{plain.LABELS[model]}-quality"
    recorder = evidence.Recorder("diaa", name, KEYS, parameters, [model], functions=MADE_BY)
    loaded = models.load(model)
    read = windows(loaded)
    for form in FORMATS:
        keys: dict[str, Any] = {"model": model, "weights": form.weights, "arithmetic": form.arithmetic}
        if tuple(keys.values()) in recorder.done:
            continue
        lm = engine(loaded, threads=1, weights=form.weights, arithmetic=form.arithmetic)
        rows = [keys | {"window": number, "loss": loss(lm, ids)} for number, ids in enumerate(read)]
        recorder.add(rows)
        recorder.checkpoint()
        perplexity = float(np.exp(np.mean([row["loss"] for row in rows])))
        print(f"{form.weights}, {form.arithmetic}: perplexity {perplexity:.3f}", flush=True)
    print(recorder.finish())
