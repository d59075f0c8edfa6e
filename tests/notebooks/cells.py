"""A notebook's code cells, run in this process one by one, so that a few can be run again with another text."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt


class Notebook:
    """Its code cells, run in this process, each from a state that was kept before it."""

    def __init__(self, path: Path, parameters: dict[str, Any]) -> None:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        self.texts = {cell["id"]: "".join(cell["source"]) for cell in cells}
        tagged = next(cell["id"] for cell in cells if "parameters" in cell["metadata"].get("tags", []))
        self.texts[tagged] += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
        self.sources = [c["id"] for c in cells if any(t.startswith("source:") for t in c["metadata"].get("tags", []))]
        self.before, self.said = {}, {}

    def run(self, names, state, texts=None):
        """Printed texts by cell; an error is printed text, too, and the last."""
        said = {}
        for name in names:
            printed = io.StringIO()
            self.before.setdefault(name, dict(state))
            try:
                with contextlib.redirect_stdout(printed):
                    exec(compile((texts or self.texts)[name], name, "exec", dont_inherit=True), state)
            except Exception as error:
                return said | {name: f"{printed.getvalue()}{type(error).__name__}: {error}"}
            finally:
                plt.close("all")
            said[name] = printed.getvalue()
        return said

    def span(self, first, last):
        names = list(self.texts)
        return names[names.index(first) : names.index(last) + 1]
