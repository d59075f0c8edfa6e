"""A notebook in which a source cell was edited runs to its end, whatever the edit does to its numbers.

One edit a notebook is drawn by the seed of make test-long (SEED=1 draws others).
"""

import os
import random

import pytest
import test_assistant_edits
import test_diaa_edits
import test_disco_edits
import test_dragon_edits
import test_grating_edits
import test_sdnpu_edits
from cells import Notebook

pytestmark = pytest.mark.long  # runs most of the notebook

TABLES = {
    "assistant": test_assistant_edits,
    "diaa": test_diaa_edits,
    "disco": test_disco_edits,
    "dragon": test_dragon_edits,
    "grating": test_grating_edits,
    "sdnpu": test_sdnpu_edits,
}


def edits():
    """(paper, cell, old text, new text) of an edit of each paper's table."""
    drawn = random.Random(int(os.environ.get("SEED") or 0))
    for paper, module in TABLES.items():
        name, entry = drawn.choice(list(module.EDITS.items()))
        # a cell of the assistant's has several functions
        cell, old, new = entry[:3] if paper == "assistant" else (name, *entry[:2])
        yield pytest.param(paper, cell, old, new, id=f"{paper}-{name}", marks=pytest.mark.whole)


@pytest.mark.usefixtures("exhibits_elsewhere")
@pytest.mark.parametrize(("paper", "cell", "old", "new"), edits())
def test_an_edited_notebook_runs_to_its_end(paper, cell, old, new):
    Notebook(paper, TABLES[paper].SHORT).begin(cell).to_the_end(cell, old, new)
