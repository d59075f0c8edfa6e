"""What every training run shares: a log that survives resuming, stopping by signal, rates, and the model it leaves."""

from __future__ import annotations

import contextlib
import copy
import csv
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ondevice import assets

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Log:
    """The CSV of a run, with the columns step, tokens and seconds among others; a resumed run drops rows after `step`.

    path: the file. columns: the first is step. step: where the run goes on from.
    """

    def __init__(self, path: Path, columns: Sequence[str], step: int) -> None:
        self.path = path
        self.columns = columns
        rows: list[list[str]] = []
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as file:
                rows = [row for row in list(csv.reader(file))[1:] if len(row) == len(columns) and int(row[0]) <= step]
        with assets.writing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([list(columns), *rows])
        last = dict(zip(columns, rows[-1], strict=True)) if rows else {"tokens": "0", "seconds": "0"}
        self.tokens = int(last["tokens"])
        self.seconds = float(last["seconds"])

    def add(self, tokens: int, seconds: float, **values: Any) -> None:
        """A row; the speed since the row before goes into tokens_per_second. tokens, seconds: from the run's start."""
        speed = round((tokens - self.tokens) / max(seconds - self.seconds, 1e-9))
        row = {"tokens": tokens, "seconds": f"{seconds:.1f}", "tokens_per_second": speed, **values}
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow([row[column] for column in self.columns])
        self.tokens = tokens
        self.seconds = seconds


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to its peak (what it was made with) times the factor."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group.setdefault("peak", group["lr"])


@contextlib.contextmanager
def signals() -> Iterator[Callable[[], bool]]:
    """A function that says whether SIGTERM or SIGINT came; the step in hand is finished first."""
    came: list[int] = []
    watched = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, frame: came.append(number)) for number in watched]
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in zip(watched, before, strict=True):
            signal.signal(number, handler)


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path, dtype: torch.dtype) -> None:
    """Save weights, configuration and tokenizer as transformers reads them; no reader sees half a file."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    stored = torch.nn.Module.to(copy.deepcopy(model), "cpu", dtype)
    stored.save_pretrained(part)
    stored.config.dtype = "float32"  # what transformers makes of the weights unasked: results are in it
    stored.config.save_pretrained(part)
    if tokenizer is not None:
        tokenizer.save_pretrained(part)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(part.iterdir()):
        file.replace(folder / file.name)
    part.rmdir()
