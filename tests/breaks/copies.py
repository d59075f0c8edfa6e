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
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.main import pytest_runtestloop

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("lib", "notebooks", "tests", "docs", "README.md", "CHANGELOG.md")
LINKED = ("data", "figures", "pyproject.toml")
SECONDS = 120  # of one break's checks; they take a few
# The server imports other people's packages once for all breaks. A submodule is named where transformers loads it late.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "pytest",
        "nbval.plugin",
        "pandas",
        "pyarrow",
        "scipy.stats",
        "torch",
        "transformers.generation.utils",
        "transformers.models.auto.modeling_auto",
        "transformers.models.bert.modeling_bert",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3.modeling_qwen3",
        "accelerate",
        "onnxruntime",
        "faiss",
        "bm25s",
        "hypothesis.extra.numpy",
        "matplotlib.pyplot",
        "seaborn",
        "nbformat",
    ]
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


def file_of(fault: Break) -> str:
    """The file of its first check."""
    return fault.checks[0].partition("::")[0]


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
    [failed] = failing_each(root, [checks], log)
    return failed


def failing_each(root: Path, groups: Sequence[Sequence[str]], log: Path) -> list[list[str]]:
    """The same for each of several groups of checks: their files are read once, and each group runs in its own fork."""
    receiver, sender = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=_check, args=(str(root), [list(checks) for checks in groups], str(log), sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS * (1 + len(groups))):
            os.killpg(process.pid, signal.SIGKILL)  # with the fork that hangs
            raise AssertionError(f"{groups}: not done in {SECONDS * (1 + len(groups))} s.")
        code, failed, unread = receiver.recv()
    except EOFError:
        code, failed, unread = None, [], []
    finally:
        process.kill()
        process.join()
    if code != pytest.ExitCode.OK or unread or len(failed) != len(groups):
        raise AssertionError(f"{groups} cannot be run ({code}; {unread}):\n{log.read_text()[-3000:]}")
    return failed


class _Failures:
    """A plugin that notes what failed: tests with their tracebacks, and files that could not be read."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.texts: list[str] = []
        self.unread: list[str] = []

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            self.texts.append(report.longreprtext)

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.unread.append(report.nodeid)


class _Apart:
    """A plugin that runs each group of checks in a fork, so that none sees what another one left."""

    def __init__(self, groups: list[list[str]], failures: _Failures) -> None:
        self.groups, self.failures = groups, failures
        self.failed: list[list[str]] = []
        self.texts: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if self.failures.unread:
            return True
        for checks in self.groups:
            receiver, sender = multiprocessing.Pipe(duplex=False)
            child = os.fork()
            if not child:
                self._run(session, checks, sender)
            sender.close()
            try:
                failed, texts = receiver.recv() if receiver.poll(SECONDS) else (None, [])
                self.texts += texts
            except EOFError:
                failed = None
            if failed is None:
                os.kill(child, signal.SIGKILL)
                self.failures.unread.append(f"{', '.join(checks)}: no such test, dead, or not done in {SECONDS} s")
            else:
                self.failed.append(failed)
            os.waitpid(child, 0)
        return True

    def _run(self, session: pytest.Session, checks: list[str], sender) -> None:
        """In the fork, which ends here; without a word where a check names no test."""
        try:
            tests = {check: [item for item in session.items if _is_of(item.nodeid, check)] for check in checks}
            session.items = list(dict.fromkeys(item for items in tests.values() for item in items))
            if all(tests.values()):
                with contextlib.suppress(session.Failed):  # -x
                    pytest_runtestloop(session)
                sender.send((self.failures.failed, self.failures.texts))
        finally:
            os._exit(0)


def _is_of(name: str, check: str) -> bool:
    return name == check or name.startswith((f"{check}[", f"{check}::"))


def _check(root: str, groups: list[list[str]], log: str, sender) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    for name in [name for name in sys.modules if name.split(".")[0].startswith("ondevice")]:
        del sys.modules[name]  # other tests share the server, and may have let it import the original
    sys.path.insert(0, f"{root}/lib")
    failures = _Failures()
    apart = _Apart(groups, failures)
    options = ["-q", "-x", "--assert=plain", "-p", "no:cacheprovider"]
    options += [f"--rootdir={root}", "-c", f"{root}/pyproject.toml"]
    named = dict.fromkeys(check for checks in groups for check in checks)
    code = pytest.main([*options, *named], plugins=[failures, apart])
    print(*apart.texts, sep="\n", flush=True)
    ours = getattr(sys.modules.get("ondevice"), "__file__", "")
    if ours and not ours.startswith(root):
        failures.unread.append(f"{ours} is not the copy")
    sender.send((int(code), apart.failed, failures.unread))
