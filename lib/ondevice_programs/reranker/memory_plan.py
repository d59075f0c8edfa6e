"""What a memory budget pays for: window, embedding rows, chunk, hidden states.

The user gives one number; this decides the rest for a pool of candidates. Memory is what the process grows by that the
system cannot drop (anonymous and shared), from the first line of the constructor on. The estimate of a chunk's
temporaries counts the tensors that transformers' layers hold at once; what the heap keeps beside them was measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ondevice.batching import by_length
from ondevice.precision import bfloat16_pays
from ondevice_papers.grating.architectures import Architecture
from ondevice_papers.grating.checkpoint import PAGE, Checkpoint
from ondevice_papers.grating.engine import CHUNK
from ondevice_papers.grating.weights import SHARE, units_of
from ondevice_papers.grating.window import span

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MB = 1_000_000
SIZES = (CHUNK, CHUNK // 2, CHUNK // 4)  # tokens of a chunk that are tried
_ROWS = 256  # embedding rows at least
_SCRATCH = 2 * MB  # bytes of a thread's attention blocks and products
_LIBRARIES = 16 * MB  # buffers that torch's libraries make on first use, threads, and Python's objects of a run
_APART = 4 * MB  # what `fixed` and `opening` of one model differ by between processes, at most, where measured
_HOLES = 0.5  # of a chunk's tensors: heap that is free and of no use before it is given back, at most, where measured


@dataclass(frozen=True)
class Plan:
    """How to run a pool, and what it takes.

    slots: units in memory, 2 or all of them. embedding_rows: that are kept. chunk: tokens. offload: hidden states go to
    a file. parts: bytes by what they are for.
    """

    slots: int
    embedding_rows: int
    chunk: int
    offload: bool
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of the whole plan."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Model:
    """What a plan has to know of a model.

    fixed: bytes taken already, such as the tokenizer's. opening: most that were taken at once while it was opened.
    """

    name: str
    checkpoint: Checkpoint
    architecture: Architecture
    fixed: int = 0
    opening: int = 0


def plan(model: Model, lengths: Sequence[int], budget: float | None) -> Plan:
    """Spend a budget of so many MB (10^6 bytes) on rows of these lengths; None is the default, whatever it takes.

    In this order, as far as it goes: what must be (two units, one row a chunk, hidden states in a file if they are less
    there), chunks of 512 tokens, a tenth of the embedding rows, hidden states in memory, all units.
    Raises ValueError on a budget that is too small, naming one that works.
    """
    vocabulary, longest, units = model.architecture.vocabulary, max(lengths), len(_spans(model))
    most = max(_ROWS, int(SHARE * vocabulary))
    fewest = min(_ROWS, vocabulary)

    def option(slots: int, rows: int, chunk: int, offload: bool) -> Plan:
        return Plan(slots, rows, chunk, offload, _parts(model, lengths, slots, rows, chunk, offload))

    chunks = list(dict.fromkeys(max(size, longest) for size in SIZES))
    if budget is None:
        return option(2, min(most, vocabulary), chunks[0], False)
    limit = budget * MB
    best = min((option(2, fewest, longest, offload) for offload in (False, True)), key=lambda smallest: smallest.total)
    needed = max(best.total, model.opening)
    if needed > limit:
        request = f"{len(lengths)} candidates of up to {longest} tokens with {model.name}"
        enough = f"a budget that works is {math.ceil((needed + _APART) / MB)} MB"
        raise ValueError(f"{budget:g} MB of memory are too few for {request}: {enough}.")
    best = _first([option(2, fewest, chunk, best.offload) for chunk in chunks], limit, best)
    row = best.parts["embedding"] // best.embedding_rows
    rows = best.embedding_rows + max(0, int((limit - best.total) // row))
    best = _first([option(2, min(most, vocabulary, rows), best.chunk, best.offload)], limit, best)
    best = _first([option(2, best.embedding_rows, best.chunk, False)], limit, best)
    return _first([option(units, best.embedding_rows, best.chunk, best.offload)], limit, best)


def _first(better: Sequence[Plan], limit: float, otherwise: Plan) -> Plan:
    return next((candidate for candidate in better if candidate.total <= limit), otherwise)


def _parts(model: Model, lengths: Sequence[int], slots: int, rows: int, chunk: int, offload: bool) -> Mapping[str, int]:
    """A plan's bytes by what they are for."""
    groups = model.checkpoint.groups
    spans = _spans(model)
    size = groups.table.dtype.itemsize
    longest = max(lengths)
    width = groups.table.length // groups.table.shape[0]  # bytes of a row
    batches = list(by_length(lengths, chunk))
    padded = max(len(batch) * lengths[batch[-1]] for batch in batches)
    temporary = activations(model.architecture.config, size, padded, longest) + 3 * padded * width
    largest = max(tensor.length for layer in groups.layers for tensor in layer.values())
    return {
        "fixed": model.fixed + _LIBRARIES,
        "window": sum(max(spans[slot::slots]) for slot in range(slots)),
        "embedding": rows * (width + 16) + 8 * model.architecture.vocabulary,
        # Twice the rest, as what the head reads is held in float32, too.
        "rest": 2 * sum(tensor.length for tensor in groups.rest.values()) + PAGE * len(groups.rest),
        "hidden": 3 * (padded * width + PAGE * max(map(len, batches))) if offload else sum(lengths) * width,
        # A copy of a matrix in the order that products of 16-bit numbers read it in, or in float32.
        "chunk": temporary + torch.get_num_threads() * _SCRATCH + (2 * largest if size == 2 else 0),
        "holes": int(_HOLES * temporary),
        "index": 8 * sum(lengths) + len(lengths) * (1200 + 48 * model.architecture.layers),
    }


def _spans(model: Model) -> list[int]:
    return [span(unit) for unit in units_of(model.checkpoint, model.architecture.part_of, model.architecture.units)]


def activations(config: PreTrainedConfig, size: int, tokens: int, longest: int) -> int:
    """Most bytes of tensors that a part of a layer, or the embedding, holds at once besides its input.

    size: bytes of a number. tokens: of the chunk, padding included; a row longer than that makes a chunk of its own.
    d: width; i: feed-forward's; q, k: of all query heads and of all key heads.
    """
    tokens, d, i = max(tokens, longest), config.hidden_size, config.intermediate_size
    wide = size == 2 and not bfloat16_pays("cpu")  # then a product is made in float32, beside its result
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or d // heads
    if not hasattr(config, "num_key_value_heads"):  # an encoder
        # Embedding: token, type and position rows with their sums; attention: q, k, v, output, two of its sums.
        held = 7 if size > 2 else 10  # of attention's scores, which DeBERTa holds whole, as they were measured
        scores = held * heads * longest if "deberta" in config.model_type else 0
        return tokens * size * (max(7 * d, d + (4 if wide else 3) * i) + scores)
    q = heads * head
    k = config.num_key_value_heads * head
    attention = d + max(4 * q + 2 * k, 3 * q + 4 * k)  # q and k before, while and after they are rotated; v
    norm = d + 3 * d * max(1, 4 // size)  # of the states in float32, their squares, the product
    feed_forward = 2 * d + (4 if wide else 3) * i  # gate, up and their product; normed states and sum
    held = 3 if size > 2 else 6  # of attention's scores, which Gemma 2's softcap takes whole
    scores = held * heads * longest if config.model_type == "gemma2" else 0
    rotation = 4 * longest * head * max(size, 4)
    return tokens * size * (max(attention, norm, feed_forward) + scores) + rotation


def anonymous() -> int:
    """Bytes of this process's memory that no file backs; 0 where the system does not tell."""
    try:
        words = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return 0
    return sum(1024 * int(words[words.index(name) + 1]) for name in ("RssAnon:", "RssShmem:") if name in words)


@contextlib.contextmanager
def highest() -> Iterator[list[int]]:
    """[1] bytes: the most that `anonymous` gave so far, as a thread asks for it every two milliseconds."""
    most, done = [anonymous()], threading.Event()

    def look() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], anonymous())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


@cache
def few_arenas() -> None:
    """One heap for all threads (glibc, once a process): what another thread's own heap keeps is in no plan."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(-8, 1)  # M_ARENA_MAX
