"""What the bundled mixture rests on: the model's answers to train and validation prompts, and the weights they fit.

`make record PAPER=speculation` records it; it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ondevice import corpus, evidence, models
from ondevice.speculation.bundled import stores
from ondevice.speculation.mixture import Mixture
from ondevice.speculation.store import Store
from ondevice_studies.speculation import fitting
from ondevice_studies.speculation.request_set import Request, answered, spread

MODEL = "pydocs-lm-base"
PROMPTS = {"train": 500, "validation": 60}  # of a task whose answers are kept
LONGEST = 128  # tokens of an answer
BEFORE = 8  # tokens of its prompt that a store keeps before an answer
KEYS = ["split", "task"]
TOLD = {"prompts a task": PROMPTS, "tokens": LONGEST, "tokens of a prompt": BEFORE}


def requests(split: str, task: str, model: Any) -> list[Request]:
    """A split's prompts of a task in an order set by hash, answered."""
    tokenizer = corpus.tokenizer()
    tasks = spread(corpus.tasks(corpus.documents(split), [task]))
    prompts = ((one.name, tokenizer(one.prompt, verbose=False)["input_ids"]) for one in tasks)
    room = model.config.max_position_embeddings - LONGEST
    fitting_in = (pair for pair in prompts if len(pair[1]) <= room)
    return answered(task, fitting_in, PROMPTS[split], model, tokenizer.eos_token_id, LONGEST)


def record(model: Any, kept: evidence.Recorder) -> None:
    """Answer what is missing."""
    for split in PROMPTS:
        for task in corpus.FAMILIES:
            if (split, task) not in kept.done:
                found = requests(split, task, model)
                rows = []
                for one in (one for one in found if one.limit > 1):
                    prompt = one.ids[-BEFORE:] if split == "train" else one.ids
                    said = (*one.said, *one.ends)[: one.limit]
                    rows.append((split, task, one.name, len(prompt), [*prompt, *said]))
                kept.add(pd.DataFrame(rows, columns=[*KEYS, "document", "prompt_tokens", "tokens"]))
                kept.checkpoint()
                print(f"{split} {task}: {len(found)} answers", flush=True)


def fitted(kept: Sequence[Store]) -> NDArray[np.float64]:
    """The weights of a mixture with these stores, on the validation answers."""
    table = evidence.load("speculation", "answered")
    seen = []
    for _, mine in table[table["split"] == "validation"].groupby("task", sort=False):
        texts = zip(mine["tokens"].map(list), mine["prompt_tokens"], strict=True)
        seen.append(fitting.observed(Mixture(stores=kept), [(tokens[:end], tokens[end:]) for tokens, end in texts]))
    return fitting.fit(*(np.concatenate(part) for part in zip(*seen, strict=True)))


def main(argv: Sequence[str] | None = None) -> None:
    """The command; once all is answered, the weights are fitted."""
    argparse.ArgumentParser(prog="make record PAPER=speculation", description=__doc__).parse_args(argv)
    torch.set_num_threads(1)
    kept = evidence.Recorder("speculation", "answered", KEYS, TOLD, [MODEL])
    record(models.load(MODEL).model, kept)
    print(kept.finish())
    print(refit())


def refit() -> Path:
    """Fit the weights, with the stores and without, to the recorded answers."""
    keys = ["stored", "kind", "order", "source"]
    rows = evidence.Recorder("speculation", "weights", keys, TOLD, [MODEL])
    for stored, kept in ((True, stores()), (False, ())):
        found = [(stored, *place, weight) for place, weight in np.ndenumerate(fitted(kept))]
        rows.add(pd.DataFrame(found, columns=[*keys, "weight"]))
    path = rows.finish()
    models.save_arrays("mixture", shipped(evidence.load("speculation", "weights")))
    return path


def shipped(table: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """The record `weights` as drafters load it: [kinds, orders, sources] with the stores, and without."""
    arrays = {}
    for name, stored in (("with stores", True), ("without stores", False)):
        rows = table[table["stored"] == stored].sort_values(["kind", "order", "source"])
        shape = [rows[column].nunique() for column in ("kind", "order", "source")]
        arrays[name] = rows["weight"].to_numpy().reshape(shape)
    return arrays
