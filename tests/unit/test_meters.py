"""Memory from outside: allocated, mapped and shared are told apart; what is left in the page cache."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ondevice import meters
from ondevice.meters import memory

MB = 1_000_000
FIFTY = 50 * MB
TOUCH = f"kept[::4096] = bytes(len(range(0, {FIFTY}, 4096)))"
SLACK = 3 * MB  # the interpreter's own, and counters that the kernel adds up late

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is measured by /proc")


def watched(body: str, **options) -> meters.Sampled:
    """A fresh Python process that runs a body between imports and the last mark."""
    head = "import mmap, sys, time\nfrom ondevice.meters import mark\nmark('baseline')\n"
    return meters.sample([sys.executable, "-c", f"{head}{body}\nmark('end')\nprint('{{\"done\": 1}}')"], **options)


def near(found: float, wanted: float) -> bool:
    return abs(found - wanted) < SLACK


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Fifty megabytes on the disk, of which the page cache holds nothing."""
    path = tmp_path / "weights"
    with path.open("wb") as opened:
        opened.write(os.urandom(MB) * 50)
        os.fsync(opened.fileno())
    meters.evict([path])
    if meters.cached_bytes([path]):
        pytest.skip("this file system's pages cannot be dropped")
    return path


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (f"kept = bytearray({FIFTY})", "anonymous"),
        (f"kept = mmap.mmap(-1, {FIFTY}); {TOUCH}", "shared"),
        ("f = open(FILE, 'rb'); kept = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); sum(kept[::4096])", "file"),
    ],
)
def test_memory_is_told_apart_by_kind(body: str, kind: str, file: Path) -> None:
    found = watched(f"FILE = {str(file)!r}\n{body}")
    for other in ("anonymous", "file", "shared"):
        assert near(found.peak(other), FIFTY if other == kind else 0), other
    assert near(found.peak("resident"), FIFTY)
    assert (found.resident == found.anonymous + found.file + found.shared).all()


def test_what_was_freed_before_a_sample_is_still_in_the_peak() -> None:
    """Faster than any sampling: the kernel's own mark, which begins anew with each phase."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not let a process forget its peak")
    found = watched(f"bytearray({FIFTY})\nmark('after')", interval=10.0)
    assert found.marks == ("baseline", "after", "end") and found.highest[0] == -1
    assert near(found.peak("resident"), FIFTY) and near(found.peak("resident", phase="baseline"), FIFTY)
    assert near(found.peak("resident", phase="after"), 0) and near(found.growth("resident").max(), 0)


def test_phases_times_and_means() -> None:
    found = watched(f"time.sleep(0.2)\nkept = bytearray({FIFTY})\nmark('full')\ntime.sleep(0.4)")
    first, full, end = found.seconds[found.at]
    assert first == 0 and 0.2 <= full < end - 0.4 + 1e-3
    assert np.diff(found.seconds).min() >= 0 and len(found.seconds) > 10  # of 10 ms, however busy the machine is
    assert 0.3 * FIFTY < found.mean("anonymous") < FIFTY
    assert found.result == {"done": 1} and found.resident[found.at[0]] > 5 * MB


def test_several_kinds_are_added_at_the_same_time() -> None:
    """Fifty that move from one kind to the other are fifty, not a hundred."""
    found = watched(f"own = bytearray({FIFTY})\nmark('own')\ndel own\nkept = mmap.mmap(-1, {FIFTY})\n{TOUCH}")
    assert near(found.peak("anonymous"), FIFTY) and near(found.peak("shared"), FIFTY)
    assert near(found.peak("anonymous", "shared"), FIFTY)


def test_pages_in_the_cache_are_counted_without_being_read(file: Path) -> None:
    assert meters.cached_bytes([file]) == 0 == meters.cached_bytes([file])  # asking brings nothing in
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        os.pread(opened.fileno(), 10 * mmap.PAGESIZE, mmap.PAGESIZE)
    assert meters.cached_bytes([file]) == 10 * mmap.PAGESIZE
    assert file.read_bytes() and meters.cached_bytes([file, file]) >= 2 * FIFTY
    meters.evict([file])
    assert meters.cached_bytes([file]) == 0


def test_the_meter_needs_no_torch() -> None:
    code = "import sys, ondevice.meters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_process_that_fails_or_hangs_is_ended_and_named() -> None:
    with pytest.raises(RuntimeError, match=r"\(1\).*ValueError: no such thing"):
        watched("raise ValueError('no such thing')")
    with pytest.raises(RuntimeError, match="1 s"):  # with its output closed
        watched("sys.stdout.close(); import os; os.close(1); time.sleep(60)", timeout=1.0)


def test_bad_input_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="0 marks"):
        meters.sample([sys.executable, "-c", "pass"])
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    for call in (lambda: meters.sample(["true"]), lambda: meters.cached_bytes([])):
        with pytest.raises(ValueError, match=r"/proc.*darwin"):
            call()
