"""A hard limit on the memory of a process: a control group of the kernel, of version 2 or of version 1.

The group counts what its processes allocate and what they bring into the page cache from the moment they join it. Pages
of files are dropped where it gets narrow; where nothing is left to drop, the kernel kills. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_NAMES = {2: ("memory.max", "memory.swap.max"), 1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")}


@contextlib.contextmanager
def hard_limit(size: int) -> Iterator[Path]:
    """The file to which a process writes its number (`join`), to be limited to so many further bytes without swap.

    The group is gone afterwards, for which its processes have to have ended. Raises OSError, with one sentence, where
    the system lets nobody make a group.
    """
    version, mount = _mounted()
    group = mount / f"ondevice-{os.getpid()}-{time.monotonic_ns()}"
    limit, swap = _NAMES[version]
    try:
        group.mkdir()
        (group / limit).write_text(str(size))
        with contextlib.suppress(OSError):  # a kernel that does not count swap
            (group / swap).write_text(str(size if version == 1 else 0))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise OSError(error.errno, f"No control group can be made in {mount.name}: {error.strerror}.") from None
    try:
        yield group / "cgroup.procs"
    finally:
        _remove(group)


def join(group: Path) -> None:
    """Have this process limited from here on, by the group that `hard_limit` gave."""
    group.write_text(str(os.getpid()))


def _mounted() -> tuple[int, Path]:
    """Version and folder of a mounted hierarchy that limits memory."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for _, folder, kind, options, *_ in map(str.split, lines):
        if kind == "cgroup" and "memory" in options.split(","):
            return 1, Path(folder)
        if kind == "cgroup2":
            with contextlib.suppress(OSError):
                if "memory" in (Path(folder) / "cgroup.subtree_control").read_text().split():
                    return 2, Path(folder)
    raise OSError("This system has no control groups that limit memory.")


def _remove(group: Path) -> None:
    for _ in range(50):  # a killed process leaves its group a moment later
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.02)
