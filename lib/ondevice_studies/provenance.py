"""Completes sidecars that were made before they were sealed: `python -m ondevice_studies.provenance`.

What nobody can tell any more becomes "unknown", and so does a commit that the history has not. The records stay as they
are, so a second run changes nothing. A record of unknown origin is mended by `make record` alone.
"""

from __future__ import annotations

import functools
import io
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from ondevice import assets, commands
from ondevice.evidence import sidecars
from ondevice.evidence.records import RecordError, enter, folder
from ondevice.evidence.sidecars import FIELDS, UNKNOWN

# Records that were not left as their recorder wrote them, by what their notes and the history of their files say.
EDITED = {
    "diaa/answers": "parts of several processes were joined, and the column stored was added, by a script of its own",
    "grating/scores": "rows of agents' tasks by the two decoders were removed",
    "scoreboard/first": "put together from earlier claims.csv by git show, as its command says",
}
UNTIMED = ("scoreboard/first",)  # its 0.0 minutes count writing alone


def ancestor(commit: str) -> str:
    """The whole name of a commit that HEAD descends from; empty for any other."""
    command = ["git", "-C", str(assets.ROOT), "merge-base", "--is-ancestor", commit, "HEAD"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return ""
    return _git("rev-parse", f"{commit}^{{commit}}").decode().strip()


@functools.cache
def code_at(commit: str, program: str) -> str:
    """`sidecars.code` of a program as it was at a commit; "unknown" where the commit has not all parts of it."""
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, "lib", "tests"))) as archive:
            archive.extractall(scratch, filter="data")
        library = Path(scratch, "lib")
        modules = [library.joinpath(*name.split(".")).with_suffix(".py") for name in program.split("+")]
        exists = all(module.is_file() for module in modules) or Path(scratch, program).is_file()
        return sidecars.code(program, library) if exists else UNKNOWN


def program_of(command: str, paper: str) -> str:
    """The module behind an earlier edition's command, whose common recorder called the one of a paper."""
    module = re.search(r"-m (\S+)", command)
    if module and module[1] != "ondevice.evidence.record":
        return module[1]
    return f"ondevice.{paper}.record" if command.startswith("python") else UNKNOWN


def completed(name: str, origin: Mapping[str, Any], table: pd.DataFrame) -> dict[str, Any]:
    """A sidecar with every field but the seal. name: paper/record. origin: as it is."""
    named = origin.get("commits") or [origin["commit"]]
    ancestors = [ancestor(commit.removesuffix("-dirty")) for commit in named]
    history = sorted({commit for commit in ancestors if commit})
    dirty = any(commit.endswith("-dirty") for commit in named)
    program = program_of(origin["command"], name.split("/")[0])
    clean = len(named) == 1 and history and not dirty
    cores = re.search(r"-(\d+)c$", origin["machine"])
    guessed = {
        **dict.fromkeys(FIELDS[:-1], UNKNOWN),
        "cores": int(cores[1]) if cores else UNKNOWN,
        "dirty": dirty,
        "program": program,
        "code": code_at(history[0], program) if clean else UNKNOWN,
    }
    checked = {
        "commit": UNKNOWN if not history else history if len(named) > 1 else history[0],
        "rows": len(table),
        "units": len(table[origin["keys"]].drop_duplicates()),
    }
    older = "commits" in origin  # a newer one was made since, and is as its recorder wrote it
    if older and name in UNTIMED:
        checked["minutes"] = UNKNOWN
    if older and name in EDITED:
        checked["edited"] = EDITED[name]
    return {**guessed, **{field: value for field, value in origin.items() if field != "seal"}, **checked}


def main() -> None:
    """The command."""
    manifest = folder() / "manifest.json"
    listed = manifest.read_text(encoding="utf-8") if manifest.is_file() else ""
    for file in sorted(folder().glob("*/*.*")):
        name = file.relative_to(folder()).with_suffix("").as_posix()
        if file.suffix != ".json":
            table = pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file, keep_default_na=False)
            origin = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
            if "seal" in origin and origin["seal"] != sidecars.seal(origin, file):
                raise RecordError(f"data/records/{name} was edited since it was sealed: git checkout restores it.")
            beside = sidecars.write(file, completed(name, origin, table))
            enter(file, sidecar=sidecars.sha256(beside), rows=len(table))
        elif f'"{name}.json"' not in listed and not [*file.parent.glob(f"{file.stem}.[pc]*")]:
            enter(file)


def _git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(assets.ROOT), *words], capture_output=True, check=True).stdout


if __name__ == "__main__":
    with commands.refusing("python -m ondevice_studies.provenance"):
        main()
