"""Copies of the notebooks to work on: `python -m ondevice.run.lab` makes them in runs/lab/, for `make lab`."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from ondevice import assets, commands
from ondevice.run.job import Layout, read_record

PROGRAM = "python -m ondevice.run.lab"
COPIED = ".copied.json"  # SHA-256 of each file as it was copied: a copy with another one has been edited


def copy_notebooks(layout: Layout) -> list[str]:
    """Copy notebooks and parameter files to runs/lab/ and return a line for each copy that stays, since it was edited.

    A copy that nobody has edited follows its original. Raises OSError where runs/lab/ cannot be written.
    """
    folder = layout.runs / "lab"
    copied = read_record(folder / COPIED) or {}
    lines = []
    for original in sorted([*layout.notebooks.glob("*.ipynb"), *layout.notebooks.glob("params/*.yaml")]):
        name = original.relative_to(layout.notebooks).as_posix()
        copy = folder / name
        if copy.is_file() and _digest(copy) != copied.get(name):
            newer = "; its original has changed since" if _digest(original) != copied.get(name) else ""
            lines.append(f"{layout.relative(copy)}: your edited copy is kept{newer}. Delete it for a new one.")
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        with assets.writing(copy) as temporary:
            shutil.copyfile(original, temporary)
        copied[name] = _digest(original)
    assets.write_text(folder / COPIED, json.dumps(copied, indent=1) + "\n")
    return lines


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(layout: Layout | None = None) -> None:
    """Copy the notebooks and their parameter files to runs/lab/; copies that were edited stay as they are."""
    commands.no_arguments(PROGRAM, main.__doc__ or "")
    with commands.refusing(PROGRAM):
        for line in copy_notebooks(layout or Layout()):
            print(line)


if __name__ == "__main__":
    main()
