"""Training of a reranker from a language model's or an encoder's trunk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ondevice import adapters, models
from ondevice.corpus.pairs import Row, is_causal, reading_pairs
from ondevice.precision import mixed_precision
from ondevice.retrieval.layer_scores import scores_of
from ondevice_training import checkpoint
from ondevice_training.muon import Muon
from ondevice_training.reranking import low_rank
from ondevice_training.reranking.lists import CANDIDATES, QUERIES
from ondevice_training.reranking.loss import listwise
from ondevice_training.running import Log, export, set_rates, signals
from ondevice_training.schedule import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Supervision = Literal["last", "deep"]
LISTS_AT_ONCE = 2  # of a step's, whose activations are in memory together
COLUMNS = ("step", "tokens", "loss", "first", "lr", "tokens_per_second", "seconds", "ndcg")


@dataclass(frozen=True)
class Recipe:
    """How a run trains. Rates are peaks; `save_every` is in seconds, `validate_every` and `log_every` in steps.

    supervision: the loss is on the last layer's scores, or on every layer's. matrix_rate: of the trunk's matrices, by
    Muon in a decoder and AdamW in an encoder; head_rate: of the new head and, in a decoder, a tenth of it of the norms.
    rank: of a low-rank adapter, which is trained in the trunk's place, by AdamW at the matrix rate; 0 is the trunk.
    """

    supervision: Supervision
    queries: int
    matrix_rate: float
    head_rate: float = 1e-3
    rank: int = 0
    warmup: int = 30
    save_every: float = 120.0
    validate_every: int = 100
    log_every: int = 10

    @property
    def schedule(self) -> Schedule:
        """The learning rate's shape over the run's steps."""
        return Schedule(max(1, self.queries // QUERIES), self.warmup)


@dataclass
class Position:
    """Where a run stands. tokens: read, without padding. seconds: time spent training, over all its processes."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stopped: bool = field(default=False, compare=False)


def start(parent: str, rank: int = 0, seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of one score with the parent's trunk and a fresh head; its embeddings are frozen.

    They are most of the weights, and hardly move. rank: as of a `Recipe`. Raises ValueError when the parent is neither
    a Llama nor a BERT, or an adapter is asked for on a BERT.
    """
    loaded = models.load(parent)
    model = warm(loaded.model, seed)
    if rank and not is_causal(model):
        raise ValueError(f"An adapter is for a decoder's attention; {parent} is an encoder.")
    if rank:
        low_rank.adapt(model, rank, seed)
    return model, reading_pairs(loaded.tokenizer, is_causal(model))


def warm(parent: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """`start` from a model in memory; without dropout, which slows a run this short."""
    model = adapters.with_score(parent, seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "embed" not in name
    return model


def optimizers_of(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon (decoder) or AdamW (encoder) for the trunk's matrices, AdamW for its norms and biases and for the head."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    head = [parameter for name, parameter in trainable.items() if name.startswith(("score", "classifier"))]
    trunk = [parameter for name, parameter in trainable.items() if not name.startswith(("score", "classifier"))]
    matrices = [parameter for parameter in trunk if parameter.ndim == 2]
    vectors = [parameter for parameter in trunk if parameter.ndim != 2]
    heads = {"params": head, "lr": recipe.head_rate}
    if recipe.rank:
        return [torch.optim.AdamW([{"params": trunk, "lr": recipe.matrix_rate}, heads], weight_decay=0.0)]
    if is_causal(model):
        groups = [{"params": vectors, "lr": recipe.head_rate / 10}, heads]
        return [Muon(matrices, lr=recipe.matrix_rate, weight_decay=0.0), torch.optim.AdamW(groups, weight_decay=0.0)]
    return [torch.optim.AdamW([{"params": trunk, "lr": recipe.matrix_rate}, heads], weight_decay=0.01)]


def train(
    recipe: Recipe,
    model: PreTrainedModel,
    lists: Callable[[int], list[Row]],
    validate: Callable[[PreTrainedModel], float],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    parent: str = "",
) -> Position:
    """Train, or go on training, until the recipe's queries are spent or a signal asks to stop.

    lists: the rows of a step. validate: nDCG@10 for the log. folder: gets checkpoint.safetensors, log.csv and model/,
    which transformers loads, or adapter/. One with a checkpoint, or with an adapter alone, is resumed; before its rate
    falls a run may be given another length. Raises ValueError on another run's or a damaged one.
    """
    optimizers = optimizers_of(model, recipe)
    schedule = recipe.schedule
    position = _resume(folder, recipe, model, optimizers)
    log = Log(folder / "log.csv", COLUMNS, position.step)

    def save() -> None:
        run: dict[str, Any] = {"supervision": recipe.supervision, "queries": recipe.queries, "rank": recipe.rank}
        here = {"step": position.step, "tokens": position.tokens, "seconds": position.seconds}
        checkpoint.save(folder / "checkpoint.safetensors", model, optimizers, {**run, **here}, bool(recipe.rank))
        if recipe.rank:
            low_rank.save(model, recipe.rank, parent, folder / "adapter", {**run, **here})

    saved = time.monotonic()
    losses: list[tuple[float, float]] = []
    with signals() as asked_to_stop:
        while position.step < schedule.total and not asked_to_stop():
            started = time.monotonic()
            factor = schedule(position.step)
            set_rates(optimizers, factor)
            rows = lists(position.step)
            losses.append(_step(model, optimizers, rows, recipe.supervision))
            position.step += 1
            position.tokens += sum(len(row.ids) for row in rows)
            position.seconds += time.monotonic() - started
            done = position.step == schedule.total
            if done or position.step % recipe.log_every == 0:
                validates = done or position.step % recipe.validate_every == 0
                loss, first = np.mean(losses, axis=0)
                log.add(
                    position.tokens,
                    position.seconds,
                    step=position.step,
                    loss=f"{loss:.4f}",
                    first=f"{first:.3f}",
                    lr=f"{factor * recipe.matrix_rate:.6f}",
                    ndcg=f"{validate(model):.4f}" if validates else "",
                )
                losses = []
            if time.monotonic() - saved > recipe.save_every:
                save()
                saved = time.monotonic()
    save()
    if not recipe.rank:
        export(model, tokenizer, folder / "model", torch.float16)
    position.stopped = position.step < schedule.total
    return position


def _step(
    model: PreTrainedModel, optimizers: list[torch.optim.Optimizer], rows: list[Row], supervision: Supervision
) -> tuple[float, float]:
    """The loss, and the share of lists whose positive is strictly first by the last layer.

    The lists go through the model some at a time: what backpropagation keeps of a deep model fills gigabytes.
    """
    lists = len(rows) // CANDIDATES
    loss, first = 0.0, 0
    for start in range(0, lists, LISTS_AT_ONCE):
        part = rows[start * CANDIDATES : (start + LISTS_AT_ONCE) * CANDIDATES]
        with mixed_precision(model.device.type):
            scores = scores_of(model, part, every=supervision == "deep")
        scores = scores.view(len(scores), -1, CANDIDATES)
        share = listwise(scores) * scores.shape[1] / lists
        torch.autograd.backward(share)
        loss += share.item()
        last = scores[-1].detach()
        first += int((last[:, :1] > last[:, 1:]).all(1).sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss, first / lists


def _resume(folder: Path, recipe: Recipe, model: PreTrainedModel, optimizers: list[torch.optim.Optimizer]) -> Position:
    path = folder / "checkpoint.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    progress: dict[str, Any] | None = None
    if path.is_file():
        progress = checkpoint.load(path, model, optimizers, bool(recipe.rank))
    elif recipe.rank:  # an adapter alone goes on, too: AdamW's means of gradients begin anew
        progress = low_rank.load(model, folder / "adapter")
    if progress is None:
        return Position()
    queries, saved = progress.get("queries"), (progress.get("supervision"), progress.get("rank", 0))
    if saved != (recipe.supervision, recipe.rank):
        message = f"{folder.name} holds a run with {saved[0]!r} supervision and rank {saved[1]}"
        raise ValueError(f"{message}, not with {recipe.supervision!r} and {recipe.rank}.")
    begun = replace(recipe, queries=queries or recipe.queries).schedule.decay_start
    if queries != recipe.queries and progress["step"] > min(begun, recipe.schedule.decay_start):
        raise ValueError(
            f"{folder.name} holds a run of {queries} queries, which cannot become one of {recipe.queries}: its rate "
            "has begun to fall, or would have."
        )
    return Position(progress["step"], progress["tokens"], progress["seconds"])
