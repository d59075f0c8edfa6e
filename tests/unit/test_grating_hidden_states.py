"""Offloaded hidden states: what comes back is what was put, in three chunks of memory, and no file stays."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from ondevice.grating import hidden_states
from ondevice.grating.checkpoint import PAGE
from ondevice.grating.hidden_states import HiddenStates, Offloaded, Resident

SHAPES = [(2, 5, 7), (1, 90, 16), (3, 64, 32), (1, 1, 1), (4, 33, 9)]


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    """No thread, and no file, with or without a name."""
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hidden-states")]
    assert not list(tmp_path.iterdir()) and not handles(tmp_path)


def handles(folder: Path) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{name}"):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(str(folder))]


def kinds(folder: Path) -> list[HiddenStates]:
    return [Resident(), Offloaded(folder)]


def started(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPES[chunk % len(SHAPES)], generator=random).to(dtype) for chunk in range(count)]


def layer(hidden: torch.Tensor, index: int) -> torch.Tensor:
    return (hidden.double() * 1.25 + index).to(hidden.dtype)


def put_all(states: HiddenStates, chunks: list[torch.Tensor]) -> None:
    for chunk, hidden in enumerate(chunks):
        states.put(chunk, hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 12])
def test_layers_over_chunks_give_the_same_either_way(tmp_path: Path, count: int, dtype: torch.dtype) -> None:
    found = []
    for states in kinds(tmp_path):
        put_all(states, started(count, dtype))
        for index in range(4):
            for chunk, hidden in states.each(range(count)):
                states.put(chunk, layer(hidden, index))
        found.append([hidden.clone() for _, hidden in states.each(range(count))])
        states.close()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_pruned_chunks_shrink_and_go(tmp_path: Path) -> None:
    """Rows leave chunks, chunks leave the pass, orders change: as a mirror in memory has it."""
    for states in kinds(tmp_path):
        mirror = {chunk: torch.arange(960.0).view(6, 20, 8) + chunk for chunk in range(8)}
        put_all(states, list(mirror.values()))
        for order in ([*range(8)], [0, 1, 3, 5, 6, 7], [6, 5, 0], [5, 0], [0], [0]):
            for chunk, hidden in states.each(order):
                assert torch.equal(hidden, mirror[chunk])
                mirror[chunk] = layer(hidden[::2].clone() if len(hidden) > 1 else hidden, chunk)
                states.put(chunk, mirror[chunk])
        states.close()


def test_a_chunk_may_grow_and_new_ones_may_come_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    for states in kinds(tmp_path):
        put_all(states, started(4))
        for chunk, hidden in states.each(range(4)):
            states.put(10 + chunk, hidden.repeat(2, 1, 1))
            states.put(chunk, hidden.repeat(1, 3, 1))
        for chunk, hidden in states.each([3, 0, 10, 12, 1, 13, 2, 11]):
            first = started(4)[chunk % 10]
            assert torch.equal(hidden, first.repeat(2, 1, 1) if chunk >= 10 else first.repeat(1, 3, 1))
        states.close()


def test_a_pass_that_only_reads_sees_every_chunk(tmp_path: Path) -> None:
    states = Offloaded(tmp_path)
    put_all(states, started(9))
    for _ in range(3):
        for chunk, hidden in states.each(range(9)):
            assert torch.equal(hidden, started(9)[chunk])
    states.close()


def test_a_pass_that_ends_early_is_no_harm(tmp_path: Path) -> None:
    states = Offloaded(tmp_path)
    put_all(states, started(9))
    for _ in range(2):
        for chunk, hidden in states.each(range(9)):
            assert torch.equal(hidden, started(9)[chunk])
            states.put(chunk, hidden)
            if chunk == 4:
                break
    states.put(5, torch.ones(2, 2))  # read ahead before
    assert torch.equal(next(states.each([5, 6]))[1], torch.ones(2, 2))
    states.close()


def test_a_put_copies(tmp_path: Path) -> None:
    states, hidden = Offloaded(tmp_path), torch.zeros(3, 4).t()
    states.put(0, hidden)
    hidden += 1
    assert torch.equal(next(states.each([0]))[1], torch.zeros(4, 3))
    states.close()


def test_memory_does_not_grow_with_the_number_of_chunks(tmp_path: Path) -> None:
    states = Offloaded(tmp_path)
    put_all(states, [torch.full((10, 1000), float(chunk)) for chunk in range(50)])
    for chunk, hidden in states.each(range(50)):
        states.put(chunk, hidden + 1)
    assert 40_000 * 3 <= states.nbytes <= (40_000 + PAGE) * 3
    assert [float(hidden.mean()) for _, hidden in states.each(range(50))] == [chunk + 1 for chunk in range(50)]
    states.close()


def test_a_place_in_the_file_is_used_again(tmp_path: Path) -> None:
    states = Offloaded(tmp_path)
    for _ in range(20):
        put_all(states, started(5))
    assert states._end <= sum(hidden.nbytes + PAGE for hidden in started(5))
    states.close()


def test_a_read_ahead_is_hidden_behind_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.005)
    states = Offloaded(tmp_path)
    put_all(states, started(6))
    list(states.each([0]))
    states.busy = states.waited = 0.0
    for chunk, hidden in states.each(range(6)):
        wait([buffer.job for buffer in states._buffers if buffer.job is not None])  # so long does the work take
        states.put(chunk, hidden)
    assert states.busy > 0.05 and states.waited < 0.4 * states.busy
    states.close()


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda *given: (time.sleep(seconds), preadv(*given))[1])
    monkeypatch.setattr(os, "pwritev", lambda *given: (time.sleep(seconds), pwritev(*given))[1])


@pytest.mark.parametrize("most", [1000, PAGE, PAGE + 8])
@pytest.mark.parametrize("direct", [True, False])
def test_short_transfers_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, direct: bool
) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    states = Offloaded(tmp_path)
    if not direct and states._file._direct is not None:
        os.close(states._file._direct)
        states._file._direct = None

    def cut(transfer: Any) -> Any:
        def once(handle: int, buffers: list[memoryview], offset: int) -> int:
            plain = states._file._plain
            return transfer(plain, [buffers[0][:most]], offset)

        return once

    monkeypatch.setattr(os, "preadv", cut(preadv))
    monkeypatch.setattr(os, "pwritev", cut(pwritev))
    put_all(states, started(6))
    for chunk, hidden in states.each(range(6)):
        states.put(chunk, layer(hidden, 1))
    assert all(torch.equal(hidden, layer(started(6)[chunk], 1)) for chunk, hidden in states.each(range(6)))
    states.close()


@pytest.mark.parametrize("after", [0, 1, 3, 7, 11])
def test_a_full_disk_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    left, pwritev = [after], os.pwritev

    def full(handle: int, buffers: list[memoryview], offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return pwritev(handle, buffers, offset)

    monkeypatch.setattr(os, "pwritev", full)
    states = Offloaded(tmp_path)
    with pytest.raises(OSError, match=r"could not be kept in .*No space left on device") as raised:
        put_all(states, started(5))
        for index in range(9):
            for chunk, hidden in states.each(range(5)):
                states.put(chunk, layer(hidden, index))
    assert raised.value.errno == 28
    assert not handles(tmp_path)  # the disk has its room back at once
    with pytest.raises(ValueError, match="closed"):
        states.put(0, torch.zeros(1))


def test_a_file_that_may_not_grow_any_more_is_one_clear_error(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    states = Offloaded(tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
        with pytest.raises(OSError, match=r"could not be kept in .*File too large"):
            put_all(states, [torch.zeros(1000) for _ in range(100)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_after_a_failed_write_no_old_states_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = Offloaded(tmp_path)
    put_all(states, started(6))
    list(states.each(range(6)))
    monkeypatch.setattr(hidden_states.os, "pwritev", lambda *given: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        for chunk, hidden in states.each(range(6)):
            assert torch.equal(hidden, started(6)[chunk])
            states.put(chunk, layer(hidden, 1))


def test_states_can_be_closed_while_a_transfer_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.02)
    states = Offloaded(tmp_path)
    put_all(states, started(5))
    _, hidden = next(states.each(range(5)))
    kept = hidden.clone()
    states.close()
    states.close()
    assert torch.equal(hidden, kept)
    with pytest.raises(ValueError, match="closed"):
        next(states.each([0]))


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    one, two = Offloaded(tmp_path), Offloaded(tmp_path)
    put_all(one, started(5))
    put_all(two, [layer(hidden, 3) for hidden in started(5)])
    for (chunk, mine), (_, theirs) in zip(one.each(range(5)), two.each(range(5)), strict=True):
        assert torch.equal(mine, started(5)[chunk]) and torch.equal(theirs, layer(mine, 3))
    one.close(), two.close()


def test_bad_input_is_named(tmp_path: Path) -> None:
    for states in kinds(tmp_path):
        states.put(0, torch.zeros(1))
        with pytest.raises(ValueError, match="no chunk 7"):
            list(states.each([0, 7]))
        states.close()
    with pytest.raises(ValueError, match=r"no folder .*nowhere"):
        Offloaded(tmp_path / "nowhere")
