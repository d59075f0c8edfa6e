"""Source cells: their text is the library's, their free names are its objects, and filling spares what was edited."""

import ast
import json
import re

import nbformat
import pytest
from edits import EDITS
from sources import free_names, problems

from ondevice.run import Layout
from ondevice.run.edits import Edits, definitions, followed
from ondevice.run.sources import HASH, SourceError, definition, digest, fill, main

LIBRARY = '''"""A module."""

import functools
import math

RATE = 2


@functools.cache
def area(radius):
    """Of a circle."""
    return RATE * math.pi * radius**2  # a comment


def volume(radius):
    return area(radius) * radius


class Shape:
    def area(self):
        return 0
'''
AREA = LIBRARY[LIBRARY.index("@functools") : LIBRARY.index("\n\n\ndef volume")]


@pytest.fixture
def layout(tmp_path):
    layout = Layout(tmp_path)
    layout.library.joinpath("ondevice", "shapes").mkdir(parents=True)
    layout.library.joinpath("ondevice", "shapes", "circle.py").write_text(LIBRARY)
    layout.notebooks.mkdir()
    return layout


def write(layout, tags, source="", **metadata):
    cell = nbformat.v4.new_code_cell(source, id="a-cell", metadata={"tags": tags, **metadata})
    cell.outputs = [nbformat.v4.new_output("stream", text="kept é\n")]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), layout.notebook("small"))


def read(layout):
    return json.loads(layout.notebook("small").read_text())["cells"][0]


def refill(layout):
    return fill(layout.notebook("small"), layout.library)


def test_an_empty_cell_is_filled_with_decorators_and_comments(layout):
    write(layout, ["source:ondevice.shapes.circle.area", "other"])
    assert refill(layout) == ["a-cell"] and refill(layout) == []
    cell = read(layout)
    assert "".join(cell["source"]) == AREA and cell["metadata"][HASH] == digest(AREA)
    assert cell["outputs"][0]["text"] == ["kept é\n"]


def test_the_cell_follows_the_library_until_it_is_edited_by_hand(layout, capsys):
    write(layout, ["source:ondevice.shapes.circle.area", "source:ondevice.shapes.circle.volume"])
    refill(layout)
    module = layout.library / "ondevice" / "shapes" / "circle.py"
    module.write_text(LIBRARY.replace("RATE * math.pi", "math.pi"))
    assert main([], layout) is None and "small: filled a-cell" in capsys.readouterr().out
    now = "".join(read(layout)["source"])
    assert "return math.pi" in now and now.endswith("\n\n\ndef volume(radius):\n    return area(radius) * radius")
    contents = nbformat.read(layout.notebook("small"), as_version=4)
    contents.cells[0].source = now.replace("radius**2", "radius**3")
    nbformat.write(contents, layout.notebook("small"))
    before = layout.notebook("small").read_bytes()
    with pytest.raises(SystemExit) as end:
        main(["small"], layout)
    error = capsys.readouterr().err
    assert end.value.code == 2 and "a-cell was edited by hand" in error and "ondevice.shapes.circle.volume" in error
    assert layout.notebook("small").read_bytes() == before
    module.write_text(module.read_text().replace("radius**2", "radius**3"))  # the change was moved to the library
    assert refill(layout) == [] and "radius**3" in "".join(read(layout)["source"])


@pytest.mark.parametrize("name", ["ondevice.shapes.circle.RATE", "ondevice.shapes.circle.Shape.area", "area", "a.b.c"])
def test_a_tag_that_names_no_definition_is_an_error(layout, name):
    write(layout, [f"source:{name}"])
    with pytest.raises(SourceError, match="no function or class"):
        refill(layout)


def test_source_cells_are_the_library(notebook):
    found = problems(notebook)
    assert not found, "\n".join(found)


def a_notebook(before="from collections.abc import Iterator, Sequence", after="", change=str):
    """A notebook around one source cell of the real library."""
    name = "ondevice.batching.by_length"
    text = change(definition(Layout().library, name))
    metadata = {"tags": [f"source:{name}"], HASH: digest(text)}
    cells = [
        nbformat.v4.new_code_cell(before, id="before"),
        nbformat.v4.new_code_cell(text, id="by-length", metadata=metadata),
        nbformat.v4.new_code_cell(after, id="after"),
    ]
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({}, []),
        ({"before": "from __future__ import annotations"}, []),
        ({"after": "def f(batch):\n    Iterator = 1\n    return [Sequence for Sequence in batch]"}, []),
        ({"before": ""}, ["by-length: uses Iterator, which no earlier", "by-length: uses Sequence, which no earlier"]),
        ({"before": "from typing import Iterator\nfrom collections.abc import Sequence"}, ["uses another Iterator"]),
        ({"after": "for Sequence in range(2):\n    pass"}, ["uses Sequence, which after assigns"]),
        ({"change": lambda text: text.replace("most", "least")}, ["text is not the library's"]),
        ({"change": lambda text: text + "\n" * 60 + "sorted"}, ["text is not the library's", "more than 60 lines"]),
    ],
)
def test_each_fault_of_a_source_cell_is_found(tmp_path, arguments, found):
    nbformat.write(a_notebook(**arguments), tmp_path / "small.ipynb")
    said = problems(tmp_path / "small.ipynb")
    assert len(said) == len(found) and all(part in line for part, line in zip(found, said, strict=True)), said


def test_free_names_are_those_of_decorators_defaults_and_nested_functions():
    text = "@cache\ndef f(x: T = A) -> R:\n    y: U = x\n    return [g(x, y, len(z)) for z in B] + [lambda: C]"
    assert free_names(text) == {"cache", "T", "A", "R", "g", "B", "C"} | ({"U"} if "U" in free_names(text) else set())
    assert free_names(text, annotations=False) == {"cache", "A", "g", "B", "C"}


@pytest.mark.parametrize("paper", EDITS)
def test_what_an_edit_replaces_stands_once_in_its_cell(paper):
    """The long tests run the edits; this shows at once where a cell has moved on."""
    cells = {cell["id"]: cell.source for cell in nbformat.read(Layout().notebook(paper), 4).cells}
    assert [edit for edit in EDITS[paper] if cells[edit.cell].count(edit.old) != 1] == []
    assert [edit for edit in EDITS[paper] if edit.shown and edit.shown not in cells] == []


# Source definitions that no display shows beside the library's: a recorded sample or a table shows an edit of theirs.
ALONE = {
    "diaa": set(),
    "disco": {"components", "migrated", "scenario"},
    "grating": {"Resident", "WeightWindow", "chunks", "run_layer", "scaled"},
    "sdnpu": {"_spent", "best_shapes", "forward", "optimum", "per_token", "scheduling_instance"},
}


@pytest.mark.parametrize("paper", ALONE)
def test_an_edit_of_a_source_cell_is_shown_beside_the_library_s(paper):
    notebook = json.loads(Layout().notebook(paper).read_text())
    texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    calls = [node for text in texts for node in ast.walk(ast.parse(re.sub("(?m)^[%!].*", "", text)))
             if isinstance(node, ast.Call) and ast.unparse(node.func) == "edits.both"]  # fmt: skip
    written = definitions(texts)
    shown = set().union(*(followed(written, call.args[0].id) for call in calls))
    assert set(Edits(paper).names) - shown == ALONE[paper]
