"""The panels of two notebooks, used in JupyterLab as a reader does: sliders move, and the edited cells' values show."""

import contextlib
import io
import os
import re
import shutil
import socket
import subprocess
import sys

import nbformat
import pytest
from waiting import wait_for

from ondevice.assets import ROOT

PAPERS = {  # cells that the panel's needs, code in place of others, an edit, and where the sliders are and go
    "disco": (
        "parameters checked imports setup device-constrained",
        'server, b, table = traces.server("LLaMA"), 0.3, "simulated"',
        ("left = b - alpha", "left = (b - alpha) / 2"),
        ("waited", {"b": 0.3, "alpha": 0.15}, {"b": 0.35, "alpha": 0.2}),
    ),
    "grating": (
        "parameters checked imports setup dispersion clustering boundary selection replay",
        "",
        ("p.std()", "p.std(ddof=1)"),
        ("pruned", {"threshold": 0.4, "K": 5}, {"threshold": 0.6, "K": 10}),
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


def answers(port: int) -> bool:
    with socket.socket() as client:
        return not client.connect_ex(("127.0.0.1", port))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab of its own, and the folder that it shows."""
    folder = tmp_path_factory.mktemp("lab")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
              "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR", "ONDEVICE_FIGURES")  # fmt: skip
    variables = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    variables |= {name: str(folder / ".own" / name.lower()) for name in places} | {"OMP_NUM_THREADS": "1"}
    (folder / "shown").mkdir()
    options = [f"--port={port}", "--ip=127.0.0.1", "--no-browser", "--allow-root", "--IdentityProvider.token=",
               f"--ServerApp.root_dir={folder / 'shown'}", "--LabApp.extension_manager=readonly"]  # fmt: skip
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], env=variables, stdout=log, stderr=log)
    try:
        wait_for(lambda: answers(port))
        yield f"http://127.0.0.1:{port}/lab", folder / "shown"
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install -e .[browser]")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if not chromium:
        pytest.skip("there is no Chromium")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("chromium"), executable_path=chromium, args=quiet, headless=True,
            viewport={"width": 1200, "height": 3000},
        )  # fmt: skip
        browser.set_default_timeout(90_000)
        yield browser.new_page()
        browser.close()


@pytest.mark.slow  # two kernels import what the notebooks do
@pytest.mark.parametrize("paper", PAPERS)
def test_sliders_show_what_the_edited_cells_compute(paper, page, lab):
    from playwright.sync_api import expect

    address, folder = lab
    notebook, (compute, first, then) = cut(paper), PAPERS[paper][3]
    nbformat.write(notebook, folder / f"{paper}.ipynb")
    page.goto(f"{address}/tree/{paper}.ipynb?reset")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
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
