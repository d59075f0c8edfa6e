"""Streaming: any files, any window, any order of layers, any ids: what comes is what the files hold."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ondevice.grating.checkpoint import INDEX, SINGLE, Checkpoint, extents
from ondevice.grating.hidden_states import Offloaded, Resident
from ondevice.grating.weights import Streamed

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool)
SIZES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
RAW = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.uint8: "U8",
       torch.int64: "I64", torch.bool: "BOOL"}  # fmt: skip


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, NaN included: comparisons are by bytes."""
    count = int(torch.tensor(shape).prod()) * dtype.itemsize if shape else dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


def same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    return (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) and raw(mine) == raw(theirs)


@st.composite
def models(draw) -> dict[str, torch.Tensor]:
    """A transformer of any shapes and dtypes; each layer has tensors of its own shapes."""
    names = draw(st.lists(st.sampled_from(["a.weight", "b.bias", "c", "norm.weight"]), min_size=1, unique=True))
    dtypes = {name: draw(st.sampled_from(DTYPES)) for name in names}
    found = {"embed_tokens.weight": filled((draw(st.integers(1, 30)), draw(st.integers(1, 9))), torch.float32, 1)}
    for layer in range(draw(st.integers(1, 6))):
        for name in names:
            found[f"layers.{layer}.{name}"] = filled(draw(SIZES), dtypes[name], len(found))
    for name in draw(st.lists(st.sampled_from(["norm.weight", "score.weight", "step"]), unique=True)):
        found[name] = filled(draw(SIZES), draw(st.sampled_from(DTYPES)), len(found))
    return found


def packed(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A file as other programs may write it: in any order, so that tensors begin at any byte."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        ends = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": RAW[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
        data += raw
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def write(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    """shards: 0 writes one file by safetensors, -1 one as other programs may, others that many files."""
    if shards <= 0:
        (packed if shards else lambda path, found: save_file(found, path))(folder / SINGLE, tensors)
        return
    places = {name: f"part-{at % shards}.safetensors" for at, name in enumerate(tensors)}
    for file in set(places.values()):
        packed(folder / file, {name: tensors[name] for name in places if places[name] == file})
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


@settings(max_examples=40, deadline=None)
@given(st.data(), models(), st.integers(-1, 4), st.booleans())
def test_what_is_streamed_is_what_the_files_hold(data, tensors, shards: int, direct: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), tensors, shards)
        layers = len(Checkpoint.open(name).groups.layers)
        weights = Streamed(name, buffers=data.draw(st.integers(2, max(2, layers))), direct=direct)
        for index in data.draw(st.lists(st.integers(-1, layers - 1), max_size=15)):
            if index < 0:
                weights.begin()
                continue
            found = weights.layer(index)
            expected = {key.split(".", 2)[2]: tensors[key] for key in tensors if key.startswith(f"layers.{index}.")}
            assert found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
        rest = weights.rest()
        assert rest.keys() == {key for key in tensors if not key.startswith(("layers.", "embed_tokens"))}
        assert all(same(rest[key], tensors[key]) for key in rest)
        weights.close()


@settings(max_examples=40, deadline=None)
@given(models(), st.integers(-1, 4))
def test_extents_hold_every_tensor_once_and_little_else(tensors, shards: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), tensors, shards)
        stored = list(Checkpoint.open(name).tensors.values())
    found = extents(stored)
    for tensor in stored:
        holding = [extent for extent in found if extent.file == tensor.file and extent.offset <= tensor.offset
                   and tensor.offset + tensor.length <= extent.offset + extent.length]  # fmt: skip
        assert len(holding) == 1 or not tensor.length
    assert sum(extent.length for extent in found) == sum(tensor.length for tensor in stored)  # files have no holes


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.lists(st.lists(st.integers(0, 29), max_size=50), max_size=8))
def test_rows_are_the_tables_and_the_last_request_is_kept(capacity: int, requests: list[list[int]]) -> None:
    table = filled((30, 5), torch.bfloat16, 0)
    with tempfile.TemporaryDirectory() as name:
        save_file({"embed_tokens.weight": table, "layers.0.a": torch.zeros(1)}, Path(name) / SINGLE)
        weights, ages = Streamed(name, embedding_rows=capacity), dict[int, int]()
        for turn, ids in enumerate(requests):
            wanted, before = set(ids), weights.embeddings.hits
            kept = {int(row) for row in weights.embeddings._id if row >= 0}
            assert same(weights.rows(torch.tensor(ids, dtype=torch.long)), table[ids])
            assert weights.embeddings.hits - before == len(wanted & kept)
            now = {int(row) for row in weights.embeddings._id if row >= 0}
            assert len(now) <= capacity and (wanted <= now or len(wanted) > min(capacity, 30))
            ages |= dict.fromkeys(wanted, turn)
            if len(wanted) <= min(capacity, 30):
                assert all(ages[gone] <= ages[row] for gone in kept - now for row in now)
        weights.close()


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 7), st.sampled_from([torch.float32, torch.bfloat16]))
def test_offloaded_states_are_the_resident_ones(data, chunks: int, dtype: torch.dtype) -> None:
    with tempfile.TemporaryDirectory() as name:
        resident, offloaded = Resident(), Offloaded(Path(name))
        for chunk in range(chunks):
            hidden = filled((data.draw(st.integers(1, 6)), data.draw(st.integers(1, 300)), 8), dtype, chunk)
            resident.put(chunk, hidden), offloaded.put(chunk, hidden)
        active = list(range(chunks))
        for seed in range(data.draw(st.integers(1, 5))):
            for (chunk, mine), (_, theirs) in zip(resident.each(active), offloaded.each(active), strict=True):
                assert same(mine, theirs)
                kept = filled((data.draw(st.integers(1, len(mine))), *mine.shape[1:]), dtype, seed)
                resident.put(chunk, kept), offloaded.put(chunk, kept)
            active = data.draw(st.lists(st.sampled_from(active), min_size=1, unique=True))
        resident.close(), offloaded.close()
