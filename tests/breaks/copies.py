"""A copy of the repository in which one text is changed, and checks that run on it in a process of their own.

Nothing of `ondevice` is imported here: the processes that are forked import it from the copy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("lib", "notebooks", "tests", "docs", "README.md")
LINKED = ("data", "figures", "pyproject.toml")
SECONDS = 120  # of one break's checks; they take a few
FORKED = multiprocessing.get_context("forkserver")  # PyTorch and its like are imported once, for all
FORKED.set_forkserver_preload(
    ["pytest", "pandas", "scipy.stats", "torch", "transformers", "matplotlib.pyplot", "seaborn", "nbformat"]
)


class NotFound(AssertionError):
    """The code has moved on: the break has to be written anew."""


@dataclass(frozen=True)
class Break:
    """A fault. old: stands once in the file (of a notebook: in the sources of its cells). new: what replaces it.

    checks: pytest's ids, of which one has to fail. passes: none does yet; whoever rebuilds the paper turns it around.
    """

    name: str
    paper: str
    file: str
    old: str
    new: str
    checks: tuple[str, ...]
    passes: bool = False


def copy(folder: Path) -> Path:
    """The repository below `folder`: what may be broken as a copy, the rest as links."""
    for name in COPIED:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / name)
        else:
            unwanted = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    return folder


@contextlib.contextmanager
def broken(root: Path, fault: Break) -> Iterator[None]:
    """Inside, the copy has the fault. Raises NotFound where its old text does not stand in the file once."""
    path = root / fault.file
    if not path.is_file():
        raise NotFound(f"{fault.name}: there is no {fault.file} any more.")
    before = path.read_text(encoding="utf-8")
    text = _changed_notebook(before, fault) if path.suffix == ".ipynb" else _changed(before, fault)
    try:
        _write(path, text)
        yield
    finally:
        _write(path, before)


def _changed(text: str, fault: Break) -> str:
    count = text.count(fault.old)
    if count != 1:
        raise NotFound(f"{fault.name}: {fault.old!r} stands {count} times in {fault.file}, not once.")
    return text.replace(fault.old, fault.new)


def _changed_notebook(text: str, fault: Break) -> str:
    notebook = json.loads(text)
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    changed = _changed("\0".join(sources), fault).split("\0")
    for cell, source in zip(notebook["cells"], changed, strict=True):
        cell["source"] = source.splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    """With no compiled file of another text: those are told apart by whole seconds and size."""
    path.write_text(text, encoding="utf-8")
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def failing(root: Path, checks: Sequence[str], log: Path) -> list[str]:
    """The ids of the checks' tests that fail on the copy as it stands; their output is in `log`."""
    receiver, sender = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=_check, args=(str(root), list(checks), str(log), sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            raise AssertionError(f"{', '.join(checks)}: not done in {SECONDS} s.")
        code, failed, unread = receiver.recv()
    except EOFError:
        code, failed, unread = None, [], []
    finally:
        process.kill()
        process.join()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or unread:
        raise AssertionError(f"{', '.join(checks)} cannot be run ({code}):\n{log.read_text()[-3000:]}")
    return failed


class _Failures:
    """A plugin that notes what failed: tests, and files that could not be read."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.unread: list[str] = []

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.unread.append(report.nodeid)


def _check(root: str, checks: list[str], log: str, sender) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    for name in [name for name in sys.modules if name.split(".")[0].startswith("ondevice")]:
        del sys.modules[name]  # other tests share the server, and may have let it import the original
    sys.path.insert(0, f"{root}/lib")
    failures = _Failures()
    options = ["-q", "-x", "--assert=plain", "-p", "no:cacheprovider"]
    options += [f"--rootdir={root}", "-c", f"{root}/pyproject.toml"]
    code = pytest.main([*options, *checks], plugins=[failures])
    ours = getattr(sys.modules.get("ondevice"), "__file__", "")
    if ours and not ours.startswith(root):
        failures.unread.append(f"{ours} is not the copy")
    sender.send((int(code), failures.failed, failures.unread))
