"""Weight files: every tensor is found where it is, and a damaged file or byte is one clear error and never a score."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ondevice import assets
from ondevice.meters import cached_bytes, evict
from ondevice_papers.grating import checksums
from ondevice_papers.grating.checkpoint import INDEX, PAGE, SINGLE, Checkpoint, Extent, Reader, pages
from ondevice_papers.grating.weights import Streamed

Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checksums' own."""
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
    return assets.cache_folder("grating")


def model(layers: int = 3, width: int = 7) -> dict[str, torch.Tensor]:
    """A decoder's tensors of odd sizes and three dtypes."""
    random = torch.Generator().manual_seed(0)
    found = {
        "model.embed_tokens.weight": torch.randn(11, width, generator=random),
        "lm_head.weight": torch.randn(11, width, generator=random),
        "model.norm.weight": torch.randn(width, generator=random),
    }
    for layer in range(layers):
        inside = {
            "mlp.up.weight": torch.randn(5, width, generator=random).bfloat16(),
            "self_attn.norm.weight": torch.randn(width, generator=random),
            "self_attn.flag": torch.randint(0, 255, (3,), generator=random).to(torch.uint8),
        }
        found |= {f"model.layers.{layer}.{name}": value for name, value in inside.items()}
    return found


def part_of(name: str) -> int:
    return int(name.startswith("mlp"))


def saved(folder: Path, tensors: Tensors) -> Path:
    save_file(dict(tensors), folder / SINGLE, {"format": "pt"})
    return folder


def sharded(folder: Path, tensors: Tensors, shards: int) -> Path:
    """Tensors dealt out in turns, so that a layer is in several files."""
    places = {name: f"model-{at % shards:05}.safetensors" for at, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: value for name, value in tensors.items() if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


# Where tensors are


def test_tensors_are_grouped_by_their_names(tmp_path: Path) -> None:
    tensors = model(12) | {"model.layers.0.rotary_emb.inv_freq": torch.ones(2), "score.weight": torch.ones(1, 7)}
    groups = Checkpoint.open(saved(tmp_path, tensors)).groups
    names = [layer["mlp.up.weight"].name for layer in groups.layers]
    assert names == [f"model.layers.{index}.mlp.up.weight" for index in range(12)]
    assert groups.table.name == "model.embed_tokens.weight" and groups.head is not None
    assert groups.rest.keys() == {"model.norm.weight", "score.weight"}
    assert groups.layers[0].keys() == {"mlp.up.weight", "self_attn.norm.weight", "self_attn.flag"}


# Damaged headers


def entry(dtype: str = "F32", shape: Any = (1,), begin: int = 0, end: int = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "no header": (b"", b"", "header"),
    "an unknown type": ({"a": entry("F12")}, b"1234", "'F12'"),
    "a wrong length": ({"a": entry(shape=(2,))}, b"1234", r"\b4 .*\(2,\)"),
    "a size that is no integer": ({"a": entry(shape=(1.0,))}, b"1234", "a has"),
    "tensors that overlap": ({"a": entry(), "b": entry()}, b"1234", "b "),
    "bytes too many": ({"a": entry()}, b"12345", "damaged: "),
    "bytes too few": ({"a": entry()}, b"123", "truncated: "),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_damaged_header_is_one_clear_error(tmp_path: Path, kind: str) -> None:
    header, data, message = HEADERS[kind]
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    with pytest.raises(ValueError, match=f"^{SINGLE} .*{message}"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("size", [7, 30, -1])
def test_a_truncated_file_is_one_clear_error(tmp_path: Path, size: int) -> None:
    path = saved(tmp_path, model()) / SINGLE
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(ValueError, match="truncated"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda places: None, INDEX),
    (lambda places: places | {"model.norm.weight": "model-9.safetensors"}, "'model-9.safetensors'"),
    (lambda places: places | {"model.norm.weight": "../model.safetensors"}, "'../model.safetensors'"),
    (lambda places: places | {"model.norm.weight": places["lm_head.weight"]}, r"model.norm.weight .*model-"),
    (lambda places: {name: file for name, file in places.items() if ".1." not in name}, "layer 1"),
], ids=["no map", "a missing file", "a file elsewhere", "another file", "a layer less"])  # fmt: skip
def test_an_index_that_does_not_fit_is_one_clear_error(tmp_path: Path, change: Callable, message: str) -> None:
    path = sharded(tmp_path, model(), 2) / INDEX
    path.write_text(json.dumps({"weight_map": change(json.loads(path.read_text())["weight_map"])}))
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(("dropped", "added", "message"), [
    (".layers.1.", {}, "layer 1"),
    (".layers.", {}, "layer 0"),
    ("embed_tokens", {}, "token embedding.* 0"),
    ("lm_head", {"decoder.embed_tokens.weight": torch.zeros(2)}, "token embedding.* 2"),
])  # fmt: skip
def test_what_is_no_whole_transformer_is_refused(tmp_path: Path, dropped: str, added: Tensors, message: str) -> None:
    tensors = {name: value for name, value in model().items() if dropped not in name} | dict(added)
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(saved(tmp_path, tensors))


# Reading


def test_a_file_that_fell_short_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(os.urandom(3 * PAGE + 123))
    reader, extent = Reader([path]), Extent(path, PAGE, 100)
    for size in (PAGE + 10, 0):
        os.truncate(path, size)
        with pytest.raises(ValueError, match="truncated"):
            reader.read(extent, memoryview(pages(extent.span)))
    reader.close()


def test_nothing_of_the_files_stays_in_the_page_cache(tmp_path: Path) -> None:
    path = saved(tmp_path, model(3, 40_001)) / SINGLE
    evict([path])
    if cached_bytes([path]):
        pytest.skip("this file system keeps its files in memory")
    weights = Streamed(tmp_path, part_of)  # headers and checksums
    weights.rows(torch.tensor([3, 9])), weights.head_rows(torch.tensor([1]))
    assert all(parameters for index in range(3) for _, parameters in weights.layer(index))
    weights.close()
    assert cached_bytes([path]) == 0


# Bytes that change


def flip(folder: Path, name: str, keep_time: bool) -> None:
    """Change a byte of a tensor, of its fourth row if it has so many: without a trace in the file's times, if asked."""
    tensor = Checkpoint.open(folder).tensors[name]
    content, times = bytearray(tensor.file.read_bytes()), tensor.file.stat()
    content[tensor.offset + (3 * 28 + 1 if tensor.length > 84 else 1)] ^= 64
    with tensor.file.open("r+b") as file:
        file.write(content)
    if keep_time:
        os.utime(tensor.file, ns=(times.st_atime_ns, times.st_mtime_ns))


def use(weights: Streamed) -> list[torch.Tensor]:
    """All that a pass reads."""
    ids = torch.tensor([3, 9])
    layers = [value.clone() for index in range(3) for _, unit in weights.layer(index) for value in unit.values()]
    return [*layers, weights.rows(ids), weights.head_rows(ids), *weights.rest().values()]


CHANGED = {"model.layers.2.mlp.up.weight": "", "model.layers.0.self_attn.flag": "", "model.norm.weight": "",
           "model.embed_tokens.weight": "row 3 of ", "lm_head.weight": ".*"}  # fmt: skip


@pytest.mark.parametrize("opened", ["before", "before, and its time is kept", "anew"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_byte_that_changes_is_an_error_that_names_the_tensor(tmp_path: Path, name: str, opened: str) -> None:
    weights = Streamed(saved(tmp_path, model()), part_of)
    flip(tmp_path, name, keep_time=opened != "before")
    if name == "model.norm.weight" and opened != "anew":
        assert len(use(weights)) == 12  # was read before: it stays in memory
        return
    with pytest.raises(ValueError, match=f"^{SINGLE} .*{CHANGED[name]}{name} .*[.]$"):
        use(Streamed(tmp_path, part_of) if opened == "anew" else weights)


def test_a_file_written_anew_is_read_anew(tmp_path: Path) -> None:
    Streamed(saved(tmp_path, model()), part_of).close()
    changed = {name: value + 1 for name, value in model().items()}
    weights = Streamed(saved(tmp_path, changed), part_of)
    assert any(torch.equal(found, changed["model.layers.2.mlp.up.weight"]) for found in use(weights))
    weights.close()


def test_files_are_read_whole_once_only_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_PIECE", 2 * 7 * 4 + 3)
    assert len(use(Streamed(sharded(tmp_path, model(), 2), part_of))) == 12
    monkeypatch.setattr(checksums, "_computed", lambda checkpoint: pytest.fail("read again"))
    assert len(use(Streamed(tmp_path, part_of))) == 12


@pytest.mark.parametrize("left", [0, 100])
def test_damaged_checksums_are_made_anew(tmp_path: Path, cache: Path, left: int) -> None:
    Streamed(saved(tmp_path, model()), part_of).close()
    (kept,) = cache.glob("*.npz")
    os.truncate(kept, left)
    weights = Streamed(tmp_path, part_of)
    assert len(use(weights)) == 12
    weights.close()
