"""A notebook in which a source cell was edited runs to its end, whatever the edit does to its numbers.

make test runs one edit a paper, make test-edits all of them.
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
    "diaa": "grow",
    "disco": "race",
    "dragon": "mixture",
    "grating": "boundary",
    "sdnpu": "pooled",
}


# Edits whose notebook does not yet come to its end: strict, so that whoever mends it has to take its line away.
STOPS = {
    "diaa-accepted": "the cell figure-table-2 draws whiskers without ends, of a sample of one prompt per task",
    "diaa-grow": "the cell tables-1-2-claims looks for methods that the sample has not run again",
    "grating-boundary": "the cell figure-4 indexes layers by what an odd boundary leaves",
}


def edits():
    """(paper, cell, old text, new text) of every edit of the papers' tables."""
    for paper, module in TABLES.items():
        for name, entry in module.EDITS.items():
            # a cell of the assistant's has several functions
            cell, old, new = entry[:3] if paper == "assistant" else (name, *entry[:2])
            key = f"{paper}-{name}"
            marks = [pytest.mark.slow]  # runs the whole notebook
            if name != FIRST[paper]:
                marks.append(pytest.mark.edits)
            if key in STOPS:
                marks.append(pytest.mark.xfail(raises=AssertionError, strict=True, reason=STOPS[key]))
            yield pytest.param(paper, cell, old, new, id=key, marks=marks)


def test_make_test_runs_one_edit_of_each_paper():
    kept = [edit for edit in edits() if pytest.mark.edits.mark not in [mark.mark for mark in edit.marks]]
    assert sorted(edit.values[0] for edit in kept) == sorted(TABLES)


@pytest.mark.timeout(1200)  # as a notebook's own run
@pytest.mark.usefixtures("exhibits_elsewhere")
@pytest.mark.parametrize(("paper", "cell", "old", "new"), edits())
def test_an_edited_notebook_runs_to_its_end(paper, cell, old, new):
    book = Notebook(paper, TABLES[paper].SHORT)
    assert book.texts[cell].count(old) == 1
    edited = book.texts | {cell: book.texts[cell].replace(old, new), "end": "print('the end')"}
    printed = book.run(list(edited), {"__name__": "__main__"}, edited)
    last = list(printed)[-1]
    assert printed.get("end") == "the end\n", f"{last}: {printed[last][-2000:]}"
