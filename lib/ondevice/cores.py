"""How many processor cores this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable(root: Path = Path("/")) -> int:
    """Cores by the process's affinity and by the quotas of its control groups, rounded up; at least 1.

    A container's `--cpus 1.5` is such a quota, of versions 1 and 2 alike. root: of the file system.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Cores that each limited group of this process has, those around it included."""
    for controllers, group in _groups(root):
        for folder in _folders(root, controllers, group):
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
                quota, period = _numbers(folder, controllers)
                if quota > 0:  # version 1 has -1 where there is no limit
                    yield quota / period


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """(controllers, path) of the groups that limit processors; version 2 names no controllers."""
    with contextlib.suppress(OSError, ValueError):  # not every system has it
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                yield controllers, group


def _folders(root: Path, controllers: str, group: str) -> Iterator[Path]:
    """Where a group's files may lie, and those of the groups around it.

    A container sees its own group at the top, whatever path the host gives it.
    """
    system = root / "sys/fs/cgroup"
    tops = [system / controllers, system / "cpu"] if controllers else [system, system / "unified"]
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for top in tops:
        for length in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:length])


def _numbers(folder: Path, controllers: str) -> tuple[int, int]:
    """Microseconds of processor time in each period, and the period's."""
    if controllers:
        texts = [(folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")]
    else:
        texts = (folder / "cpu.max").read_text(encoding="utf-8").split()
    quota, period = map(int, texts)
    return quota, period
