"""A process's memory over time, as another process sees it in /proc, and what the page cache holds of files.

The metric decides who wins: weights that are a mapping of their file are resident, but not anonymous; weights that are
read through the page cache are neither. So all are taken at once. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

INTERVAL = 0.01  # seconds between two samples
_FIELDS = ("VmRSS", "RssAnon", "RssFile", "RssShmem")  # in /proc/PID/status, in kB
_MARK = "#mark "
_METERED = "ONDEVICE_METERED"


@dataclass(frozen=True)
class Sampled:
    """Memory of a process, in bytes, at T times and M marks. A phase lasts from a mark to the next one.

    seconds: [T] since the first mark, which is the baseline; negative before it.
    resident: [T] all of its memory that is there; the sum of the next three.
    anonymous: [T] its own: heap, stacks, private copies. file: [T] of files that it has mapped, libraries included;
        the system can drop it. shared: [T] shared memory, which it cannot drop.
    marks: [M] their names. at: [M] the sample taken at each. highest: [M] the kernel's own peak (VmHWM) of the phase
        that ends at the mark; -1 at the first mark, and where the kernel does not let it be reset.
    lines: what the process printed otherwise.
    """

    seconds: NDArray[np.float64]
    resident: NDArray[np.int64]
    anonymous: NDArray[np.int64]
    file: NDArray[np.int64]
    shared: NDArray[np.int64]
    marks: tuple[str, ...]
    at: NDArray[np.int64]
    highest: NDArray[np.int64]
    lines: tuple[str, ...]

    @property
    def result(self) -> Any:
        """The last line that the process printed, from JSON."""
        return json.loads(self.lines[-1])

    def growth(self, *kinds: str) -> NDArray[np.int64]:
        """[T] sum of some kinds (resident, anonymous, file, shared) over what it was at the first mark."""
        total = np.sum([getattr(self, kind) for kind in kinds], axis=0)
        return total - total[self.at[0]]

    def peak(self, *kinds: str, phase: str | None = None) -> int:
        """Largest growth from the first mark to the last one, or in one phase; of resident memory the kernel's too."""
        first = 0 if phase is None else self.marks.index(phase)
        last = len(self.marks) - 1 if phase is None else first + 1
        sampled = int(self.growth(*kinds)[self.at[first] : self.at[last] + 1].max())
        if kinds != ("resident",):
            return sampled
        return max(sampled, int(self.highest[first + 1 : last + 1].max() - self.resident[self.at[0]]))

    def mean(self, *kinds: str) -> float:
        """Growth on average over the time from the first mark to the last one."""
        within = slice(self.at[0], self.at[-1] + 1)
        seconds = self.seconds[within]
        growth = self.growth(*kinds)[within]
        return float(np.trapezoid(growth, seconds) / (seconds[-1] - seconds[0]))


# In the process that measures


def sample(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    interval: float = INTERVAL,
    timeout: float = 3600.0,
) -> Sampled:
    """Run a program that sets at least two marks (`mark`) and sample its memory until it ends.

    environment: variables beside this process's own. interval, timeout: seconds.
    Raises ValueError on a system without /proc and for fewer than two marks; RuntimeError, with the program's last
    words, where it fails or takes longer. The program does not survive the call.
    """
    require_proc()
    own = os.environ | {_METERED: "1"} | dict(environment or {})
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=own, bufsize=0
        )
        with process:
            try:
                watch = _Watch(process, time.monotonic() + timeout)
                watch.run(interval)
                process.wait(max(0.1, watch.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{_shown(command)} took more than {timeout:g} s.") from None
            finally:
                process.kill()
        if process.returncode:
            raise RuntimeError(f"{_shown(command)} failed ({process.returncode}): {_last_words(errors)}")
    return watch.sampled(_shown(command))


class _Watch:
    """Samples the memory of one running process, and keeps its marks and what it prints."""

    def __init__(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self.deadline = deadline
        self._answers = process.stdin
        self._printed = process.stdout
        self._status = Path(f"/proc/{process.pid}/status")
        self._forget = Path(f"/proc/{process.pid}/clear_refs")
        self._rows: list[tuple[float, ...]] = []
        self._marks: list[tuple[str, int, int]] = []
        self._lines: list[str] = []
        self._reset = False  # whether the kernel's peak began anew at the last mark

    def run(self, interval: float) -> None:
        """Sample every `interval` seconds until the process closes its output."""
        poll, rest, due = select.poll(), b"", time.monotonic()
        poll.register(self._printed, select.POLLIN)
        while True:
            if poll.poll(max(0.0, 1000 * (due - time.monotonic()))):
                read = os.read(self._printed.fileno(), 1 << 16)
                if not read:
                    break
                *whole, rest = (rest + read).split(b"\n")
                for line in whole:
                    self._hear(line.decode(errors="replace"))
            now = time.monotonic()
            if now >= due:
                self._take()
                due = max(due + interval, now)
            if now > self.deadline:
                raise subprocess.TimeoutExpired("", 0)
        if rest:
            self._hear(rest.decode(errors="replace"))

    def sampled(self, name: str) -> Sampled:
        """All samples and marks, as arrays. name: of the program, for the error."""
        if len(self._marks) < 2:
            raise ValueError(f"{name} set {len(self._marks)} marks; a baseline and an end are needed.")
        rows = np.array(self._rows)
        names, at, highest = zip(*self._marks, strict=True)
        resident, anonymous, file, shared = rows[:, 1:].astype(np.int64).T
        return Sampled(
            rows[:, 0] - rows[at[0], 0],
            resident,
            anonymous,
            file,
            shared,
            names,
            np.array(at),
            np.array(highest),
            tuple(self._lines),
        )

    def _hear(self, line: str) -> None:
        """A printed line. The process waits at a mark until the sample is taken and its peak begins anew."""
        if not line.startswith(_MARK):
            self._lines.append(line)
            return
        sizes = self._take()
        if sizes is None:
            return
        highest = sizes["VmHWM"] if self._reset else -1
        self._marks.append((line.removeprefix(_MARK), len(self._rows) - 1, highest))
        with contextlib.suppress(OSError):
            self._reset = False
            self._forget.write_text("5", encoding="ascii")
            self._reset = True
        with contextlib.suppress(BrokenPipeError):
            self._answers.write(b"\n")

    def _take(self) -> dict[str, int] | None:
        """A sample; None where the process has ended."""
        try:
            text = self._status.read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        sizes = _sizes(text)
        if "VmRSS" not in sizes:
            return None
        self._rows.append((time.monotonic(), *(float(sizes.get(field, 0)) for field in _FIELDS)))
        return sizes


def _sizes(status: str) -> dict[str, int]:
    """Bytes by name of the sizes in a /proc/PID/status."""
    words = [line.split() for line in status.splitlines()]
    return {word[0].rstrip(":"): 1024 * int(word[1]) for word in words if len(word) == 3 and word[2] == "kB"}


def _shown(command: Sequence[str]) -> str:
    """Enough to know which program it was: its file and first arguments, without code or paths."""
    return " ".join([Path(command[0]).name, *(word for word in command[1:4] if len(word) < 40 and os.sep not in word)])


def _last_words(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "it said nothing"


# In the process that is measured


def mark(name: str) -> None:
    """Begin a phase, once it has been sampled; the first mark is the baseline. Does nothing where nobody measures."""
    if os.environ.get(_METERED):
        print(f"{_MARK}{name}", flush=True)
        sys.stdin.readline()


def trim() -> None:
    """Give the free memory of the C heap back to the system, so that it is not reused unseen. glibc only."""
    release = getattr(_libc(), "malloc_trim", None)
    if release is not None:
        release(0)


# The page cache


def cached_bytes(files: Sequence[Path]) -> int:
    """Bytes of files that the page cache holds. Asked of the kernel (mincore), which reads none of them for it."""
    require_proc()
    return sum(_cached(file) for file in files)


def evict(files: Sequence[Path]) -> None:
    """Take files out of the page cache, but for what a process has mapped."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # pages that are not written yet cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def require_proc() -> None:
    """Raise ValueError where memory cannot be measured."""
    if not Path("/proc/self/status").is_file() or not sys.platform.startswith("linux"):
        raise ValueError(f"Memory is measured by /proc, which {sys.platform} does not have.")


def _cached(file: Path) -> int:
    if not file.stat().st_size:
        return 0
    with file.open("rb") as opened:
        mapped = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)  # nobody touches it
    states = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
    first = ctypes.c_void_p(mapped.ctypes.data)
    into = ctypes.c_void_p(states.ctypes.data)
    if _libc().mincore(first, ctypes.c_size_t(len(mapped)), into):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), file.name)
    return mmap.PAGESIZE * int((states & 1).sum())


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
