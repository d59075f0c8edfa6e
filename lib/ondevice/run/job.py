"""One run: a notebook with a set of parameters, the folders it reads and writes, and what its result is made from."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ondevice
from ondevice import assets, closure

SCOREBOARD = "scoreboard"  # the notebook that reads what the others published


class Layout:
    """The repository's folders below `root`; tests give another root."""

    def __init__(self, root: Path = assets.ROOT) -> None:
        self.root, self.runs, self.figures = root, root / "runs", root / "figures"
        self.notebooks, self.library, self.data = root / "notebooks", root / "lib", root / "data"

    def papers(self, named: Sequence[str] = ()) -> list[str]:
        """Names of the notebooks, or of those that are named, the scoreboard last."""
        papers = sorted(path.stem for path in self.notebooks.glob("*.ipynb"))
        if unknown := [name for name in named if name not in papers]:
            raise ValueError(f"There is no notebook for {', '.join(unknown)}. The papers: {', '.join(papers)}.")
        return sorted(set(named or papers), key=lambda name: (name == SCOREBOARD, name))

    def notebook(self, paper: str) -> Path:
        return self.notebooks / f"{paper}.ipynb"

    def parameter_file(self, paper: str, name: str) -> Path:
        return self.notebooks / "params" / f"{paper}.{name}.yaml"

    def relative(self, path: Path) -> str:
        """`path` as shown to the user: from the root where it lies below it."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


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
        """Where a finished run lies: twelve digits name a set of parameters, whatever their order."""
        text = json.dumps(self.parameters, sort_keys=True, default=str)
        return self.layout.runs / self.paper / hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def part(self) -> Path:
        """Where the run lies while it is under way, and after it has failed."""
        return self.folder.with_name(f"{self.folder.name}.part")

    @property
    def begun(self) -> Path:
        """What a run is made from; it lies there while a runner looks after the run, or was killed doing so."""
        return self.part / "begun.json"

    @property
    def log(self) -> Path:
        return self.part / "log.txt"

    def made_from(self) -> dict[str, str]:
        """The hashes of parameters, code and data: a result with the present ones stands."""
        return dict(parameters_hash=self.folder.name, fingerprint=fingerprint(self.layout, self.paper, self.parameters))

    def record(self) -> dict[str, Any] | None:
        """The record of a finished run of these parameters by the present code and data, or None."""
        record = read_record(self.folder / "result.json")
        return record if record and self.made_from().items() <= record.items() else None


def fingerprint(layout: Layout, paper: str, parameters: Mapping[str, Any] | None = None) -> str:
    """SHA-256 over what a paper's notebook uses: its code cells, the modules that they import, directly or through
    others, the versions of the packages that those import, and the data that they name.

    Data: the papers' lists, and each paper's tables, trace, record, prompt set or bundled model whose name stands as a
    string in that code or is a parameter's value; for a parameter that is a file or folder of the user's, its content.
    Prose, stored outputs and the runner itself do not count. For the scoreboard the published verdicts do, and the
    notebooks, to whose sections it links.
    """
    code = _code(layout, paper)
    uses = dependencies(layout, paper)
    values = [value for value in _flat(list((parameters or {}).values())) if isinstance(value, str)]
    names = {*uses.strings, *values}
    folders = [layout.data / name for name in ("paper", "traces", "records", "prompts")]
    named = [path for folder in folders for path in closure.named(folder, names)]
    named += (layout.data / "paper").glob("*.csv")
    files = {file for path in named for file in (path.rglob("*") if path.is_dir() else [path])}
    if paper == SCOREBOARD:
        files |= {*layout.figures.glob("*/claims.csv"), *layout.notebooks.glob("*.ipynb")} - {layout.notebook(paper)}
    paths = [layout.notebooks / os.path.expanduser(value) for value in values if value]  # a notebook runs in its folder
    own = [_content(path) for path in paths if os.path.exists(path)]  # without an error on a text that is no path
    facts = [
        ondevice.__version__,
        sys.version,
        closure.versions(uses.others),
        code,
        closure.code_hash(layout.library, uses.modules),
        _models(layout, names),
        own,
    ]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for path in sorted(filter(Path.is_file, files)):
        digest.update(f"\0{path.relative_to(layout.root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def dependencies(layout: Layout, paper: str) -> closure.Closure:
    """What a paper's code cells depend on. The scoreboard reads claims' rules, not what their values are made from."""
    leaves = r"ondevice_studies\.\w+\.claims" if paper == SCOREBOARD else ""
    return closure.closure(layout.library, [text for text, _ in _code(layout, paper)], leaves)


def _code(layout: Layout, paper: str) -> list[tuple[str, list[str]]]:
    """(text, tags) of a notebook's code cells."""
    cells = json.loads(layout.notebook(paper).read_text(encoding="utf-8"))["cells"]
    return [("".join(c["source"]), c["metadata"].get("tags", [])) for c in cells if c["cell_type"] == "code"]


def _models(layout: Layout, names: Set[str]) -> dict[str, str]:
    """The checksums of the named bundled models' files, and of weights that are named."""
    checksums = read_record(layout.data / "models" / "manifest.json") or {}
    return {
        file: checksum
        for file, checksum in checksums.items()
        if file.partition("/")[0].removesuffix(".safetensors") in names
    }


def _content(path: Path) -> list[tuple[str, str]]:
    """(name, checksum) of a file, or of each file of a folder."""
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return [(str(each.relative_to(path)), _checksum(each, assets.stamp(each))) for each in files if each.is_file()]


@cache
def _checksum(path: Path, stamp: tuple[int, ...]) -> str:
    """Of a file in this state, computed once a process."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flat(value: Any) -> list[Any]:
    return [item for each in value for item in _flat(each)] if isinstance(value, list) else [value]


def read_record(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None when the file is missing or holds anything else."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
