"""Every source cell of DIAA's notebook acts: a wrong body put in its place moves what Part I draws."""

import numpy as np
import pytest
from cells import Notebook

pytestmark = pytest.mark.long  # runs most of the notebook

# By source cell: what stands there, what is put in its place, the cell that draws it, its table in `live`, the column.
EDITS = {
    "means": ("sums / np.bincount(keys)[rows]", "-sums", "means-shown", "means", "value"),
    "overwrite": ("tables.tokens[rows] = fresh.tokens[nodes]", "pass", "overwrite-shown", "overwrite", "value"),
    "utility": (
        "np.setdiff1d(np.arange(len(draft)), draft.parents)",
        "np.arange(len(draft))",
        "grow-shown",
        "grow",
        "printed U",
    ),
    "grow": ("len(tree) < budget:", "len(tree) < 2:", "grow-shown", "grow", "expected"),
    "refill": ("rank - 1]", "-rank]", "refill-shown", "refill", "value"),
    "accepted": ("node = children.get((-1, tokens[0]))", "node = None", "walk-shown", "walk", "accepted"),
    "loop": ("tokens += emitted", "tokens += emitted[:1]", "methods", "methods", "value"),
    "learning": ("self.update(self.tables, keys, fresh)", "pass", "methods", "methods", "value"),
    "drafter": ("self._shape = tree.draft()", "self._shape = EMPTY", "methods", "methods", "value"),
    "mix": ("+ weight * p", "- weight * p", "mix-shown", "mix", "value"),
    "maximised": ("(explained + strength * prior)", "explained + 1", "maximised-shown", "maximised", "value"),
    "grow-likeliest": (
        "tokens.append(candidates[number][0])",
        "tokens.append(candidates[-1][0])",
        "grow-likeliest-shown",
        "grow-likeliest",
        "value",
    ),
    "size": ("expected / seconds", "1 / seconds", "size-shown", "size", "value"),
}
SHORT = {"tokens": 16, "each": 1, "threads": 1, "again": ["cold"]}


@pytest.fixture(scope="module")
def diaa(exhibits_elsewhere):
    return Notebook("diaa", SHORT).begin("again")


def test_every_source_cell_has_an_edit(diaa):
    assert set(diaa.sources) == set(EDITS)


@pytest.mark.parametrize("cell", EDITS)
def test_a_wrong_body_moves_a_value_beyond_its_interval(diaa, cell):
    old, new, last, name, column = EDITS[cell]
    assert diaa.texts[cell].count(old) == 1
    before = diaa.before["in-use"]["live"][name]
    after = diaa.live(cell, last, diaa.texts | {cell: diaa.texts[cell].replace(old, new)})[name]
    if column == "value":
        moved = (after["value"] < before["low"]) | (after["value"] > before["high"])
    else:
        moved = np.array([abs(after[column].sum() / before[column].sum() - 1) > 0.1])
    assert moved.any(), after


def test_an_unedited_repeat_moves_none(diaa):
    timed = ("cost", "size")
    again = diaa.live("means-shown", "mixture-shown")
    for name, before in diaa.before["in-use"]["live"].items():
        if name not in timed:
            columns = [column for column in before if not column.startswith("time")]
            assert again[name][columns].equals(before[columns]), name


def test_the_sample_says_that_the_algorithm_was_edited_and_goes_on(diaa):
    assert "ran again exactly" in diaa.said["again"] and "differ" not in diaa.said["again"]
    edited = diaa.texts | {"again": "grow = lambda *a, real=grow: real(a[0], a[1], 4)\n" + diaa.texts["again"]}
    state = dict(diaa.before["again"])
    said = diaa.run(["again", "corner"], state, edited | {"corner": "print(corner(sides))"})
    assert "differ" in said["again"] and said["corner"] == "measured+recorded, not your edit\n"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("tree.parents[:1] = [1] * len(tree.parents[:1])", "earlier nodes"),  # a cycle
        ("[tree.add(1, -1, 1, 0.5) for _ in range(budget)]", "budget"),
    ],
)
def test_a_tree_that_is_none_is_refused_in_one_sentence(diaa, body, sentence):
    nonsense = f"""def grow(tables, root, budget, real=grow):
    tree = real(tables, root, budget)
    {body}
    return tree
"""
    edited = diaa.texts | {"methods": nonsense + diaa.texts["methods"]}
    said = diaa.run(["methods"], dict(diaa.before["methods"]), edited)["methods"]
    assert "ValueError" in said and sentence in said and "\n" not in said.strip()


def test_the_edited_notebook_runs_to_its_end(diaa):
    diaa.to_the_end("size", *EDITS["size"][:2])
