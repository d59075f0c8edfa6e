"""How many cores a process may use: its affinity and its groups' quotas, whichever is less."""

import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice import cores

ALL = 8
FILES = {  # what the kernel shows: files below the root, and cores that may be used
    "no groups": ({}, ALL),
    "version 2, a container's own": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
    "version 2, no limit": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, ALL),
    "version 2, one and a half": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
    "version 2, a tenth": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
    "version 2, more than there are": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "990000 10000"}, ALL),
    "version 2, of a group around": (
        {"proc/self/cgroup": "0::/a.slice/b.scope", "sys/fs/cgroup/a.slice/cpu.max": "300000 100000",
         "sys/fs/cgroup/a.slice/b.scope/cpu.max": "max 100000"}, 3,
    ),
    "version 2 beside version 1": (
        {"proc/self/cgroup": "0::/x", "sys/fs/cgroup/unified/x/cpu.max": "400000 100000"}, 4,
    ),
    "version 1, a host's path": (
        {"proc/self/cgroup": "3:memory:/docker/f00\n2:cpu,cpuacct:/docker/f00",
         "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
         "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"}, 2,
    ),
    "version 1, of its own": (
        {"proc/self/cgroup": "1:cpu:/jobs/7", "sys/fs/cgroup/cpu/jobs/7/cpu.cfs_quota_us": "500000",
         "sys/fs/cgroup/cpu/jobs/7/cpu.cfs_period_us": "100000"}, 5,
    ),
    "version 1, no limit": (
        {"proc/self/cgroup": "1:cpu:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
         "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, ALL,
    ),
    "a set of processors alone": ({"proc/self/cgroup": "3:cpuset:/x", "sys/fs/cgroup/cpuset/x/cpus": "1"}, ALL),
    "files of nobody": ({"proc/self/cgroup": "words\n0::/", "sys/fs/cgroup/cpu.max": ""}, ALL),
    "no period": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "100000 0"}, ALL),
}  # fmt: skip


@pytest.fixture
def eight(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(ALL)), raising=False)


@pytest.mark.parametrize("case", FILES)
def test_cores_are_those_of_affinity_and_quota(case, tmp_path, eight):
    files, expected = FILES[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.usable(tmp_path) == expected


@given(st.integers(1, 10**7), st.integers(1000, 10**6), st.integers(1, 2))
def test_a_quota_is_rounded_up(tmp_path_factory, quota, period, version):
    root = tmp_path_factory.mktemp("root")
    files = {
        1: {"proc/self/cgroup": "4:cpu:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": f"{quota}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": f"{period}\n"},
        2: {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": f"{quota} {period}\n"},
    }[version]  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert cores.usable(root) == min(cores.usable(root / "nothing"), max(1, math.ceil(quota / period)))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinities")
def test_an_affinity_counts():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cores.usable() == 1
    finally:
        os.sched_setaffinity(0, allowed)
