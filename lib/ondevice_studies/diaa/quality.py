"""What a format does to the text: perplexity of WikiText-2's test split, in each format, window by window.

`make record PAPER=diaa ARGS="--only quality"` records it. Windows are drawn evenly over the split and know nothing of
each other; only losses are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
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


def record(model: str) -> None:
    """Record what is missing, a format at a time."""
    recorder = evidence.Recorder(
        "diaa", f"{plain.LABELS[model]}-quality", KEYS, {"windows": WINDOWS, "tokens": WINDOW, "threads": 1}, [model]
    )
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
