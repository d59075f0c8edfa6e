"""Notebooks in JupyterLab as a reader has them: opening one and saving it changes no tracked file, nor does a run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from lab_driven import chromium_page, jupyterlab, run_all_cells
from waiting import wait_for

from ondevice.assets import ROOT
from ondevice.run import SCOREBOARD, Layout
from ondevice.run.lab import copy_notebooks

PAPERS = Layout().papers()


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *named, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def copied_checkout(folder: Path) -> Layout:
    """The checkout's files in a git repository of their own, all committed; models are links, which nobody writes to.

    The notebooks name the Python that runs here: a kernel writes its version into what it opens, whichever it is.
    """
    listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            copy = os.symlink if name.startswith("data/models/") else shutil.copyfile
            copy(ROOT / name, folder / name)
    layout = Layout(folder)
    for paper in layout.papers():
        notebook = nbformat.read(layout.notebook(paper), as_version=4)
        notebook.metadata.language_info.version = ".".join(map(str, sys.version_info[:3]))
        nbformat.write(notebook, layout.notebook(paper))
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "as it is")
    return layout


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    return copied_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with chromium_page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture(scope="module")
def lab(layout, page, tmp_path_factory):
    """A JupyterLab on the copied checkout, whose kernels import the library of that checkout."""
    own = tmp_path_factory.mktemp("own")
    with jupyterlab(layout.root, own, {"PYTHONPATH": str(layout.library)}) as address:
        yield address


def saved(page, notebook: Path) -> None:
    """Save the open notebook, and wait until the file is whole; Jupyter keeps the old one beside it until then."""
    before = notebook.stat().st_mtime_ns
    old = notebook.with_name(f".~{notebook.name}")
    page.keyboard.press("Control+s")
    wait_for(lambda: notebook.stat().st_mtime_ns > before and not old.exists())


@pytest.mark.parametrize("paper", PAPERS)
def test_opening_and_saving_changes_nothing(paper, layout, page, lab):
    page.goto(f"{lab}/tree/notebooks/{paper}.ipynb?reset")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    page.locator(".jp-Notebook .jp-Cell").first.click()
    saved(page, layout.notebook(paper))
    assert git(layout.root, "status", "--porcelain") == "", git(layout.root, "diff")[:2000]


def test_a_copy_of_make_lab_runs_and_leaves_the_checkout_as_it_is(layout, page, lab):
    assert copy_notebooks(layout) == []
    copy = layout.runs / "lab" / f"{SCOREBOARD}.ipynb"
    page.goto(f"{lab}/tree/runs/lab/{SCOREBOARD}.ipynb?reset")
    run_all_cells(page)
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=busy]").wait_for()
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    saved(page, copy)
    cells = [cell for cell in nbformat.read(copy, as_version=4).cells if cell.cell_type == "code"]
    assert [output for cell in cells for output in cell.outputs if output.output_type == "error"] == []
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert git(layout.root, "status", "--porcelain") == ""


def test_an_edited_copy_is_kept_and_the_others_follow(tmp_path):
    layout = Layout(tmp_path)
    (layout.notebooks / "params").mkdir(parents=True)
    files = ["disco.ipynb", "diaa.ipynb", "params/disco.full.yaml"]
    for name in files:
        (layout.notebooks / name).write_text("1")
    assert copy_notebooks(layout) == []
    lab = layout.runs / "lab"
    (lab / "diaa.ipynb").write_text("edited")
    kept = copy_notebooks(layout)
    assert len(kept) == 1 and "runs/lab/diaa.ipynb" in kept[0] and "changed" not in kept[0]
    for name in files:
        (layout.notebooks / name).write_text("2")
    kept = copy_notebooks(layout)
    assert len(kept) == 1 and "changed" in kept[0]
    assert [(lab / name).read_text() for name in files] == ["2", "edited", "2"]
    (lab / "diaa.ipynb").unlink()
    assert copy_notebooks(layout) == [] and (lab / "diaa.ipynb").read_text() == "2"
