"""What a memory budget pays for: window, embedding rows, chunk, hidden states.

The user gives one number; this decides the rest for a pool of candidates. Memory is anonymous memory over what the
process has once the model's code is imported: what the operating system cannot drop. The estimate of a chunk's
temporaries follows transformers' layers, as they are called by `architectures`, and was fitted to nothing: it counts
the tensors alive at once. Attention scores are not among them, as torch's fused attention never holds them all.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ondevice.batching import by_length
from ondevice.grating.checkpoint import PAGE, Checkpoint, extents
from ondevice.grating.quantised import dequantised_bytes
from ondevice.grating.weights import SHARE
from ondevice.precision import bfloat16_pays

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MB = 1_000_000
CHUNK = 512  # tokens: the fewest at which a core's products are efficient (the paper gives no number)
SIZES = (CHUNK, CHUNK // 2, CHUNK // 4)  # that are tried
_ROWS = 256  # embedding rows at least
_SCRATCH = MB  # bytes of a thread's attention blocks and products
_HOLES = 0.75, 1.0  # of a chunk's tensors, of hidden states: heap that is free and of no use, at most, where measured
_LIBRARIES = 14 * MB  # buffers that torch's libraries make on first use, threads, and Python's objects of a run


@dataclass(frozen=True)
class Pool:
    """What is to be ranked. tokens: of all rows, with the padding of their chunks."""

    candidates: int
    longest: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """How to run a pool, and what it takes.

    buffers: layers that memory has room for. embedding_rows: that are kept. chunk: tokens. offload: hidden states go to
    a file. parts: bytes by what they are for. limit: bytes of the budget, infinity without one.
    """

    buffers: int
    embedding_rows: int
    chunk: int
    offload: bool
    parts: Mapping[str, int]
    limit: float

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def plan(
    checkpoint: Checkpoint, config: PreTrainedConfig, candidates: int, longest: int, budget: float | None,
    *, tokens: int | None = None, fixed: int = 0, name: str | None = None,
) -> Plan:  # fmt: skip
    """Spend a budget of so many MB (10^6 bytes) on a pool; None is the paper's setting whatever it takes.

    longest: tokens of the longest row. tokens: of all rows, padding included; by default all are the longest.
    fixed: bytes that are taken already, such as the tokenizer's. name: of the model, in errors, else its folder's.
    In this order, as far as it goes: what must be (two layers, one row a chunk, hidden states in a file if they are
    less there), chunks of 512 tokens, a tenth of the embedding rows, hidden states in memory, and more layers.
    Raises ValueError on a budget that is too small, naming the smallest, and on a pool without candidates or tokens.
    """
    if candidates < 1 or longest < 1:
        raise ValueError(f"A pool has at least one candidate and token, not {candidates} and {longest}.")
    if budget is not None and not budget > 0:
        raise ValueError(f"A memory budget is above 0 MB, not {budget}.")
    pool = Pool(candidates, longest, candidates * longest if tokens is None else tokens)
    costs = _Costs(checkpoint, config, pool, fixed)
    if budget is None:
        return costs.plan(2, costs.most_rows, max(CHUNK, longest), False, math.inf)
    limit = budget * MB
    least = min((costs.plan(2, costs.fewest_rows, longest, offload, limit) for offload in (False, True)), key=_total)
    if least.total > limit:
        needed = math.ceil(least.total / MB)
        shown = f"{candidates} candidates of up to {longest} tokens" if longest > 1 else "even a single token"
        raise ValueError(
            f"{budget:g} MB of memory are too few for {shown} with {name or checkpoint.folder.name}: the smallest "
            f"budget that works is {needed} MB."
        )
    return _improved(costs, least, pool)


def _improved(costs: _Costs, found: Plan, pool: Pool) -> Plan:
    """Spend what is left of the limit."""

    def first(*better: Plan) -> Plan:
        return next((one for one in better if one.total <= found.limit), found)

    chunks = [max(pool.longest, size) for size in SIZES]
    found = first(*(costs.changed(found, chunk=chunk) for chunk in chunks))
    rows = found.embedding_rows + int((found.limit - found.total) // costs.row)
    found = first(costs.changed(found, embedding_rows=min(costs.most_rows, rows)))
    found = first(costs.changed(found, offload=False))
    buffers = min(found.buffers + int((found.limit - found.total) // costs.layer), max(2, costs.layers))
    return first(costs.changed(found, buffers=buffers))


def _total(found: Plan) -> int:
    return found.total


class _Costs:
    """Bytes of everything, for one model and pool."""

    def __init__(self, checkpoint: Checkpoint, config: PreTrainedConfig, pool: Pool, fixed: int) -> None:
        groups = checkpoint.groups
        self.config, self.pool, self.fixed = config, pool, fixed
        self.layers = len(groups.layers)
        self.layer = max(sum(extent.span for extent in extents(layer.values())) for layer in groups.layers)
        self.dequantised = dequantised_bytes(checkpoint)
        tensors = [tensor for layer in groups.layers for tensor in layer.values()]
        self.largest = max(math.prod(tensor.shape) for tensor in tensors)
        self.vocabulary, self.width = groups.table.shape
        self.size = groups.table.dtype.itemsize
        self.row = self.width * self.size + 16  # with its place in the cache's lists
        # Twice the rest, as what the head reads is held in float32, too.
        self.rest = 2 * sum(tensor.length for tensor in groups.rest.values()) + PAGE * len(groups.rest)
        self.fewest_rows = min(_ROWS, self.vocabulary)
        self.most_rows = max(self.fewest_rows, int(SHARE * self.vocabulary))

    def plan(self, buffers: int, rows: int, chunk: int, offload: bool, limit: float) -> Plan:
        """The plan of these choices."""
        busy = activations(self.config, self.size, chunk, self.pool.longest)
        chunk_states = min(chunk, self.pool.tokens) * self.width * self.size
        # In memory each is kept as it is; in a file there are three, in whole pages. Two are between one and the other.
        states = 3 * (chunk_states + PAGE) if offload else self.pool.tokens * self.width * self.size
        parts = {
            "fixed": self.fixed + _LIBRARIES,
            "window": buffers * self.layer + self.dequantised,
            "embedding": rows * self.row + 4 * self.vocabulary,
            "rest": self.rest,
            "hidden": states,
            "chunk": busy + 2 * chunk_states + torch.get_num_threads() * _SCRATCH + self._packed(),
            "index": self._index(),
        }
        parts["holes"] = int(_HOLES[0] * parts["chunk"]) + (0 if offload else int(_HOLES[1] * states))
        return Plan(buffers, rows, chunk, offload, parts, limit)

    def changed(self, old: Plan, **values: int) -> Plan:
        """A plan with other choices."""
        new = replace(old, **values)  # type: ignore[arg-type]
        return self.plan(new.buffers, new.embedding_rows, new.chunk, new.offload, new.limit)

    def _packed(self) -> int:
        """A copy of a matrix in the order that products of 16-bit numbers read it in."""
        return 2 * self.largest if self.size == 2 else 0

    def _index(self) -> int:
        """What grows with the number of candidates: their token ids, scores of all layers, and results."""
        return self.pool.tokens * 8 + self.pool.candidates * (900 + 32 * self.layers)


def activations(config: PreTrainedConfig, size: int, tokens: int, longest: int) -> int:
    """Most bytes of tensors that a layer, or the embedding, holds at once besides its input.

    size: bytes of a number. tokens: of the chunk, padding included; a row longer than that makes a chunk of its own.
    d: width; i: feed-forward's; q, k: of all query heads and of all key heads.
    """
    tokens, d, i = max(tokens, longest), config.hidden_size, config.intermediate_size
    emulated = size == 2 and not bfloat16_pays("cpu")  # then a product is made in float32, beside its result
    if not hasattr(config, "num_key_value_heads"):  # an encoder
        # Embedding: token, type and position rows with their sums; attention: q, k, v, output, two of its sums.
        return tokens * size * max(7 * d, d + (3 if emulated else 2) * i)
    head = getattr(config, "head_dim", None) or d // config.num_attention_heads
    q, k = config.num_attention_heads * head, config.num_key_value_heads * head
    attention = d + max(4 * q + 2 * k, 3 * q + 4 * k)  # q and k before, while and after they are rotated; v
    norm = d + 3 * d * max(1, 4 // size)  # of the states in float32, their squares, the product
    feed_forward = 2 * d + (4 if emulated else 3) * i  # gate, up and their product; normed states and sum
    rotation = 4 * longest * head * max(size, 4)
    return tokens * size * max(attention, norm, feed_forward) + rotation


def padded_tokens(lengths: Sequence[int], chunk: int) -> int:
    """Tokens of rows of these lengths, with the padding of chunks as `batching.by_length` makes them."""
    return sum(len(batch) * lengths[batch[-1]] for batch in by_length(lengths, chunk))


def anonymous() -> int:
    """Bytes of this process's memory that no file backs; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def give_back() -> None:
    """Have the allocator return free memory to the system, where it knows how (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
