"""Streaming: any files, any window, any passes: what comes is what the files hold."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ondevice import assets
from ondevice_papers.grating.checkpoint import INDEX
from ondevice_papers.grating.weights import BY_LAYER, BY_PART, Streamed

RAW = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64", torch.uint8: "U8", torch.int64: "I64"}
SIZES = st.lists(st.integers(1, 40), max_size=3).map(tuple)
NAMES = ("a.weight", "a.bias", "b.weight", "b.step")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(assets.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, NaN included: comparisons are by bytes."""
    count = int(torch.tensor(shape).prod()) * dtype.itemsize if shape else dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return (mine.dtype, mine.shape, raw(mine)) == (theirs.dtype, theirs.shape, raw(theirs))


@st.composite
def models(draw) -> dict[str, torch.Tensor]:
    """A transformer of any shapes and dtypes; each layer has tensors of its own shapes."""
    dtypes = {name: draw(st.sampled_from(list(RAW))) for name in NAMES}
    found = {"embed_tokens.weight": filled((draw(st.integers(1, 30)), draw(st.integers(1, 9))), torch.float32, 1)}
    for layer in range(draw(st.integers(1, 5))):
        for name in NAMES:
            found[f"layers.{layer}.{name}"] = filled(draw(SIZES), dtypes[name], len(found))
    for name in draw(st.lists(st.sampled_from(["norm.weight", "score.weight"]), unique=True)):
        found[name] = filled(draw(SIZES), draw(st.sampled_from(list(RAW))), len(found))
    return found


def packed(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A file as other programs may write it: in any order, so that tensors begin at any byte."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        ends = [len(data), len(data) + len(raw(tensor))]
        header[name] = {"dtype": RAW[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
        data += raw(tensor)
    words = json.dumps(header).encode()
    path.write_bytes(len(words).to_bytes(8, "little") + words + data)


def write(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    places = {name: f"part-{at % shards}.safetensors" for at, name in enumerate(tensors)}
    for file in set(places.values()):
        packed(folder / file, {name: tensors[name] for name in places if places[name] == file})
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


@given(models(), st.integers(1, 4), st.sampled_from([BY_PART, BY_LAYER]), st.integers(2, 11),
       st.lists(st.integers(0, 5), max_size=4))  # fmt: skip
def test_what_is_streamed_is_what_the_files_hold(tensors, shards: int, cut, slots: int, passes: list[int]) -> None:
    layers = sum(name.endswith("a.bias") for name in tensors)
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), tensors, shards)
        units = layers * len(cut)
        weights = Streamed(Path(name), lambda inner: int(inner[0] == "b"), units=cut, slots=min(slots, units))
        for last in passes:
            weights.begin()
            for index in range(min(last, layers)):
                found = dict[str, bool]()
                for _, unit in weights.layer(index):
                    found |= {key: same(value, tensors[f"layers.{index}.{key}"]) for key, value in unit.items()}
                assert found == dict.fromkeys(NAMES, True)
        rest = weights.rest()
        assert rest.keys() == {key for key in tensors if not key.startswith(("layers.", "embed_tokens"))}
        assert all(same(rest[key], tensors[key]) for key in rest)
        weights.close()
