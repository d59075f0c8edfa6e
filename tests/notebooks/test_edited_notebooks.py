"""A notebook in which a source cell was edited runs to its end, whatever the edit does to its numbers.

make test runs one edit per paper, make test-edits all of them. The two long notebooks, DIAA's and GRATING's, have their
edit of make test in `test_diaa_edits` and `test_grating_edits`, where the cells before the edited one have run already.
"""

import pytest
import test_assistant_edits
import test_diaa_edits
import test_disco_edits
import test_dragon_edits
import test_grating_edits
import test_sdnpu_edits
from cells import Notebook

TABLES = {
    "assistant": test_assistant_edits,
    "diaa": test_diaa_edits,
    "disco": test_disco_edits,
    "dragon": test_dragon_edits,
    "grating": test_grating_edits,
    "sdnpu": test_sdnpu_edits,
}
FIRST = {  # the edit of each paper that make test runs
    "assistant": "verify",
    "disco": "race",
    "dragon": "mixture",
    "sdnpu": "pooled",
}


def edits():
    """(paper, cell, old text, new text) of every edit of the papers' tables."""
    for paper, module in TABLES.items():
        for name, entry in module.EDITS.items():
            # a cell of the assistant's has several functions
            cell, old, new = entry[:3] if paper == "assistant" else (name, *entry[:2])
            key = f"{paper}-{name}"
            marks = [pytest.mark.slow]  # runs the whole notebook
            if name != FIRST.get(paper):
                marks.append(pytest.mark.edits)
            yield pytest.param(paper, cell, old, new, id=key, marks=marks)


def test_make_test_runs_one_edit_of_each_paper():
    kept = [edit for edit in edits() if pytest.mark.edits.mark not in [mark.mark for mark in edit.marks]]
    assert sorted(edit.values[0] for edit in kept) == sorted(FIRST)
    assert set(TABLES) - set(FIRST) == {"diaa", "grating"}
    for name in ("diaa", "grating"):
        assert hasattr(TABLES[name], "test_the_edited_notebook_runs_to_its_end")


@pytest.mark.timeout(1200)  # as a notebook's own run
@pytest.mark.usefixtures("exhibits_elsewhere")
@pytest.mark.parametrize(("paper", "cell", "old", "new"), edits())
def test_an_edited_notebook_runs_to_its_end(paper, cell, old, new):
    Notebook(paper, TABLES[paper].SHORT).begin(cell).to_the_end(cell, old, new)
