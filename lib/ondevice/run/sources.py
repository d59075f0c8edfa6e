"""Source cells: notebook cells that hold a definition of the library. The library is the master.

A code cell tagged `source:ondevice_papers.diaa.tree.grow` holds that function, decorators included; several tags,
several definitions. The metadata `source_sha256` says what text it was filled with, so a cell that was edited by hand
is noticed and left alone.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ondevice import assets, commands
from ondevice.run.job import Layout

TAG = "source:"
HASH = "source_sha256"


class SourceError(ValueError):
    """A source cell that cannot be filled; the message says why and what to do."""


def names(cell: dict[str, Any]) -> list[str]:
    """The definitions that a cell of a notebook is tagged with."""
    return [tag.removeprefix(TAG) for tag in cell["metadata"].get("tags", []) if tag.startswith(TAG)]


def definition(library: Path, name: str) -> str:
    """The text of <package>.<module>.<name>, a function or class at the top of its module, decorators included.

    library: the folder with the packages. Raises SourceError.
    """
    module, _, last = name.rpartition(".")
    path = library.joinpath(*module.split(".")).with_suffix(".py")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == last:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise SourceError(f"the library has no function or class {name} at the top of a module")


def filled(library: Path, cell: dict[str, Any]) -> str:
    """The text that a source cell should have."""
    return "\n\n\n".join(definition(library, name) for name in names(cell))


def fill(notebook: Path, library: Path) -> list[str]:
    """Fill a notebook's source cells from the library; return the ids of those that changed.

    Outputs of all cells stay. Raises SourceError where a cell was edited by hand, and then writes nothing.
    """
    contents = json.loads(notebook.read_text(encoding="utf-8"))
    before = json.dumps(contents)
    changed = []
    for cell in filter(names, contents["cells"]):
        text = filled(library, cell)
        now = "".join(cell["source"])
        if now != text:
            if now.strip() and digest(now) != cell["metadata"].get(HASH):
                what = f"Move the change into {' and '.join(names(cell))}, or empty it to get the library's text back."
                raise SourceError(f"{notebook.name}: its cell {cell['id']} was edited by hand. {what}")
            cell["source"] = text.splitlines(keepends=True)
            changed.append(cell["id"])
        cell["metadata"][HASH] = digest(text)
    if json.dumps(contents) != before:
        assets.write_text(notebook, json.dumps(contents, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    return changed


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main(arguments: Sequence[str] | None = None, layout: Layout | None = None) -> None:
    """Fill the source cells of notebooks from the library."""
    layout = layout or Layout()
    program = "python -m ondevice.run.sources"
    parser = commands.Parser(program, description=main.__doc__, example=f"{program} diaa")
    parser.add_argument("papers", nargs="*", metavar="paper", help="notebooks (default: all)")
    named = parser.parse_args(arguments).papers
    with commands.refusing(program):
        for paper in layout.papers(named):
            for cell in fill(layout.notebook(paper), layout.library):
                print(f"{paper}: filled {cell}")


if __name__ == "__main__":
    main(sys.argv[1:])
