"""A JupyterLab of a test's own, and a Chromium to drive it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

_OWN = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
        "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR")  # fmt: skip
_QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync"]  # fmt: skip


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return not client.connect_ex(("127.0.0.1", port))


@contextlib.contextmanager
def jupyterlab(shown: Path, own: Path, variables: dict[str, str]) -> Iterator[str]:
    """The address of a JupyterLab on the folder `shown`, whose settings and log stand in the folder `own`.

    variables: of its environment, besides those of the test's.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    environment |= {name: str(own / name.lower()) for name in _OWN} | {"OMP_NUM_THREADS": "1"} | variables
    options = [f"--port={port}", "--ip=127.0.0.1", "--no-browser", "--allow-root", "--IdentityProvider.token=",
               f"--ServerApp.root_dir={shown}", "--LabApp.extension_manager=readonly"]  # fmt: skip
    own.mkdir(parents=True, exist_ok=True)
    with (own / "log").open("w") as log:
        command = [sys.executable, "-m", "jupyterlab", *options]
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_for(lambda: _answers(port))
        yield f"http://127.0.0.1:{port}/lab"
    finally:
        server.terminate()
        server.wait(30)


@contextlib.contextmanager
def chromium_page(profile: Path) -> Iterator[Any]:
    """A page of a Chromium with its profile in a folder; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install -e .[browser]")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if not chromium:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch_persistent_context(
            profile, executable_path=chromium, args=_QUIET, headless=True, viewport={"width": 1200, "height": 3000}
        )
        browser.set_default_timeout(90_000)
        yield browser.new_page()
        browser.close()


def run_all_cells(page: Any) -> None:
    """Run the notebook that is open, once its kernel is connected.

    JupyterLab calls a notebook idle before it has a kernel; cells that are run then are lost. So the status bar counts,
    and the cells are asked for again where none has begun.
    """
    from playwright.sync_api import TimeoutError

    begun = page.locator(".jp-InputPrompt", has_text=re.compile(r"\[(\*|\d+)\]"))
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    for seconds in (10, 20, 60):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        with contextlib.suppress(TimeoutError):
            begun.first.wait_for(timeout=1000 * seconds)
            return
    raise AssertionError("JupyterLab ran no cell")
