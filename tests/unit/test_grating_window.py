"""The sliding window and the embedding cache: right weights in time, whatever the disk does."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ondevice import assets
from ondevice_papers.grating.checkpoint import SINGLE, Checkpoint, Reader
from ondevice_papers.grating.embedding_cache import EmbeddingCache
from ondevice_papers.grating.weights import BY_LAYER, Streamed
from ondevice_papers.grating.window import Unit, WeightWindow
from ondevice_studies.grating import live

LAYERS, WIDTH, V = 5, 64, 50


def tensors() -> dict[str, torch.Tensor]:
    """Each layer's values say which layer and part it is."""
    found = {"model.embed_tokens.weight": torch.arange(V * WIDTH, dtype=torch.float32).view(V, WIDTH)}
    for layer in range(LAYERS):
        found[f"model.layers.{layer}.attn.weight"] = torch.full((WIDTH, WIDTH), float(layer))
        found[f"model.layers.{layer}.mlp.weight"] = torch.full((3 + layer, WIDTH), layer + 0.5)
    return found | {"model.norm.weight": torch.ones(WIDTH), "score.weight": torch.full((1, WIDTH), 2.0)}


def part_of(name: str) -> int:
    return int(name.startswith("mlp"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))
    save_file(tensors(), tmp_path / SINGLE)
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    """Nothing that a test closes leaves a thread or an open file."""
    before = threading.enumerate()
    yield
    assert not [thread for thread in threading.enumerate() if thread not in before]
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    assert not [link for link in links if os.path.realpath(link).startswith(f"{tmp_path}/{SINGLE}")]


def right(weights: Any, layer: int) -> bool:
    """Whether a layer's units are all there, in order, and hold its values when they are given."""
    found = dict[str, bool]()
    for _, unit in weights.layer(layer):
        found |= {name: bool((value == layer + part_of(name) / 2).all()) for name, value in unit.items()}
    return found == {"attn.weight": True, "mlp.weight": True}


def settled(window: WeightWindow) -> None:
    """Wait for all that is read ahead."""
    window.thread.submit(int).result()


def change_reads(patch: pytest.MonkeyPatch, change: Callable[..., int]) -> None:
    original = os.preadv
    patch.setattr(os, "preadv", lambda handle, buffers, at: change(original, handle, buffers, at))


def failing(*_: Any) -> int:
    raise OSError(5, "Input/output error")


# Units


def test_all_slots_read_each_unit_once_and_two_read_all_in_each_pass(folder: Path) -> None:
    size = sum(value.nbytes for name, value in tensors().items() if ".layers." in name)
    for slots, passes in ((2, [1, 2, 3]), (None, [1, 1, 1])):
        weights, count = Streamed(folder, part_of, slots=slots), []
        for _ in passes:
            assert all(right(weights, layer) for layer in range(LAYERS))
            count.append(weights.window.read_bytes / size)
        assert count == passes
        weights.close()


def test_a_units_memory_is_not_written_to_until_the_next_one_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot is filled with NaN before it is read into, so that a view that is used too late shows it."""
    original = Streamed._read

    def poisoned(self: Streamed, unit: Unit, memory: mmap.mmap) -> None:
        memory[:] = b"\xff" * len(memory)
        original(self, unit, memory)

    monkeypatch.setattr(Streamed, "_read", poisoned)
    weights = Streamed(folder, part_of)
    window, before = weights.window, None
    for index in [*range(2 * LAYERS), 0, 1, 2]:
        (value,) = window.unit(index).values()
        settled(window)
        assert bool((value == index / 2).all())
        assert before is None or not bool((before == (index - 1) / 2).any()) or index == 2 * LAYERS - 1
        before = value
    weights.close()


def test_time_that_is_waited_is_counted_and_a_unit_that_is_there_costs_none(folder: Path) -> None:
    go = threading.Event()
    units: list[Unit] = list(Checkpoint.open(folder).groups.layers)
    window = WeightWindow(units, lambda unit, memory: go.wait(20))
    threading.Timer(0.05, go.set).start()
    window.unit(0)
    waited = window.stalled
    settled(window)
    window.unit(1)
    assert waited > 0.02 and window.stalled - waited < 0.02
    window.close()


def test_a_failing_read_is_the_callers_error_and_the_unit_can_be_asked_for_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = Streamed(folder, part_of)
    assert right(weights, 0)
    settled(weights.window)
    with monkeypatch.context() as broken:
        change_reads(broken, failing)
        weights.window.unit(2)  # was there before the disk broke
        for _ in range(2):
            with pytest.raises(OSError, match=r"Input/output error.*'model.safetensors'"):
                weights.window.unit(3)
    assert all(right(weights, layer) for layer in [1, 2, 3, 4, 0])
    weights.close()


def test_a_failure_that_nobody_asked_for_is_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Streamed(folder, part_of, units=BY_LAYER)
    weights.begin()
    settled(weights.window)
    with monkeypatch.context() as broken:
        change_reads(broken, failing)
        assert right(weights, 0)  # layer 1 fails ahead, and the pass ends here
        settled(weights.window)
    weights.begin()
    assert all(right(weights, layer) for layer in range(LAYERS))
    weights.close()


# Embedding rows


@pytest.fixture
def table(folder: Path) -> Iterator[Callable[[int], EmbeddingCache]]:
    found = Checkpoint.open(folder)
    reader = Reader(found.files)
    yield lambda capacity: EmbeddingCache(found.groups.table, capacity, reader)
    reader.close()


def test_a_cache_finds_what_is_due_unless_it_forgets(table: Callable[[int], EmbeddingCache]):
    kept, forgetful = table(6), table(6)
    requests = [np.unique(np.random.default_rng(seed).integers(0, 8, 4)) for seed in range(30)]
    for wanted in requests:
        kept.fetch(wanted)
        forgetful.fetch(wanted)
        forgetful.slot[:], forgetful.id[:] = -1, -1
    due = live.due([set(wanted.tolist()) for wanted in requests], 6)
    assert kept.hits >= due > 20 and forgetful.hits == 0


def rows(cache: EmbeddingCache, ids: list[int]) -> bool:
    return torch.equal(cache.rows(torch.tensor(ids)), tensors()["model.embed_tokens.weight"][ids])


def test_the_rows_used_longest_ago_make_room(table: Any) -> None:
    cache = table(4)
    for ids, hits, misses in [([1, 2, 1], 0, 2), ([3, 4], 0, 4), ([1], 1, 4), ([9, 8], 1, 6), ([1, 9, 8], 4, 6),
                              ([2], 4, 7), ([1, 9, 8], 7, 7)]:  # fmt: skip
        assert rows(cache, ids) and (cache.hits, cache.misses) == (hits, misses)
    assert sorted(cache.id.tolist()) == [1, 2, 8, 9]


@pytest.mark.parametrize("capacity", [1, 7, 50, 1000])
def test_a_request_may_be_larger_than_the_cache(table: Any, capacity: int) -> None:
    cache = table(capacity)
    assert all(rows(cache, ids) for ids in ([5, 3, 5], [*range(V), *range(V)], [7], list(range(V - 1, -1, -3))))
    assert cache.capacity == min(capacity, V) == len(cache.kept)


@pytest.mark.parametrize("reads", [0, 2])
def test_a_failed_read_leaves_no_wrong_row(table: Any, monkeypatch: pytest.MonkeyPatch, reads: int) -> None:
    cache, left = table(3), iter(range(reads))
    assert rows(cache, [1, 2, 3])
    with monkeypatch.context() as broken:
        change_reads(broken, lambda read, *given: failing() if next(left, None) is None else read(*given))
        with pytest.raises(OSError, match="Input/output error"):
            cache.rows(torch.tensor([4, 5, 6, 7]))
    assert all(rows(cache, ids) for ids in ([1, 2, 3], [4, 5, 6], [3, 4]))


def test_a_short_read_of_a_row_is_continued_and_a_cut_file_is_an_error(
    folder: Path, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = table(10)
    change_reads(monkeypatch, lambda original, handle, buffers, at: original(handle, [buffers[0][:100]], at))
    assert rows(cache, [7, 30])
    os.truncate(folder / SINGLE, cache.table.offset + 40 * WIDTH * 4 + 9)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight.*truncated"):
        cache.rows(torch.tensor([40]))


@pytest.mark.parametrize("ids", [[V], [3, -1]])
def test_ids_without_a_row_are_refused(folder: Path, ids: list[int]) -> None:
    weights = Streamed(folder, part_of)
    for ask in (weights.rows, weights.head_rows):
        with pytest.raises(ValueError, match=f" 49.* {ids[-1]}"):
            ask(torch.tensor(ids))
    weights.close()
