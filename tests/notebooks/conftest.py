"""What the notebook tests share: the committed notebooks, nbval, and the memory of what passed before."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from validation import SANITIZE, Validation, validate

from ondevice.evidence import environment
from ondevice.run import Layout
from ondevice.run.job import fingerprint

LAYOUT = Layout()
RECHECK = "ONDEVICE_RECHECK"  # set by `make test FORCE=1`
PASSED = pytest.StashKey[bool]()


@pytest.fixture
def nbval(tmp_path: Path) -> Callable[..., Validation]:
    """`nbval(notebook, **variables)` validates a notebook in a scratch folder, with these environment variables."""
    return partial(validate, scratch=tmp_path)


@pytest.fixture
def unless_unchanged(request: pytest.FixtureRequest):
    """Skips a test of a notebook that passed with the same text, exhibits, code, data and packages; else notes it."""
    paper = request.getfixturevalue("notebook").stem
    key = f"ondevice/{request.node.originalname}/{paper}"
    check = LAYOUT.parameter_file(paper, "check")
    files = [LAYOUT.notebook(paper), SANITIZE, *([check] if check.is_file() else [])]
    files += sorted((LAYOUT.figures / paper).glob("[!.]*"))
    state = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    state.update(json.dumps([fingerprint(LAYOUT, paper), environment()]).encode())
    if request.config.cache.get(key, None) == state.hexdigest() and not os.environ.get(RECHECK):
        pytest.skip(f"{paper}: nothing has changed since this passed (make test FORCE=1 repeats it)")
    yield
    if request.node.stash.get(PASSED, False):
        request.config.cache.set(key, state.hexdigest())


@pytest.fixture(scope="module")
def exhibits_elsewhere(tmp_path_factory: pytest.TempPathFactory):
    """Cells that run in this process save in a scratch folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONDEVICE_FIGURES", str(tmp_path_factory.mktemp("figures")))
        patch.setenv("TQDM_DISABLE", "1")
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "notebook" in metafunc.fixturenames:
        # The larger ones take longer, more or less: what is long must not begin last.
        notebooks = sorted(map(LAYOUT.notebook, LAYOUT.papers()), key=lambda path: -path.stat().st_size)
        metafunc.parametrize("notebook", notebooks, ids=[notebook.stem for notebook in notebooks])


@pytest.hookimpl(tryfirst=True)  # before groups are given by file
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs a notebook whole does so in either process, and first; edits come in the notebooks' order."""
    whole = {item for item in items if item.get_closest_marker("whole")}
    for item in whole:
        item.add_marker(pytest.mark.xdist_group(f"whole {item.callspec.id}"))
    edited = {item: item.callspec.params["paper"] for item in items if item.path.stem == "test_edits"}
    items.sort(key=lambda item: (item not in whole, edited.get(item, "")))
