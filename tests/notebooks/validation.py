"""nbval on a notebook, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ondevice.evidence.exhibits import MACHINE_VARIABLE
from ondevice.run import Layout

SANITIZE = Path(__file__).with_name("sanitize.cfg")


@dataclass(frozen=True)
class Validation:
    """What nbval said of a notebook: numbers of cells, and its output. exhibits: the folder that it saved them in."""

    passed: int
    failed: int
    output: str
    exhibits: Path


def publishing_machine(paper: str) -> str:
    """The name of the machine whose run published a notebook's exhibits: captions and inputs have it."""
    exhibit = min((Layout().figures / paper).glob("*.json"))
    return json.loads(exhibit.read_text(encoding="utf-8"))["machine"]["name"]


def validate(notebook: Path, scratch: Path, **more: str) -> Validation:
    """Run nbval on a notebook, with exhibits and pytest's own files in `scratch`; compares nbval-check-output cells.

    more: environment variables.
    """
    config = scratch / "pytest.ini"
    config.write_text("[pytest]\n")  # not the repository's: Jupyter's own warnings are no errors here
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(config),
        "--rootdir",
        str(scratch),
        "-p",
        "no:cacheprovider",
        "--nbval-lax",
        "--nbval-current-env",
        "--nbval-sanitize-with",
        str(SANITIZE),
        str(notebook),
    ]
    variables = {name: value for name, value in os.environ.items() if name not in ("MPLBACKEND", "PYTEST_ADDOPTS")}
    variables |= {"ONDEVICE_FIGURES": str(scratch / "figures"), "ONDEVICE_RESULT": str(scratch / "result.json")}
    variables[MACHINE_VARIABLE] = publishing_machine(notebook.stem)
    output = subprocess.run(command, env=variables | more, capture_output=True, text=True, check=False).stdout
    summary = output.strip().splitlines()[-1] if output.strip() else ""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|xfailed)\b", summary)}
    passed = counts.pop("passed", 0)
    return Validation(passed, sum(counts.values()), output, scratch / "figures" / notebook.stem)
