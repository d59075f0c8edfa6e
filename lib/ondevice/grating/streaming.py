"""Weights from the disk: how much of the reading is hidden (section 4.2), and the embedding cache (section 4.4).

Layers have the 0.6B shape with random weights, made on the fly in the cache folder and removed afterwards: their values
do not matter here. Reads are direct, so that the disk is measured and not the page cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ondevice import assets, shapes
from ondevice.grating.architectures import Architecture, Row
from ondevice.grating.checkpoint import Checkpoint, Reader, StoredTensor
from ondevice.grating.embedding_cache import EmbeddingCache
from ondevice.grating.engine import Engine
from ondevice.grating.printed import SMALL
from ondevice.grating.recordings import without_bars
from ondevice.grating.weights import SHARE, Streamed
from ondevice.meters import evict

if TYPE_CHECKING:
    from ondevice.grating.baselines import Model
    from ondevice.grating.recordings import Asked

DISK = "O_DIRECT"
_ROWS = 2_048  # of the embedding table of the few layers: it has no part in what is measured
_ROW = 64  # tokens of a candidate, at most


# Hidden reads


@dataclasses.dataclass(frozen=True)
class Reads:
    """What passes over a few layers gave.

    points: disk, tokens, hidden (share of the read time that nobody waited for), stalled_ms, read_ms (of a layer),
    compute_ms. crossover: disk -> tokens from which reads should be hidden: `gflops` over `gbs` of the disk.
    """

    points: pd.DataFrame
    crossover: Mapping[str, float]
    gflops: float
    gbs: Mapping[str, float]


def hidden_reads(
    tokens: Sequence[int] = (16, 64, 128, 256, 512, 1024, 2048), throttles: Sequence[float] = (300e6,), layers: int = 5,
    passes: int = 2, shape: str = SMALL,
) -> Reads:  # fmt: skip
    """Passes over layers of a shape, their reads overlapped: for each number of tokens and disk.

    throttles: bytes a second of simulated slower disks. layers: at least three, as the first is read before any
    computation and not counted. passes: of which the median counts. GFLOP/s are those of the most tokens.
    Raises ValueError on fewer layers.
    """
    if layers < 3:
        raise ValueError(f"Reads are hidden behind at least 3 layers, not {layers}.")
    disks: dict[str, float | None] = {DISK: None}
    disks |= {f"throttled to {rate / 1e6:g} MB/s": rate for rate in throttles}
    rows, gflops, gbs = [], 0.0, {}
    with few_layers(layers, shape) as folder:
        architecture = Architecture(_config(folder), (0, 1))
        size = sum(tensor.length for tensor in Checkpoint.open(folder).groups.layers[0].values())
        for disk, throttle in disks.items():
            with contextlib.closing(Streamed(folder, throttle=throttle)) as weights:
                name = disk if weights._reader.direct or throttle else "through the page cache"
                engine = Engine(architecture, weights)
                engine.score(_rows(32))
                found = {count: _passes(engine, weights, count, passes) for count in tokens}
            gbs[name] = size / float(np.median([read for read, _, _ in found.values()])) / 1e9
            if throttle is None:
                most = max(tokens)
                gflops = size * most / found[most][2] / 1e9  # 2 operations a weight of 2 bytes
            rows += [(name, count, 1 - stalled / read, 1e3 * stalled, 1e3 * read, 1e3 * compute)
                     for count, (read, stalled, compute) in found.items()]  # fmt: skip
    points = pd.DataFrame(rows, columns=["disk", "tokens", "hidden", "stalled_ms", "read_ms", "compute_ms"])
    return Reads(points, {disk: gflops / rate for disk, rate in gbs.items()}, gflops, gbs)


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(folder))


@contextlib.contextmanager
def few_layers(layers: int, shape: str = SMALL, rows: int = _ROWS) -> Iterator[Path]:
    """A folder with so many layers of a published shape, random, in bfloat16; removed at the end."""
    of = shapes.shape(shape)
    small = dataclasses.replace(of, values=of.values | {"num_hidden_layers": layers, "vocab_size": rows})
    with tempfile.TemporaryDirectory(dir=assets.cache_folder("grating"), prefix=".layers-") as name:
        with without_bars():
            shapes.random_model(small, torch.bfloat16, 0).save_pretrained(name)
        evict(sorted(Path(name).glob("*.safetensors")))
        yield Path(name)


def _rows(tokens: int) -> list[Row]:
    """Candidates of at most 64 tokens, so many together."""
    lengths = [_ROW] * (tokens // _ROW) + ([tokens % _ROW] if tokens % _ROW else [])
    return [Row(tuple(range(2, 2 + length)), length) for length in lengths]


def _passes(engine: Engine, weights: Streamed, tokens: int, passes: int) -> tuple[float, float, float]:
    """Seconds a layer: of reading, waiting, computing; of the pass with the median wait, without the first layer."""
    found = []
    for _ in range(passes):
        scores = engine.score(_rows(tokens))
        read, stalled = weights.window.read_seconds[1:], weights.window.stalled_seconds[1:]
        computing = scores.seconds[1:] - scores.stalls[1:]
        found.append((float(read.mean()), float(stalled.mean()), float(computing.mean())))
    return sorted(found, key=lambda one: one[1] / one[0])[(passes - 1) // 2]


# The embedding cache


def embedding_cache(
    streams: Mapping[str, tuple[StoredTensor, Sequence[NDArray[np.int64]]]], share: float = SHARE
) -> pd.DataFrame:
    """Figure of section 4.4: stream, query (1 is cold), hit_rate (of distinct rows), added_ms, tokens, distinct.

    streams: by name a table in a file and the token ids of each query. The cache has room for a share of the rows.
    added_ms: over gathering as many rows from memory. The file is taken out of the page cache before the first query.
    """
    rows = []
    for stream, (table, queries) in streams.items():
        evict([table.file])
        with contextlib.closing(Reader([table.file])) as reader:
            cache = EmbeddingCache(table, max(1, int(share * table.shape[0])), reader)
            resident = torch.zeros(cache.capacity, table.shape[1], dtype=table.dtype)
            for number, ids in enumerate(queries, 1):
                hits, misses = cache.hits, cache.misses
                wanted = torch.from_numpy(ids)
                started = time.perf_counter()
                cache.rows(wanted)
                between = time.perf_counter()
                resident[wanted % len(resident)]
                plain, taken = time.perf_counter() - between, between - started
                hits, misses = cache.hits - hits, cache.misses - misses
                rows.append((stream, number, hits / (hits + misses), 1e3 * max(0.0, taken - plain), len(ids),
                             hits + misses))  # fmt: skip
            cache.close()
    return pd.DataFrame(rows, columns=["stream", "query", "hit_rate", "added_ms", "tokens", "distinct"])


def warm_cost(table: pd.DataFrame, seconds: Mapping[str, float]) -> pd.DataFrame:
    """What the cache costs: stream, cold_ms (the first query), warm_ms and hit_rate (medians of the later half), share.

    seconds: by stream what a query takes in all, of which `share` is the warm cost.
    """
    rows = []
    for stream, found in table.groupby("stream", sort=False):
        later = found[found["query"] > found["query"].max() / 2]
        warm = float(later["added_ms"].median())
        share = warm / 1e3 / seconds[str(stream)] if str(stream) in seconds else float("nan")
        rows.append((stream, float(found["added_ms"].iloc[0]), warm, float(later["hit_rate"].median()), share))
    return pd.DataFrame(rows, columns=["stream", "cold_ms", "warm_ms", "hit_rate", "share"])


@contextlib.contextmanager
def zipf_stream(
    queries: int = 30, tokens: int = 2560, vocabulary: int = 151_669, width: int = 512, exponent: float = 1.0,
    seed: int = 0,
) -> Iterator[tuple[StoredTensor, list[NDArray[np.int64]]]]:  # fmt: skip
    """A table of random rows in a file, removed at the end, and ids whose r-th most frequent has the weight r^-a.

    width: of a row, in bfloat16; half of the 0.6B shape's by default, as the table is else 311 MB. The ranks of the
    ids are shuffled: frequent rows do not lie together.
    """
    drawn = np.random.default_rng(seed)
    weights = np.arange(1, vocabulary + 1, dtype=np.float64) ** -exponent
    names, ends = drawn.permutation(vocabulary), np.cumsum(weights / weights.sum())
    ids = [names[np.minimum(np.searchsorted(ends, drawn.random(tokens)), vocabulary - 1)] for _ in range(queries)]
    with tempfile.TemporaryDirectory(dir=assets.cache_folder("grating"), prefix=".table-") as name:
        path = Path(name) / "table"
        with path.open("wb") as file:
            for start in range(0, vocabulary, 8192):
                rows = min(8192, vocabulary - start)
                file.write(drawn.bytes(2 * rows * width))
        yield StoredTensor("table", path, 0, 2 * vocabulary * width, torch.bfloat16, (vocabulary, width)), ids


def real_stream(model: Model, pools: Sequence[Asked]) -> tuple[StoredTensor, list[NDArray[np.int64]]]:
    """A reranker's own table, and the tokens that it reads of each pool."""
    found = [model.rows(pool.query, pool.documents) for pool in pools]
    ids = [np.array([token for row in rows for token in row.ids], np.int64) for rows in found]
    return Checkpoint.open(model.folder).groups.table, ids

