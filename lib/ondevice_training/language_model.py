"""Training of a small Llama-shaped language model on the documentation corpus."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ondevice.precision import mixed_precision
from ondevice_training import checkpoint
from ondevice_training.batches import Batches
from ondevice_training.muon import Muon
from ondevice_training.running import Log, export, set_rates, signals
from ondevice_training.schedule import Schedule

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

CONTEXT = 1024  # tokens
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "small": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 704},
    "base": {"hidden_size": 320, "num_hidden_layers": 12, "num_attention_heads": 5, "intermediate_size": 864},
}
COLUMNS = ("step", "tokens", "loss", "lr", "tokens_per_second", "seconds", "perplexity")


@dataclass(frozen=True)
class Recipe:
    """How a run trains. Rates are peaks; times are in seconds, `validate_every` and `log_every` in steps."""

    size: str
    tokens: int
    batch_tokens: int = 4096
    context: int = CONTEXT
    matrix_rate: float = 0.02
    vector_rate: float = 0.005
    warmup: int = 50
    save_every: float = 300.0
    validate_every: int = 250
    log_every: int = 10
    compiled: bool = False

    @property
    def schedule(self) -> Schedule:
        """The learning rate's shape over the run's steps."""
        return Schedule(max(1, self.tokens // self.batch_tokens), self.warmup)


@dataclass
class Position:
    """Where a run stands. seconds: time spent in training, over all its processes."""

    step: int = 0
    total: int = 0
    seconds: float = 0.0
    size: str = ""
    stopped: bool = field(default=False, compare=False)


def build(size: str, vocabulary: int, end: int, pad: int, context: int = CONTEXT, seed: int = 0) -> LlamaForCausalLM:
    """A fresh model of a named size; raises ValueError on an unknown one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if size not in SIZES:
        raise ValueError(f"There is no size {size!r}; there are {', '.join(SIZES)}.")
    torch.manual_seed(seed)
    shape: dict[str, Any] = {**SIZES[size], "vocab_size": vocabulary, "max_position_embeddings": context}
    return LlamaForCausalLM(
        LlamaConfig(tie_word_embeddings=True, bos_token_id=end, eos_token_id=end, pad_token_id=pad, **shape)
    )


def optimizers_of(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embeddings and norms."""
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    others = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=recipe.vector_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, lr=recipe.matrix_rate), adam]


def train(
    recipe: Recipe,
    model: LlamaForCausalLM,
    batches: Batches,
    held_out: np.ndarray,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "cpu",
) -> Position:
    """Train, or go on training, until the recipe's tokens are spent or a signal asks to stop.

    held_out: [windows, context] token ids for the perplexity. folder: gets checkpoint.safetensors,
    before-decay.safetensors, log.csv and model/, which transformers loads. A folder with a checkpoint is resumed; with
    more tokens than it was begun with, from before its decay. Raises ValueError on another run's or a damaged one.
    """
    torch.nn.Module.to(model, device)
    optimizers = optimizers_of(model, recipe)
    schedule = recipe.schedule
    position = _resume(folder, recipe, model, optimizers)
    loss_of = _loss_function(model, recipe.compiled, device)
    log = Log(folder / "log.csv", COLUMNS, position.step)

    def save(name: str = "checkpoint") -> None:
        progress = {"step": position.step, "total": schedule.total, "seconds": position.seconds, "size": recipe.size}
        checkpoint.save(folder / f"{name}.safetensors", model, optimizers, progress)

    saved = time.monotonic()
    losses: list[float] = []
    with signals() as asked_to_stop:
        while position.step < schedule.total and not asked_to_stop():
            if position.step == schedule.decay_start:
                save("before-decay")
            started = time.monotonic()
            factor = schedule(position.step)
            set_rates(optimizers, factor)
            losses.append(_step(loss_of, model, optimizers, batches(position.step), device))
            position.step += 1
            position.seconds += time.monotonic() - started
            done = position.step == schedule.total
            if done or position.step % recipe.log_every == 0:
                validates = done or position.step % recipe.validate_every == 0
                perplexity = f"{perplexity_of(model, held_out, device):.3f}" if validates else ""
                log.add(
                    position.step * recipe.batch_tokens,
                    position.seconds,
                    step=position.step,
                    loss=f"{np.mean(losses):.4f}",
                    lr=f"{factor * recipe.matrix_rate:.6f}",
                    perplexity=perplexity,
                )
                losses = []
            if time.monotonic() - saved > recipe.save_every:
                save()
                export(model, tokenizer, folder / "model", torch.bfloat16)
                saved = time.monotonic()
    save()
    export(model, tokenizer, folder / "model", torch.bfloat16)
    position.stopped = position.step < schedule.total
    return position


@torch.no_grad()
def perplexity_of(model: torch.nn.Module, held_out: np.ndarray, device: str = "cpu", rows: int = 8) -> float:
    """exp of the mean loss per token over windows [n, context], each read on its own, its first token given."""
    total = 0.0
    count = 0
    for start in range(0, len(held_out), rows):
        ids = torch.from_numpy(held_out[start : start + rows]).to(device)
        with mixed_precision(device):
            logits = model(ids[:, :-1], use_cache=False).logits
        total += F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum").item()
        count += ids[:, 1:].numel()
    return math.exp(total / count)


def _loss_function(model: LlamaForCausalLM, compiled: bool, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model(inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    if not compiled:
        return loss_of
    if device == "cpu":
        # PyTorch's fused attention is slow backwards on a CPU: at 8 x 512 tokens the plain products, once compiled,
        # make a whole step 14 % shorter (12 layers of 384, two cores).
        model.set_attn_implementation("eager")
    return torch.compile(loss_of, dynamic=False)  # two widths of batch, two graphs


def _step(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batch: tuple[np.ndarray, np.ndarray],
    device: str,
) -> float:
    inputs, targets = (torch.from_numpy(part).to(device) for part in batch)
    with mixed_precision(device):
        loss = loss_of(inputs, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _resume(folder: Path, recipe: Recipe, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> Position:
    path = folder / "checkpoint.safetensors"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        return Position(size=recipe.size)
    progress = checkpoint.load(path, model, optimizers)
    if progress["size"] != recipe.size:
        raise ValueError(f"{folder.name} holds a run of size {progress['size']!r}, not {recipe.size!r}.")
    begun = Schedule(progress["total"], recipe.warmup)
    if progress["total"] < recipe.schedule.total and progress["step"] > begun.decay_start:
        earlier = folder / "before-decay.safetensors"
        if not earlier.is_file():
            raise ValueError(f"{folder.name} cannot be extended: its decay has begun and {earlier.name} is gone.")
        progress = checkpoint.load(earlier, model, optimizers)
    return Position(progress["step"], progress["total"], progress["seconds"], progress["size"])
