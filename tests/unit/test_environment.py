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
    assert pip == [["-e .[dev]"]] and "dev" in PROJECT["optional-dependencies"]
    assert ENVIRONMENT["name"] == PROJECT["name"]


def test_both_ask_for_the_same_python():
    [python] = [entry for entry in ENVIRONMENT["dependencies"] if str(entry).startswith("python")]
    assert python == f"python{PROJECT['requires-python']}"


def test_the_set_up_finds_one_pin_of_torch():
    assert len(re.findall(r"torch==[0-9.]*", (ROOT / "pyproject.toml").read_text())) == 1
