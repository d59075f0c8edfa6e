"""nbval on a notebook, in a process of its own; copies with the compared cells alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat

SANITIZE = Path(__file__).with_name("sanitize.cfg")
COMPARED = "nbval-check-output"
FULL = "check:full"  # on a compared cell: what it prints depends on cells that take minutes
SET_UP = ("parameters", "checked", "imports", "setup")


@dataclass(frozen=True)
class Validation:
    """What nbval said of a notebook: numbers of cells, and its output."""

    passed: int
    failed: int
    output: str


def validate(notebook: Path, scratch: Path) -> Validation:
    """Run nbval on a notebook, with exhibits and pytest's own files in `scratch`; compares nbval-check-output cells."""
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
    output = subprocess.run(command, env=variables, capture_output=True, text=True, check=False).stdout
    summary = output.strip().splitlines()[-1] if output.strip() else ""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|xfailed)\b", summary)}
    passed = counts.pop("passed", 0)
    return Validation(passed, sum(counts.values()), output)


def compared_cells(notebook: Path, folder: Path) -> Path:
    """A copy with the set-up and the compared cells alone, less those whose outputs need the whole run (check:full)."""
    contents = nbformat.read(notebook, as_version=4)
    contents.cells = [
        cell
        for cell in contents.cells
        if cell.id in SET_UP or (COMPARED in (tags := cell.metadata.get("tags", [])) and FULL not in tags)
    ]
    nbformat.write(contents, folder / notebook.name)
    return folder / notebook.name
