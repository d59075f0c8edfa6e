"""Weight files: every tensor is found where it is, every damaged file is one clear error, every read is whole."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from waiting import least_time

from ondevice.grating import checkpoint
from ondevice.grating.checkpoint import INDEX, PAGE, SINGLE, Checkpoint, Extent, Reader, extents, pages

Tensors = Mapping[str, torch.Tensor]


def model(layers: int = 3, width: int = 7) -> dict[str, torch.Tensor]:
    """A decoder's tensors of odd sizes and three dtypes."""
    random = torch.Generator().manual_seed(0)
    found = {
        "model.embed_tokens.weight": torch.randn(11, width, generator=random),
        "model.norm.weight": torch.randn(width, generator=random),
        "score.weight": torch.randn(1, width, generator=random),
    }
    for layer in range(layers):
        inside = {
            "mlp.up.weight": torch.randn(5, width, generator=random).bfloat16(),
            "norm.weight": torch.randn(width, generator=random),
            "flag": torch.randint(0, 255, (3,), generator=random).to(torch.uint8),
        }
        found |= {f"model.layers.{layer}.{name}": value for name, value in inside.items()}
    return found


def saved(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / SINGLE, {"format": "pt"})
    return folder


def sharded(folder: Path, tensors: Tensors, shards: int) -> Path:
    """Tensors dealt out in turns, so that a layer is in several files."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {name: f"model-{at % shards:05}.safetensors" for at, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: value for name, value in tensors.items() if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def written(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / SINGLE).write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return folder


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def cached(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    size = path.stat().st_size
    library = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        flags = (ctypes.c_ubyte * -(-size // PAGE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert library.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), flags) == 0
    return sum(flag & 1 for flag in flags)


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(reader: Reader, extent: Extent) -> bytes:
    memory = pages(extent.span)
    reader.read(extent, memoryview(memory)[: extent.span])
    start = extent.offset - extent.first
    return memory[start : start + extent.length]


# Where tensors are


@pytest.mark.parametrize("shards", [0, 1, 2, 5])
def test_every_tensor_is_found_where_it_is(tmp_path: Path, shards: int) -> None:
    tensors = model()
    folder = sharded(tmp_path, tensors, shards) if shards else saved(tmp_path, tensors)
    found = Checkpoint.open(folder)
    assert found.tensors.keys() == tensors.keys() and len(found.files) == max(1, shards)
    for name, tensor in tensors.items():
        stored = found.tensors[name]
        assert (stored.dtype, stored.shape) == (tensor.dtype, tuple(tensor.shape))
        assert stored.file.read_bytes()[stored.offset : stored.offset + stored.length] == bytes_of(tensor)


def test_tensors_are_grouped(tmp_path: Path) -> None:
    tensors = model(12) | {"lm_head.weight": torch.zeros(11, 7), "model.layers.0.rotary_emb.inv_freq": torch.ones(2)}
    groups = Checkpoint.open(saved(tmp_path, tensors)).groups
    names = [layer["norm.weight"].name for layer in groups.layers]
    assert names == [f"model.layers.{index}.norm.weight" for index in range(12)]
    assert groups.table.name == "model.embed_tokens.weight" and groups.head is not None
    assert groups.rest.keys() == {"model.norm.weight", "score.weight"}
    assert groups.layers[0].keys() == {"mlp.up.weight", "norm.weight", "flag"}


def test_an_encoders_tensors_are_grouped(tmp_path: Path) -> None:
    names = ["bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight",
             "bert.encoder.layer.0.output.LayerNorm.weight", "classifier.bias"]  # fmt: skip
    tensors = {name: torch.zeros(2, 3) for name in names} | {"bert.embeddings.position_ids": torch.arange(2)}
    groups = Checkpoint.open(saved(tmp_path, tensors)).groups
    assert groups.layers[0].keys() == {"output.LayerNorm.weight"} and groups.head is None
    assert groups.table.name == names[0] and groups.rest.keys() == {names[1], names[3]}


def test_neighbours_are_read_at_once_and_distant_tensors_are_not(tmp_path: Path) -> None:
    layers = Checkpoint.open(saved(tmp_path, model(3, 4001))).groups.layers
    # A dtype each, as safetensors writes the wider ones first; the last layer's bytes begin behind its matrix.
    assert [len(extents(layer.values())) for layer in layers] == [3, 3, 2]
    assert sum(extent.length for extent in extents(layers[0].values())) == sum(t.length for t in layers[0].values())
    plain = {name: value.float() for name, value in model(3, 4001).items()}
    layers = Checkpoint.open(saved(tmp_path, plain)).groups.layers
    assert [len(extents(layer.values())) for layer in layers] == [1, 1, 1]


def test_headers_leave_nothing_in_the_page_cache(tmp_path: Path) -> None:
    path = saved(tmp_path, model(3, 40_001)) / SINGLE
    drop(path)
    if cached(path):
        pytest.skip("this file system keeps its files in memory")
    Checkpoint.open(tmp_path)
    assert cached(path) == 0


def test_memory_for_reads_is_private_and_aligned_and_takes_room_only_when_used() -> None:
    """Shared memory would count elsewhere, and so would not be seen where processes' own memory is compared."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    shared, own, size = status("RssShmem"), status("RssAnon"), 64 << 20
    memory = pages(size)
    assert len(memory) == size and status("RssAnon") < own + size // 4
    memory[:] = b"\x01" * size
    assert status("RssAnon") > own + size // 2 and status("RssShmem") < shared + size // 4
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PAGE == 0


# Damage


def entry(dtype: str = "F32", shape: Any = (1,), begin: int = 0, end: int = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "no header": (b"", b"", "header cannot be read"),
    "no JSON": (b"\x80\x04K\x01.", b"", "header cannot be read"),
    "a list": ([1], b"", "header cannot be read"),
    "no places": ({"a": {"dtype": "F32", "shape": [1]}}, b"1234", "header cannot be read"),
    "an unknown type": ({"a": entry("F12")}, b"1234", "'F12'"),
    "a wrong length": ({"a": entry(shape=(2,))}, b"1234", r"4 bytes, not those of \(2,\)"),
    "a negative size": ({"a": entry(shape=(-1, -1))}, b"1234", "no count"),
    "a size that is no integer": ({"a": entry(shape=(1.0,))}, b"1234", "no count"),
    "a negative place": ({"a": entry(begin=-4, end=0)}, b"", "no count"),
    "an end before the beginning": ({"a": entry(shape=(0,), begin=4, end=0)}, b"1234", "-4 bytes"),
    "tensors that overlap": ({"a": entry(), "b": entry()}, b"1234", "b begins at byte"),
    "a hole": ({"a": entry(), "b": entry(begin=8, end=12)}, b"1" * 12, "b begins at byte"),
    "bytes too many": ({"a": entry()}, b"12345", "damaged: "),
    "bytes too few": ({"a": entry()}, b"123", "truncated: "),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_damaged_header_is_one_clear_error(tmp_path: Path, kind: str) -> None:
    header, data, message = HEADERS[kind]
    with pytest.raises(ValueError, match=message) as raised:
        Checkpoint.open(written(tmp_path, header, data))
    assert str(raised.value).startswith(SINGLE)


@pytest.mark.parametrize("size", [0, 7, 8, 30, -1])
def test_a_truncated_file_is_one_clear_error(tmp_path: Path, size: int) -> None:
    path = saved(tmp_path, model()) / SINGLE
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(ValueError, match="truncated"):
        Checkpoint.open(tmp_path)


def test_a_header_of_2_to_the_60_bytes_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not hold its header"):
        Checkpoint.open(written(tmp_path, {}, length=1 << 60))


INDICES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no map": (lambda index: {}, "no map of tensors"),
    "a list": (lambda index: [1], "no map of tensors"),
    "a missing file": (lambda index: changed(index, "score.weight", "model-9.safetensors"), "no file of the folder"),
    "a file elsewhere": (lambda index: changed(index, "score.weight", "../model.safetensors"), "no file of the folder"),
    "another file": (lambda index: changed(index, "score.weight", other(index)), "score.weight in model-.*not"),
    "a tensor less": (lambda index: changed(index, "model.layers.1.flag", None), "lacks layer 1's flag"),
}


def changed(index: dict[str, Any], name: str, file: str | None) -> dict[str, Any]:
    places = index["weight_map"] | {name: file}
    return {"weight_map": {key: value for key, value in places.items() if value is not None}}


def other(index: dict[str, Any]) -> str:
    return next(file for file in index["weight_map"].values() if file != index["weight_map"]["score.weight"])


@pytest.mark.parametrize("kind", INDICES)
def test_an_index_that_does_not_fit_is_one_clear_error(tmp_path: Path, kind: str) -> None:
    change, message = INDICES[kind]
    path = sharded(tmp_path, model(), 2) / INDEX
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda found: found.pop("model.layers.1.norm.weight"), "lacks layer 1's norm.weight"),
    (lambda found: [found.pop(name) for name in list(found) if ".layers.1." in name], "lacks layer 1's"),
    (lambda found: [found.pop(name) for name in list(found) if ".layers." in name], "lacks layer 0's tensors"),
    (lambda found: found.pop("model.embed_tokens.weight"), "one token embedding, not 0"),
    (lambda found: found.update({"decoder.embed_tokens.weight": torch.zeros(2)}), "one token embedding, not 2"),
], ids=["a tensor", "a layer", "all layers", "no embedding", "two embeddings"])  # fmt: skip
def test_what_is_no_whole_transformer_is_refused(tmp_path: Path, change: Callable, message: str) -> None:
    tensors = model()
    change(tensors)
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(saved(tmp_path, tensors))


def test_folders_without_whole_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither"):
        Checkpoint.open(tmp_path)


# Reading


@pytest.fixture
def some_file(tmp_path: Path) -> Path:
    path = tmp_path / "bytes"
    path.write_bytes(os.urandom(3 * PAGE + 123))
    return path


EXTENTS = [(0, 1), (1, PAGE - 1), (PAGE - 1, 2), (5, 3 * PAGE), (3 * PAGE, 123), (0, 3 * PAGE + 123)]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("offset", "length"), EXTENTS)
def test_a_read_gives_the_files_bytes(some_file: Path, direct: bool, offset: int, length: int) -> None:
    reader = Reader([some_file], direct)
    assert read(reader, Extent(some_file, offset, length)) == some_file.read_bytes()[offset : offset + length]
    reader.close()


@pytest.mark.parametrize("most", [1, 100, PAGE, PAGE + 1, 2 * PAGE])
@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_are_continued(some_file: Path, monkeypatch: pytest.MonkeyPatch, most: int, direct: bool) -> None:
    whole, preadv, calls = some_file.read_bytes(), os.preadv, []

    def short(handle: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if direct and len(calls) > 1:
            assert (handle == handles[0]) == (offset % PAGE == 0)  # O_DIRECT takes nothing between pages
        part = bytearray(os.pread(plain, min(most, len(buffers[0])), offset))
        buffers[0][: len(part)] = part
        return len(part)

    reader = Reader([some_file], direct)
    plain = reader.handle(some_file)
    handles = [file.fileno() for file in reader._direct.values() if file is not None]
    if direct and not handles:
        pytest.skip("this file system has no direct reads")
    monkeypatch.setattr(os, "preadv", short)
    assert read(reader, Extent(some_file, 5, 2 * PAGE)) == whole[5 : 5 + 2 * PAGE]
    assert len(calls) > 1 and preadv is not os.preadv
    reader.close()


def test_a_file_system_that_refuses_a_direct_read_is_read_through_the_page_cache(
    some_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, preadv = Reader([some_file]), os.preadv
    refused = [file.fileno() for file in reader._direct.values() if file is not None]

    def refuse(handle: int, buffers: list[memoryview], offset: int) -> int:
        if handle in refused:
            raise OSError(22, "Invalid argument")
        return preadv(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    assert read(reader, Extent(some_file, 7, 5000)) == some_file.read_bytes()[7:5007]
    assert not reader.direct
    reader.close()


def test_a_file_that_fell_short_is_truncated(some_file: Path) -> None:
    reader = Reader([some_file])
    os.truncate(some_file, PAGE + 10)
    with pytest.raises(ValueError, match=rf"bytes ended at byte {PAGE + 10}, 90 bytes before .* truncated"):
        read(reader, Extent(some_file, PAGE, 100))
    os.truncate(some_file, 0)
    with pytest.raises(ValueError, match="truncated"):
        read(reader, Extent(some_file, PAGE, 100))
    reader.close()


def test_a_failing_disk_is_an_error_with_the_files_name(some_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    reader = Reader([some_file])
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match=r"Input/output error \(while weights were read\): 'bytes'"):
        read(reader, Extent(some_file, 0, 10))
    reader.close()


def test_a_throttle_slows_reads_down_to_its_rate_and_no_further(some_file: Path) -> None:
    reader = Reader([some_file], throttle=PAGE * 20)
    two_pages = partial(read, reader, Extent(some_file, 0, 2 * PAGE))
    assert 0.1 <= least_time(two_pages, below=0.2) < 0.2
    reader.close()
    with pytest.raises(ValueError, match="above 0 bytes a second, not 0"):
        Reader([some_file], throttle=0)


def test_throttled_bytes_are_shared_between_readers() -> None:
    throttle = checkpoint.Throttle(1000.0)
    started = time.perf_counter()
    for _ in range(2):
        throttle.wait(50, started)  # both were begun at once
    assert time.perf_counter() - started >= 0.1
