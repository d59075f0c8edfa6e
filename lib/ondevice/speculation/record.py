"""The stores and weights of the bundled models: train text, answers to train prompts, and fits on validation ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ondevice import assets, corpus, evidence, models
from ondevice.speculation import fitting
from ondevice.speculation.mixture import Mixture
from ondevice.speculation.request_set import Request, answered, spread
from ondevice.speculation.store import Store

MODEL = "pydocs-lm-base"
PROMPTS = {"train": 500, "validation": 60}  # of a task whose answers are kept
LONGEST = 128  # tokens of an answer
BEFORE = 8  # tokens of its prompt that a store keeps before an answer
TOKENS, WINDOW = 1_500_000, 512  # of train text, in windows from all over it
KEYS = ["split", "task"]
TOLD = {"prompts a task": PROMPTS, "tokens": LONGEST, "tokens of a prompt": BEFORE}


def text() -> list[NDArray[np.int64]]:
    """Windows of the train tasks: prompts and the answers that people wrote."""
    every = corpus.task_tokens("train")
    starts = np.linspace(0, len(every) - WINDOW, TOKENS // WINDOW).astype(int)
    return [every[start : start + WINDOW].astype(np.int64) for start in starts]


def answers() -> list[NDArray[np.int64]]:
    """The model's answers to train prompts, each behind the end of its prompt."""
    table = evidence.load("speculation", "answered")
    return [np.asarray(tokens, np.int64) for tokens in table.loc[table["split"] == "train", "tokens"]]


def stores() -> list[Store]:
    """Of the text and of the answers, kept in data/cache/speculation."""
    found = []
    for sequences in (text(), answers()):
        key = sha256(b"".join(one.tobytes() for one in sequences)).hexdigest()[:24]
        folder = assets.cache_folder("speculation") / f"store-{key}"
        if not folder.is_dir():
            Store.of(sequences).save(folder)
        found.append(Store.load(folder))
    return found


def weights(stored: bool) -> NDArray[np.float64]:
    """Of a mixture with the stores, or without."""
    table = evidence.load("speculation", "weights")
    mine = table[table["stored"] == stored]
    return mine["weight"].to_numpy().reshape([mine[column].nunique() for column in ("kind", "order", "source")])


def mixture(stored: bool = True, **options: Any) -> Mixture:
    """A new drafter. stored: whether it reads the stores, whose tokens are the bundled models'; any model goes without.

    options: of `Mixture`.
    """
    return Mixture(weights(stored), stores() if stored else (), **options)


# The recording


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


def fitted() -> Iterator[dict[str, Any]]:
    """The rows of the weights, of mixtures with and without stores, on the validation answers."""
    table = evidence.load("speculation", "answered")
    table = table[table["split"] == "validation"]
    for stored in (True, False):
        kept, seen = stores() if stored else [], []
        for _, mine in table.groupby("task", sort=False):
            blank = Mixture(np.zeros((*fitting.SHAPE, 4 + len(kept))), kept)
            texts = zip(mine["tokens"].map(list), mine["prompt_tokens"], strict=True)
            seen.append(fitting.observed(blank, [(tokens[:end], tokens[end:]) for tokens, end in texts]))
        for place, weight in np.ndenumerate(fitting.fit(*(np.concatenate(part) for part in zip(*seen, strict=True)))):
            yield {"stored": stored, **dict(zip(("kind", "order", "source"), place, strict=True)), "weight": weight}


def main(argv: Sequence[str] | None = None) -> None:
    """The command; once all is answered, the weights are fitted."""
    argparse.ArgumentParser(prog="make record PAPER=speculation", description=__doc__).parse_args(argv)
    torch.set_num_threads(1)
    kept = evidence.Recorder("speculation", "answered", KEYS, TOLD, [MODEL])
    record(models.load(MODEL).model, kept)
    print(kept.finish())
    print(refit())


def refit() -> Path:
    """Fit the weights to the recorded answers."""
    rows = evidence.Recorder("speculation", "weights", ["stored", "kind", "order", "source"], TOLD, [MODEL])
    rows.add(list(fitted()))
    return rows.finish()
