"""environment.yml is a thin shell around pyproject.toml, which alone lists dependencies."""

import contextlib
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ondevice.assets import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())


def test_environment_yml_adds_no_dependency():
    conda = [entry for entry in ENVIRONMENT["dependencies"] if isinstance(entry, str)]
    pip = [entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict)]
    assert sorted(re.split(r"[<>=]", entry)[0] for entry in conda) == ["pip", "python"]
    assert [[line for line in lines if not line.startswith("--extra-index-url")] for lines in pip] == [
        ["-c requirements.lock", "-e .[dev]"]
    ]
    assert "dev" in PROJECT["optional-dependencies"]
    assert ENVIRONMENT["name"] == PROJECT["name"]


def test_the_lock_has_what_pyproject_asks_for():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}
    extras = PROJECT["optional-dependencies"]
    lists = [PROJECT["dependencies"], *(extras[name] for name in extras if name != "peers")]  # which are built
    names = {re.split(r"[\[<>=]", entry)[0].lower() for asked in lists for entry in asked} - {PROJECT["name"]}
    assert names <= set(locked) and all(locked.values())


def test_the_core_is_small_and_takes_ranges():
    asked = [Requirement(entry) for entry in PROJECT["dependencies"]]
    assert len(asked) <= 14 and all(str(requirement.specifier).startswith(">=") for requirement in asked)
    heavy = {"matplotlib", "pandas", "pyarrow", "scipy", "scikit-learn"}
    assert not heavy & {name for name, _ in reached(PROJECT["dependencies"])}


def reached(entries: list[str]) -> set[tuple[str, str]]:
    """(distribution, extra or "") of requirements and of all that they require, of what is installed here."""
    found = set[tuple[str, str]]()
    waiting = [Requirement(entry) for entry in entries]
    while waiting:
        asked = waiting.pop()
        name = canonicalize_name(asked.name)
        for extra in {"", *asked.extras} - {extra for known, extra in found if known == name}:
            found.add((name, extra))
            with contextlib.suppress(metadata.PackageNotFoundError):
                waiting += [
                    each for each in map(Requirement, metadata.requires(name) or ())
                    if each.marker is None or each.marker.evaluate({"extra": extra})
                ]  # fmt: skip
    return found


PARTS = {  # what an installation with an extra is for
    "": [
        "ondevice.causal_lm.lean", "ondevice.speculation.bundled", "ondevice.speculation.custom_generate",
        "ondevice.speculation.layer_skipping", "ondevice.speculation.token_recycling", "ondevice_papers.diaa.warmup",
        "ondevice_papers.sdnpu.drafter", "ondevice_programs.graphs.__main__", "ondevice_programs.reranker.__main__",
    ],
    "pair": ["ondevice_programs.pair.__main__"],
    "router": ["ondevice_programs.reranker.server", "ondevice_programs.router.__main__"],
}  # fmt: skip


def isolated(folder: Path, extra: str, code: str) -> subprocess.CompletedProcess[str]:
    """Code in a Python that sees the distributions of the core and an extra alone."""
    asked = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(extra, [])]
    for name in {name for name, _ in reached(asked)}:
        tops = {file.parts[0] for file in metadata.files(name) or ()} - {"..", "__pycache__"}
        for top in tops:
            with contextlib.suppress(FileExistsError):  # of a namespace
                (folder / top).symlink_to(str(metadata.distribution(name).locate_file(top)))
    path = os.pathsep.join(map(str, (folder, ROOT / "lib")))
    words = [sys.executable, "-S", "-W", "ignore", "-c", code]
    return subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)


@pytest.mark.long  # each in a process that imports all of its programs
@pytest.mark.parametrize("extra", PARTS)
def test_an_extra_brings_what_its_programs_import(extra, tmp_path):
    made = isolated(tmp_path, extra, f"import {', '.join(PARTS[extra])}")
    assert made.returncode == 0, made.stderr


@pytest.mark.long  # processes
@pytest.mark.parametrize(("program", "words", "extra"), [
    ("ondevice-router", ["serve", "--budget", "0.3"], "router"), ("ondevice-pair", ["device"], "pair"),
    ("ondevice-rerank", ["serve", "--port", "0"], "router"), ("ondevice-run", [], "notebooks"),
])  # fmt: skip
def test_a_program_without_its_extra_says_which(program, words, extra, tmp_path):
    module, _, function = PROJECT["scripts"][program].partition(":")
    code = f"import sys; sys.argv[1:] = {words}; from {module} import {function}; sys.exit({function}())"
    made = isolated(tmp_path, "", code)
    (line,) = made.stderr.splitlines()
    assert made.returncode == 2 and not made.stdout and f'"ondevice[{extra}]"' in line
