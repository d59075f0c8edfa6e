"""What a result was made from, as hashes: while they stay the same, the result stands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ondevice
from ondevice.run.layout import SCOREBOARD, Layout


def parameters_hash(parameters: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that name a set of parameters, whatever their order."""
    return hashlib.sha256(json.dumps(parameters, sort_keys=True, default=str).encode()).hexdigest()[:12]


def fingerprint(layout: Layout, paper: str) -> str:
    """SHA-256 over the library version, the modules and data that a paper's notebook may use, and its code cells.

    Other papers' packages and the runner itself do not count; for the scoreboard the published results do.
    """
    digest = hashlib.sha256(ondevice.__version__.encode())
    for path in (*_modules(layout, paper), *_data(layout), *_published(layout, paper)):
        digest.update(f"\0{path.relative_to(layout.root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    digest.update(_code(layout.notebook(paper)))
    return digest.hexdigest()


def _modules(layout: Layout, paper: str) -> Iterator[Path]:
    others = {*layout.papers(), "run"} - {paper}
    for path in sorted(layout.library.rglob("*.py")):
        if path.relative_to(layout.library).parts[0] not in others:
            yield path


def _data(layout: Layout) -> Iterator[Path]:
    for folder in ("paper", "traces"):
        yield from sorted(path for path in (layout.data / folder).rglob("*") if path.is_file())
    manifest = layout.data / "models" / "manifest.json"  # the checksums of all bundled models
    if manifest.is_file():
        yield manifest


def _published(layout: Layout, paper: str) -> Iterator[Path]:
    if paper == SCOREBOARD:
        for name in ("claims.csv", "exhibits.csv"):
            yield from sorted(path for path in layout.figures.glob(f"*/{name}") if path.parent.name != SCOREBOARD)


def _code(notebook: Path) -> bytes:
    """The code cells with their tags: prose and stored outputs do not change a result."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [["".join(c["source"]), c["metadata"].get("tags", [])] for c in cells if c["cell_type"] == "code"]
    return json.dumps(code).encode()
