"""Every source cell of a notebook acts: a wrong body in its place changes what the cells behind it show."""

import os
import random
import re

import numpy as np
import pandas as pd
import pytest
from cells import Notebook
from edits import ASSISTANT, EDITS, SHORT, Edit, notebook

from ondevice import evidence
from ondevice.run.edits import SHIPPED, YOURS

pytestmark = pytest.mark.long  # runs most of the notebooks


@pytest.fixture(scope="module")
def saved(exhibits_elsewhere):
    """By name the table that an exhibit was saved with last."""
    tables = {}

    def save(self, stem, table=None, *arguments, **options):
        tables[stem] = yours(pd.DataFrame(table)).copy()
        return right(self, stem, table, *arguments, **options)

    right = evidence.PaperRun.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence.PaperRun, "save", save)
        yield tables


def yours(table):
    """Of a table with both versions the edit's rows, as they would stand alone."""
    if "version" not in table:
        return table
    return table[table["version"] == YOURS].drop(columns="version").reset_index(drop=True)


def alone(printed):
    """A printed text without what is said of the shipped version."""
    lines = [line for line in printed.splitlines() if SHIPPED not in line]
    return re.sub(f",? ?{YOURS}|version", "", "\n".join(lines)).split()


KEPT: dict[str, Notebook] = {}  # the one that ran last


@pytest.fixture
def book(paper, saved):
    """A notebook that has run, with all that it saved and printed; tests are in the notebooks' order."""
    if paper not in KEPT:
        KEPT.clear()
        saved.clear()
        KEPT[paper] = notebook(paper)
        KEPT[paper].showed = dict(saved) | KEPT[paper].said
    return KEPT[paper]


def each(papers, edits=None):
    """Parameters: papers, and edits of each where they are given. One process has all of a notebook."""
    group = {paper: pytest.mark.xdist_group(f"edits {paper}") for paper in papers}
    if edits is None:
        return pytest.mark.parametrize("paper", [pytest.param(paper, marks=group[paper]) for paper in papers])
    params = [
        pytest.param(paper, edit, id=f"{paper}-{edit.cell}", marks=group[paper])
        for paper in papers
        for edit in edits[paper]
    ]
    return pytest.mark.parametrize(("paper", "edit"), params)


def those(wanted):
    return {paper: [edit for edit in edits if wanted(paper, edit)] for paper, edits in EDITS.items()}


@each(EDITS)
def test_every_source_cell_has_an_edit(book):
    assert set(book.sources) == {edit.cell for edit in EDITS[book.paper]}


@each(["assistant"])
def test_every_function_of_the_assistants_cells_has_an_edit(book):
    defined = re.findall(r"^def (\w+)", "\n".join(book.texts[cell] for cell in book.sources), re.M)
    assert sorted(ASSISTANT) == sorted(defined)


@each(EDITS, those(lambda paper, edit: edit.shown and not edit.table and paper != "grating"))
def test_a_wrong_body_changes_what_is_printed(book, edit):
    assert alone(book.again(*edit[:4]).get(edit.shown, "")) != alone(book.said[edit.shown])


@each(EDITS, those(lambda paper, edit: edit.table))
def test_a_wrong_body_moves_a_value_beyond_its_interval(book, edit):
    before = book.tables[edit.table]
    after = book.live(edit.cell, edit.shown, book.edited(*edit[:3]))[edit.table]
    if "version" in after:  # the shipped mechanism stands beside, as it was
        shipped = after[after["version"] == SHIPPED].reset_index(drop=True)
        columns = [column for column in before if not column.startswith("time")]
        assert shipped[columns].equals(before[columns]), shipped
    after = yours(after)
    if edit.column == "value":
        moved = (after["value"] < before["low"]) | (after["value"] > before["high"])
    else:
        moved = np.array([abs(after[edit.column].sum() / before[edit.column].sum() - 1) > 0.1])
    assert moved.any(), after


@each(EDITS, those(lambda paper, edit: edit.exhibits))
def test_a_wrong_body_moves_every_exhibit_that_rests_on_it(book, saved, edit):
    stems = {exhibit.removesuffix("_quality") for exhibit in edit.exhibits}
    makers = [n for n, text in book.texts.items() if n in edit.exhibits or any(f'"{stem}"' in text for stem in stems)]
    needed = {name for maker in makers for name in book.needed(maker)}
    names = [name for name in book.span(edit.cell, list(book.texts)[-1]) if name == edit.cell or name in needed]
    saved.clear()
    printed = book.run(names, dict(book.before[edit.cell]) | {"live": {}}, book.edited(*edit[:3]))
    assert "Error: " not in list(printed.values())[-1], printed
    after = dict(saved) | printed
    assert [name for name in sorted(edit.exhibits) if same(after[name], book.showed[name])] == []


def same(first, second):
    return first.equals(second) if isinstance(first, pd.DataFrame) else first == second


@each(["disco"])
def test_every_exact_or_simulated_exhibit_moves_with_some_edit(book):
    moved = set().union(*(edit.exhibits for edit in EDITS["disco"]))
    resting = {
        "table_01_device_rows", "table_08_prices", "beyond_00_own_device", "fig_02_ttft_over_time", "fig_03_tbt",
        "fig_08_quality", "fig_10_quality", "equation_6_bound",
    }  # fmt: skip
    assert set(book.showed) - set(book.said) - moved == resting


UNEDITED = {"diaa": ("means-shown", "mixture-shown"), "grating": ("dispersion", "margin-shown"),
            "sdnpu": ("searched", "pool-shown")}  # fmt: skip


@each(UNEDITED)
def test_an_unedited_repeat_moves_none(book):
    again = book.live(*UNEDITED[book.paper])
    for name, before in book.tables.items():
        if name not in ("cost", "size"):  # times
            columns = [column for column in before if not column.startswith("time")]
            assert again[name][columns].equals(before[columns]), name


# What runs a record's sample again says that the algorithm was edited
SAMPLED = {
    "dragon": [Edit("mixture", "eta_local * p_local +", "1 - eta_local * p_local -", "answers-again")],
    "grating": [edit for edit in EDITS["grating"] if edit.shown == "live-again"],
    "sdnpu": [edit._replace(shown="again") for edit in EDITS["sdnpu"] if edit.cell == "pooled"],
}


@each(SAMPLED, SAMPLED)
def test_a_sample_says_that_the_algorithm_was_edited(book, edit):
    wrong, right = book.again(*edit[:4])[edit.shown], book.said[edit.shown]
    assert "was the algorithm edited?" in wrong and agreeing(wrong) < agreeing(right)
    assert book.paper == "sdnpu" or "was the algorithm edited?" not in right
    assert ("but for rounding: False" in wrong) == (book.paper == "grating") == ("but for rounding: True" in right)


def agreeing(text):
    return sum(map(int, re.findall(r"(\d+) of \d+ samples", text)))


@each(["diaa"])
def test_diaas_sample_goes_on_with_what_was_recorded(book):
    assert "ran again exactly" in book.said["again"] and "differ" not in book.said["again"]
    edited = book.texts | {"again": "grow = lambda *a, real=grow: real(a[0], a[1], 4)\n" + book.texts["again"]}
    printed = book.run(["again", "corner"], dict(book.before["again"]), edited | {"corner": "print(corner(sides))"})
    assert "differ" in printed["again"] and printed["corner"] == "measured+recorded, not your edit\n"


@each(["diaa"])
@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("tree.parents[:1] = [1] * len(tree.parents[:1])", "earlier nodes"),  # a cycle
        ("[tree.add(1, -1, 1, 0.5) for _ in range(budget)]", "budget"),
    ],
)
def test_a_tree_that_is_none_is_refused_in_one_sentence(book, body, named):
    nonsense = f"""def grow(tables, root, budget, real=grow):
    tree = real(tables, root, budget)
    {body}
    return tree
"""
    edited = book.texts | {"methods": nonsense + book.texts["methods"]}
    printed = book.run(["methods"], dict(book.before["methods"]), edited)["methods"]
    sentence, *table = printed.splitlines()  # the library's numbers stand below it
    assert "ValueError" in sentence and named in sentence and SHIPPED not in printed and len(table) == 4


@each(["dragon"])
def test_the_devices_side_of_live_sessions_decides_with_the_cells(book):
    """What the live cells hand to the device are the functions of the cells, which call each other."""
    state = book.before["answers-again"]
    assert all(function in state["rules"] for function in (state["draft_on"], state["settle"], state["take_over"]))
    names = [state[name].__globals__ for name in ("decide", "settle")]
    assert names[0] is names[1] and names[0]["target"] is state["target"]
    assert "decide=decide" in Notebook("dragon", {}).texts["live"]


PLANNED = {"execute", "greedy", "latencies", "downhill", "ours-schedule"}


@each(["sdnpu"], those(lambda paper, edit: edit.cell in PLANNED))
def test_a_wrong_rule_moves_the_planned_share_beside_the_recorded_one(book, edit):
    between = [*book.span(edit.cell, "ours-schedule"), "figure-8", "switching"]
    printed = book.run(between, dict(book.before["switching"]), book.edited(*edit[:3]))
    assert printed["switching"] != book.said["switching"]


def drawn():
    """An edit of each notebook, by the seed of make test-long (SEED=1 draws others)."""
    draw = random.Random(int(os.environ.get("SEED") or 0))
    for paper, edits in EDITS.items():
        edit = draw.choice(edits)
        yield pytest.param(paper, edit, id=f"{paper}-{edit.cell}", marks=pytest.mark.whole)


@pytest.mark.usefixtures("exhibits_elsewhere")
@pytest.mark.parametrize(("paper", "edit"), drawn())
def test_an_edited_notebook_runs_to_its_end(paper, edit):
    """Whatever the edit does to its numbers."""
    Notebook(paper, SHORT[paper]).begin(edit.cell).to_the_end(*edit[:3])
