"""A recording in a clean worktree of a commit, so that work goes on beside it and the code can be found later.

What is not committed becomes a commit of its own, kept under refs/records. The worktree stands in the cache folder.
What the recording wrote in it is brought back when it ends; after a kill, when the next one starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ondevice import assets, commands
from ondevice.evidence.exhibits import as_json
from ondevice.evidence.sidecars import digest

RECORDS = "data/records"  # may differ from the commit: recorders read each other's newest records
MANIFEST = "manifest.json"  # files of this name are merged by line


def folder() -> Path:
    """Where worktrees stand."""
    return assets.cache_folder("worktrees").resolve()


def inside() -> bool:
    """Whether this code is a worktree's."""
    return assets.ROOT.parent == folder()


def run(words: Sequence[str], commit: str = "") -> int:
    """The exit code of `python words` in a new worktree of a commit, or of the checkout as it is now.

    Raises ValueError outside a git checkout, and for a commit that is none.
    """
    for left in folder().glob(f"*-{_host()}-*"):
        if not _in_use(left):
            bring_back(left)
    commit = git("rev-parse", "--verify", f"{commit}^{{commit}}") if commit else snapshot()
    tree = folder() / f"{commit[:12]}-{_host()}-{os.getpid()}"
    git("worktree", "add", "--quiet", "--detach", str(tree), commit)
    try:
        shutil.rmtree(tree / RECORDS, ignore_errors=True)
        shutil.copytree(assets.ROOT / RECORDS, tree / RECORDS)
        git("add", "--all", RECORDS, tree=tree)  # so that git tells what the recording changes
        process = subprocess.Popen([sys.executable, *words], cwd=tree, env=_environment(tree))
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the recorder has it as well
            process.wait()
            code = commands.INTERRUPTED
    finally:
        bring_back(tree)
    if code:
        print(f"Not finished. With --commit {commit} the same command goes on, whatever is edited.", file=sys.stderr)
    return code


def snapshot() -> str:
    """HEAD where no file but records differs from it, else a new commit of all files that git does not ignore."""
    head = git("rev-parse", "HEAD")
    with tempfile.TemporaryDirectory() as scratch:
        index = {"GIT_INDEX_FILE": f"{scratch}/index"}
        git("read-tree", head, variables=index)
        git("add", "--all", "--", ".", f":!{RECORDS}", variables=index)
        tree = git("write-tree", variables=index)
    if tree == git("rev-parse", f"{head}^{{tree}}"):
        return head
    who = ["-c", "user.name=ondevice", "-c", "user.email=records@localhost"]
    commit = git(*who, "commit-tree", tree, "-p", head, "-m", "A recording's code, with what was not committed")
    git("update-ref", f"refs/records/{time.strftime('%Y-%m-%d')}-{commit[:12]}", commit)
    return commit


def bring_back(tree: Path) -> None:
    """Copy what a recording wrote into the checkout, and remove the worktree.

    Lines of manifests are merged. A file outside data/records that was edited in the checkout meanwhile stays.
    """
    with contextlib.suppress(ValueError):  # a worktree that was only begun
        for name in git("ls-files", "--modified", "--others", "--exclude-standard", tree=tree).splitlines():
            before = subprocess.run(["git", "-C", tree, "show", f":{name}"], capture_output=True, check=False).stdout
            target, new = assets.ROOT / name, (tree / name).read_bytes()
            if Path(name).name == MANIFEST:
                old = json.loads(before or "{}")
                lines = json.loads(target.read_bytes()) if target.is_file() else {}
                lines |= {line: entry for line, entry in json.loads(new).items() if old.get(line) != entry}
                assets.write_text(target, as_json(dict(sorted(lines.items()))))
            elif name.startswith(f"{RECORDS}/") or not target.is_file() or target.read_bytes() in (before, new):
                with assets.writing(target) as copy:
                    copy.write_bytes(new)
            else:
                print(f"{name} was edited beside the recording, and stays as it is.", file=sys.stderr)
    shutil.rmtree(tree, ignore_errors=True)
    git("worktree", "prune")


def git(*words: str, tree: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
    """What git prints in the checkout or another tree; ValueError with its first line where it fails."""
    command = ["git", "-C", str(tree or assets.ROOT), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | (variables or {}))
    if done.returncode:
        error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise ValueError(f"A record is made from a git checkout, and git {words[0]} fails: {error}")
    return done.stdout.strip()


def _environment(tree: Path) -> dict[str, str]:
    """With the worktree's code, this checkout's local data and the same cache."""
    paths = [str(tree / "lib"), *filter(None, [os.environ.get("PYTHONPATH")])]
    data = assets.local_data()
    return (
        os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), assets.CACHE_VARIABLE: str(folder().parent)}
        | ({assets.LOCAL_DATA_VARIABLE: str(data.resolve())} if data else {})
    )


def _host() -> str:
    """Tells hosts with one cache apart, without their names."""
    return digest(platform.node())[:6]


def _in_use(tree: Path) -> bool:
    """Whether the process that made a worktree lives, or another one stands in it."""
    if psutil.pid_exists(int(tree.name.rpartition("-")[2])):
        return True
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(tree):
                return True
    return False
