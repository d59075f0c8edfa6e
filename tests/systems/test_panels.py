"""The panels of two notebooks, used in JupyterLab as a reader does: sliders move, and the edited cells' values show."""

import contextlib
import io
import re

import nbformat
import pytest
from lab_driven import chromium_page, jupyterlab, run_all_cells

from ondevice.assets import ROOT

PAPERS = {  # cells that the panel's needs, code in place of others, an edit, and where the sliders are and go
    "disco": (
        "parameters checked imports setup device-constrained",
        'expected, live = races.expected, {"waits": "simulated"}',
        ("left = b - alpha", "left = (b - alpha) / 2"),
        ("waited", {"b": 0.3, "alpha": 0.15}, {"b": 0.35, "alpha": 0.2}),
    ),
    "grating": (
        "parameters checked imports setup dispersion clustering boundary boundary-shown selection replay "
        "selection-shown",
        "",
        ("p.std()", "p.std(ddof=1)"),
        ("at_threshold", {"threshold": 0.4, "K": 5}, {"threshold": 0.6, "K": 10}),
    ),
}


def cells(paper: str) -> dict[str, nbformat.NotebookNode]:
    notebook = nbformat.read(ROOT / "notebooks" / f"{paper}.ipynb", as_version=4)
    assert "widgets" not in notebook.metadata
    return {cell.id: cell for cell in notebook.cells}


def cut(paper: str) -> nbformat.NotebookNode:
    """A notebook of what the panel needs, with an edit such as a reader makes."""
    needed, instead, (old, new), _ = PAPERS[paper]
    every = cells(paper)
    texts = [*(every[name].source for name in needed.split()), instead, every["panel"].source]
    assert sum(text.count(old) for text in texts) == 1
    made = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    made.cells = [nbformat.v4.new_code_cell(text.replace(old, new)) for text in texts if text]
    return made


def line(now: dict[str, float], values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in {**now, **values}.items())


@pytest.mark.parametrize("paper", PAPERS)
def test_what_is_stored_is_a_figure_and_no_widget(paper):
    kinds = [set(output.data) for output in cells(paper)["panel"].outputs]
    assert kinds == [{"text/plain"}, {"text/plain", "image/png"}]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab of its own, and the folder that it shows."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "shown").mkdir()
    with jupyterlab(folder / "shown", folder / "own", {"ONDEVICE_FIGURES": str(folder / "figures")}) as address:
        yield address, folder / "shown"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with chromium_page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.mark.parametrize("paper", PAPERS)
def test_sliders_show_what_the_edited_cells_compute(paper, page, lab):
    from playwright.sync_api import expect

    address, folder = lab
    notebook, (compute, first, then) = cut(paper), PAPERS[paper][3]
    nbformat.write(notebook, folder / f"{paper}.ipynb")
    page.goto(f"{address}/tree/{paper}.ipynb?reset")
    run_all_cells(page)
    ours: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in notebook.cells:
            exec(cell.source, ours)
    said, picture = page.locator(".jp-OutputArea-output pre").last, page.locator(".jp-OutputArea-output img").last
    expect(said).to_have_text(line(first, ours[compute](**first)), timeout=90_000)
    seen = picture.get_attribute("src")
    for (name, value), slider in zip(then.items(), page.locator(".noUi-handle").all(), strict=True):
        slider.press("ArrowRight")
        expect(page.locator(".widget-readout", has_text=re.compile(f"^{value:g}$"))).to_have_count(1)
        first[name] = value
        expect(said).to_have_text(line(first, ours[compute](**first)), timeout=60_000)
        expect(picture).not_to_have_attribute("src", seen)
        seen = picture.get_attribute("src")
