"""The hash of the code behind a record: what changes it, and what does not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ondevice import assets
from ondevice.evidence import sidecars
from ondevice.evidence.code import code_hash

MAKER = '''"""A program."""
from lab import tools
from lab.numbers import SIZE as WIDTH, Box
from lab.names import measured

def rows(count: int) -> list:
    """Some rows."""
    return [measured(tools.doubled(number)) + WIDTH for number in range(count)]

def chart():
    return tools.unused()

if __name__ == "__main__":
    print(rows(3))
'''
FILES = {
    "maker.py": MAKER,
    "tools.py": "STEP = 2\ndef doubled(number):\n    return STEP * number\ndef unused():\n    return 0\n",
    "numbers.py": "SIZE = 5\nclass Box:\n    def volume(self):\n        return SIZE ** 3\n",
    "names.py": "from lab.depth import measured\n",
    "depth.py": "def measured(number):\n    from lab import late\n    return late.scaled(number)\n",
    "late.py": "TABLE = {'round': 'lab.rounding:nearest'}\ndef scaled(number):\n    return TABLE, number\n",
    "rounding.py": "def nearest(number):\n    return round(number)\ndef up(number):\n    return -(-number // 1)\n",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "lib" / "lab").mkdir(parents=True)
    for name, text in {"__init__.py": "", **FILES}.items():
        (tmp_path / "lib" / "lab" / name).write_text(text)
    return tmp_path / "lib"


def edited(library: Path, file: str, old: str, new: str) -> str:
    """The hash of `rows` after an edit."""
    path = library / "lab" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    path.touch()
    return code_hash(library, "lab.maker:rows")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("maker.py", "in range(count)", "in range(1, count)"),
        ("tools.py", "STEP * number", "STEP * number + 1"),
        ("tools.py", "STEP = 2", "STEP = 3"),
        ("numbers.py", "SIZE = 5", "SIZE = 6"),
        ("depth.py", "late.scaled(number)", "late.scaled(-number)"),
        ("late.py", "TABLE, number", "number, TABLE"),
        ("rounding.py", "return round(number)", "return round(number, 1)"),
        ("names.py", "lab.depth import", "lab.rounding import up as"),
    ],
    ids=["itself", "module.function", "a constant", "renamed import", "behind a re-export", "imported inside",
         "named by a string", "another function"],
)  # fmt: skip
def test_what_a_function_reaches_changes_its_hash(library: Path, file: str, old: str, new: str):
    before = code_hash(library, "lab.maker:rows")
    assert edited(library, file, old, new) != before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("maker.py", '"""Some rows."""', '"""Rows, by number."""  # as before'),
        ("maker.py", "count: int) -> list", "count: float) -> tuple"),
        ("maker.py", "return tools.unused()", "return 1"),
        ("maker.py", "print(rows(3))", "print(rows(4))"),
        ("tools.py", "return 0", "return 1"),
        ("numbers.py", "SIZE ** 3", "SIZE ** 2"),
        ("rounding.py", "-(-number // 1)", "number"),
    ],
    ids=["words", "annotations", "another function", "the command", "what is not used", "a class that is not used",
         "beside what a string names"],
)  # fmt: skip
def test_what_it_does_not_reach_leaves_the_hash(library: Path, file: str, old: str, new: str):
    before = code_hash(library, "lab.maker:rows")
    assert edited(library, file, old, new) == before


def test_a_local_name_is_not_the_modules(library: Path):
    before = edited(library, "maker.py", "def rows(count: int)", "def rows(count, chart=0)")
    assert edited(library, "maker.py", "return tools.unused()", "return 1") == before


def test_a_default_of_the_same_name_is_the_modules(library: Path):
    """As of all functions here that an experiment can put another one in."""
    before = edited(library, "maker.py", "def rows(count: int)", "def rows(count, *, measured=measured)")
    assert edited(library, "late.py", "TABLE, number", "number, TABLE") != before


def test_a_module_counts_whole_after_a_part_of_it(library: Path):
    program = "lab.tools:doubled+lab.tools"
    before = code_hash(library, program)
    edited(library, "tools.py", "return 0", "return 1")
    assert code_hash(library, program) != before


def test_a_class_counts_whole_and_a_module_too(library: Path):
    whole = {name: code_hash(library, name) for name in ("lab.numbers:Box", "lab.tools", "lab.maker")}
    edited(library, "numbers.py", "SIZE ** 3", "SIZE ** 2")
    edited(library, "tools.py", "return 0", "return 1")
    assert all(code_hash(library, name) != before for name, before in whole.items())


def test_what_is_not_there_has_no_hash_and_makes_no_record(library: Path):
    assert code_hash(library, "lab.gone") == code_hash(library, "lab.maker:gone") == ""
    assert code_hash(library, "lab.maker:rows+lab.gone") == ""
    with pytest.raises(ValueError, match=r"ondevice\.gone"):
        sidecars.made_by({}, ["ondevice.gone:rows"])


def test_every_recorder_names_the_functions_that_make_its_rows():
    """Without them all of its module counts, and a record is of other code at the next edit beside it."""
    unnamed = []
    for path in (assets.ROOT / "lib" / "ondevice_studies").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if called == "Recorder" and "functions" not in {word.arg for word in node.keywords}:
                unnamed.append(f"{path.stem}:{node.lineno}")
    assert unnamed == []
