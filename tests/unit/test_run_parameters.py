"""Values of --set and of parameter files: any that the cell's own default has, and no other kind in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice import yaml_file
from ondevice.run.job import Layout
from ondevice.run.parameters import ParameterError, check_parameters, grid, read_parameters

CELL = '''
name: str = "Pixel 7 Pro, Bloom-560M"  # has a comma
model: str = "tiny"  # of a folder
none: str = ""
seed: int = 0  # of draws [-9 to 1e9]
rate: float = 0.5
flag: bool = True
again: list = ["cold", "mixture 32"]  # {cold | PLD | mixture 32}
deep: list = [[1, 2]]
free: list = []
most: int | None = None
hash: str = "a  # b"  # after a text that looks like a comment
'''


def written(folder: Path, cell: str = CELL) -> Layout:
    cells = [{"cell_type": "code", "source": cell, "metadata": {"tags": ["parameters"]}}]
    layout = Layout(folder)
    layout.notebooks.mkdir(exist_ok=True)
    layout.notebook("paper").write_text(json.dumps({"cells": cells}))
    return layout


@pytest.fixture(scope="module")
def parameters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return read_parameters(written(tmp_path_factory.mktemp("house")).notebook("paper"))


def values(parameters: Any, setting: str) -> list[Any]:
    [name] = {name for combination in grid("paper", parameters, [setting]) for name in combination}
    return [combination[name] for combination in grid("paper", parameters, [setting])]


def test_the_help_begins_behind_the_default(parameters: Any) -> None:
    assert (parameters["hash"].default, parameters["hash"].help) == ("a  # b", "after a text that looks like a comment")


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("name=Xiaomi 14, Qwen-0.5B", ["Xiaomi 14, Qwen-0.5B"]),
        ('name="a, b","c, d"', ["a, b", "c, d"]),
        ("model=a,b", ["a", "b"]),
        ("model='a,b'", ["a,b"]),
        ("model=/x=y #1: *z", ["/x=y #1: *z"]),
        ("model=yes,123,null,[x]", ["yes", "123", "null", "[x]"]),
        ("model=O'Brien's", ["O'Brien's"]),
        ("none=", [""]),
        ("seed=010,-3", [10, -3]),
        ("rate=1,1e-3,-.5", [1.0, 0.001, -0.5]),
        ("flag=no,True", [False, True]),
        ('again=[cold, "mixture 32"],[PLD]', [["cold", "mixture 32"], ["PLD"]]),
        ("deep=[[3], [4, 5]]", [[[3], [4, 5]]]),
        ("free=[1, a, true]", [[1, "a", True]]),
        ("most=null,3,None", [None, 3, None]),
    ],
)
def test_a_setting_takes_what_a_default_may_be(parameters: Any, setting: str, read: list[Any]) -> None:
    assert values(parameters, setting) == read
    assert list(map(type, values(parameters, setting))) == list(map(type, read))


@pytest.mark.parametrize(
    "setting",
    [
        "seed=0.5", "seed=1:30", "seed=yes", "seed=null", "seed=", "seed", "seed={a: 1}", "seed=[1]", "seed=1,,2",
        "rate=high", "flag=1", "again=cold", "again=[warm]", "deep=[[a]]", "most=many", "model=", 'model="a" b',
        "sede=1", "seed=-10",
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused_in_one_sentence(parameters: Any, setting: str) -> None:
    with pytest.raises(ParameterError, match=setting[:4]) as caught:
        values(parameters, setting)
    assert "\n" not in str(caught.value)


@given(st.text(min_size=1).filter(lambda text: text.strip() == text and not set(text) & set("\"\n\r\0")))
def test_any_text_comes_through_quotes_as_it_is(parameters: Any, text: str) -> None:
    assert values(parameters, f'model="{text}"') == [text]
    if not set(text) & set(",'"):
        assert values(parameters, f"model={text}") == [text]


@given(st.lists(st.integers(-9, 10**9), min_size=1), st.lists(st.floats(allow_nan=False), min_size=1))
def test_any_numbers_come_through(parameters: Any, whole: list[int], real: list[float]) -> None:
    assert values(parameters, f"seed={','.join(map(str, whole))}") == whole
    assert values(parameters, f"rate={', '.join(map(repr, real))}") == real


# A notebook's own cell


def test_a_copy_of_a_notebook_is_checked_by_its_own_cell(tmp_path: Path) -> None:
    layout = written(tmp_path, "seed: int = 0  # [0 to 9]\n")
    own = "seed: int = 0  # [0 to 99]\nbeams: int = 2  # of the copy [1 to 4]\n"
    cells = ["", "%matplotlib inline", own, "# Parameters\nseed = 50\nbeams = 3\n"]
    given = {"In": cells, "seed": 50, "beams": 3}
    assert check_parameters("paper", given, layout) == {"seed": 50, "beams": 3}
    original = {"In": ["", cells[-1]], "seed": 5}
    for wrong, named in (({"beams": 5}, "beams"), ({"seed": "1"}, "seed"), (original, "beams")):
        with pytest.raises(ParameterError, match=named):
            check_parameters("paper", given | wrong, layout)


# Files


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("seed: 1\nrate: 2\nseed: 3\n", "'seed' twice, in lines 1 and 3"),
        ('seed: 1\n"seed": 1\n', "'seed' twice"),
        ("a:\n  b: {c: 1,\n    c: 2}\n", "'c' twice, in lines 2 and 3"),
        ("a:\n- b: 1\n  d: 2\n  b: 3\n", "'b' twice, in lines 2 and 4"),
        ("x: &x {a: 1}\ny:\n  <<: *x\n  a: 2\n  a: 3\n", "'a' twice, in lines 4 and 5"),
        ("x:\n  <<: {a: 1,\n   a: 2}\n", "'a' twice"),
        ("a: {b: 1, b: 2}\n", "'b' twice, in lines 1 and 1"),
        ("? [a, b]\n: 1\n? [a, b]\n: 2\n", "twice"),
        ("- 1\n", "mapping"), ("", "mapping"), ("a: [", "YAML"), ("a: 1\n---\nb: 1\n", "YAML"), ("[" * 9999, "YAML"),
    ],
)  # fmt: skip
def test_a_file_that_says_two_things_is_refused_in_one_sentence(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=named) as caught:
        yaml_file.mapping(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_what_a_merge_brings_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("x: &x {a: 1, b: 2}\ny: &y\n  <<: *x\n  a: 3\nz:\n  <<: [*y, *x]\n  b: 4\nw: *y\n")
    assert yaml_file.mapping(path) == {
        "x": {"a": 1, "b": 2}, "y": {"a": 3, "b": 2}, "z": {"a": 3, "b": 4}, "w": {"a": 3, "b": 2},
    }  # fmt: skip
