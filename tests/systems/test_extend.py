"""docs/extend.md by hand, in a copy: files and lines are written where the page says, and its commands run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice import assets

pytestmark = pytest.mark.long
SECTIONS = {
    section.partition("\n")[0]: section
    for section in (assets.ROOT / "docs" / "extend.md").read_text(encoding="utf-8").split("\n## ")
}


def blocks(title: str, language: str) -> list[str]:
    """A section's blocks of code in a language, "" for those without one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", SECTIONS[title], re.M | re.S)
    return [text for kind, text in fenced if kind == language]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The checkout's code and its data."""
    for name in ("lib", "tests"):
        shutil.copytree(assets.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("data", "docs", "pyproject.toml"):
        (tmp_path / name).symlink_to(assets.ROOT / name)
    return tmp_path


def ran(copy: Path, *words: str) -> str:
    """What Python prints there."""
    environment = os.environ | {"PYTHONPATH": str(copy / "lib"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def inserted(path: Path, after: str, line: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(after) == 1
    path.write_text(text.replace(after, after + line), encoding="utf-8")


def test_a_drafter_is_a_file_and_a_row(copy: Path) -> None:
    """Its line in a table turned a test red, and nothing compared it with the others."""
    library = copy / "lib" / "ondevice" / "speculation"
    (library / "last_token.py").write_text(blocks("A drafter", "python")[0], encoding="utf-8")
    row, commands, _ = blocks("A drafter", "")
    inserted(library / "drafters.py", "DRAFTERS: dict[str, Entry] = {\n", row)
    bench, identity = (shlex.split(line) for line in commands.splitlines())
    assert " passed" in ran(copy, *identity[1:], "-q", "-p", "no:cacheprovider")
    assert "last-token" in ran(copy, "-m", "ondevice_programs.bench", bench[1], "--help")
    assert " passed" in ran(copy, "-m", "pytest", "-q", "tests/unit/test_drafters.py", "-k", "last-token")
    made = "import ondevice.speculation.drafters as d; print(d.create('last-token', 9).propose([1, 2, 1], 4).tokens)"
    assert ran(copy, "-c", made).split() == ["[2", "1]"]


def test_a_policy_is_a_function_and_a_line(copy: Path) -> None:
    path = copy / "lib" / "ondevice_papers" / "disco" / "dispatch.py"
    function = blocks("A dispatch policy", "python")[0]
    path.write_text(f"{path.read_text(encoding='utf-8')}\n\n{function}", encoding="utf-8")
    study = copy / "lib" / "ondevice_studies" / "disco" / "study.py"
    inserted(study, "makers: dict[str, Callable[[Side, Latency, DeviceSpeed, float], DispatchPolicy]] = {\n",
             blocks("A dispatch policy", "")[0])  # fmt: skip
    compared = """
from ondevice_papers.disco.distributions import DEVICES
from ondevice_papers.disco.race import play
from ondevice_studies.disco import study, traces
lengths = traces.lengths()
policies = study.policies(lengths, names=["DiSCo", "Stoch", "shortest first"])
table = study.sweep(["Command"], list(DEVICES.values())[:1], [0.3], policies, play, lengths, (4, 400), 0)
print(table[table["constrained"] == "device"].groupby("policy")["mean_s"].mean().to_string())
"""
    lines = ran(copy, "-c", compared).splitlines()
    assert {line.rsplit(None, 1)[0] for line in lines[1:]} == {"DiSCo", "Stoch", "shortest first"}
