"""Exhibits that need few of a notebook's cells are made again from these, with the notebook's own parameters.

Numbers and drawing are the published ones. nbval's run compares the others, and the pictures themselves.
"""

import functools

import pytest
from cells import Notebook

from ondevice.run import Layout
from ondevice_studies import published

pytestmark = pytest.mark.long  # nbval compares the same exhibits, with the rest of the notebook

LAYOUT = Layout()
MOST = 14  # cells
LONG = {
    "diaa": {
        "confidence",
        "cost-drawn",
        "figure-2",
        "figure-7",
        "figure-10",
        "grow-drawn",
        "grow-likeliest-shown",
        "map",
        "maximised-shown",
        "means-shown",
        "methods-drawn",
        "mix-shown",
        "overwrite-shown",
        "refill-shown",
        "size-drawn",
        "sized",
        "strongest",
    },
    "disco": {
        "figure-2",
        "figure-3",
        "figure-5",
        "figure-6",
        "figure-7",
        "figures-8-10",
        "own-drawn",
        "plane",
        "stream-drawn",
        "table-1",
        "table-2-figure",
        "table-3",
        "tail-bound",
    },
    "grating": {"applications", "beyond-01", "cache-shown", "certified-shown", "figures-11-14", "pruning-table"},
    "sdnpu": {"pool-shown", "ratios", "reuse-shown", "searched-shown", "table-2", "table-4"},
}  # more than some seconds


@functools.cache
def notebook(paper):
    return Notebook(paper, {})


def chosen():
    """(paper, cell): each saves an exhibit."""
    for paper in LAYOUT.papers():
        for cell, text in notebook(paper).texts.items():
            short = "run.save(" in text and cell not in LONG.get(paper, ())
            if short and len(notebook(paper).needed(cell)) <= MOST:
                yield pytest.param(paper, cell, id=f"{paper}-{cell}")


STATES: dict[tuple[str, ...], dict] = {}  # by the paper and the cells that have run: the names that they left


def run_to(paper, cell):
    """Run a cell and those that it needs; what another exhibit has run of their first ones is not run again."""
    book, cells = notebook(paper), (paper, *notebook(paper).needed(cell))
    texts = book.texts | {"end": "print('the end')"}
    start = next((end for end in range(len(cells) - 1, 1, -1) if cells[:end] in STATES), 1)
    state = dict(STATES.get(cells[:start], {"__name__": "__main__"}))
    for place in range(start, len(cells)):
        printed = book.run([cells[place], "end"], state, texts)
        assert printed.get("end") == "the end\n", printed
        STATES[cells[: place + 1]] = dict(state)


@pytest.mark.parametrize(("paper", "cell"), chosen())
@pytest.mark.usefixtures("exhibits_elsewhere")
def test_an_exhibit_is_made_again_from_its_cells(paper, cell, tmp_path, monkeypatch):
    monkeypatch.setenv("ONDEVICE_FIGURES", str(tmp_path))
    run_to(paper, cell)
    assert list((tmp_path / paper).glob("*.csv"))
    differences = published.differences(tmp_path / paper, LAYOUT.figures / paper)
    assert [sentence for sentence in differences if ".png is another" not in sentence] == []
