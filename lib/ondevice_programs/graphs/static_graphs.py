"""Static graphs as a runtime has them: opened from a folder, loaded from files, run a chunk at a time, let go again.

An NPU runs graphs of fixed shapes that must be loaded before they run. For a CPU, ONNX Runtime optimises each graph of
an exported folder for this machine, into a file with the weights inside; loading such a file is the counterpart of
loading an NPU's graph. For the HTP, a graph is compiled as it is loaded, and runs in the emulator of its arithmetic.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray

from ondevice import assets
from ondevice.causal_lm import drawing
from ondevice_programs.graphs import htp

Rows = NDArray[np.float32]
WEIGHTS = "weights.bin"
FACTS = "graphs.json"
FORMAT = 2
HIDDEN = np.float32(-1e4)  # added to the score of a row that may not be seen; fits 16 bits
_TYPES = {
    "tensor(int32)": np.int32,
    "tensor(float)": np.float32,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
}


@dataclass(frozen=True)
class Graph:
    """A loaded graph. rows: that it runs, always."""

    session: Any
    rows: int


@dataclass(frozen=True)
class Cache:
    """Static keys and values of one block: [layers, key-value heads, capacity, head size], rows by position."""

    keys: NDArray[Any]
    values: NDArray[Any]


@dataclass(frozen=True, eq=False)
class Graphs:
    """An opened folder's graphs of a model in N blocks.

    large, small: rows of G1, the prefill graph, and of G2, the decode graph. large_files, small_files: each block's.
    facts: of the folder. ends: embedding and head, small and large, which stay loaded.
    """

    facts: dict[str, Any]
    large: int
    small: int
    large_files: tuple[Path, ...]
    small_files: tuple[Path, ...]
    ends: dict[str, Graph]

    @property
    def blocks(self) -> int:
        """N, the number of blocks that the layers are dealt into."""
        return len(self.large_files)

    def caches(self) -> list[Cache]:
        """Empty caches, one a block."""
        kind = np.dtype(self.facts["cache"])
        shapes = [
            (layers, *(self.facts[name] for name in ("groups", "capacity", "size"))) for layers in self.facts["layers"]
        ]
        # Not np.zeros, whose memory is only found by the first chunk that reads it.
        return [Cache(np.full(shape, 0, kind), np.full(shape, 0, kind)) for shape in shapes]

    def load(self, path: Path) -> Graph:
        """A block's graph from its file, as `load` for the folder's target."""
        return load(path, self.facts["target"])

    def embed(self, ids: Sequence[int]) -> Rows:
        """[n, h] what the first block is given for n tokens."""
        return self._through("embed", np.asarray(ids, np.int32), "ids")

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
    graph: Graph,
    hidden: Rows,
    cache: Cache,
    start: int,
    sees: NDArray[np.bool_],
    positions: Sequence[int] | NDArray[np.int64],
) -> Rows:
    """[n, h] a block's output for n rows [n, h] behind `start` rows of its cache, in ceil(n / graph.rows) runs.

    sees: [n, n], whether a row sees a column; all see the cache. positions: [n], of the rows. The rows' keys and values
    are written to the cache from `start` on; the last run is padded with rows that none sees and that are not kept.
    Raises ValueError, before any run, where the cache has no room for them.
    """
    out = np.empty_like(hidden)
    capacity = cache.keys.shape[2]
    if start + len(hidden) > capacity:
        raise ValueError(f"{len(hidden)} rows behind {start} are more than the {capacity} that these graphs hold.")
    for at in range(0, len(hidden), graph.rows):
        part = slice(at, min(at + graph.rows, len(hidden)))
        count = part.stop - at
        before = start + at
        mask = np.full((graph.rows, capacity + graph.rows), HIDDEN, np.float32)
        mask[:, :start] = 0.0
        mask[:count, start:before][sees[part, :at]] = 0.0
        mask[:count, capacity : capacity + count][sees[part, part]] = 0.0
        given = {
            "hidden": padded(hidden[part], graph.rows),
            "mask": mask,
            "positions": padded(np.asarray(positions[part], np.int32), graph.rows),
        }
        for layer in range(len(cache.keys)):
            given |= {f"past_keys_{layer}": cache.keys[layer], f"past_values_{layer}": cache.values[layer]}
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


def read(built: Graphs, ids: Sequence[int]) -> torch.Tensor:
    """[n, V] logits after each of n tokens, block by block, on the small graphs where one run of them is enough."""
    causal = np.tri(len(ids), dtype=bool)
    hidden = built.embed(ids)
    files = built.small_files if len(ids) <= built.small else built.large_files
    for path, cache in zip(files, built.caches(), strict=True):
        hidden = forward(built.load(path), hidden, cache, 0, causal, range(len(ids)))
    return built.logits(hidden)


def opened(folder: Path, cache: Path | None = None) -> Graphs:
    """The graphs of an exported folder; a CPU's are optimised for this machine, in files of their own, once.

    cache: the folder of these files, by default the user's. Raises ValueError where the folder is not whole, OSError
    where the cache cannot be written.
    """
    facts = facts_of(folder)
    names = [name for name in facts["files"] if name.endswith(".onnx")]
    if facts["target"] == "cpu":
        key = sha256((json.dumps(facts["files"], sort_keys=True) + onnxruntime.__version__).encode()).hexdigest()[:24]
        cache = (cache or assets.cache_folder("sdnpu")) / key
        files = {name: cache / name for name in names}
        missing = [name for name, path in files.items() if not path.is_file()]
    else:
        files = {name: folder / name for name in names}
        missing = names
    for name in {*missing, *([WEIGHTS] if missing else [])}:
        if checksum(folder / name) != facts["files"][name][0]:
            raise ValueError(f"{name} in {folder.name} is damaged: export it again.")
    for name in missing if facts["target"] == "cpu" else ():
        _optimise(folder / name, files[name])
    chunks = (int(facts["large"]), int(facts["small"]))
    ends = {}
    for chunk in chunks:
        ends[f"embed-{chunk}"] = load(files[f"embed-{chunk}.onnx"])
        ends[f"head-{chunk}"] = load(files[f"head-{chunk}.onnx"], facts["target"])
    large, small = (
        tuple(files[f"block{number:02}-{chunk}.onnx"] for number in range(len(facts["layers"]))) for chunk in chunks
    )
    return Graphs(facts, *chunks, large, small, ends)


def _optimise(source: Path, path: Path) -> None:
    """Write a graph as the runtime runs it on this machine, with its weights inside."""
    with assets.writing(path) as temporary:
        options = drawing.options()
        options.optimized_model_filepath = str(temporary)
        whole = onnx.load(source).SerializeToString()
        try:
            onnxruntime.InferenceSession(whole, options, providers=["CPUExecutionProvider"])
            complete = temporary.stat().st_size > 0
        except Exception as error:  # the runtime's errors have no common class of their own
            raise OSError(f"{path.parent}: the optimised {source.name} cannot be written ({_first(error)}).") from None
        if not complete:
            raise OSError(f"{path.parent}: the optimised {source.name} cannot be written.")


def facts_of(folder: Path) -> dict[str, Any]:
    """What a folder says of its graphs. Raises ValueError where it is not whole, or holds others too."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        missing = [name for name in facts["files"] if not (folder / name).is_file()]
        if facts["format"] != FORMAT:
            raise ValueError("another version")
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{folder} holds no graphs of this version: `ondevice-graphs export` makes them.") from None
    if missing:
        raise ValueError(f"{folder} is not whole: {missing[0]} is missing; export it again.")
    foreign = {path.name for path in folder.glob("*.onnx")} - set(facts["files"])
    if foreign:
        raise ValueError(f"{folder} has {min(foreign)}, which was not exported with the others.")
    for name, (_, size) in facts["files"].items():
        if (folder / name).stat().st_size != size:
            raise ValueError(f"{name} in {folder.name} is truncated: export it again.")
    return facts


def load(path: Path, target: str = "cpu") -> Graph:
    """A graph from its file, that runs on one thread, the calling one; it has run once, so that its memory is there.

    Weights lie in pages of their own and activations in an arena that all graphs share, so that a graph that is let go
    gives its memory back. Raises FileNotFoundError, for a file that is damaged or truncated ValueError, and
    htp.CompilerRefused where the HTP's compiler does not take the graph.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no graph {path.name} in {path.parent}: export it first.")
    if target == "htp":
        session = htp.session(path)
        return Graph(session, session.get_inputs()[0].shape[0])
    _own_pages()
    options = drawing.options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # done when it was compiled
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    options.add_session_config_entry("session.use_env_allocators", "1")
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        with drawing.flushing_denormals():
            session.run(None, zeros(session))
        return Graph(session, session.get_inputs()[0].shape[0])
    except Exception as error:  # the runtime's errors have no common class of their own
        raise ValueError(f"{path.name} is damaged or truncated, or no graph: delete it ({_first(error)}).") from None


def _first(error: Exception) -> str:
    return str(error).split("\n")[0][:200]


def zeros(session: Any) -> dict[str, NDArray[Any]]:
    """Inputs of a session's shapes and types."""
    return {value.name: np.zeros(value.shape, _TYPES[value.type]) for value in session.get_inputs()}


@lru_cache
def _own_pages() -> None:
    """Once a process: large allocations in mappings of their own, and one arena for all sessions."""
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg(0, 1, -1, -1))
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD, which otherwise grows with what is freed


def checksum(path: Path) -> str:
    """SHA-256 over a file, 64 hex digits."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
