"""Static graphs: a causal LM's decoder in blocks, each compiled for one chunk length, on disk and out of it again.

An NPU runs graphs of fixed shapes that must be loaded before they run. Their counterpart here is an ONNX file a block
and chunk length, with the weights inside, optimised when it is built; loading it is a session of ONNX Runtime, which
reads the file and packs the matrices, and a first run, which finds its memory. The runtime's calls, loading included,
let other threads of Python run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch
from numpy.typing import ArrayLike, NDArray

from ondevice import assets
from ondevice.causal_lm import drawing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Floats = NDArray[np.float32]
_HIDDEN = np.float32(-1e30)  # added to the score of a key that a token may not see
_MOST_BYTES = 2**31 - 1  # of a protobuf message


@dataclass(frozen=True)
class Graph:
    """A loaded graph of one block. chunk: the tokens that it runs, always. capacity: rows of its static cache."""

    session: Any
    chunk: int
    capacity: int


@dataclass(frozen=True)
class Cache:
    """Static keys and values of one block: [layers, key-value heads, capacity, head size], rows by position."""

    keys: Floats
    values: Floats


@dataclass(frozen=True, eq=False)
class Graphs:
    """A model cut into N blocks, each with a file for the large chunk (G1) and one for the small chunk (G2).

    large, small: tokens of a run, c1 and c2; c2 divides c1. layers: each block's. capacity: rows of the static cache.
    cosines, sines: [capacity, head size], the rotary angles of each position. The token embedding and the output head
    stay with the model, outside of the blocks.
    """

    model: PreTrainedModel
    layers: tuple[range, ...]
    large: int
    small: int
    capacity: int
    large_files: tuple[Path, ...]
    small_files: tuple[Path, ...]
    cosines: Floats = field(repr=False)
    sines: Floats = field(repr=False)

    @property
    def blocks(self) -> int:
        """N."""
        return len(self.layers)

    def caches(self) -> list[Cache]:
        """Empty caches, one a block."""
        heads, size = drawing.heads(self.model.config)[1:]
        shapes = [(len(layers), heads, self.capacity, size) for layers in self.layers]
        # Not np.zeros, whose memory is only found by the first chunk that reads it.
        return [Cache(np.full(shape, 0.0, np.float32), np.full(shape, 0.0, np.float32)) for shape in shapes]

    def embed(self, ids: ArrayLike) -> Floats:
        """[n, h] what the first block is given for n tokens.

        Raises ValueError for no tokens, more than the static cache holds, or ids that are not in the vocabulary.
        """
        tokens, table = np.asarray(ids), self.model.get_input_embeddings()
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"A prompt is a list of at least one token, not of shape {tokens.shape}.")
        if len(tokens) > self.capacity:
            raise ValueError(f"A prompt of {len(tokens)} tokens is longer than the static cache of {self.capacity}.")
        if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= len(table.weight):  # type: ignore[arg-type]
            raise ValueError(f"A prompt's ids are from 0 to {len(table.weight) - 1}.")  # type: ignore[arg-type]
        with torch.inference_mode():
            return np.ascontiguousarray(table(torch.from_numpy(tokens.astype(np.int64))).numpy())

    def logits(self, hidden: Floats) -> torch.Tensor:
        """[n, V] after the last block's output [n, h]."""
        model: Any = self.model
        with torch.inference_mode():
            return model.lm_head(model.model.norm(torch.from_numpy(hidden)))

    def run(self, graph: Graph, block: int, hidden: Floats, cache: Cache, start: int) -> Floats:
        """[n, h] a block's output for any n tokens [n, h] from position `start` on, in ceil(n / chunk) runs.

        The last run is padded to the graph's length: no token sees the padding, whose rows are not kept. The tokens'
        keys and values are written into `cache`, where the positions before `start` must be filled.
        """
        if not 0 <= start <= start + len(hidden) <= self.capacity:
            raise ValueError(f"Tokens {start} to {start + len(hidden)} are not in the cache of {self.capacity} rows.")
        if len(cache.keys) != len(self.layers[block]):
            raise ValueError(f"The cache of {len(cache.keys)} layers is not block {block}'s.")
        out = np.empty_like(hidden)
        for at in range(0, len(hidden), graph.chunk):
            part = hidden[at : at + graph.chunk]
            out[at : at + len(part)] = self._run_once(graph, part, cache, start + at)
        return out

    def _run_once(self, graph: Graph, part: Floats, cache: Cache, start: int) -> Floats:
        count, end = len(part), start + len(part)
        mask = np.full((graph.chunk, graph.capacity + graph.chunk), _HIDDEN, np.float32)
        mask[:, :start] = 0.0
        mask[:, graph.capacity :] = np.triu(mask[:, graph.capacity :], 1)
        given = {
            "hidden": _padded(part, graph.chunk), "mask": mask,
            "cosines": _padded(self.cosines[start:end], graph.chunk),
            "sines": _padded(self.sines[start:end], graph.chunk),
        }  # fmt: skip
        for layer in range(len(cache.keys)):
            given |= {f"keys{layer}": cache.keys[layer], f"values{layer}": cache.values[layer]}
        with drawing.flushing_denormals():
            hidden, *rows = graph.session.run(None, given)
        for layer in range(len(cache.keys)):
            cache.keys[layer, :, start:end] = rows[2 * layer][:, :count]
            cache.values[layer, :, start:end] = rows[2 * layer + 1][:, :count]
        return hidden[:count]


def build(
    model: PreTrainedModel, blocks: int, large: int = 256, small: int = 32, capacity: int = 1024,
    folder: Path | None = None,
) -> Graphs:  # fmt: skip
    """The graphs of a model in float32; a file that is there is kept, the others are built.

    blocks: N, into which the layers are dealt evenly. folder: by default one in the cache. A file is named by a hash
    of its graph and weights and of the runtime's version, so a change of any of them builds anew.
    Raises ValueError for a model whose layers are not plain ones of `drawing.SUPPORTED`, or sizes that do not fit.
    """
    _check(model, blocks, large, small, capacity)
    place = folder or assets.cache_folder("sdnpu")
    parts = np.array_split(np.arange(model.config.num_hidden_layers), blocks)
    layers = tuple(range(int(part[0]), int(part[-1]) + 1) for part in parts)
    made = {chunk: [_build_file(model, span, chunk, capacity, place) for span in layers] for chunk in (large, small)}
    positions, decoder = torch.arange(capacity)[None], model.model
    with torch.inference_mode():
        angles = decoder.rotary_emb(torch.zeros(1), positions)
    cosines, sines = (np.ascontiguousarray(found[0].numpy(), np.float32) for found in angles)
    return Graphs(model, layers, large, small, capacity, tuple(made[large]), tuple(made[small]), cosines, sines)


def load(path: Path) -> Graph:
    """A graph from its file, that runs on one thread, the calling one; it has run once, so that its memory is there.

    Raises FileNotFoundError or, for a file that is damaged or truncated, ValueError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no graph {path.name} in {path.parent}: build it first.")
    options = drawing.options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # done when it was built
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        shapes = {value.name: value.shape for value in session.get_inputs()}
        with drawing.flushing_denormals():
            session.run(None, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
        return Graph(session, shapes["hidden"][0], shapes["keys0"][1])
    except Exception as error:  # the runtime's errors have no common class of their own
        reason = str(error).split("\n")[0][:200]
        raise ValueError(
            f"{path.name} is damaged or truncated, or no graph of a block: delete it ({reason})."
        ) from None


def drop_from_page_cache(path: Path) -> None:
    """Have the next load read a file from the disk; where the system cannot, it stays in memory."""
    with path.open("rb") as opened:
        os.fsync(opened.fileno())  # what is not written yet cannot be dropped
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _check(model: PreTrainedModel, blocks: int, large: int, small: int, capacity: int) -> None:
    config: Any = model.config
    drawing.require_drawable(model, "Graphs are")
    if not 1 <= blocks <= config.num_hidden_layers:
        raise ValueError(
            f"{config.num_hidden_layers} layers make 1 to {config.num_hidden_layers} blocks, not {blocks}."
        )
    if not 1 <= small < large or large % small:
        raise ValueError(f"The small chunk must divide a larger one: {small} does not divide {large}.")
    if not 1 <= capacity <= config.max_position_embeddings:
        raise ValueError(f"The static cache has 1 to {config.max_position_embeddings} rows, not {capacity}.")


def _build_file(model: PreTrainedModel, layers: range, chunk: int, capacity: int, folder: Path) -> Path:
    """The file of one block at one chunk length, optimised by the runtime when it is not there yet."""
    proto = _Drawing(model, chunk, capacity).block(layers)
    if proto.ByteSize() > _MOST_BYTES:
        raise ValueError(
            f"A block of {len(layers)} layers has {proto.ByteSize() / 2**30:.1f} GiB; cut it into smaller ones."
        )
    stored = proto.SerializeToString(deterministic=True)
    key = sha256(onnxruntime.__version__.encode() + stored).hexdigest()[:24]
    path = folder / f"block-{chunk}-{key}.onnx"
    if not path.is_file():
        with assets.writing(path) as temporary:
            options = drawing.options()
            options.optimized_model_filepath = str(temporary)
            onnxruntime.InferenceSession(stored, options, providers=["CPUExecutionProvider"])
    return path


def _padded(rows: Floats, count: int) -> Floats:
    if len(rows) == count:
        return rows
    return np.concatenate([rows, np.zeros((count - len(rows), rows.shape[1]), np.float32)])


class _Drawing(drawing.Drawing):
    """One static graph: layers over a static cache, c tokens at a time.

    Inputs: hidden [c, h], mask [c, K + c] (added to the scores, cache first), cosines and sines [c, d], and keysI,
    valuesI [g, K, d] of the block's layer I. Outputs: hidden, and the new rows [g, c, d] of each keysI, valuesI.
    """

    def __init__(self, model: PreTrainedModel, chunk: int, capacity: int) -> None:
        super().__init__(model)
        self._chunk, self._capacity = chunk, capacity
        self._rows: list[str] = []

    def block(self, layers: range) -> onnx.ModelProto:
        """The model file of some layers, in order."""
        chunk, rows, size = self._chunk, self._capacity, self.size
        hidden, cached = [chunk, self.model.config.hidden_size], [self.groups, rows, size]
        inputs = {"hidden": hidden, "mask": [chunk, rows + chunk], "cosines": [chunk, size], "sines": [chunk, size]}
        state = "hidden"
        for index, number in enumerate(layers):
            inputs |= {f"keys{index}": cached, f"values{index}": cached}
            state = self.layer(index, self.model.model.layers[number], state)
        return self.proto(inputs, {state: hidden} | {key: [self.groups, chunk, size] for key in self._rows})

    def attention(self, index: int, part: Any, given: str) -> str:
        """The query heads of a group lie behind each other, so that keys and values are not repeated for them."""
        chunk, groups, size = self._chunk, self.groups, self.size
        share = self.heads // groups
        queries = self._split(
            self.linear(given, part.q_proj), [chunk, groups, share, size], [1, 2, 0, 3], part, "q_norm"
        )
        keys = self._split(self.linear(given, part.k_proj), [chunk, groups, size], [1, 0, 2], part, "k_norm")
        values = self._split(self.linear(given, part.v_proj), [chunk, groups, size], [1, 0, 2])
        queries, keys = self._rotated(queries), self._rotated(keys)
        self._rows += [keys, values]
        queries = self.op("Mul", queries, self.constant(np.float32(part.scaling)))
        queries = self.shaped(queries, [groups, share * chunk, size])
        all_keys = self.op("Concat", f"keys{index}", keys, axis=1)
        all_values = self.op("Concat", f"values{index}", values, axis=1)
        scores = self.op("MatMul", queries, self.op("Transpose", all_keys, perm=[0, 2, 1]))
        width = self._capacity + chunk
        scores = self.op("Add", self.shaped(scores, [groups, share, chunk, width]), "mask")
        shares = self.shaped(self.op("Softmax", scores, axis=-1), [groups, share * chunk, width])
        found = self.shaped(self.op("MatMul", shares, all_values), [groups, share, chunk, size])
        found = self.shaped(self.op("Transpose", found, perm=[2, 0, 1, 3]), [chunk, self.heads * size])
        return self.linear(found, part.o_proj)

    def _split(self, flat: str, shape: Sequence[int], order: Sequence[int], part: Any = None, norm: str = "") -> str:
        """Heads out of a projection; Qwen 3 normalises those of queries and keys."""
        heads = self.shaped(flat, shape)
        if hasattr(part, norm):
            heads = self.norm(heads, getattr(part, norm))
        return self.op("Transpose", heads, perm=list(order))

    def _rotated(self, heads: str) -> str:
        """Rotary positions on the halves of each head."""
        halves = self.constant(np.array([self.size // 2] * 2))
        first, second = self.ops(2, "Split", heads, halves, axis=-1)
        turned = self.op("Concat", self.op("Neg", second), first, axis=-1)
        return self.op("Add", self.op("Mul", heads, "cosines"), self.op("Mul", turned, "sines"))
