"""environment.yml is a thin shell around pyproject.toml, which alone lists dependencies."""

import re
import tomllib

import yaml

from ondevice.assets import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())


def test_environment_yml_adds_no_dependency():
    conda = [entry for entry in ENVIRONMENT["dependencies"] if isinstance(entry, str)]
    pip = [entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict)]
    assert sorted(re.split(r"[<>=]", entry)[0] for entry in conda) == ["pip", "python"]
    assert [[line for line in lines if not line.startswith("--extra-index-url")] for lines in pip] == [["-e .[dev]"]]
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
