"""The folders that a run reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ondevice import assets

SCOREBOARD = "scoreboard"  # the notebook that reads what the others published, so it runs after them


@dataclass(frozen=True)
class Layout:
    """The repository's folders below `root`; tests give another root."""

    root: Path = assets.ROOT

    @property
    def notebooks(self) -> Path:
        return self.root / "notebooks"

    @property
    def figures(self) -> Path:
        return self.root / "figures"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def library(self) -> Path:
        return self.root / "lib" / "ondevice"

    @property
    def data(self) -> Path:
        return self.root / "data"

    def papers(self) -> list[str]:
        """Names of the notebooks, the scoreboard last."""
        names = (path.stem for path in self.notebooks.glob("*.ipynb"))
        return sorted(names, key=lambda name: (name == SCOREBOARD, name))

    def notebook(self, paper: str) -> Path:
        return self.notebooks / f"{paper}.ipynb"

    def parameter_file(self, paper: str, name: str) -> Path:
        return self.notebooks / "params" / f"{paper}.{name}.yaml"

    def relative(self, path: Path) -> str:
        """`path` as shown to the user: from the root where it lies below it."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)
