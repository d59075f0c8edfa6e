"""How a record was made: the fields of the sidecar beside it, where they come from, and the seal over them.

A field that nobody can tell any more, of a record made before sidecars had it, is "unknown".
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ondevice import assets
from ondevice.closure import closure, versions
from ondevice.evidence.code import code_hash
from ondevice.evidence.exhibits import as_json, environment

UNKNOWN = "unknown"
FIELDS = (  # parts: of each process, when it began, its minutes and what was busy beside it; beside: what is at the end
    "command", "parameters", "models", "corpus", "machine", "processor", "cores", "versions", "python", "program",
    "code", "commit", "dirty", "keys", "minutes", "parts", "beside", "rows", "units", "seal",
)  # fmt: skip
BUSY = 0.2  # cores; a process that takes more is busy
_LIBRARY = Path(__file__).resolve().parents[2]


def made_by(names: Mapping[str, Any], functions: Sequence[Callable[..., Any] | str] = ()) -> dict[str, Any]:
    """The fields that say which program makes a record, with what, and where.

    names: the globals of that program. functions: those that make the record's rows, and classes, or their names as
    `module:name`; without any, all of the program, whose code is unknown where it is not the library's.
    """
    program = "+".join(map(_name, functions)) if functions else _program(names)
    reached = code(program)
    if functions and not reached:
        raise ValueError(f"A record cannot be of {program}: a part of it is not in the library.")
    here = environment()
    return {
        "processor": here["machine"]["processor"],
        "cores": here["machine"]["cores"],
        "versions": dict(versions(_packages(_LIBRARY, program))),
        "python": here["python"],
        "program": program,
        "code": reached or UNKNOWN,
    }


@functools.cache
def code(program: str, library: Path = _LIBRARY) -> str:
    """A hash of the code that a program reaches (`code_hash`). library: the folder with the packages (lib/)."""
    return code_hash(library, program)


@functools.cache
def checkout() -> tuple[str, bool]:
    """(commit, whether files differ from it), when first asked for: the code that runs is that of the start.

    Records may differ, as a run of several adds to them. Outside a checkout the commit is "unknown".
    """
    commit = _git("rev-parse", "HEAD")
    return commit or UNKNOWN, bool(_git("status", "--porcelain", "--", ".", ":!data/records"))


def busy(seconds: float = 0.1) -> dict[str, Any]:
    """How many processes other than this one and its children are busy for so many seconds, and their names."""
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    others = [process for process in psutil.process_iter(["name"]) if process.pid not in own]
    taken = []
    for wait in (seconds, 0.0):  # the first call begins the count
        taken = [(process.info["name"], _percent(process)) for process in others]
        time.sleep(wait)
    names = sorted(name for name, percent in taken if percent > 100 * BUSY)
    return {"processes": len(names), "names": names}


def write(path: Path, origin: Mapping[str, Any]) -> Path:
    """Write a record's sidecar with its seal; returns its path. origin: all fields but the seal."""
    assets.write_text(path.with_suffix(".json"), as_json({**origin, "seal": seal(origin, path)}))
    return path.with_suffix(".json")


def seal(origin: Mapping[str, Any], path: Path) -> str:
    """SHA-256 over all other fields of a sidecar and the bytes of its record.

    It stops edits by hand, not somebody who computes it anew: against that there are tests of what records must hold.
    """
    fields = {field: value for field, value in json.loads(as_json(origin)).items() if field != "seal"}
    return digest([fields, sha256(path)])


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest(content: Any) -> str:
    """SHA-256 over what JSON can hold, in one order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _program(names: Mapping[str, Any]) -> str:
    """The dotted name of the module with these globals; of a script its path below the checkout, or its name."""
    if spec := names.get("__spec__"):
        return str(spec.name)
    path = Path(names.get("__file__", names["__name__"])).resolve()
    return path.relative_to(assets.ROOT).as_posix() if path.is_relative_to(assets.ROOT) else path.name


def _name(function: Callable[..., Any] | str) -> str:
    """`module:name`, the module by its file's name where it is run as a program."""
    if isinstance(function, str):
        return function
    return f"{_program(vars(sys.modules[function.__module__]))}:{function.__qualname__}"


@functools.cache
def _packages(library: Path, program: str) -> frozenset[str]:
    """Top-level names of the packages from elsewhere that a program's modules import."""
    parts = [part.partition(":")[0] for part in program.split("+")]
    scripts = [library.parent / part for part in parts]
    texts = [script.read_text(encoding="utf-8") for script in scripts if script.is_file()]
    imports = [f"import {part}" for part in parts if part.replace(".", "_").isidentifier()]
    return closure(library, [*texts, *imports]).others


def _percent(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):  # it has ended
        return float(process.cpu_percent())
    return 0.0


def _git(*words: str) -> str:
    run = subprocess.run(["git", "-C", str(assets.ROOT), *words], capture_output=True, text=True, check=False)
    return run.stdout.strip()
