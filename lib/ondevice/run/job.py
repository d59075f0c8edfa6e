"""One run: a notebook with a set of parameters, and the folder that holds what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ondevice.run.fingerprint import fingerprint, parameters_hash
from ondevice.run.layout import Layout


@dataclass(frozen=True)
class Job:
    """What to run; plain data, so that it travels to another process or machine.

    parameters: every parameter with its value. changed: those that differ from the notebook's defaults.
    timeout: seconds for the whole notebook, None for no limit. threads: of each numeric library, None for its default.
    stop: the run ends as soon as this file exists, wherever it runs.
    """

    paper: str
    parameters: Mapping[str, Any]
    changed: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout = field(default_factory=Layout)
    timeout: float | None = None
    threads: int | None = None
    stop: Path | None = None

    @property
    def name(self) -> str:
        """`disco`, or `disco seed=1` for a run whose parameters differ from the defaults."""
        return " ".join([self.paper, *(f"{name}={value}" for name, value in self.changed.items())])

    @property
    def folder(self) -> Path:
        """Where a finished run lies."""
        return self.layout.runs / self.paper / parameters_hash(self.parameters)

    @property
    def part(self) -> Path:
        """Where the run lies while it is under way, and after it has failed."""
        return self.folder.with_name(f"{self.folder.name}.part")

    @property
    def log(self) -> Path:
        return self.part / "log.txt"

    def record(self) -> dict[str, Any] | None:
        """The record of a finished run of these parameters by the present code and data, or None."""
        record = read_record(self.folder / "result.json")
        if record is None or record.get("parameters_hash") != parameters_hash(self.parameters):
            return None
        return record if record.get("fingerprint") == fingerprint(self.layout, self.paper) else None


def read_record(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None when the file is missing or holds anything else."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
