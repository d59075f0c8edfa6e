"""environment.yml is a thin shell around pyproject.toml, which alone lists dependencies."""

import re
import tomllib

import yaml
from packaging.requirements import Requirement
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


def test_conda_takes_the_pythons_that_ci_tries():
    [python] = [entry for entry in ENVIRONMENT["dependencies"] if str(entry).startswith("python")]
    tried = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    minors = sorted(int(version.partition(".")[2]) for version in tried["python"])
    assert python == f"python>=3.{minors[0]},<3.{minors[-1] + 1}"
    assert PROJECT["requires-python"] == f">=3.{minors[0]}"


def test_the_lock_has_what_pyproject_asks_for():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}
    extras = PROJECT["optional-dependencies"]
    lists = [PROJECT["dependencies"], *(extras[name] for name in extras if name != "peers")]  # which are built
    names = {re.split(r"[\[<>=]", entry)[0].lower() for asked in lists for entry in asked} - {PROJECT["name"]}
    assert names <= set(locked) and all(locked.values())


def test_the_set_up_finds_one_pin_of_torch():
    assert len(re.findall(r"torch==[0-9.]*", (ROOT / "pyproject.toml").read_text())) == 1


def test_of_two_builds_of_torch_pip_takes_the_one_for_cpus():
    """environment.yml adds an index with CPU builds; both the pin and the lock must allow them, and they sort above."""
    [pin] = [Requirement(entry) for entry in PROJECT["dependencies"] if entry.startswith("torch")]
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    [locked] = [Requirement(line) for line in lock if line.startswith("torch==")]
    [version] = [Version(one.version) for one in pin.specifier]
    builds = [version, Version(f"{version}+cpu")]
    assert [*locked.specifier.filter(pin.specifier.filter(builds))] == builds and max(builds) == builds[1]


WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}


def test_the_lock_is_tried_every_week_and_audited():
    weekly = WORKFLOWS["weekly"]
    assert weekly[True]["schedule"]  # YAML's "on"
    assert {"locked", "newest"} <= set(weekly["jobs"]["versions"]["strategy"]["matrix"]["versions"])
    steps = [step.get("run", "") for step in WORKFLOWS["test"]["jobs"]["audit"]["steps"]]
    assert any("pip-audit" in step and "-r requirements.lock" in step for step in steps)
    assert "pip-audit" not in (ROOT / "pyproject.toml").read_text()
