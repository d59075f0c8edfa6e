"""The named parts of a bench in one JSON file, from which an interrupted bench goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ondevice import assets

SCHEMA = 1
_NAMES = ("model", "command")  # what files are named in


def begun(path: Path | None, head: dict[str, Any]) -> dict[str, Any]:
    """The parts in a file, or new ones. head: the parts that must be the same to go on.

    `command` and the model's `spec` name files, which may have moved; their content counts, and the new names are kept.
    Raises ValueError where the file is no bench, or one of another head.
    """
    head = {"schema": SCHEMA, **head}
    if path is None or not path.is_file():
        return {**head, "complete": False, "seconds": {}, "unfinished": {}}
    parts = read(path)
    if not parts.keys() >= head.keys():
        raise ValueError(f"{path} is a bench of an earlier version, which kept less of its model: name another file.")
    if any(parts["model"].get(name) != head["model"].get(name) for name in ("sha256", "parameters")):
        raise ValueError(f"{path} has measured another model than {head['model']['spec']} is now: name another file.")
    other = [name for name in head if name not in _NAMES and parts[name] != head[name]]
    if other:
        raise ValueError(f"{path} is a bench of {parts['model']['spec']} with other {other[0]}: name another file.")
    return parts | {name: head[name] for name in _NAMES}


def save(path: Path | None, parts: dict[str, Any]) -> None:
    """Write the file, whole, where there is one."""
    if path is not None:
        assets.write_text(path, json.dumps(parts, indent=1 if parts["complete"] else None) + "\n")


def read(path: Path) -> dict[str, Any]:
    """The parts in a file. Raises ValueError, with one sentence, where it holds none of this schema."""
    try:
        parts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        parts = None
    kinds = {"model": dict, "machine": dict, "complete": bool, "seconds": dict}
    if isinstance(parts, dict) and not parts.get("complete"):
        kinds["unfinished"] = dict
    whole = isinstance(parts, dict) and all(isinstance(parts.get(name), kind) for name, kind in kinds.items())
    if not whole or parts.get("schema") != SCHEMA or "spec" not in parts["model"]:
        raise ValueError(f"{path} is not the JSON of a bench, schema {SCHEMA}: name another file.")
    return parts
