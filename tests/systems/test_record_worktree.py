"""A recording in a worktree of its own: of what is not committed, beside work that goes on, and after a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from waiting import wait_for

from ondevice import assets
from ondevice.evidence import records, sidecars

# A paper whose units wait for the test's word: a file `go` in the folder that $HOLD names.
PAPER = """
    import argparse, os, time
    from pathlib import Path
    from ondevice import assets
    from ondevice.evidence import Recorder

    FACTOR = 2

    def main(arguments):
        parser = argparse.ArgumentParser()
        parser.add_argument("--seed", type=int, default=0)
        seed = parser.parse_args(arguments).seed
        hold = Path(os.environ["HOLD"])
        run = Recorder("tiny", "others" if seed else "products", ["unit"], {"seed": seed}, every=0)
        for unit in range(4):
            if (unit,) not in run.done:
                if unit == 2:
                    (hold / "waiting").write_text(str(assets.ROOT))
                    while not (hold / "go").exists():
                        time.sleep(0.05)
                folder = assets.local_data()
                run.add([{"unit": unit, "product": FACTOR * unit, "process": os.getpid(), "data": folder.name}])
        print(run.finish())
        (assets.ROOT / "notes.txt").write_text("recorded")
"""


def git(root, *words):
    run = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A repository with the library and one small paper, committed; its cache, and a local data folder beside it."""
    root = tmp_path / "repository"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("ondevice", "ondevice_studies"):
        shutil.copytree(assets.ROOT / "lib" / name, root / "lib" / name, ignore=ignored)
    for paper in ("assistant", "diaa", "disco", "dragon", "grating", "sdnpu", "speculation"):
        shutil.rmtree(root / "lib" / "ondevice_studies" / paper)
    files = {"lib/ondevice_studies/tiny/__init__.py": "", "data/models/manifest.json": "{}", "notes.txt": "first\n",
             "data/records/manifest.json": "{}", ".gitignore": "__pycache__/\n",
             "lib/ondevice_studies/tiny/record.py": textwrap.dedent(PAPER)}  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "shared" / "data").mkdir(parents=True)
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "a@localhost")
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", "first")
    monkeypatch.setenv("HOLD", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(root / "lib"))
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(assets.LOCAL_DATA_VARIABLE, raising=False)
    monkeypatch.setattr(assets, "data", lambda *parts: root.joinpath("data", *parts))
    return tmp_path


def started(home, *words):
    command = [sys.executable, "-m", "ondevice_studies.record", "tiny", *words]
    return subprocess.Popen(
        command, cwd=home / "repository", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def waiting(home) -> Path:
    """The root that the recorder runs in, once it waits in its third unit."""
    wait_for((home / "waiting").exists, 120)
    time.sleep(0.1)
    root = Path((home / "waiting").read_text())
    (home / "waiting").unlink()
    return root


def finished(process):
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out + err


def worktrees(home):
    left = list((home / "cache" / "worktrees").iterdir())
    return len(left), len(git(home / "repository", "worktree", "list").splitlines())


def test_uncommitted_code_becomes_a_commit_and_work_goes_on_beside_it(home):
    root = home / "repository"
    program = root / "lib" / "ondevice_studies" / "tiny" / "record.py"
    program.write_text(program.read_text().replace("FACTOR = 2", "FACTOR = 3"))
    (root / "new.txt").write_text("untracked\n")
    head = git(root, "rev-parse", "HEAD")
    process = started(home)
    tree = waiting(home)
    assert tree != root and tree.parent == home / "cache" / "worktrees"
    assert (tree / "new.txt").is_file() and git(tree, "status", "--porcelain", "--", ".", ":!data/records") == ""
    program.write_text(program.read_text().replace("FACTOR = 3", "FACTOR = 5"))  # beside it
    (root / "notes.txt").write_text("edited\n")
    (home / "go").touch()
    assert "notes.txt" in finished(process)
    assert (root / "notes.txt").read_text() == "edited\n"
    table = records.load("tiny", "products")
    made = table.attrs["sidecar"]
    assert table["product"].tolist() == [0, 3, 6, 9] and not made["dirty"]
    [reference, commit] = git(root, "for-each-ref", "refs/records", "--format=%(refname) %(objectname)").split()
    assert made["commit"] == commit != head and reference.startswith("refs/records/20")
    assert git(root, "rev-parse", f"{commit}^") == head == git(root, "rev-parse", "HEAD")
    assert "FACTOR = 3" in git(root, "show", f"{commit}:lib/ondevice_studies/tiny/record.py")
    assert git(root, "show", f"{commit}:new.txt") == "untracked" and "FACTOR = 5" in program.read_text()
    assert git(root, "diff", "--cached", "--name-only") == "" and worktrees(home) == (0, 1)


def test_two_recordings_at_once_both_stay_in_the_manifest(home):
    process = started(home)
    waiting(home)
    root = home / "repository" / "data" / "records"
    (root / "tiny").mkdir()
    (root / "tiny" / "calibration.json").write_text("{}")
    records.enter(root / "tiny" / "calibration.json")  # what another one brings back meanwhile
    (home / "go").touch()
    finished(process)
    assert set(json.loads((root / "manifest.json").read_text())) == {"tiny/calibration.json", "tiny/products.parquet"}


def test_a_killed_recording_goes_on_and_loses_nothing(home):
    process = started(home)
    waiting(home)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert worktrees(home) == (1, 2)
    (home / "go").touch()
    finished(started(home))
    table = records.load("tiny", "products")
    first, second, *others = table["process"]
    assert first == second != others[0] and table["product"].tolist() == [0, 2, 4, 6]
    assert set(table["data"]) == {"data"} and worktrees(home) == (0, 1)
    made, root = table.attrs["sidecar"], home / "repository"
    assert len(made["parts"]) == 2 and made["code"] == sidecars.code(made["program"], root / "lib")
    assert (made["commit"], made["dirty"]) == (git(root, "rev-parse", "HEAD"), False)  # of a clean checkout
    changed = {"data/records/manifest.json", "notes.txt", "data/records/tiny/products.json",
               "data/records/tiny/products.parquet"}  # fmt: skip
    assert {line.split()[1] for line in git(root, "status", "--porcelain", "-uall").splitlines()} == changed


def test_a_recording_whose_starter_was_killed_is_brought_back_by_the_next(home):
    process = started(home)
    tree = waiting(home)
    process.kill()  # alone: the recorder goes on and finishes in its worktree
    process.wait()
    (home / "go").touch()
    wait_for(lambda: "tiny/products.parquet" in (tree / "data" / "records" / "manifest.json").read_text())
    time.sleep(2)
    finished(started(home, "--seed", "1"))
    assert worktrees(home) == (0, 1)
    for name, seed in (("products", 0), ("others", 1)):
        assert records.load("tiny", name).attrs["sidecar"]["parameters"] == {"seed": seed}


def test_a_run_of_other_code_begins_anew_and_commit_names_the_one_that_goes_on(home):
    root = home / "repository"
    process = started(home)
    waiting(home)
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate(timeout=200)[1]
    assert process.returncode == 130 and f"--commit {git(root, 'rev-parse', 'HEAD')}" in error
    program = root / "lib" / "ondevice_studies" / "tiny" / "record.py"
    program.write_text(program.read_text().replace("FACTOR = 2", "FACTOR = 7"))
    (home / "go").touch()
    finished(started(home))
    assert records.load("tiny", "products")["product"].tolist() == [0, 7, 14, 21]
    finished(started(home, "--commit", "HEAD"))
    table = records.load("tiny", "products")
    assert table["product"].tolist() == [0, 2, 4, 6] and table["process"].nunique() == 2


def test_what_is_no_commit_or_no_checkout_is_refused(home):
    for words in (["--commit", "nowhere"], []):
        if not words:
            shutil.rmtree(home / "repository" / ".git")
        process = started(home, *words)
        error = process.communicate(timeout=200)[1]
        assert process.returncode == 2 and error.count("\n") == 1 and "git" in error
