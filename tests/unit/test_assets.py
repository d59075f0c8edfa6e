import errno
import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ondevice import assets


def test_writing_replaces_the_file_in_one_step(tmp_path):
    path = tmp_path / "new" / "result.json"
    with assets.writing(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists() and temporary.suffix == ".json"
    assert path.read_text() == "whole" and os.listdir(path.parent) == ["result.json"]


def test_writing_leaves_nothing_of_a_failure(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("before")

    def fail_halfway():
        with assets.writing(path) as temporary:
            temporary.write_text("ha")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_halfway()
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["result.json"]


def test_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match=r"result\.json"), assets.writing(tmp_path / "result.json"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []


def test_written_files_are_readable_as_any_other(tmp_path):
    before = os.umask(0o022)
    try:
        assets.write_text(tmp_path / "a.txt", "é")
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "é"


def test_the_local_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(assets.LOCAL_DATA_VARIABLE, str(tmp_path))
    assert assets.local_data() == tmp_path
    monkeypatch.setenv(assets.LOCAL_DATA_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"ONDEVICE_DATA.*nowhere"):
        assets.local_data()
    monkeypatch.delenv(assets.LOCAL_DATA_VARIABLE)
    monkeypatch.setattr(assets, "ROOT", tmp_path / "clone")
    assert assets.local_data() is None


def test_missing_tables_are_named():
    with pytest.raises(ValueError, match="'nobody'"):
        assets.paper_list("claims", "nobody")
    with pytest.raises(FileNotFoundError, match="table_99"):
        assets.paper_table("disco", "table_99")
    with pytest.raises(FileNotFoundError, match="none"):
        assets.derived_trace("none")


def test_caches_are_the_users_unless_a_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv(assets.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(assets.platformdirs, "user_cache_dir", lambda name, appauthor: str(tmp_path / "user" / name))
    assert assets.cache_folder("corpus") == tmp_path / "user" / "ondevice" / "corpus"
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "named"))
    assert assets.cache_folder("corpus") == tmp_path / "named" / "corpus" and (tmp_path / "named" / "corpus").is_dir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"corpus.*ONDEVICE_CACHE"):
        assets.cache_folder("corpus")


def test_arrays_are_read_in_many_threads(tmp_path) -> None:
    """The interpreter changes threads within a header's parsing, which fails in Python 3.11 without a lock."""
    whole, single = tmp_path / "a.npz", tmp_path / "a.npy"
    np.savez(whole, first=np.arange(3), second=np.array("text"))
    np.save(single, np.arange(4))

    def read(_: int) -> bool:
        kept = assets.arrays(whole)
        return list(kept) == ["first", "second"] and kept["first"][2] == len(assets.array(single, mapped=True)) - 2

    def switch(*_: object) -> None:
        list(range(50))

    before, often = gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(switch)
    gc.set_threshold(5)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(read, range(600)))
    finally:
        gc.callbacks.remove(switch)
        gc.set_threshold(*before)
        sys.setswitchinterval(often)
