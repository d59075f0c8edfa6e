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
from ondevice.speculation import fitting
from ondevice.speculation.bundled import stores
from ondevice.speculation.mixture import Mixture
from ondevice.speculation.store import Store
from ondevice_studies.speculation import plain
from ondevice_studies.speculation.request_set import Request, answered, spread

MODEL = "pydocs-lm-base"
PROMPTS = {"train": 500, "validation": 60}  # of a task whose answers are kept
LONGEST = 128  # tokens of an answer
BEFORE = 8  # tokens of its prompt that a store keeps before an answer
KEYS = ["split", "task"]
PARAMETERS = {"prompts a task": PROMPTS, "tokens": LONGEST, "tokens of a prompt": BEFORE}


def requests(split: str, task: str, model: Any) -> list[Request]:
    """A split's prompts of a task in an order set by hash, answered."""
    tokenizer = corpus.tokenizer()
    tasks = spread(corpus.tasks(corpus.documents(split), [task]))
    prompts = ((example.name, tokenizer(example.prompt, verbose=False)["input_ids"]) for example in tasks)
    room = model.config.max_position_embeddings - LONGEST
    fitting_in = (pair for pair in prompts if len(pair[1]) <= room)
    return answered(task, fitting_in, PROMPTS[split], model, tokenizer.eos_token_id, LONGEST)


def record(model: Any, recorder: evidence.Recorder) -> None:
    """Answer what is missing."""
    for split in PROMPTS:
        for task in corpus.FAMILIES:
            if (split, task) not in recorder.done:
                batch = requests(split, task, model)
                rows = []
                for request in (request for request in batch if request.limit > 1):
                    prompt = request.ids[-BEFORE:] if split == "train" else request.ids
                    answer = (*request.answer, *request.ends)[: request.limit]
                    rows.append((split, task, request.name, len(prompt), [*prompt, *answer]))
                recorder.add(pd.DataFrame(rows, columns=[*KEYS, "document", "prompt_tokens", "tokens"]))
                recorder.checkpoint()
                print(f"{split} {task}: {len(batch)} answers", flush=True)


def fitted(with_stores: Sequence[Store]) -> NDArray[np.float64]:
    """The weights of a mixture with these stores, on the validation answers."""
    table = evidence.load("speculation", "answered")
    seen = []
    for _, rows in table[table["split"] == "validation"].groupby("task", sort=False):
        texts = zip(rows["tokens"].map(list), rows["prompt_tokens"], strict=True)
        seen.append(
            fitting.observed(Mixture(stores=with_stores), [(tokens[:end], tokens[end:]) for tokens, end in texts])
        )
    return fitting.weights_of(*(np.concatenate(part) for part in zip(*seen, strict=True)))


def main(argv: Sequence[str] | None = None) -> None:
    """The command; once all is answered, the weights are fitted."""
    parser = argparse.ArgumentParser(prog="make record PAPER=speculation", description=__doc__)
    parser.add_argument("--only", choices=["plain", "answered", "weights"])
    parser.add_argument("--models", nargs="+", choices=list(plain.LABELS), default=list(plain.LABELS))
    options = parser.parse_args(argv)
    only = options.only
    torch.set_num_threads(1)
    if only in (None, "plain"):
        for model in options.models:
            answers = plain.recorder(model)
            plain.record(model, answers)
            print(answers.finish())
    if only == "plain":
        return
    if only != "weights":
        recorder = evidence.Recorder("speculation", "answered", KEYS, PARAMETERS, [MODEL])
        record(models.load(MODEL).model, recorder)
        print(recorder.finish())
    if only != "answered":
        print(refit())


def refit() -> Path:
    """Fit the weights, with the stores and without, to the recorded answers."""
    keys = ["stored", "kind", "order", "source"]
    recorder = evidence.Recorder("speculation", "weights", keys, PARAMETERS, [MODEL])
    for stored, with_stores in ((True, stores()), (False, ())):
        rows = [(stored, *index, weight) for index, weight in np.ndenumerate(fitted(with_stores))]
        recorder.add(pd.DataFrame(rows, columns=[*keys, "weight"]))
    path = recorder.finish()
    shipped_now = shipped(evidence.load("speculation", "weights"))
    models.save_arrays("mixture", {**models.load_arrays("mixture"), **shipped_now})
    return path


def shipped(table: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """The record `weights` as drafters load it: [kinds, orders, sources] with the stores, and without."""
    arrays = {}
    for name, stored in (("with stores", True), ("without stores", False)):
        rows = table[table["stored"] == stored].sort_values(["kind", "order", "source"])
        shape = [rows[column].nunique() for column in ("kind", "order", "source")]
        arrays[name] = rows["weight"].to_numpy().reshape(shape)
    return arrays
