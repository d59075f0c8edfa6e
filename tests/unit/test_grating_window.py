"""The sliding window: right weights in time, whatever the disk does, and no more memory than was said."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from waiting import one_of, wait_for

from ondevice.grating import checkpoint, embedding_cache
from ondevice.grating.checkpoint import PAGE, SINGLE, Checkpoint, Reader
from ondevice.grating.embedding_cache import EmbeddingCache
from ondevice.grating.weights import InMemory, Streamed, Weights
from ondevice.grating.window import Window

LAYERS, WIDTH, V = 6, 64, 50
TIMEOUT = 20.0


def tensors(layers: int = LAYERS) -> dict[str, torch.Tensor]:
    """Each layer's values say which layer it is."""
    found = {"model.embed_tokens.weight": torch.arange(V * WIDTH, dtype=torch.float32).view(V, WIDTH)}
    for layer in range(layers):
        found[f"model.layers.{layer}.a.weight"] = torch.full((WIDTH, WIDTH), float(layer))
        found[f"model.layers.{layer}.b.weight"] = torch.full((3, WIDTH), layer + 0.5)
    return found | {"model.norm.weight": torch.ones(WIDTH), "score.weight": torch.full((1, WIDTH), 2.0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / SINGLE)
    return tmp_path


@pytest.fixture(autouse=True)
def no_thread_stays() -> Any:
    """Nothing that a test closes leaves a thread."""
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


def right(weights: Weights | Window, index: int) -> bool:
    layer = weights.layer(index)
    return bool((layer["a.weight"] == index).all() and (layer["b.weight"] == index + 0.5).all())


def opened(folder: Path, buffers: int = 2, **values: Any) -> tuple[Window, Reader]:
    found = Checkpoint.open(folder)
    reader = Reader(found.files, **values)
    return Window(found.groups.layers, reader, buffers), reader


def settled(window: Window) -> None:
    """Wait for all that is read ahead."""
    for buffer in [*window._sliding, *window._own.values()]:
        if buffer.job is not None:
            buffer.job.result(TIMEOUT)


# Layers


@pytest.mark.parametrize("buffers", range(2, LAYERS + 1))
@pytest.mark.parametrize("order", [
    [0, 1, 2, 3, 4, 5] * 3, [0, 1, 2, 0, 1, 2, 3, 4, 5, 0], [5, 4, 3, 2, 1, 0, 5], [3, 3, 0, 0, 3], [0, 2, 4, 1, 3, 5],
], ids=str)  # fmt: skip
def test_any_order_of_layers_is_right(folder: Path, buffers: int, order: list[int]) -> None:
    weights = Streamed(folder, buffers=buffers)
    assert all(right(weights, index) for index in order)
    weights.close()


def test_memory_is_two_layers_and_is_allocated_once(folder: Path) -> None:
    window, reader = opened(folder)
    layer = (WIDTH + 3) * WIDTH * 4
    assert 2 * layer <= window.nbytes <= 2 * (layer + 2 * PAGE)
    seen = set()
    for _ in range(2):
        for index in range(LAYERS):
            seen |= {value.untyped_storage().data_ptr() for value in window.layer(index).values()}
    assert len(seen) == 2
    window.close(), reader.close()


@pytest.mark.parametrize("buffers", [3, 4, 6])
def test_with_more_memory_some_layers_are_read_once(folder: Path, buffers: int) -> None:
    window, reader = opened(folder, buffers)
    assert len(window.kept) == (LAYERS if buffers == LAYERS else buffers - 2) and 0 in window.kept
    for _ in range(2):
        for index in range(LAYERS):
            assert right(window, index)
    streamed = {index for index in range(LAYERS) if window.read_seconds[index] > 0}
    assert streamed == set(range(LAYERS)) - set(window.kept)
    window.close(), reader.close()


def test_the_next_layer_is_read_while_this_one_is_in_use(folder: Path) -> None:
    window, reader = opened(folder, throttle=2e6)  # some 9 ms a layer
    window.begin()
    settled(window)
    for index in [*range(LAYERS), *range(LAYERS)]:
        assert right(window, index)
        settled(window)  # so long is it in use
    assert window.read_seconds.min() > 0.008
    assert window.stalled_seconds.sum() < 0.5 * window.read_seconds.sum()

    def idle() -> bool:
        for index in range(LAYERS):
            window.layer(index)
        return bool(window.stalled_seconds[1:].sum() > 0.5 * window.read_seconds[1:].sum())

    assert one_of(20, idle)  # without work there is no hiding
    window.close(), reader.close()


def test_a_buffer_is_refilled_only_when_the_next_layer_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every buffer is filled with NaN before it is refilled: views that are used too late show it."""
    poison(monkeypatch)
    window, reader = opened(folder)
    for index in [*range(LAYERS), 0, 1, 2]:
        layer = window.layer(index)
        settled(window)
        assert bool((layer["a.weight"] == index).all())
        following = window.layer((index + 1) % LAYERS)
        settled(window)
        assert bool(layer["a.weight"].ne(index).all()) and bool((following["a.weight"] == (index + 1) % LAYERS).all())
    window.close(), reader.close()


def test_a_use_after_recycling_is_nan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, then_read=2)
    window, reader = opened(folder)
    late = window.layer(0)["a.weight"]
    assert right(window, 1)
    with pytest.raises(TimeoutError):
        window.layer(2)
    assert bool(late.isnan().all())
    window.close(), reader.close()


def poison(monkeypatch: pytest.MonkeyPatch, then_read: int = 1000) -> None:
    """Fill memory with NaN before it is read into, and fail after so many reads."""
    original, count = Window._read, [0]

    def read(window: Window, into: mmap.mmap, index: int, stop: threading.Event) -> float:
        into[:] = b"\xff" * len(into)
        count[0] += 1
        if count[0] > then_read:
            raise TimeoutError
        return original(window, into, index, stop)

    monkeypatch.setattr(Window, "_read", read)


# Early stops and closing


@pytest.mark.parametrize("rate", [None, 3e6])
def test_two_early_stops_with_a_read_in_flight(folder: Path, rate: float | None) -> None:
    window, reader = opened(folder, throttle=rate)
    for last in (2, 2, 4, 0):
        window.begin()
        for index in range(last + 1):
            assert right(window, index)
    window.begin()
    window.close(), window.close(), reader.close()


def test_a_read_that_nobody_wants_any_more_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk holds back layer 0's first page until another layer is asked for; its other pages are not read then."""
    monkeypatch.setattr(checkpoint, "_PIECE", PAGE)
    window, reader = opened(folder)
    begun, go, places = threading.Event(), threading.Event(), list[int]()

    def held(original: Any, handle: int, buffers: list[memoryview], at: int) -> int:
        places.append(at)
        begun.set()
        assert go.wait(TIMEOUT)
        return original(handle, buffers, at)

    def meanwhile(work: Callable[[], Any]) -> None:
        """Begin a pass, do some work while its first page is read, and go on once that read is no more wanted."""
        begun.clear(), go.clear(), places.clear()
        window.begin()
        assert begun.wait(TIMEOUT)
        unwanted = next(buffer.stop for buffer in window._sliding if buffer.layer == 0)
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            wait_for(unwanted.is_set)
            go.set()
            working.result(TIMEOUT)

    preadv(monkeypatch, held)
    meanwhile(lambda: (window.layer(3), settled(window)))  # the next one after it is 4
    needed = sum(extent.span for index in (3, 4) for extent in window._places[index])
    assert len(places) == 1 + needed // PAGE
    meanwhile(window.close)
    assert len(places) == 1
    reader.close()


def test_nothing_can_be_asked_of_closed_weights(folder: Path) -> None:
    weights = Streamed(folder)
    layer = weights.layer(0)
    weights.close()
    weights.close()
    assert bool((layer["a.weight"] == 0).all())  # memory that somebody still looks at is not taken away
    ids = torch.tensor([1])
    for ask in (weights.begin, lambda: weights.layer(0), lambda: weights.layer(1), lambda: weights.rows(ids)):
        with pytest.raises(ValueError, match="closed"):
            ask()


def test_files_are_closed(folder: Path) -> None:
    def handles() -> set[str]:
        found = {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
        return {path for path in found if path.startswith(str(folder))}

    weights = Streamed(folder)
    assert handles()
    weights.close()
    assert not handles()
    with pytest.raises(ValueError, match="buffers"):
        Streamed(folder, buffers=1)
    assert not handles()


def test_two_windows_in_one_process(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    save_file({name: value + 10 for name, value in tensors().items()}, tmp_path / "other" / SINGLE)
    one, two = Streamed(folder), Streamed(tmp_path / "other", buffers=3)
    for index in [*range(LAYERS), *range(LAYERS)]:
        first, second = one.layer(index)["a.weight"], two.layer(index)["a.weight"]
        assert bool((first == index).all()) and bool((second == index + 10).all())
        if index == 3:
            one.begin()
    one.close()
    assert bool((two.layer(0)["a.weight"] == 10).all())
    two.close()


# A disk that is slow, short or failing


def preadv(monkeypatch: pytest.MonkeyPatch, change: Callable[..., int]) -> None:
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, at: change(original, handle, buffers, at))


def test_slow_and_short_reads_give_the_same_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def halting(original: Any, handle: int, buffers: list[memoryview], at: int) -> int:
        time.sleep(0.002)
        most = min(len(buffers[0]), 3 * PAGE)
        return original(handle, [buffers[0][:most]], at)

    weights = Streamed(folder)
    preadv(monkeypatch, halting)
    assert all(right(weights, index) for index in [0, 1, 2, 3, 4, 5, 0, 1])
    weights.close()


def test_a_failing_read_is_the_callers_error_and_the_layer_can_be_asked_for_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = threading.Event()

    def failing(original: Any, handle: int, buffers: list[memoryview], at: int) -> int:
        if broken.is_set():
            raise OSError(5, "Input/output error")
        return original(handle, buffers, at)

    weights = Streamed(folder)
    preadv(monkeypatch, failing)
    assert right(weights, 0) and right(weights, 1)
    settled(weights.window)
    broken.set()
    assert right(weights, 2)  # was there before the disk broke; layer 3 is read ahead, and fails unnoticed
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            weights.layer(3)
    broken.clear()
    assert all(right(weights, index) for index in [3, 4, 5, 0, 1])
    weights.close()


def test_a_failure_that_is_never_asked_for_harms_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(original: Any, handle: int, buffers: list[memoryview], at: int) -> int:
        raise OSError(5, "Input/output error")

    weights = Streamed(folder)
    assert right(weights, 0)
    settled(weights.window)
    preadv(monkeypatch, failing)
    assert right(weights, 1)
    weights.close()


def test_a_file_cut_in_the_middle_of_a_run_is_one_clear_error(folder: Path) -> None:
    weights = Streamed(folder)
    last = weights.checkpoint.groups.layers[4]["a.weight"]
    assert right(weights, 0)
    os.truncate(folder / SINGLE, last.offset + 100)
    assert all(right(weights, index) for index in [1, 2, 3])
    with pytest.raises(ValueError, match=rf"{SINGLE} ended at byte .* truncated"):
        weights.layer(4)
    with pytest.raises(ValueError, match="truncated"):
        weights.layer(4)
    weights.close()


# The page cache


def cached(path: Path) -> int:
    size = path.stat().st_size
    library = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        flags = (ctypes.c_ubyte * -(-size // PAGE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert library.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), flags) == 0
    return sum(flag & 1 for flag in flags)


@pytest.mark.parametrize("direct", [True, False])
def test_a_pass_leaves_nothing_of_the_file_in_the_page_cache(tmp_path: Path, direct: bool) -> None:
    path = tmp_path / SINGLE
    many = {f"model.layers.{layer}.a.weight": torch.rand(300_000 + layer) for layer in range(5)}
    save_file(many | {"model.embed_tokens.weight": torch.rand(3000, 33), "score.weight": torch.rand(33)}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(path):
        pytest.skip("this file system keeps its files in memory")
    weights = Streamed(tmp_path, direct=direct)
    for _ in range(2):
        weights.begin()
        weights.rows(torch.randint(0, 3000, (500,)))
        for index in range(5):
            weights.layer(index)
    settled(weights.window)
    weights.close()
    assert cached(path) == 0


# Embedding rows


@pytest.fixture
def table(folder: Path) -> Any:
    found = Checkpoint.open(folder)
    reader = Reader(found.files)
    yield lambda capacity: EmbeddingCache(found.groups.table, capacity, reader)
    reader.close()


def expected(ids: list[int]) -> torch.Tensor:
    return tensors()["model.embed_tokens.weight"][ids]


def test_the_rows_used_longest_ago_make_room(table: Any) -> None:
    cache = table(4)
    for ids, hits, misses in [([1, 2, 1], 0, 2), ([3, 4], 0, 4), ([1], 1, 4), ([9, 8], 1, 6), ([1, 9, 8], 4, 6),
                              ([2], 4, 7), ([1, 9, 8], 7, 7)]:  # fmt: skip
        assert torch.equal(cache.rows(torch.tensor(ids)), expected(ids))
        assert (cache.hits, cache.misses) == (hits, misses)
    assert sorted(cache._id.tolist()) == [1, 2, 8, 9]


@pytest.mark.parametrize("block", [3, 1024])
@pytest.mark.parametrize("capacity", [1, 2, 7, 49, 50, 1000])
def test_a_request_may_be_larger_than_the_cache(
    table: Any, capacity: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_cache, "_BLOCK", block)
    cache = table(capacity)
    for ids in ([5, 3, 5], [*range(V), *range(V)], [7], list(range(V - 1, -1, -3)), []):
        assert torch.equal(cache.rows(torch.tensor(ids, dtype=torch.long)), expected(ids))
    assert cache.capacity == min(capacity, V)


def test_memory_of_rows_comes_in_blocks_as_it_is_needed(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_cache, "_BLOCK", 4)
    cache = table(10)
    sizes = []
    for ids in ([], [7, 7], [1, 2, 3, 4], range(V), range(V)):
        cache.rows(torch.tensor(list(ids), dtype=torch.long))
        sizes.append([len(block) for block in cache._blocks])
    assert sizes == [[], [4], [4, 4], [4, 4, 2], [4, 4, 2]]


def test_a_failed_read_leaves_no_wrong_row(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = table(3)
    cache.rows(torch.tensor([1, 2, 3]))
    with monkeypatch.context() as broken:
        left = [2]

        def failing(original: Any, handle: int, buffers: list[memoryview], at: int) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(5, "Input/output error")
            return original(handle, buffers, at)

        preadv(broken, failing)
        with pytest.raises(OSError, match="Input/output error"):
            cache.rows(torch.tensor([4, 5, 6]))
    for ids in ([1, 2, 3], [4, 5, 6], [3, 4]):
        assert torch.equal(cache.rows(torch.tensor(ids)), expected(ids))


def test_a_short_read_of_a_row_is_continued_and_a_cut_file_is_an_error(
    folder: Path, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = table(10)
    preadv(monkeypatch, lambda original, handle, buffers, at: original(handle, [buffers[0][:100]], at))
    assert torch.equal(cache.rows(torch.tensor([7, 30])), expected([7, 30]))
    os.truncate(folder / SINGLE, cache.table.offset + 40 * WIDTH * 4 + 9)
    with pytest.raises(ValueError, match="truncated"):
        cache.rows(torch.tensor([40]))


@pytest.mark.parametrize("ids", [torch.tensor([V]), torch.tensor([3, -1]), torch.tensor([[1]]), torch.tensor([1.0])])
def test_ids_without_a_row_are_refused(folder: Path, ids: torch.Tensor) -> None:
    weights = Streamed(folder)
    with pytest.raises(ValueError, match="Token ids are"):
        weights.rows(ids)
    with pytest.raises(ValueError, match="Token ids are"):
        weights.head_rows(ids)
    weights.close()


# Models


def built(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=99, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2,
                 max_position_embeddings=40, pad_token_id=0, num_labels=1,
                 tie_word_embeddings=kind == "tied")  # fmt: skip
    if kind in ("bert", "xlm-roberta", "llama"):
        return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **sizes))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", num_key_value_heads=1, head_dim=12, **sizes))


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "llama", "tied", "untied"])
def test_a_saved_model_streams_what_the_loaded_one_holds(tmp_path: Path, kind: str) -> None:
    model = built(kind)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    memory, disk = InMemory(model), Streamed(tmp_path)
    assert len(disk.checkpoint.files) > 1 and memory.layers == disk.layers == 3
    for index in [0, 1, 2, 0]:
        mine, theirs = memory.layer(index), disk.layer(index)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    mine, theirs = memory.rest(), disk.rest()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    ids = torch.tensor([5, 98, 0, 5])
    assert torch.equal(memory.rows(ids), disk.rows(ids)) and torch.equal(memory.head_rows(ids), disk.head_rows(ids))
    assert torch.equal(disk.head_rows(ids), disk.rows(ids)) == (kind != "untied")
    memory.close(), disk.close()


# Bad input


def test_bad_input_is_named(folder: Path) -> None:
    for buffers in (1, 0, LAYERS + 1):
        with pytest.raises(ValueError, match=f"2 to {LAYERS} buffers, not {buffers}"):
            Streamed(folder, buffers=buffers)
    with pytest.raises(ValueError, match="at least one row, not 0"):
        Streamed(folder, embedding_rows=0)
    with pytest.raises(ValueError, match="above 0 bytes a second, not -1"):
        Streamed(folder, throttle=-1)
    weights, memory = Streamed(folder), InMemory(built("llama"))
    for index in (-1, LAYERS):
        for held in (weights, memory):
            with pytest.raises(ValueError, match=f"layers 0 to .*, not {index}"):
                held.layer(index)
    weights.close()
