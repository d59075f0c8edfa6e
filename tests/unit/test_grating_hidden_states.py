"""Hidden states, resident and in a file: what comes back is what was put, and no file stays."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice_papers.grating.checkpoint import PAGE
from ondevice_papers.grating.hidden_states import HiddenStates, Offloaded, Resident

LENGTHS = (5, 90, 17, 64, 1, 33, 9, 300, 2, 40)
WIDTH = 36
STATES: dict[str, Callable[..., HiddenStates]] = {
    "resident": lambda folder, dtype=torch.float32: Resident(LENGTHS, WIDTH, dtype),
    "offloaded": lambda folder, dtype=torch.float32: Offloaded(LENGTHS, WIDTH, dtype, folder),
}


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    """No thread, and no file, with or without a name."""
    before = threading.enumerate()
    yield
    assert not [thread for thread in threading.enumerate() if thread not in before]
    assert not list(tmp_path.iterdir()) and not handles(tmp_path)


def handles(folder: Path) -> list[str]:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [path for path in map(os.readlink, filter(os.path.islink, links)) if path.startswith(str(folder))]


def mirror(dtype: torch.dtype = torch.float32) -> dict[int, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {place: torch.randn(length, WIDTH, generator=random).to(dtype) for place, length in enumerate(LENGTHS)}


def padded(right: dict[int, torch.Tensor], group: list[int]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([right[one] for one in group], batch_first=True)


def passed(states: HiddenStates, right: dict[int, torch.Tensor], groups: list[list[int]], change: float = 1.25) -> bool:
    """A pass over groups, which changes them; whether all states were those of the mirror."""
    same = True
    for group, hidden in zip(groups, states.each(groups), strict=True):
        same &= torch.equal(hidden, padded(right, group))
        states.put(group, (hidden.double() * change).to(hidden.dtype) + 1)  # in the padding, too
        for one in group:
            right[one] = (right[one].double() * change).to(right[one].dtype) + 1
    return same


def filled(states: HiddenStates, right: dict[int, torch.Tensor]) -> HiddenStates:
    for group in ([0, 1, 2, 3], [4, 5], [6, 7, 8], [9]):
        states.put(group, padded(right, group))
    return states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", STATES)
def test_what_was_put_comes_back_in_groups_made_anew_as_candidates_leave(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    right = mirror(dtype)
    states = filled(STATES[kind](tmp_path, dtype), right)
    for groups in ([[8, 0, 4], [2, 1], [6, 3, 9, 5, 7]], [[4, 8], [0], [6], [2, 9], [5]], [[4, 6, 2]], [[2]], [[2]]):
        assert passed(states, right, groups)
    states.close()


def test_a_file_has_no_name_and_its_pages_are_whole(tmp_path: Path) -> None:
    states = Offloaded(LENGTHS, WIDTH, torch.float32, tmp_path)
    assert not list(tmp_path.iterdir()) and handles(tmp_path)
    assert (np.diff(states.starts) % PAGE == 0).all()
    states.close()


# A disk that is short, cannot be read directly, is full or fails


@pytest.mark.parametrize("most", [1000, PAGE, PAGE + 8])
def test_short_transfers_are_continued_and_never_directly_between_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    states, right = Offloaded(LENGTHS, WIDTH, torch.float32, tmp_path), mirror()
    plain, direct = states.file.plain.fileno(), states.file._direct

    def short(call: Any) -> Any:
        def once(handle: int, buffers: list[memoryview], at: int) -> int:
            assert direct is None or (handle == direct.fileno()) == (at % PAGE == 0)
            return call(plain, [buffers[0][:most]], at)

        return once

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, short(getattr(os, name)))
    filled(states, right)
    assert all(passed(states, right, [[0, 1, 7], [3]]) for _ in range(2))
    states.close()


def test_where_direct_transfers_are_not_possible_the_page_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, right = Offloaded(LENGTHS, WIDTH, torch.float32, tmp_path), mirror()

    def refuse(call: Any) -> Any:
        def once(handle: int, buffers: list[memoryview], at: int) -> int:
            if handle != states.file.plain.fileno():
                raise OSError(errno.EINVAL, "Invalid argument")
            return call(handle, buffers, at)

        return once

    monkeypatch.setattr(os, "pwritev", refuse(os.pwritev))
    monkeypatch.setattr(os, "preadv", refuse(os.preadv))
    filled(states, right)
    assert all(passed(states, right, [[0, 1, 7], [3]]) for _ in range(2)) and states.file._direct is None
    states.close()


@pytest.mark.parametrize("after", [0, 9])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_or_failing_disk_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, code: int
) -> None:
    left, pwritev = [after], os.pwritev

    def full(*given: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code))
        return pwritev(*given)

    monkeypatch.setattr(os, "pwritev", full)
    states, right = Offloaded(LENGTHS, WIDTH, torch.float32, tmp_path), mirror()
    with pytest.raises(OSError, match=f"{tmp_path.name}.*{os.strerror(code)}") as told:
        filled(states, right)
        passed(states, right, [[0, 1], [2, 3], [4, 5, 6, 7, 8, 9]])
    assert told.value.errno == code
    states.close()
