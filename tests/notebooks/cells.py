"""A notebook's code cells, run in this process one by one, so that a few can be run again with another text."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
from typing import Any

import matplotlib.pyplot as plt
from sources import assigned, free_names

from ondevice.run import Layout


class Notebook:
    """Its code cells, run in this process, each from a state that was kept before it."""

    def __init__(self, paper: str, parameters: dict[str, Any]) -> None:
        self.paper = paper
        text = Layout().notebook(paper).read_text()
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        self.texts = {cell["id"]: "".join(cell["source"]) for cell in cells}
        tagged = next(cell["id"] for cell in cells if "parameters" in cell["metadata"].get("tags", []))
        self.texts[tagged] += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
        self.sources = [c["id"] for c in cells if any(t.startswith("source:") for t in c["metadata"].get("tags", []))]
        self.before, self.said, self.tables = {}, {}, {}

    def run(self, names, state, texts=None):
        """Printed texts by cell; an error is printed text, too, and the last."""
        said = {}
        for name in names:
            printed = io.StringIO()
            self.before.setdefault(name, dict(state))
            text = (texts or self.texts)[name]
            state["In"] = [*state.get("In", ()), text]  # as a kernel has it
            try:
                with contextlib.redirect_stdout(printed):
                    exec(compile(text, name, "exec", dont_inherit=True), state)
            except Exception as error:
                return said | {name: f"{printed.getvalue()}{type(error).__name__}: {error}"}
            finally:
                plt.close("all")
            said[name] = printed.getvalue()
        return said

    def span(self, first, last):
        names = list(self.texts)
        return names[names.index(first) : names.index(last) + 1]

    def needed(self, cell):
        """The cells that a cell's names come from, in their order, and the cell itself."""
        names, wanted = [], set()
        for name in reversed(self.span(next(iter(self.texts)), cell)):
            reads, binds = names_of(self.texts[name])
            if name == cell or wanted & binds:
                names.append(name)
                wanted = wanted - binds | reads
        return names[::-1]

    def leave(self, kept):
        """Of the cells, so many; the others do nothing."""
        self.texts = {name: text if name in kept else "pass" for name, text in self.texts.items()}

    def begin(self, last):
        """Run the cells up to one; none may fail."""
        state = {"__name__": "__main__"}
        self.said = self.run(self.span(next(iter(self.texts)), last), state)
        failed = {name: text for name, text in self.said.items() if "Error: " in text}
        assert not failed and last in self.said
        live = state.get("live")
        self.tables = dict(live) if isinstance(live, dict) else {}  # DRAGON's is a function
        return self

    def edited(self, cell, old, new):
        """All texts, one of them with an edit."""
        assert self.texts[cell].count(old) == 1
        return self.texts | {cell: self.texts[cell].replace(old, new)}

    def again(self, cell, old, new, shown):
        """What the cells from an edited one to another print."""
        return self.run(self.span(cell, shown), dict(self.before[cell]), self.edited(cell, old, new))

    def to_the_end(self, cell, old, new):
        """Run the cells from an edited one to the notebook's last; none may fail."""
        texts = self.edited(cell, old, new) | {"end": "print('the end')"}
        rest = self.span(cell, list(self.texts)[-1])
        printed = self.run([*rest, "end"], dict(self.before[cell]), texts)
        last = list(printed)[-1]
        assert printed.get("end") == "the end\n", f"{last}: {printed[last][-2000:]}"

    def live(self, first, last, texts=None):
        """The tables that the cells from one to another leave in `live`, run once more."""
        state = dict(self.before[first]) | {"live": dict(self.before[first]["live"])}
        printed = self.run(self.span(first, last), state, texts)
        assert "Error: " not in printed[list(printed)[-1]], printed
        return state["live"]


@functools.cache
def names_of(text):
    """The names that a cell reads from earlier ones, and those that it binds."""
    reads, binds = set(), set()
    lines = [line for line in text.splitlines() if not line.startswith(("%", "!"))]
    for statement in ast.parse("\n".join(lines)).body:
        code = ast.unparse(statement)
        nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Import | ast.ImportFrom)]
        own = assigned(code) | {alias.asname or alias.name.partition(".")[0] for node in nodes for alias in node.names}
        first = isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr)  # what it reads is older
        reads |= free_names(code) - binds - (set() if first else own)
        binds |= own
    return reads, binds
