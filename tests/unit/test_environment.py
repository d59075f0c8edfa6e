"""environment.yml is a thin shell around pyproject.toml, which alone lists dependencies."""

import contextlib
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

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


def test_of_two_builds_of_torch_pip_takes_the_one_for_cpus():
    """The set-up and environment.yml add an index of CPU builds: range and lock allow them, and they sort above."""
    [asked] = [Requirement(entry) for entry in PROJECT["dependencies"] if entry.startswith("torch")]
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    [locked] = [Requirement(line) for line in lock if line.startswith("torch==")]
    [version] = [Version(specifier.version) for specifier in locked.specifier]
    builds = [version, Version(f"{version}+cpu")]
    assert [*locked.specifier.filter(asked.specifier.filter(builds))] == builds and max(builds) == builds[1]
    [line] = [line for lines in ENVIRONMENT["dependencies"] if isinstance(lines, dict)
              for line in lines["pip"] if line.startswith("--extra-index-url")]  # fmt: skip
    assert f"cpu={line.split()[1]}\n" in (ROOT / ".ci/setup").read_text()


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


@pytest.mark.long  # each in a process that imports all of its programs
@pytest.mark.parametrize("extra", PARTS)
def test_an_extra_brings_what_its_programs_import(extra, tmp_path):
    """Python sees the distributions of the core and the extra alone."""
    asked = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(extra, [])]
    for name in {name for name, _ in reached(asked)}:
        tops = {file.parts[0] for file in metadata.files(name) or ()} - {"..", "__pycache__"}
        for top in tops:
            with contextlib.suppress(FileExistsError):  # of a namespace
                (tmp_path / top).symlink_to(str(metadata.distribution(name).locate_file(top)))
    words = [sys.executable, "-S", "-W", "ignore", "-c", f"import {', '.join(PARTS[extra])}"]
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "lib")))
    made = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
