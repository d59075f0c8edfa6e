"""The named parts of a bench in one JSON file, from which an interrupted bench goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ondevice import assets

SCHEMA = 1


def begun(path: Path | None, head: dict[str, Any]) -> dict[str, Any]:
    """The parts in a file, or new ones. head: the parts that must be the same to go on, with `model` and its `spec`.

    Raises ValueError where the file is no bench, or one of another head.
    """
    head = {"schema": SCHEMA, **head}
    if path is None or not path.is_file():
        return {**head, "complete": False, "seconds": {}, "unfinished": {}}
    parts = read(path)
    other = [name for name in head if parts.get(name) != head[name]]
    if other:
        raise ValueError(f"{path} is a bench of {parts['model']['spec']} with another {other[0]}: name another file.")
    return parts


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
    if not isinstance(parts, dict) or parts.get("schema") != SCHEMA or "spec" not in parts.get("model", ()):
        raise ValueError(f"{path} is not the JSON of a bench, schema {SCHEMA}: name another file.")
    return parts
