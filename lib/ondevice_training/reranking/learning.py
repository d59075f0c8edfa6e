"""Training of a reranker from a language model's or an encoder's trunk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from ondevice import adapters, models
from ondevice.corpus.pairs import Row, is_causal, reading_pairs
from ondevice.precision import mixed_precision
from ondevice.retrieval.layer_scores import scores_of
from ondevice_training import checkpoint
from ondevice_training.reranking import low_rank
from ondevice_training.reranking.lists import CANDIDATES, QUERIES
from ondevice_training.running import Log, export, set_rate, signals
from ondevice_training.schedule import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LISTS_AT_ONCE = 2  # of a step's, whose activations are in memory together
COLUMNS = ("step", "tokens", "loss", "first", "lr", "tokens_per_second", "seconds", "ndcg")


@dataclass(frozen=True)
class TrainingRecipe:
    """How a run trains. Rates are peaks; `save_every` is in seconds, `validate_every` and `log_every` in steps.

    rate: of an encoder's trunk, or of the low-rank adapter of this `rank` that is trained in a decoder's trunk's place.
    head_rate: of the new head.
    """

    queries: int
    rate: float
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

    They are most of the weights, and hardly move. rank: of a decoder's adapter; 0 is for an encoder, whose trunk is
    trained. Raises ValueError when the parent is neither a Llama nor a BERT, or the rank is not for it.
    """
    loaded = models.load(parent)
    model = warm(loaded.model, seed)
    if rank and not is_causal(model):
        raise ValueError(f"An adapter is for a decoder's attention; {parent} is an encoder.")
    if is_causal(model) and not rank:
        raise ValueError(f"{parent} is a decoder, of which an adapter is trained: give its rank.")
    if rank:
        low_rank.adapt(model, rank, seed)
    return model, reading_pairs(loaded.tokenizer, is_causal(model))


def warm(parent: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """`start` from a model in memory; without dropout, which slows a run this short."""
    model = adapters.with_score(parent, seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "embed" not in name
    return model


def optimizer_of(model: PreTrainedModel, recipe: TrainingRecipe) -> torch.optim.Optimizer:
    """AdamW for what is trained of the trunk, and at another rate for the head."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    head = [parameter for name, parameter in trainable.items() if name.startswith(("score", "classifier"))]
    trunk = [parameter for name, parameter in trainable.items() if not name.startswith(("score", "classifier"))]
    groups = [{"params": trunk, "lr": recipe.rate}, {"params": head, "lr": recipe.head_rate}]
    return torch.optim.AdamW(groups, weight_decay=0.0 if recipe.rank else 0.01)


def train(
    recipe: TrainingRecipe,
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
    optimizer = optimizer_of(model, recipe)
    schedule = recipe.schedule
    position = _resume(folder, recipe, model, optimizer)
    log = Log(folder / "log.csv", COLUMNS, position.step)

    def save() -> None:
        run: dict[str, Any] = {"queries": recipe.queries, "rank": recipe.rank}
        here = {"step": position.step, "tokens": position.tokens, "seconds": position.seconds}
        checkpoint.save(folder / "checkpoint.safetensors", model, optimizer, {**run, **here})
        if recipe.rank:
            low_rank.save(model, recipe.rank, parent, folder / "adapter", {**run, **here})

    saved = time.monotonic()
    losses: list[tuple[float, float]] = []
    with signals() as asked_to_stop:
        while position.step < schedule.total and not asked_to_stop():
            started = time.monotonic()
            factor = schedule(position.step)
            set_rate(optimizer, factor)
            rows = lists(position.step)
            losses.append(_step(model, optimizer, rows))
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
                    lr=f"{factor * recipe.rate:.6f}",
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


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: list[Row]) -> tuple[float, float]:
    """The loss, and the share of lists whose positive is strictly first.

    The loss is a list's softmax cross-entropy, whose right answer is its first candidate. The lists go through the
    model some at a time: what backpropagation keeps of a deep model fills gigabytes.
    """
    lists = len(rows) // CANDIDATES
    loss, first = 0.0, 0
    for start in range(0, lists, LISTS_AT_ONCE):
        part = rows[start * CANDIDATES : (start + LISTS_AT_ONCE) * CANDIDATES]
        with mixed_precision(model.device.type):
            scores = scores_of(model, part, every=False)[-1].view(-1, CANDIDATES)
        right = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        share = F.cross_entropy(scores, right, reduction="sum") / lists
        torch.autograd.backward(share)
        loss += share.item()
        scores = scores.detach()
        first += int((scores[:, :1] > scores[:, 1:]).all(1).sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, first / lists


def _resume(folder: Path, recipe: TrainingRecipe, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Position:
    path = folder / "checkpoint.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    progress: dict[str, Any] | None = None
    if path.is_file():
        progress = checkpoint.load(path, model, optimizer)
    elif recipe.rank:  # an adapter alone goes on, too: AdamW's means of gradients begin anew
        progress = low_rank.load(model, folder / "adapter")
    if progress is None:
        return Position()
    queries, rank = progress.get("queries"), progress.get("rank", 0)
    if rank != recipe.rank:
        raise ValueError(f"{folder.name} holds a run of rank {rank}, not {recipe.rank}.")
    begun = replace(recipe, queries=queries or recipe.queries).schedule.decay_start
    if queries != recipe.queries and progress["step"] > min(begun, recipe.schedule.decay_start):
        raise ValueError(
            f"{folder.name} holds a run of {queries} queries, which cannot become one of {recipe.queries}: its rate "
            "has begun to fall, or would have."
        )
    return Position(progress["step"], progress["tokens"], progress["seconds"])
