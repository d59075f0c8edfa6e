"""A hard limit on memory: what a process may have, when it is killed, and that nothing is left of the group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.meters import limit

MB = 1_000_000
EATS = """
import sys, pathlib
from ondevice.meters.limit import join
join(pathlib.Path(sys.argv[1]))
eaten = [bytearray(1_000_000) for _ in range(int(sys.argv[2]))]
print(len(eaten))
"""


def made() -> bool:
    try:
        with limit.hard_limit(50 * MB):
            return True
    except OSError:
        return False


def eat(megabytes: int, of: int) -> tuple[int, str, Path]:
    with limit.hard_limit(of * MB) as group:
        done = subprocess.run([sys.executable, "-c", EATS, str(group), str(megabytes)], capture_output=True, text=True)
    return done.returncode, done.stdout, group


@pytest.mark.skipif(not made(), reason="this system lets nobody make a control group")
def test_a_process_that_takes_more_is_killed_and_no_group_is_left():
    killed, printed, group = eat(200, of=60)
    assert killed == -9 and not printed and not group.parent.exists()
    assert eat(30, of=60)[:2] == (0, "30\n")


def test_a_system_without_groups_or_where_none_can_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "groups").write_text("a file")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="groups: Not a directory"):
        patch.setattr(limit, "_mounted", lambda: (2, tmp_path / "groups"))
        limit.hard_limit(MB).__enter__()
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "proc /proc proc rw 0 0\ncgroup2 /x cgroup2 rw 0 0")
    with pytest.raises(OSError, match="no control groups"):
        limit.hard_limit(MB).__enter__()
