"""Static graphs: a causal LM's decoder in blocks, each drawn for two chunk lengths, on disk and out of it again.

An NPU runs graphs of fixed shapes that must be loaded before they run. `export` writes them as portable ONNX, standard
operators of opset 17 only, over one file of weights. `compiled` lets ONNX Runtime optimise each for this machine, into
a file with the weights inside; loading such a file, as `load` does, is the counterpart of loading an NPU's graph.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from onnxruntime.quantization import (  # type: ignore[import-untyped]
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)

from ondevice import assets
from ondevice.causal_lm import drawing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Rows = NDArray[np.float32]
PRECISIONS = ("fp32", "fp16", "int8")
OPSET = 17  # which QNN's and ExecuTorch's importers read
LARGE = 256  # rows of G1 (section 3.2)
SMALL = 32  # rows of G2
WEIGHTS = "weights.bin"
FACTS = "graphs.json"
HIDDEN = np.float32(-1e4)  # added to the score of a row that may not be seen; fits 16 bits
_PAGE = 4096
_INLINE = 1024  # bytes of a constant that stays in the graph


@dataclass(frozen=True)
class Graph:
    """A loaded graph. rows: that it runs, always. size: bytes of its file."""

    session: Any
    rows: int
    size: int


@dataclass(frozen=True)
class Cache:
    """Static keys and values of one block: [layers, key-value heads, capacity, head size], rows by position."""

    keys: Rows
    values: Rows


@dataclass(frozen=True, eq=False)
class Graphs:
    """Compiled graphs of a model in N blocks. layers: of each block. capacity: rows of the static cache.

    large_files, small_files: each block's G1 and G2. facts: of the folder.
    """

    facts: dict[str, Any]
    large_files: tuple[Path, ...]
    small_files: tuple[Path, ...]
    ends: dict[str, Graph]  # embedding and head, small and large, which stay loaded

    @property
    def blocks(self) -> int:
        """N, the number of blocks that the layers are dealt into."""
        return len(self.large_files)

    @property
    def large(self) -> int:
        """Rows of G1, the prefill graph."""
        return int(self.facts["large"])

    @property
    def small(self) -> int:
        """Rows of G2, the decode graph."""
        return int(self.facts["small"])

    @property
    def capacity(self) -> int:
        """Rows of the static cache."""
        return int(self.facts["capacity"])

    def caches(self) -> list[Cache]:
        """Empty caches, one a block."""
        groups = self.facts["groups"]
        size = self.facts["size"]
        shapes = [(layers, groups, self.capacity, size) for layers in self.facts["layers"]]
        # Not np.zeros, whose memory is only found by the first chunk that reads it.
        return [Cache(np.full(shape, 0.0, np.float32), np.full(shape, 0.0, np.float32)) for shape in shapes]

    def embed(self, ids: Sequence[int]) -> Rows:
        """[n, h] what the first block is given for n tokens."""
        return self._through("embed", np.asarray(ids, np.int64), "ids")

    def logits(self, hidden: Rows) -> torch.Tensor:
        """[n, V] after the last block's output [n, h]."""
        return torch.from_numpy(self._through("head", hidden, "hidden"))

    def _through(self, end: str, given: NDArray[Any], name: str) -> Rows:
        graph = self.ends[f"{end}-{self.small if len(given) <= self.small else self.large}"]
        parts = []
        for at in range(0, len(given), graph.rows):
            part = given[at : at + graph.rows]
            parts.append(graph.session.run(None, {name: padded(part, graph.rows)})[0][: len(part)])
        return np.concatenate(parts)


def forward(
    graph: Graph, hidden: Rows, cache: Cache, start: int, sees: NDArray[np.bool_],
    positions: Sequence[int] | NDArray[np.int64],
) -> Rows:  # fmt: skip
    """[n, h] a block's output for n rows [n, h] behind `start` rows of its cache, in ceil(n / graph.rows) runs.

    sees: [n, n], whether a row sees a column; all see the cache. positions: [n], of the rows. The rows' keys and values
    are written to the cache from `start` on; the last run is padded with rows that none sees and that are not kept.
    """
    out = np.empty_like(hidden)
    capacity = cache.keys.shape[2]
    for at in range(0, len(hidden), graph.rows):
        part = slice(at, min(at + graph.rows, len(hidden)))
        count = part.stop - at
        before = start + at
        mask = np.full((graph.rows, capacity + graph.rows), HIDDEN, np.float32)
        mask[:, :start] = 0.0
        mask[:count, start:before][sees[part, :at]] = 0.0
        mask[:count, capacity : capacity + count][sees[part, part]] = 0.0
        given = {"hidden": padded(hidden[part], graph.rows), "mask": mask,
                 "places": padded(np.asarray(positions[part], np.int64), graph.rows)}  # fmt: skip
        for layer in range(len(cache.keys)):
            given |= {f"keys{layer}": cache.keys[layer], f"values{layer}": cache.values[layer]}
        with drawing.flushing_denormals():
            output, *rows = graph.session.run(None, given)
        out[part] = output[:count]
        for layer in range(len(cache.keys)):
            cache.keys[layer, :, before : before + count] = rows[2 * layer][:, :count]
            cache.values[layer, :, before : before + count] = rows[2 * layer + 1][:, :count]
    return out


def padded(rows: NDArray[Any], count: int) -> NDArray[Any]:
    """The rows and zeros behind them, `count` together."""
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])


# Writing


def export(
    model: PreTrainedModel, folder: Path, *, name: str = "", blocks: int = 6, large: int = LARGE, small: int = SMALL,
    capacity: int = 0, precision: str = "fp32", texts: Sequence[Sequence[int]] = (), tokenizer: Any = None,
) -> Path:  # fmt: skip
    """Write a model's graphs into a new folder, check them and run them; returns the folder.

    blocks: N, into which the layers are dealt evenly. capacity: rows of the static cache, by default the model's
    context and one draft. texts: token ids that int8's ranges of activations are found on.
    Raises ValueError for a model that cannot be drawn and for numbers that do not fit.
    """
    capacity = capacity or model.config.max_position_embeddings + small
    _check(model, blocks, large, small, precision)
    parts = np.array_split(np.arange(model.config.num_hidden_layers), blocks)
    heads, groups, size = drawing.heads(model.config)
    embedding: Any = model.get_input_embeddings()
    facts: dict[str, Any] = dict(
        format=1, model=name, precision=precision, opset=OPSET, large=large, small=small, capacity=capacity,
        context=capacity - small, layers=[len(part) for part in parts], hidden=model.config.hidden_size, groups=groups,
        size=size, vocabulary=int(embedding.weight.shape[0]), heads=heads,
        tokenizer="" if tokenizer is None else tokenizer_digest(tokenizer),
    )  # fmt: skip
    with assets.writing(folder / FACTS) as temporary:
        shutil.rmtree(temporary.parent / "new", ignore_errors=True)
        weights = _Weights(folder / WEIGHTS)
        for chunk in (large, small):
            drawn = {"embed": Drawing(model, chunk, capacity).embedding()}
            drawn |= {
                f"block{number:02}": Drawing(model, chunk, capacity).block(part.tolist())
                for number, part in enumerate(parts)
            }
            drawn["head"] = Drawing(model, chunk, capacity).head()
            if precision == "int8":
                drawn = quantized(drawn, chunk, facts, texts)
            for stem, proto in drawn.items():
                proto = halved(proto) if precision == "fp16" else proto
                onnx.save(weights.outside(proto), folder / f"{stem}-{chunk}.onnx")
        weights.close()
        files = sorted(folder.glob("*.onnx"))
        facts["files"] = {path.name: [_sha256(path), path.stat().st_size] for path in [*files, folder / WEIGHTS]}
        for path in files:
            onnx.checker.check_model(str(path), full_check=True)
            session = onnxruntime.InferenceSession(str(path), drawing.options(), providers=["CPUExecutionProvider"])
            session.run(None, zeros(session))
        temporary.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def tokenizer_digest(tokenizer: Any) -> str:
    """12 hex digits of a vocabulary, so that a history of other ids is noticed."""
    return sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:12]


class _Weights:
    """One file that all graphs share: equal constants lie in it once, each graph's first one on a page of its own."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._offsets = dict[bytes, int]()

    def outside(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """The graph with its large constants in the file."""
        for tensor in proto.graph.initializer:
            data = numpy_helper.to_array(tensor).tobytes()
            if len(data) < _INLINE:
                continue
            key = sha256(data).digest()
            if key not in self._offsets:
                self._file.write(bytes(-self._file.tell() % _PAGE))
                self._offsets[key] = self._file.tell()
                self._file.write(data)
            for field in ("raw_data", "float_data", "int32_data", "int64_data"):
                tensor.ClearField(field)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for name, value in (("location", WEIGHTS), ("offset", self._offsets[key]), ("length", len(data))):
                tensor.external_data.add(key=name, value=str(value))
        return proto

    def close(self) -> None:
        self._file.close()


def halved(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A graph in 16-bit floats, with inputs and outputs in 32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16  # type: ignore[import-untyped]
    from onnxruntime.transformers.onnx_model import OnnxModel  # type: ignore[import-untyped]

    half = OnnxModel(convert_float_to_float16(proto, keep_io_types=True))
    half.topological_sort()  # the casts of inputs come last
    return half.model


def quantized(
    drawn: dict[str, onnx.ModelProto], rows: int, facts: dict[str, Any], texts: Sequence[Sequence[int]]
) -> dict[str, onnx.ModelProto]:
    """Linear layers in int8 as QDQ, by onnxruntime's own tool: weights by channel, ranges of activations from texts."""
    if not texts:
        raise ValueError("int8 needs texts to find the ranges of activations on.")
    with tempfile.TemporaryDirectory() as temporary:
        paths = {stem: Path(temporary) / f"{stem}.onnx" for stem in drawn}
        for stem, proto in drawn.items():
            onnx.save(proto, paths[stem])
        given = _inputs(paths, rows, facts, texts)
        int8 = {"embed": drawn["embed"]}
        logging.disable(logging.WARNING)  # that shapes could be inferred before: they are static
        for stem in list(drawn)[1:]:
            target = paths[stem].with_suffix(".int8.onnx")
            quantize_static(
                paths[stem], target, _Reader(given[stem]), quant_format=QuantFormat.QDQ, per_channel=True,
                op_types_to_quantize=["MatMul"], weight_type=QuantType.QInt8, activation_type=QuantType.QUInt8,
                extra_options={"MatMulConstBOnly": True},
            )  # fmt: skip
            int8[stem] = onnx.load(target)
        logging.disable(logging.NOTSET)
        return int8


def _inputs(
    paths: dict[str, Path], rows: int, facts: dict[str, Any], texts: Sequence[Sequence[int]]
) -> dict[str, list[dict[str, Any]]]:
    """What each graph is given while the float graphs read the texts."""
    sessions = {stem: onnxruntime.InferenceSession(str(path), drawing.options()) for stem, path in paths.items()}
    given: dict[str, list[dict[str, Any]]] = {stem: [] for stem in paths}

    def noted(stem: str) -> Any:
        class Noting:
            def run(self, names: None, inputs: dict[str, Any]) -> Any:
                given[stem].append({key: np.array(value) for key, value in inputs.items()})
                return sessions[stem].run(names, inputs)

        return Graph(Noting(), rows, 0)

    ends = {f"{end}-{facts[size]}": noted(end) for end in ("embed", "head") for size in ("large", "small")}
    float_graphs = Graphs(facts, (), (), ends)
    for text in texts:
        caches = float_graphs.caches()
        causal = np.tri(len(text), dtype=bool)
        hidden = float_graphs.embed(text)
        for number, cache in enumerate(caches):
            hidden = forward(noted(f"block{number:02}"), hidden, cache, 0, causal, range(len(text)))
        float_graphs.logits(hidden)
    return given


class _Reader(CalibrationDataReader):
    def __init__(self, given: Sequence[dict[str, Any]]) -> None:
        self._left = iter(given)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._left, None)


def _check(model: PreTrainedModel, blocks: int, large: int, small: int, precision: str) -> None:
    drawing.require_drawable(model, "Graphs are")
    layers = model.config.num_hidden_layers
    if not 1 <= blocks <= layers:
        raise ValueError(f"{layers} layers make 1 to {layers} blocks, not {blocks}.")
    if not 1 <= small < large or large % small:
        raise ValueError(f"The small chunk must divide a larger one: {small} does not divide {large}.")
    if precision not in PRECISIONS:
        raise ValueError(f"There is no precision {precision!r}; there are {', '.join(PRECISIONS)}.")


# Running


def compiled(folder: Path, cache: Path | None = None) -> Graphs:
    """The graphs of an exported folder, each optimised for this machine in a file of its own; made once.

    cache: the folder of these files, by default the user's. Raises ValueError where the folder is not whole.
    """
    facts = _facts(folder)
    key = sha256((json.dumps(facts, sort_keys=True) + onnxruntime.__version__).encode()).hexdigest()[:24]
    cache = (cache or assets.cache_folder("sdnpu")) / key
    files = {}
    for name in (name for name in facts["files"] if name.endswith(".onnx")):
        files[name] = path = cache / name
        if not path.is_file():
            for part in (name, WEIGHTS):
                if _sha256(folder / part) != facts["files"][part][0]:
                    raise ValueError(f"{part} in {folder.name} is damaged: export it again.")
            with assets.writing(path) as temporary:
                options = drawing.options()
                options.optimized_model_filepath = str(temporary)
                whole = onnx.load(folder / name).SerializeToString()
                onnxruntime.InferenceSession(whole, options, providers=["CPUExecutionProvider"])
    chunks = (facts["large"], facts["small"])
    ends = {f"{end}-{chunk}": load(files[f"{end}-{chunk}.onnx"]) for end in ("embed", "head") for chunk in chunks}
    large, small = (
        tuple(files[f"block{number:02}-{chunk}.onnx"] for number in range(len(facts["layers"]))) for chunk in chunks
    )
    return Graphs(facts, large, small, ends)


def _facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        missing = [name for name in facts["files"] if not (folder / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{folder} holds no exported graphs: `ondevice-graphs export` makes them.") from None
    if missing:
        raise ValueError(f"{folder} is not whole: {missing[0]} is missing; export it again.")
    for name, (_, size) in facts["files"].items():
        if (folder / name).stat().st_size != size:
            raise ValueError(f"{name} in {folder.name} is truncated: export it again.")
    return facts


def load(path: Path) -> Graph:
    """A graph from its file, that runs on one thread, the calling one; it has run once, so that its memory is there.

    Weights lie in pages of their own and activations in an arena that all graphs share, so that a graph that is let go
    gives its memory back. Raises FileNotFoundError or, for a file that is damaged or truncated, ValueError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no graph {path.name} in {path.parent}: export or compile it first.")
    _own_pages()
    options = drawing.options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # done when it was compiled
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    options.add_session_config_entry("session.use_env_allocators", "1")
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        with drawing.flushing_denormals():
            session.run(None, zeros(session))
        return Graph(session, session.get_inputs()[0].shape[0], path.stat().st_size)
    except Exception as error:  # the runtime's errors have no common class of their own
        reason = str(error).split("\n")[0][:200]
        raise ValueError(f"{path.name} is damaged or truncated, or no graph: delete it ({reason}).") from None


def zeros(session: Any) -> dict[str, NDArray[Any]]:
    """Inputs of a session's shapes and types."""
    types = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
    return {value.name: np.zeros(value.shape, types[value.type]) for value in session.get_inputs()}


_done: list[bool] = []


def _own_pages() -> None:
    """Once a process: large allocations in mappings of their own, and one arena for all sessions."""
    if not _done:
        _done.append(True)
        onnxruntime.create_and_register_allocator(
            onnxruntime.OrtMemoryInfo(
                "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
            ),
            onnxruntime.OrtArenaCfg(0, 1, -1, -1),
        )
        if hasattr(libc := ctypes.CDLL(None), "mallopt"):
            libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD, which otherwise grows with what is freed


def drop_from_page_cache(path: Path) -> None:
    """Have the next load read a file from the disk; where the system cannot, it stays in memory."""
    with path.open("rb") as opened:
        os.fsync(opened.fileno())  # what is not written yet cannot be dropped
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(path: Path) -> float:
    """Share of a file's pages in the page cache, by mincore (Linux)."""
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        cached = (ctypes.c_ubyte * pages)()
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), cached):
            raise OSError(ctypes.get_errno(), "mincore failed")
        return sum(page & 1 for page in cached) / pages


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# Drawing


class Drawing(drawing.Drawing):
    """Static graphs over a static cache of K rows, c rows at a time.

    A block's inputs: hidden [c, h], mask [c, K + c] (added to the scores, cache first), places [c] (positions), and
    keysI, valuesI [g, K, d] of its layer I. Outputs: hidden, and the new rows [g, c, d] of each keysI, valuesI.
    """

    def __init__(self, model: PreTrainedModel, chunk: int, capacity: int) -> None:
        super().__init__(model)
        self._chunk = chunk
        self._capacity = capacity
        self._rows: list[str] = []

    def block(self, layers: Sequence[int]) -> onnx.ModelProto:
        """The graph of some layers, in order."""
        chunk, rows, size = self._chunk, self._capacity, self.size
        with torch.inference_mode():
            angles = self.model.model.rotary_emb(torch.zeros(1), torch.arange(rows)[None])
        self._angles = [self.op("Gather", self.constant(table[0]), "places", axis=0) for table in angles]
        hidden = [chunk, self.model.config.hidden_size]
        cached = [self.groups, rows, size]
        inputs: dict[str, Any] = {
            "hidden": hidden,
            "mask": [chunk, rows + chunk],
            "places": (onnx.TensorProto.INT64, [chunk]),
        }
        state = "hidden"
        for index, number in enumerate(layers):
            inputs |= {f"keys{index}": cached, f"values{index}": cached}
            state = self.layer(index, self.model.model.layers[number], state)
        return self._portable(inputs, {state: hidden} | {key: [self.groups, chunk, size] for key in self._rows})

    def embedding(self) -> onnx.ModelProto:
        """The graph of the embedding: ids [c] to hidden [c, h]."""
        table = self.constant(self.model.get_input_embeddings().weight)
        shape = [self._chunk, self.model.config.hidden_size]
        ids = {"ids": (onnx.TensorProto.INT64, [self._chunk])}
        return self._portable(ids, {self.op("Gather", table, "ids"): shape})

    def head(self) -> onnx.ModelProto:
        """The graph of last norm and head: hidden [c, h] to logits [c, V]."""
        logits = self.linear(self.norm("hidden", self.model.model.norm), self.model.lm_head)
        width = self.model.lm_head.weight.shape[0]
        return self._portable({"hidden": [self._chunk, self.model.config.hidden_size]}, {logits: [self._chunk, width]})

    def norm(self, state: str, norm: Any) -> str:
        """Root-mean-square normalisation of the last axis, without RMSNormalization, which opset 17 has not."""
        mean = self.op("ReduceMean", self.op("Mul", state, state), axes=[-1], keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.constant(np.float32(norm.variance_epsilon))))
        return self.op("Mul", self.op("Div", state, root), self.constant(norm.weight))

    def attention(self, index: int, part: Any, given: str) -> str:
        """The query heads of a group lie behind each other, so that keys and values are not repeated for them."""
        chunk, groups, size = self._chunk, self.groups, self.size
        share = self.heads // groups
        queries = self._split(
            self.linear(given, part.q_proj), [chunk, groups, share, size], [1, 2, 0, 3], part, "q_norm"
        )
        keys = self._split(self.linear(given, part.k_proj), [chunk, groups, size], [1, 0, 2], part, "k_norm")
        values = self._split(self.linear(given, part.v_proj), [chunk, groups, size], [1, 0, 2])
        queries = self._rotated(queries)
        keys = self._rotated(keys)
        self._rows += [keys, values]
        queries = self.op("Mul", queries, self.constant(np.float32(part.scaling)))
        queries = self.shaped(queries, [groups, share * chunk, size])
        all_keys = self.op("Concat", f"keys{index}", keys, axis=1)
        all_values = self.op("Concat", f"values{index}", values, axis=1)
        scores = self.op("MatMul", queries, self.op("Transpose", all_keys, perm=[0, 2, 1]))
        width = self._capacity + chunk
        scores = self.op("Add", self.shaped(scores, [groups, share, chunk, width]), "mask")
        shares = self.shaped(self.op("Softmax", scores, axis=-1), [groups, share * chunk, width])
        mixed = self.shaped(self.op("MatMul", shares, all_values), [groups, share, chunk, size])
        mixed = self.shaped(self.op("Transpose", mixed, perm=[2, 0, 1, 3]), [chunk, self.heads * size])
        return self.linear(mixed, part.o_proj)

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
        cosines, sines = self._angles
        return self.op("Add", self.op("Mul", heads, cosines), self.op("Mul", turned, sines))

    def _portable(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> onnx.ModelProto:
        proto = self.proto(inputs, outputs)
        del proto.opset_import[:]
        proto.opset_import.append(onnx.helper.make_opsetid("", OPSET))
        proto.ir_version = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", OPSET)])
        return proto
